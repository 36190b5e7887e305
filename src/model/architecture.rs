//! The model families that share the Llama block.

/// What a family adds to the Llama block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Architecture {
    /// Llama 2 and 3: nothing.
    Llama,
    /// Mistral: attention that sees some tokens back only.
    Mistral {
        /// How many positions back a token sees, itself included; `None` for all.
        sliding_window: Option<usize>,
    },
    /// Qwen2 and 2.5: biases on the projections to queries, keys and values.
    Qwen2,
    /// Qwen3: an RMSNorm over every head of the queries and keys, before they are rotated.
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

    /// Whether queries, keys and values have biases.
    pub fn has_qkv_bias(self) -> bool {
        self == Self::Qwen2
    }

    /// Whether every head of the queries and keys is normalized.
    pub fn has_qk_norm(self) -> bool {
        self == Self::Qwen3
    }

    /// How many positions back a token sees, itself included; `None` for all.
    pub fn sliding_window(self) -> Option<usize> {
        match self {
            Self::Mistral { sliding_window } => sliding_window,
            Self::Llama | Self::Qwen2 | Self::Qwen3 => None,
        }
    }
}
