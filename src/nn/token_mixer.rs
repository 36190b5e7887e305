//! The module of a layer that mixes tokens, or the MLP in its place.

mod checkpoint;

pub use checkpoint::MixerKept;

use super::{
    AttentionConfig, AttentionExtent, AttentionProjections, AttentionSaved, BackwardPass, BranchGradients,
    BranchInput, ForwardPass, LatentAttention, LatentAttentionSaved, LayerError, LinearAttention,
    LinearAttentionConfig, LinearAttentionProjections, LinearAttentionSaved, Mlp, MlpConfig, MlpProjections,
    MlpSaved, ModuleWeights, NormConfig, NumHeads, ParameterList, SelfAttention, ShortConv, ShortConvConfig,
    ShortConvSaved, TensorRank,
};
use candle_core::Tensor;

/// Sizes and options of a layer's token mixer: attention, linear attention or short convolution; or that it has none.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum MixerConfig {
    /// Attention, also latent attention.
    Attention(AttentionConfig),
    /// Linear attention: Gated DeltaNet, Kimi Delta Attention or Mamba 2.
    LinearAttention(LinearAttentionConfig),
    /// Gated short convolution.
    ShortConv(ShortConvConfig),
    /// No mixer: the layer is an MLP, as some layers of Nemotron-H are.
    Mlp,
}

impl MixerConfig {
    /// The attention, if it is that.
    pub fn attention(&self) -> Option<&AttentionConfig> {
        match self {
            Self::Attention(attention) => Some(attention),
            Self::LinearAttention(_) | Self::ShortConv(_) | Self::Mlp => None,
        }
    }

    /// As [`attention`](Self::attention), to change it.
    pub fn attention_mut(&mut self) -> Option<&mut AttentionConfig> {
        match self {
            Self::Attention(attention) => Some(attention),
            Self::LinearAttention(_) | Self::ShortConv(_) | Self::Mlp => None,
        }
    }

    /// Elements per token of the widest of its tensors.
    pub fn width(&self) -> usize {
        match self {
            Self::Attention(attention) => attention.num_heads * attention.q_outputs_per_head(),
            Self::LinearAttention(linear) => 2 * linear.key_dim() + linear.value_dim(),
            Self::ShortConv(conv) => 3 * conv.channels,
            // That of the model's MLPs.
            Self::Mlp => 0,
        }
    }

    /// The heads of which the ranks of sp have whole sequences, of a module that is not attention.
    pub fn exchanged_heads(&self) -> Option<NumHeads> {
        match self {
            Self::Attention(_) | Self::Mlp => None,
            Self::LinearAttention(linear) => Some(linear.heads()),
            Self::ShortConv(conv) => Some(conv.heads()),
        }
    }

    /// The config of the part that one rank of tp has, with its heads.
    ///
    /// # Errors
    /// Heads that cannot be divided over so many ranks; `layer` is the name for the error.
    pub fn divided(&self, layer: &str, tp: TensorRank) -> Result<Self, LayerError> {
        Ok(match self {
            Self::Attention(attention) => attention.divided(layer, tp)?.0.into(),
            Self::LinearAttention(linear) => Self::LinearAttention(linear.divided(layer, tp)?.0),
            Self::ShortConv(conv) => Self::ShortConv(conv.divided(layer, tp)?.0),
            Self::Mlp => Self::Mlp,
        })
    }

    /// The linear attention, if it is that.
    pub fn linear_attention(&self) -> Option<&LinearAttentionConfig> {
        match self {
            Self::LinearAttention(linear) => Some(linear),
            Self::Attention(_) | Self::ShortConv(_) | Self::Mlp => None,
        }
    }

    /// The short convolution, if it is that.
    pub fn short_conv(&self) -> Option<&ShortConvConfig> {
        match self {
            Self::ShortConv(conv) => Some(conv),
            Self::Attention(_) | Self::LinearAttention(_) | Self::Mlp => None,
        }
    }
}

impl From<AttentionConfig> for MixerConfig {
    fn from(attention: AttentionConfig) -> Self {
        Self::Attention(attention)
    }
}

impl From<LinearAttentionConfig> for MixerConfig {
    fn from(linear: LinearAttentionConfig) -> Self {
        Self::LinearAttention(linear)
    }
}

impl From<ShortConvConfig> for MixerConfig {
    fn from(conv: ShortConvConfig) -> Self {
        Self::ShortConv(conv)
    }
}

/// What the token mixers of a model's layers are made of, in addition to the config of each.
#[derive(Debug, Clone, Copy)]
pub struct MixerParts {
    /// The projections of an attention.
    pub attention: AttentionProjections,
    /// The projections of a linear attention.
    pub linear_attention: LinearAttentionProjections,
    /// The projections of an MLP in the mixer's place.
    pub mlp: MlpProjections,
    /// Its size and activation.
    pub mlp_config: MlpConfig,
    /// Elements per token of the residual stream.
    pub hidden_size: usize,
    /// The model's norms.
    pub norm: NormConfig,
    /// The weights of all projections.
    pub weights: ModuleWeights,
}

/// The module that mixes the tokens of a layer.
#[derive(Debug)]
pub enum TokenMixer {
    /// Attention.
    Attention(SelfAttention),
    /// Latent attention.
    LatentAttention(LatentAttention),
    /// Linear attention: Gated DeltaNet, Kimi Delta Attention or Mamba 2.
    LinearAttention(LinearAttention),
    /// Gated short convolution.
    ShortConv(ShortConv),
    /// An MLP in its place, which mixes none.
    Mlp(Mlp),
}

/// The state of a [`TokenMixer`]: of one head chunk of an attention, or of all.
pub enum MixerSaved {
    /// State of a head chunk.
    Attention(AttentionSaved),
    /// State of all heads, or the tensors of a checkpoint.
    LatentAttention(LatentAttentionSaved),
    /// State of all heads.
    LinearAttention(LinearAttentionSaved),
    /// State of all channels.
    ShortConv(ShortConvSaved),
    /// State of an MLP.
    Mlp(MlpSaved),
}

impl TokenMixer {
    /// Adds the projections, as [`SelfAttention::new`], [`LatentAttention::new`], [`LinearAttention::new`], [`ShortConv::new`] or [`Mlp::new`].
    pub fn new(parameters: &mut ParameterList, config: MixerConfig, parts: MixerParts) -> Self {
        let MixerParts { hidden_size: hidden, weights, .. } = parts;
        match config {
            MixerConfig::Attention(shape) => match shape.latent {
                Some(latent) => {
                    let latent = LatentAttention::new(parameters, hidden, shape, latent, weights);
                    Self::LatentAttention(latent)
                }
                None => {
                    let attention = SelfAttention::new(parameters, parts.attention, hidden, shape, weights);
                    Self::Attention(attention)
                }
            },
            MixerConfig::LinearAttention(shape) => {
                let (projections, eps) = (parts.linear_attention, parts.norm.eps);
                let linear = LinearAttention::new(parameters, projections, hidden, shape, eps, weights);
                Self::LinearAttention(linear)
            }
            MixerConfig::ShortConv(shape) => {
                Self::ShortConv(ShortConv::new(parameters, hidden, shape, weights))
            }
            MixerConfig::Mlp => Self::Mlp(Mlp::new(parameters, parts.mlp, hidden, parts.mlp_config, weights)),
        }
    }

    /// The attention, if it is that and not latent.
    pub fn attention(&self) -> Option<&SelfAttention> {
        match self {
            Self::Attention(attention) => Some(attention),
            _ => None,
        }
    }

    /// Adds norms of queries and keys and biases of an attention that has them, in this order.
    pub fn add_norms_and_biases(
        &mut self,
        parameters: &mut ParameterList,
        projections: AttentionProjections,
        norm: NormConfig,
    ) {
        if let Self::Attention(attention) = self {
            attention.add_norms(parameters, projections, norm);
            attention.add_biases(parameters, projections);
        }
    }

    /// Keeps the heads, channels or intermediate elements of one rank of tp.
    ///
    /// # Errors
    /// Heads that cannot be divided over so many ranks.
    pub fn divide(&mut self, parameters: &mut ParameterList, tp: TensorRank) -> Result<(), LayerError> {
        match self {
            Self::Attention(attention) => attention.divide(parameters, tp),
            Self::LatentAttention(latent) => latent.divide(parameters, tp),
            Self::ShortConv(conv) => conv.divide(parameters, tp),
            Self::LinearAttention(linear) => linear.divide(parameters, tp),
            Self::Mlp(mlp) => mlp.divide(parameters, tp),
        }
    }

    /// The size of an attention, for its FLOPs.
    pub fn extent(&self) -> Option<AttentionExtent> {
        match self {
            Self::Attention(attention) => Some(attention.extent()),
            Self::LatentAttention(latent) => Some(latent.extent()),
            _ => None,
        }
    }

    /// Whether [`forward`](Self::forward) joins the branch itself. Only an MLP does; after other modules the caller calls
    /// [`Branch::join`](super::Branch::join).
    pub fn joins_its_branch(&self) -> bool {
        matches!(self, Self::Mlp(_))
    }

    /// Adds the output to the tensor that the branch opens; an MLP then [joins](Self::joins_its_branch) the branch. Only attention keeps
    /// something for a checkpoint.
    ///
    /// # Shapes
    /// Result: `[batch, seq_local, hidden]`.
    ///
    /// # Errors
    /// A refused operation, or failed communication.
    pub fn forward(
        &self,
        input: BranchInput<'_>,
        kept: &mut MixerKept,
        pass: &ForwardPass<'_>,
    ) -> Result<Tensor, LayerError> {
        let (saves, is_kept) = (kept.saves(), kept.is_state());
        let mut keep = |saved| kept.keep(saved, pass);
        let (y, saved) = match self {
            Self::Attention(attention) => {
                let keep = |saved| keep(MixerSaved::Attention(saved));
                return attention.forward(input, saves, keep, pass);
            }
            Self::LatentAttention(latent) => {
                let (y, saved) = latent.forward(input, saves, pass)?;
                (y, Some(MixerSaved::LatentAttention(saved)))
            }
            Self::LinearAttention(linear) => {
                let (y, saved) = linear.forward(input, is_kept, pass)?;
                (y, saved.map(MixerSaved::LinearAttention))
            }
            Self::ShortConv(conv) => {
                let (y, saved) = conv.forward(input, is_kept, pass)?;
                (y, saved.map(MixerSaved::ShortConv))
            }
            Self::Mlp(mlp) => {
                let (y, saved) = mlp.forward(input, is_kept, pass)?;
                (y, saved.map(MixerSaved::Mlp))
            }
        };
        saved.into_iter().for_each(keep);
        Ok(y)
    }

    /// Backward of [`forward`](Self::forward), from all that it saved; an attention or an MLP recomputes what is missing.
    ///
    /// # Errors
    /// As [`forward`](Self::forward), or state of another module.
    pub fn backward(
        &self,
        input: BranchInput<'_>,
        saved: Vec<MixerSaved>,
        gradients: BranchGradients<'_>,
        pass: &BackwardPass<'_>,
    ) -> Result<(), LayerError> {
        if let Self::Attention(attention) = self {
            let chunks = saved.into_iter().map(|saved| match saved {
                MixerSaved::Attention(saved) => Ok(saved),
                _ => Err(pass.forward.foreign_state()),
            });
            return attention.backward(input, chunks.collect::<Result<_, _>>()?, gradients, pass);
        }
        match (self, saved.into_iter().next()) {
            (Self::LatentAttention(latent), Some(MixerSaved::LatentAttention(saved))) => {
                latent.backward(input, saved, gradients, pass)
            }
            (Self::LinearAttention(linear), Some(MixerSaved::LinearAttention(saved))) => {
                linear.backward(input, saved, gradients, pass)
            }
            (Self::ShortConv(conv), Some(MixerSaved::ShortConv(saved))) => {
                conv.backward(input, saved, gradients, pass)
            }
            (Self::Mlp(mlp), None) => mlp.backward(input, None, gradients.dx, pass),
            (Self::Mlp(mlp), Some(MixerSaved::Mlp(saved))) => {
                mlp.backward(input, Some(saved), gradients.dx, pass)
            }
            _ => Err(pass.forward.foreign_state()),
        }
    }
}

impl MixerSaved {
    /// Bytes of the tensors.
    pub fn bytes(&self) -> usize {
        match self {
            Self::Attention(saved) => saved.bytes(),
            Self::LatentAttention(saved) => saved.bytes(),
            Self::LinearAttention(saved) => saved.bytes(),
            Self::ShortConv(saved) => saved.bytes(),
            Self::Mlp(saved) => saved.bytes(),
        }
    }

    /// The tensors that a checkpoint with outputs has. Recycles the others.
    pub fn into_checkpoint(self, pass: &ForwardPass<'_>) -> Vec<Tensor> {
        match self {
            Self::Attention(saved) => return saved.into_checkpoint(pass).into(),
            Self::LatentAttention(saved) => return saved.into_checkpoint(pass).into(),
            Self::LinearAttention(saved) => saved.recycle(pass),
            Self::ShortConv(saved) => saved.recycle(pass),
            Self::Mlp(saved) => saved.recycle(pass),
        }
        Vec::new()
    }

    /// Recycles all tensors.
    pub fn recycle(self, pass: &ForwardPass<'_>) {
        pass.recycle(self.into_checkpoint(pass));
    }
}
