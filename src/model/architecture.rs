//! The model families that share the Llama block.

/// The differences between a family and the Llama block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Architecture {
    /// Llama 2 and 3: nothing.
    Llama,
    /// Mistral: sliding-window attention.
    Mistral {
        /// Number of tokens that a token attends to, including itself; `None` for all.
        sliding_window: Option<usize>,
    },
    /// Qwen2 and 2.5: biases on the q, k and v projections.
    Qwen2,
    /// Qwen3: an RMSNorm over every head of the queries and keys, before the rotary embedding.
    Qwen3,
}

impl Architecture {
    /// `model_type` in a Hugging Face `config.json`, and the class in `architectures`.
    pub fn hf_names(self) -> (&'static str, &'static str) {
        match self {
            Self::Llama => ("llama", "LlamaForCausalLM"),
            Self::Mistral { .. } => ("mistral", "MistralForCausalLM"),
            Self::Qwen2 => ("qwen2", "Qwen2ForCausalLM"),
            Self::Qwen3 => ("qwen3", "Qwen3ForCausalLM"),
        }
    }

    /// Returns whether queries, keys and values have biases.
    pub fn has_qkv_bias(self) -> bool {
        self == Self::Qwen2
    }

    /// Returns whether every head of the queries and keys is normalized.
    pub fn has_qk_norm(self) -> bool {
        self == Self::Qwen3
    }

    /// Number of tokens that a token attends to, including itself; `None` for all.
    pub fn sliding_window(self) -> Option<usize> {
        match self {
            Self::Mistral { sliding_window } => sliding_window,
            Self::Llama | Self::Qwen2 | Self::Qwen3 => None,
        }
    }
}
