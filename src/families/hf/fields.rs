//! The allow-list of fields in `config.json`: those that the model's family asked for, and those without effect. Others
//! are refused, since they could change what the model computes.

use super::config::HfConfig;
use crate::families::ModelError;
use serde_json::Value;

/// Fields without effect on logits, loss and gradients. So are fields that begin with `_`, which are internal
/// to transformers.
const HARMLESS: &[&str] = &[
    // The file, and its weights.
    "dtype",
    "is_llama_config",
    "keys_to_ignore_at_inference",
    "license",
    "name_or_path",
    "torch_dtype",
    "transformers.js_config",
    "transformers_version",
    "unsloth_fixed",
    "unsloth_version",
    // Alternative implementations.
    "attn_implementation",
    "base_model_pp_plan",
    "base_model_tp_plan",
    "chunk_size_feed_forward",
    "experts_implementation",
    "gradient_checkpointing",
    "pretraining_tp",
    "tf_legacy_loss",
    "torchscript",
    "use_bfloat16",
    // Choice of outputs.
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "tie_last_hidden_states",
    "use_return_dict",
    // Lengths that no computation uses; and a window's layers, if no window is used.
    "max_sequence_length",
    "max_seq_length",
    "max_window_layers",
    "model_max_length",
    "seq_length",
    // The tokenizer.
    "bos_token_id",
    "cls_token_id",
    "decoder_start_token_id",
    "eos_token_id",
    "mask_token_id",
    "sep_token_id",
    "tokenizer_class",
    "unk_token_id",
    // Heads for other tasks.
    "finetuning_task",
    "id2label",
    "label2id",
    "num_labels",
    "problem_type",
    "task_specific_params",
    // Encoder-decoder models.
    "cross_attention_hidden_size",
    "is_decoder",
    "tie_encoder_decoder",
    // Generation.
    "assistant_confidence_threshold",
    "assistant_lookbehind",
    "bad_words_ids",
    "begin_suppress_tokens",
    "cache_implementation",
    "diversity_penalty",
    "do_sample",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "encoder_repetition_penalty",
    "epsilon_cutoff",
    "eta_cutoff",
    "exponential_decay_length_penalty",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "length_penalty",
    "max_length",
    "max_new_tokens",
    "min_length",
    "min_p",
    "no_repeat_ngram_size",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "output_scores",
    "prefix",
    "remove_invalid_values",
    "repetition_penalty",
    "return_dict_in_generate",
    "suppress_tokens",
    "target_lookbehind",
    "temperature",
    "top_k",
    "top_p",
    "typical_p",
    "use_cache",
];

/// (field, values without effect, why others are refused)
type Fixed = (&'static str, &'static [&'static str], &'static str);

const QUANTIZED: &str = "this version loads f32, bf16 and f16: save the model without quantization";
const INTERLEAVED: &str =
    "this model_type rotates the halves of a head, not neighboring elements: it must be false";
const SAME_NORMS: &str =
    "this version normalizes queries and keys where the model_type implies it: it must be false";

const FIXED: &[Fixed] = &[
    // transformers also accepts null, for a model that attends to later tokens.
    ("is_causal", &["true"], "this version computes causal attention only: it must be true, or left out"),
    ("is_encoder_decoder", &["false", "null"], "this version has decoders only: it must be false"),
    ("add_cross_attention", &["false", "null"], "this version has no cross-attention: it must be false"),
    ("pruned_heads", &["{}", "null"], "this version has no pruned heads: leave it out"),
    ("per_layer_config", &["{}", "null"], "this version has the same sizes in every layer: leave it out"),
    ("partial_rotary_factor", &["1", "1.0", "null"], "this model_type rotates whole heads: leave it out"),
    ("quantization_config", &["null"], QUANTIZED),
    ("compression_config", &["null"], QUANTIZED),
    ("quantization", &["null"], QUANTIZED),
    ("rope_interleave", &["false", "null"], INTERLEAVED),
    ("rope_interleaved", &["false", "null"], INTERLEAVED),
    ("use_mrope", &["false", "null"], "this version has one position per token: it must be false"),
    ("qk_layernorm", &["false", "null"], SAME_NORMS),
    ("use_qk_norm", &["false", "null"], SAME_NORMS),
];

/// Dropout probabilities.
const DROPOUT: &[&str] = &[
    "attention_dropout",
    "attn_pdrop",
    "embd_pdrop",
    "embedding_dropout",
    "hidden_dropout",
    "resid_pdrop",
    "residual_dropout",
];

impl HfConfig<'_> {
    /// Returns notes on fields that are known but not applied, once the family of the model called `class` has read its own.
    pub(crate) fn check_fields(&self, class: &str) -> Result<Vec<String>, ModelError> {
        let fields = self.value.as_object().into_iter().flatten();
        let notes = fields.map(|(field, value)| self.check_field(class, field, value));
        Ok(notes.collect::<Result<Vec<_>, _>>()?.into_iter().flatten().collect())
    }

    fn check_field(&self, class: &str, field: &str, value: &Value) -> Result<Option<String>, ModelError> {
        if self.is_known(field) {
            return Ok(None);
        }
        if let Some((key, harmless, expected)) = FIXED.iter().find(|(key, ..)| *key == field) {
            let is_harmless = harmless.contains(&value.to_string().as_str());
            return if is_harmless { Ok(None) } else { Err(self.error(key, expected)) };
        }
        if let Some(key) = DROPOUT.iter().find(|key| **key == field && !value.is_null()) {
            let probability = self.number(key, 0.0)?;
            let note = || format!("`{key}` is {probability}, which is not applied: there is no dropout");
            return Ok((probability != 0.0).then(note));
        }
        match field {
            _ if value.is_null() || field.starts_with('_') || HARMLESS.contains(&field) => Ok(None),
            "auto_map" => Ok(Some(format!(
                "`auto_map` names code of the model's own, which is not run: the model is computed as {class}"
            ))),
            // `torch.nn.Embedding(padding_idx)`
            "pad_token_id" => Ok(Some(format!(
                "`pad_token_id` is {value}: its embedding is trained like any other; transformers gives it no gradient"
            ))),
            _ => Err(ModelError::UnknownField {
                origin: self.origin.to_owned(),
                key: field.to_owned(),
                got: value.to_string().chars().take(80).collect(),
            }),
        }
    }
}
