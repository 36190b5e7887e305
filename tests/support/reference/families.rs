//! The parts of other families' blocks.

use super::weights::{ReferenceConfig, RopeScaling};

/// A family, with the numbers that its tests use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// Also Mistral, Qwen2, Qwen3 and Seed-OSS.
    Llama,
    /// Chunks where Gemma 2 has windows; the other layers do not rotate.
    Llama4,
    Ministral,
    Ministral3,
    Gemma,
    Gemma2,
    Gemma3,
    /// Layers without a window have half as many KV heads, twice as large, and values that are the keys.
    Gemma4,
    Granite,
    Olmo2,
    Olmo3,
    Exaone4,
    Phi3,
    SmolLm3,
    Glm,
    Glm4,
    Cohere,
    Cohere2,
    /// Linear attention in every layer but the last.
    Qwen35,
    KimiLinear,
    /// As Qwen3.5, with other parameters for the projections of linear attention.
    Qwen3Next,
    Ernie,
    Gpt2,
    GptNeoX,
    GptJ,
    Phi,
    StarCoder2,
    Nemotron,
    StableLm,
    /// Short convolutions in every layer but the last.
    Lfm2,
    /// The attention of gpt-oss, which has sinks, with the MLP of Llama.
    GptOss,
    /// Mamba 2 in every layer but the last.
    GraniteHybrid,
    /// Layers with one branch each: Mamba 2, an MLP, attention, an MLP, and again.
    NemotronH,
    /// Latent attention, with a latent of the queries.
    DeepseekV2,
    /// As DeepSeek-V2, with another factor on the logits.
    DeepseekV3,
    /// Latent attention without a latent of the queries, in which halves rotate.
    Youtu,
    /// Latent attention in which halves rotate, and factors.
    MiniCpm3,
}

/// Names of the parameters of a block.
pub struct BlockNames {
    /// Before the index of the layer.
    pub layers: &'static str,
    /// Before the names of the projections of queries, keys and values.
    pub attention: &'static str,
    /// Before those of Mamba 2.
    pub mamba: &'static str,
    /// Queries, keys and values in one parameter.
    pub qkv: Option<&'static str>,
    pub o: &'static str,
    /// Norms of queries and keys.
    pub qk_norms: [&'static str; 2],
    /// Gate, up and down projection of an MLP with a gate.
    pub gated_mlp: [&'static str; 3],
    /// Gate and up projection in one parameter.
    pub fused_gate_up: Option<&'static str>,
    /// The projections of an MLP without a gate.
    pub plain_mlp: Option<[&'static str; 2]>,
}

/// Names of the embedding, the final norm, and the head.
pub struct OuterNames {
    pub embedding: &'static str,
    pub norm: &'static str,
    pub head: &'static str,
}

/// The number of learned positions of GPT-2.
pub const NUM_POSITIONS: usize = 30;

/// The rotary base of Gemma 3's layers with a window.
pub const LOCAL_THETA: f64 = 100.0;

/// The part of the pairs that rotates in Gemma 4's layers without a window.
const PROPORTIONAL: f64 = 0.5;

/// The growth of Ministral 3's queries, with the original length of its scaling.
pub const QUERY_GROWTH: f64 = 0.7;

/// The growth of Llama 4's queries in layers that do not rotate, and the positions with the same growth.
pub const LLAMA4_GROWTH: (f64, u32) = (0.6, 5);

/// Granite's factors on embedding, residual branches, attention and logits.
pub const GRANITE: [f64; 4] = [3.0, 0.4, 0.3, 0.5];

/// MiniCPM3's `scale_emb`, `scale_depth` and `dim_model_base`.
pub const MINICPM3: [f64; 3] = [3.0, 0.9, 12.0];

/// The number whose root divides Gemma's logits of attention.
pub const QUERY_PRE_ATTN_SCALAR: f64 = 7.0;

/// Command's factor on the logits.
pub const LOGIT_SCALE: f64 = 0.4;

/// Gemma 2's soft caps of the logits of attention and head.
pub const SOFTCAPS: [f64; 2] = [0.9, 1.5];

impl Family {
    /// Gemma 1 to 4.
    pub fn is_gemma(self) -> bool {
        matches!(self, Self::Gemma | Self::Gemma2 | Self::Gemma3 | Self::Gemma4)
    }

    /// GLM-4, in both versions.
    pub fn is_glm(self) -> bool {
        matches!(self, Self::Glm | Self::Glm4)
    }

    /// Cohere's Command, in both versions: LayerNorm, and attention and MLP side by side.
    pub fn is_cohere(self) -> bool {
        matches!(self, Self::Cohere | Self::Cohere2)
    }

    /// Whether attention and MLP are side by side, behind one norm.
    pub fn shares_norm(self) -> bool {
        self.is_cohere() || matches!(self, Self::GptJ | Self::Phi)
    }

    /// Whether the head has a bias.
    pub fn has_head_bias(self) -> bool {
        matches!(self, Self::GptJ | Self::Phi)
    }

    /// Qwen3.5 and Qwen3-Next: linear attention, and attention with a gate on its output.
    pub fn has_delta_net(self) -> bool {
        matches!(self, Self::Qwen35 | Self::Qwen3Next)
    }

    /// Whether neighboring elements rotate as a pair.
    pub fn is_interleaved(self) -> bool {
        self.is_glm()
            || self.is_cohere()
            || matches!(self, Self::Llama4 | Self::Ernie | Self::GptJ | Self::DeepseekV2 | Self::DeepseekV3)
    }

    /// Whether norms have biases.
    pub fn has_norm_bias(self) -> bool {
        let of_gpt = matches!(self, Self::Gpt2 | Self::GptNeoX | Self::GptJ | Self::StarCoder2);
        of_gpt || matches!(self, Self::Phi | Self::Nemotron | Self::StableLm)
    }

    /// Whether norms subtract the mean.
    pub fn is_centered(self) -> bool {
        self.is_cohere() || self.has_norm_bias()
    }

    pub fn block_names(self) -> BlockNames {
        let llama = BlockNames {
            layers: "model.layers",
            attention: "self_attn",
            mamba: "mamba",
            qkv: None,
            o: "self_attn.o_proj",
            qk_norms: ["self_attn.q_norm", "self_attn.k_norm"],
            gated_mlp: ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"],
            fused_gate_up: None,
            plain_mlp: None,
        };
        match self {
            Self::Llama4 => BlockNames {
                gated_mlp: ["feed_forward.gate_proj", "feed_forward.up_proj", "feed_forward.down_proj"],
                ..llama
            },
            Self::Lfm2 => BlockNames {
                o: "self_attn.out_proj",
                qk_norms: ["self_attn.q_layernorm", "self_attn.k_layernorm"],
                gated_mlp: ["feed_forward.w1", "feed_forward.w3", "feed_forward.w2"],
                ..llama
            },
            Self::GraniteHybrid => BlockNames {
                gated_mlp: ["", "", "shared_mlp.output_linear"],
                fused_gate_up: Some("shared_mlp.input_linear"),
                ..llama
            },
            Self::Glm | Self::Glm4 => BlockNames { fused_gate_up: Some("mlp.gate_up_proj"), ..llama },
            Self::Phi3 => BlockNames {
                fused_gate_up: Some("mlp.gate_up_proj"),
                qkv: Some("self_attn.qkv_proj"),
                ..llama
            },
            Self::StarCoder2 => BlockNames { plain_mlp: Some(["mlp.c_fc", "mlp.c_proj"]), ..llama },
            Self::NemotronH => BlockNames {
                layers: "backbone.layers",
                attention: "mixer",
                mamba: "mixer",
                o: "mixer.o_proj",
                plain_mlp: Some(["mixer.up_proj", "mixer.down_proj"]),
                ..llama
            },
            Self::Nemotron => BlockNames { plain_mlp: Some(["mlp.up_proj", "mlp.down_proj"]), ..llama },
            Self::Gpt2 => BlockNames {
                layers: "transformer.h",
                qkv: Some("attn.c_attn"),
                o: "attn.c_proj",
                plain_mlp: Some(["mlp.c_fc", "mlp.c_proj"]),
                ..llama
            },
            Self::GptJ => BlockNames {
                layers: "transformer.h",
                attention: "attn",
                o: "attn.out_proj",
                plain_mlp: Some(["mlp.fc_in", "mlp.fc_out"]),
                ..llama
            },
            Self::Phi => BlockNames {
                o: "self_attn.dense",
                qk_norms: ["self_attn.q_layernorm", "self_attn.k_layernorm"],
                plain_mlp: Some(["mlp.fc1", "mlp.fc2"]),
                ..llama
            },
            Self::GptNeoX => BlockNames {
                layers: "gpt_neox.layers",
                qkv: Some("attention.query_key_value"),
                o: "attention.dense",
                plain_mlp: Some(["mlp.dense_h_to_4h", "mlp.dense_4h_to_h"]),
                ..llama
            },
            _ => llama,
        }
    }

    pub fn outer_names(self) -> OuterNames {
        let (embedding, norm, head) = match self {
            Self::Gpt2 | Self::GptJ => ("transformer.wte", "transformer.ln_f", "lm_head"),
            Self::Phi => ("model.embed_tokens", "model.final_layernorm", "lm_head"),
            Self::GptNeoX => ("gpt_neox.embed_in", "gpt_neox.final_layer_norm", "embed_out"),
            Self::Lfm2 => ("model.embed_tokens", "model.embedding_norm", "lm_head"),
            Self::NemotronH => ("backbone.embeddings", "backbone.norm_f", "lm_head"),
            _ => ("model.embed_tokens", "model.norm", "lm_head"),
        };
        OuterNames { embedding, norm, head }
    }

    /// Whether only every other layer has the window.
    pub fn has_full_layers(self) -> bool {
        matches!(
            self,
            Self::Llama4
                | Self::Gemma2
                | Self::Gemma3
                | Self::Gemma4
                | Self::Olmo3
                | Self::Exaone4
                | Self::Ministral
                | Self::Cohere2
                | Self::GptOss
        )
    }

    /// The soft caps of the logits of attention and head.
    pub fn softcaps(self) -> [Option<f64>; 2] {
        match self {
            Self::Gemma2 => SOFTCAPS.map(Some),
            Self::Gemma4 => [None, Some(SOFTCAPS[1])],
            _ => [None; 2],
        }
    }

    /// Added to the weights of norms.
    pub fn norm_offset(self) -> f64 {
        match self {
            Self::Gemma | Self::Gemma2 | Self::Gemma3 | Self::Nemotron => 1.0,
            family if family.has_delta_net() => 1.0,
            _ => 0.0,
        }
    }

    /// Names of the norms before and after attention, before and after the MLP.
    pub fn norms(self) -> [Option<&'static str>; 4] {
        let (input, post_attention) = (Some("input_layernorm"), Some("post_attention_layernorm"));
        let post_feedforward = Some("post_feedforward_layernorm");
        match self {
            Self::Gemma2 | Self::Gemma3 | Self::Gemma4 => {
                [input, post_attention, Some("pre_feedforward_layernorm"), post_feedforward]
            }
            Self::Glm4 => {
                [input, Some("post_self_attn_layernorm"), post_attention, Some("post_mlp_layernorm")]
            }
            Self::Olmo2 | Self::Olmo3 | Self::Exaone4 => [None, post_attention, None, post_feedforward],
            Self::Cohere | Self::Cohere2 | Self::Phi => [input, None, None, None],
            Self::GptJ => [Some("ln_1"), None, None, None],
            Self::Gpt2 => [Some("ln_1"), None, Some("ln_2"), None],
            Self::Lfm2 => [Some("operator_norm"), None, Some("ffn_norm"), None],
            Self::NemotronH => [Some("norm"), None, None, None],
            _ => [input, None, post_attention, None],
        }
    }
}

impl ReferenceConfig {
    /// The sizes and the rotary embedding of a layer's attention, which differ by layer in Gemma 4.
    pub fn of_layer(&self, layer: usize) -> Self {
        if !self.is_global(layer) {
            return self.clone();
        }
        let rope_scaling = RopeScaling::Proportional { part: PROPORTIONAL };
        Self {
            head_dim: 2 * self.head_dim,
            num_kv_heads: self.num_kv_heads.div_ceil(2),
            rope_scaling,
            ..self.clone()
        }
    }

    /// Whether a layer is one of Gemma 4 without a window: its values are the keys before their norm.
    pub fn is_global(&self, layer: usize) -> bool {
        self.family == Family::Gemma4 && self.window(layer).is_none()
    }

    /// Whether a layer has linear attention by the delta rule instead of attention.
    pub fn is_linear(&self, layer: usize) -> bool {
        (self.family.has_delta_net() || self.family == Family::KimiLinear) && layer + 1 < self.num_layers
    }

    /// Whether a layer has a short convolution instead of attention.
    pub fn is_conv(&self, layer: usize) -> bool {
        self.family == Family::Lfm2 && layer + 1 < self.num_layers
    }

    /// Whether a layer has Mamba 2 instead of attention.
    pub fn is_mamba(&self, layer: usize) -> bool {
        match self.family {
            Family::GraniteHybrid => layer + 1 < self.num_layers,
            Family::NemotronH => layer.is_multiple_of(4),
            _ => false,
        }
    }

    /// Whether a layer has an MLP: every one, or every other one of Nemotron-H, which then has nothing else.
    pub fn has_mlp(&self, layer: usize) -> bool {
        self.family != Family::NemotronH || layer % 2 == 1
    }

    /// Whether a layer has attention.
    pub fn has_attention(&self, layer: usize) -> bool {
        let is_mlp = self.family == Family::NemotronH && self.has_mlp(layer);
        !self.is_linear(layer) && !self.is_conv(layer) && !self.is_mamba(layer) && !is_mlp
    }

    /// Whether q, k and v have biases.
    pub fn has_qkv_bias(&self) -> bool {
        let of_others = matches!(self.family, Family::Lfm2 | Family::GraniteHybrid | Family::NemotronH);
        self.qkv_bias && !of_others || self.all_biases()
    }

    /// Whether the projections of Mamba 2 have biases.
    pub fn mamba_biases(&self) -> bool {
        matches!(self.family, Family::GraniteHybrid | Family::NemotronH) && self.qkv_bias
    }

    /// Whether the projections of MLPs have biases.
    pub fn mlp_bias(&self) -> bool {
        self.all_biases() || self.family == Family::GptJ || self.family == Family::NemotronH && self.qkv_bias
    }

    /// Groups of B and C of Mamba 2: two in models with biases.
    pub fn mamba_groups(&self) -> usize {
        if self.mamba_biases() { 2 } else { 1 }
    }

    /// Whether the short convolutions of LFM2 have biases.
    pub fn conv_bias(&self) -> bool {
        self.family == Family::Lfm2 && self.qkv_bias
    }

    /// The window of a layer, or the size of its chunks.
    pub fn window(&self, layer: usize) -> Option<usize> {
        self.sliding_window.filter(|_| !self.family.has_full_layers() || layer.is_multiple_of(2))
    }

    /// The rotary base of a layer; `None` without rotation, in every other one of SmolLM3 and those of Llama 4, EXAONE 4 and Command without a window.
    pub fn theta(&self, layer: usize) -> Option<f64> {
        match self.family {
            Family::Gemma3 | Family::Gemma4 if self.window(layer).is_some() => Some(LOCAL_THETA),
            Family::SmolLm3 if layer % 2 == 1 => None,
            Family::Gpt2 | Family::GraniteHybrid | Family::NemotronH | Family::KimiLinear => None,
            Family::Llama4 | Family::Exaone4 | Family::Cohere2 if self.window(layer).is_none() => None,
            _ => Some(self.rope_theta),
        }
    }

    /// Whether the projections of attention's output and of the MLP have biases.
    pub fn all_biases(&self) -> bool {
        match self.family {
            Family::Gpt2 | Family::GptNeoX | Family::Phi | Family::StarCoder2 => true,
            Family::Ernie | Family::Nemotron => self.qkv_bias,
            _ => false,
        }
    }

    /// The factors on embedding, residual branches and logits of MiniCPM3.
    pub fn minicpm3_factors(&self) -> [f64; 3] {
        let [embedding, depth, base] = MINICPM3;
        [embedding, depth / (self.num_layers as f64).sqrt(), base / self.hidden_size as f64]
    }

    /// The factor on the logits of attention.
    pub fn attention_scale(&self) -> f64 {
        match self.family {
            Family::Granite | Family::GraniteHybrid => GRANITE[2],
            Family::Gemma4 => 1.0,
            Family::Gemma2 | Family::Gemma3 => 1.0 / QUERY_PRE_ATTN_SCALAR.sqrt(),
            _ => 1.0 / (self.head_dim as f64).sqrt(),
        }
    }

    /// Elements of the norms of queries and keys, if there are any.
    pub fn qk_norm_sizes(&self) -> Option<[usize; 2]> {
        match self.family {
            Family::Olmo2 | Family::Olmo3 => {
                Some([self.num_heads, self.num_kv_heads].map(|heads| heads * self.head_dim))
            }
            Family::Gemma3 | Family::Gemma4 | Family::Exaone4 | Family::Lfm2 => Some([self.head_dim; 2]),
            family if family.has_delta_net() => Some([self.head_dim; 2]),
            _ => self.qk_norm.then_some([self.head_dim; 2]),
        }
    }
}
