//! Our keys for the arguments of Hugging Face's Trainer, the keys of ArcticTraining and other common names.

/// A name that is not a key, and the key that does the same.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Synonym {
    pub(crate) name: &'static str,
    /// The path of the key.
    pub(crate) key: &'static str,
    /// How its value differs; empty if it does not.
    pub(crate) remark: &'static str,
}

const fn synonym(name: &'static str, key: &'static str) -> Synonym {
    Synonym { name, key, remark: "" }
}

const SYNONYMS: &[Synonym] = &[
    synonym("learning_rate", "optimizer.params.lr"),
    synonym("lr", "optimizer.params.lr"),
    synonym("weight_decay", "optimizer.params.weight_decay"),
    Synonym { remark: "the first element", ..synonym("adam_beta1", "optimizer.params.betas") },
    Synonym { remark: "the second element", ..synonym("adam_beta2", "optimizer.params.betas") },
    synonym("adam_epsilon", "optimizer.params.eps"),
    Synonym { remark: "\"AdamW\" for \"adamw_torch\"", ..synonym("optim", "optimizer.type") },
    Synonym {
        remark: "\"WarmupCosineLR\" for \"cosine\", \"WarmupDecayLR\" for \"linear\"",
        ..synonym("lr_scheduler_type", "scheduler.type")
    },
    synonym("warmup_steps", "scheduler.params.warmup_num_steps"),
    Synonym {
        remark: "in steps, not as a ratio",
        ..synonym("warmup_ratio", "scheduler.params.warmup_num_steps")
    },
    synonym("max_grad_norm", "gradient_clipping"),
    synonym("per_device_train_batch_size", "train_micro_batch_size_per_gpu"),
    synonym("per_gpu_train_batch_size", "train_micro_batch_size_per_gpu"),
    synonym("batch_size", "train_batch_size"),
    synonym("global_batch_size", "train_batch_size"),
    synonym("num_train_epochs", "ulysses.epochs"),
    synonym("num_epochs", "ulysses.epochs"),
    synonym("max_steps", "ulysses.steps"),
    synonym("num_train_steps", "ulysses.steps"),
    synonym("logging_steps", "steps_per_print"),
    synonym("save_steps", "checkpoint.interval"),
    synonym("save_interval", "checkpoint.interval"),
    synonym("save_total_limit", "checkpoint.keep_last"),
    Synonym {
        remark: "the file `best` in the output directory names the checkpoint; it is not loaded",
        ..synonym("load_best_model_at_end", "checkpoint.keep_best")
    },
    synonym("eval_on_start", "ulysses.validation.eval_on_start"),
    synonym("early_stopping_patience", "ulysses.validation.early_stopping_patience"),
    synonym("early_stopping_threshold", "ulysses.validation.early_stopping_threshold"),
    synonym("eval_steps", "ulysses.validation.eval_interval"),
    synonym("max_seq_length", "ulysses.seq_len"),
    synonym("max_length", "ulysses.seq_len"),
    synonym("block_size", "ulysses.seq_len"),
    synonym("model_max_length", "ulysses.seq_len"),
    synonym("model_name_or_path", "ulysses.model"),
    synonym("tokenizer_name", "ulysses.tokenizer"),
    synonym("train_file", "ulysses.data"),
    synonym("dataset_name", "ulysses.data"),
    synonym("dataset", "ulysses.data"),
    synonym("output_dir", "ulysses.output"),
    synonym("gradient_checkpointing", "ulysses.activation_checkpointing"),
    Synonym {
        remark: "with `ulysses.activation_checkpointing`",
        ..synonym("activation_checkpoint_cpu_offload", "activation_checkpointing.cpu_checkpointing")
    },
    Synonym {
        remark: "a number of tokens, such as 2048",
        ..synonym("tiled_mlp_compute", "ulysses.tile_tokens")
    },
    synonym("exit_iteration", "ulysses.steps"),
    synonym("train_iters", "ulysses.steps"),
    synonym("zero_stage", "zero_optimization.stage"),
    synonym("sp", "sequence_parallel_size"),
    synonym("sp_size", "sequence_parallel_size"),
    synonym("tp", "tensor_parallel_size"),
    synonym("tp_size", "tensor_parallel_size"),
    synonym("tensor_model_parallel_size", "tensor_parallel_size"),
    synonym("pp", "pipeline_parallel_size"),
    synonym("pp_size", "pipeline_parallel_size"),
    synonym("pipeline_model_parallel_size", "pipeline_parallel_size"),
    synonym("pipeline_parallel_degree", "pipeline_parallel_size"),
    synonym("virtual_pipeline_model_parallel_size", "ulysses.pipeline.virtual_stages"),
    synonym("num_virtual_stages_per_pipeline_rank", "ulysses.pipeline.virtual_stages"),
    synonym("dp", "data_parallel_size"),
    synonym("dp_size", "data_parallel_size"),
    Synonym { remark: "true for \"bfloat16\"", ..synonym("dtype", "bf16.enabled") },
    Synonym { remark: "true for \"bfloat16\"", ..synonym("torch_dtype", "bf16.enabled") },
    synonym("data_seed", "seed"),
    synonym("ddp_timeout", "ulysses.comm.timeout_seconds"),
];

#[cfg(test)]
pub(crate) fn synonyms() -> &'static [Synonym] {
    SYNONYMS
}

/// Returns our key for `name`.
pub(crate) fn synonym_of(name: &str) -> Option<&'static Synonym> {
    SYNONYMS.iter().find(|synonym| synonym.name == name)
}
