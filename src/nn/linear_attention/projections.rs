//! The projections of linear attention, by their parameters.

use super::{LinearAttentionConfig, Mixed};
use crate::nn::{GroupNames, Linear, ParameterList, WeightSpec};

/// The projections of linear attention, by the names of their parameters; those of Kimi Delta Attention have one.
#[derive(Debug, Clone, Copy)]
pub struct LinearAttentionProjections {
    /// The name of a Mamba 2, before those of its parameters.
    pub mamba: &'static str,
    /// Those of a Gated DeltaNet.
    pub delta_net: DeltaNetProjections,
}

/// The parameters of the projections of Gated DeltaNet, but for that of its output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeltaNetProjections {
    /// `in_proj_qkv`, `in_proj_z`, `in_proj_b` and `in_proj_a` (Qwen3.5).
    Each,
    /// `in_proj_qkvz` and `in_proj_ba`: one key head with its value heads after the other (Qwen3-Next).
    ByKeyHead,
}

impl DeltaNetProjections {
    /// Adds the parameters. Returns the projections of the inputs of heads, and that of z.
    pub(super) fn add(
        self,
        parameters: &mut ParameterList,
        hidden_size: usize,
        shape: LinearAttentionConfig,
        weight: WeightSpec,
    ) -> (Mixed<Linear>, Linear) {
        let (keys, values, heads) = (shape.key_dim(), shape.value_dim(), shape.num_value_heads);
        match self {
            Self::Each => {
                let names = GroupNames::One("linear_attn.in_proj_qkv");
                let qkv = Linear::group(parameters, names, [keys, keys, values], hidden_size, weight);
                let mut linear = |name: &str, out| Linear::new(parameters, name, [out, hidden_size], weight);
                let z = linear("linear_attn.in_proj_z", values);
                let b = Some(linear("linear_attn.in_proj_b", heads));
                let a = linear("linear_attn.in_proj_a", heads);
                (Mixed { qkv, b, a }, z)
            }
            Self::ByKeyHead => {
                let of_key_head = |outs: usize| outs / shape.num_key_heads;
                let outs = [keys, keys, values, values];
                let names = GroupNames::Interleaved("linear_attn.in_proj_qkvz", outs.map(of_key_head));
                let [q, k, v, z] = Linear::group(parameters, names, outs, hidden_size, weight);
                let outs = [heads; 2];
                let names = GroupNames::Interleaved("linear_attn.in_proj_ba", outs.map(of_key_head));
                let [b, a] = Linear::group(parameters, names, outs, hidden_size, weight);
                (Mixed { qkv: [q, k, v], b: Some(b), a }, z)
            }
        }
    }
}
