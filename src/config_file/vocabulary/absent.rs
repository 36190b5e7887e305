//! Features of other programs that do not exist here, with the alternatives.

/// Names in other programs, and the answer.
const ABSENT: &[(&[&str], &str)] = &[
    (
        &["lora", "lora_r", "lora_rank", "lora_alpha", "use_lora", "qlora", "peft", "adapter"],
        "adapters (LoRA) are not implemented; all parameters are trained, or frozen by name with `ulysses.parameter_groups`",
    ),
    (
        &["dpo", "orpo", "kto", "grpo", "ppo", "rlhf", "reward_model", "beta_dpo"],
        "preference losses and reinforcement learning are not implemented; the loss is cross-entropy of the next token",
    ),
    (
        &[
            "loss",
            "loss_type",
            "loss_function",
            "label_smoothing",
            "label_smoothing_factor",
            "z_loss",
            "distillation",
        ],
        "the loss is cross-entropy of the next token (`loss_normalization` sets its mean); a program of yours may have another, by `objective::AutogradObjective`",
    ),
    (
        &["generate", "generation", "max_new_tokens", "temperature", "top_p", "predict_with_generate"],
        "text is not generated; export the model with `ulysses checkpoint export`, and use Hugging Face's layout in a server",
    ),
    (
        &["quantization", "load_in_4bit", "load_in_8bit", "quantization_config"],
        "weights are not quantized; `bf16` or `fp16` store them in 16 bits",
    ),
    (
        &["custom_optimizer", "optimizer_class", "optimizers"],
        "optimizers are those of `optimizer.type`; the library takes no optimizer of your own",
    ),
    (
        &["streaming", "num_workers", "dataloader_num_workers"],
        "data is read from local files, by a thread of its own; it is not streamed from a network",
    ),
];

/// Returns the answer for a name.
pub(crate) fn absent(name: &str) -> Option<&'static str> {
    ABSENT.iter().find(|(names, _)| names.contains(&name)).map(|(_, answer)| *answer)
}
