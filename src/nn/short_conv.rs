//! Gated short convolution, which mixes the tokens in most layers of LFM2.
//!
//! ```text
//! b, c, v = in_proj(x)
//! y = out_proj(c · conv(b · v))    causal, within documents
//! ```
//!
//! The convolution sees whole sequences: before it tokens are [exchanged for channels](super::HeadExchange), as heads of one
//! element, and after it channels for tokens. A rank computes the gradients of its own channels' taps; the sum over the
//! sequence's ranks is the whole.

use super::causal_conv::CausalConv;
use super::heads::{even_ranges, one_each};
use super::shard::{ExtendedTokens, Reach};
use super::{
    BackwardPass, BranchGradients, BranchInput, ForwardPass, GroupNames, HeadTransfer, LayerError, Linear,
    ModuleWeights, NumHeads, ParameterList, TensorRank, token_dims, token_rows,
};
use candle_core::Tensor;
use std::ops::Range;
use std::sync::Arc;
use ulysses_kernels::glu::{self, Activation::Identity};
use ulysses_kernels::tensor;

/// The convolution of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShortConvConfig {
    /// Its channels: the width of the residual stream or, on a rank of tp, a part of them.
    pub channels: usize,
    /// Tokens that it reads, including the current one.
    pub taps: usize,
    /// Whether convolution and projections have biases.
    pub bias: bool,
}

impl ShortConvConfig {
    /// The channels, as heads of one element.
    pub fn heads(&self) -> NumHeads {
        NumHeads::ungrouped(self.channels)
    }

    /// The convolution of one rank of tp, with the channels of every rank.
    ///
    /// # Errors
    /// More ranks than channels; `layer` is the name for the error.
    pub fn divided(self, layer: &str, tp: TensorRank) -> Result<(Self, Vec<Range<usize>>), LayerError> {
        let ranges = even_ranges(layer, self.channels, tp)?;
        Ok((Self { channels: ranges[tp.rank].len(), ..self }, ranges))
    }
}

/// A gated short convolution, without the branch that it is in.
#[derive(Debug)]
pub struct ShortConv {
    shape: ShortConvConfig,
    /// b, c and v.
    input: [Linear; 3],
    conv: CausalConv,
    out: Linear,
}

/// State of a forward pass for its backward pass.
pub struct ShortConvSaved {
    /// b, c and v of this rank's tokens.
    projections: [Tensor; 3],
    /// Input of the convolution: this rank's channels of all tokens, or all channels of its extended tokens.
    gated: Tensor,
    /// Its output, for this rank's tokens.
    convolved: Tensor,
}

impl ShortConvSaved {
    fn into_tensors(self) -> impl Iterator<Item = Tensor> {
        self.projections.into_iter().chain([self.gated, self.convolved])
    }

    /// Bytes of the tensors.
    pub fn bytes(&self) -> usize {
        self.projections.iter().chain([&self.gated, &self.convolved]).map(tensor::bytes).sum()
    }

    /// Recycles the tensors.
    pub fn recycle(self, pass: &ForwardPass<'_>) {
        pass.recycle(self.into_tensors());
    }
}

impl ShortConv {
    /// Adds the parameters under `conv`.
    pub fn new(
        parameters: &mut ParameterList,
        hidden_size: usize,
        shape: ShortConvConfig,
        weights: ModuleWeights,
    ) -> Self {
        let ShortConvConfig { channels, taps, bias } = shape;
        let names = GroupNames::One("conv.in_proj");
        let mut input = Linear::group(parameters, names, [channels; 3], hidden_size, weights.input);
        let mut conv = CausalConv::new(parameters, "conv.conv", channels, taps, weights.input.init, false);
        let mut out = Linear::new(parameters, "conv.out_proj", [hidden_size, channels], weights.output);
        if bias {
            Linear::add_group_bias(parameters, names, input.each_mut());
            conv.add_bias(parameters, "conv.conv", channels);
            out.add_bias(parameters, "conv.out_proj");
        }
        Self { shape, input, conv, out }
    }

    /// Keeps the channels of one rank of tp; the output is then a partial sum.
    ///
    /// # Errors
    /// More ranks than channels.
    pub fn divide(&mut self, parameters: &mut ParameterList, tp: TensorRank) -> Result<(), LayerError> {
        let (shape, own) = self.shape.divided(parameters.layer(), tp)?;
        Linear::divide_outputs(parameters, self.input.each_mut(), [&own[..]; 3], tp.rank);
        self.conv.divide(parameters, &one_each(&own), tp.rank);
        self.out.divide_inputs(parameters, &own, tp.rank);
        self.shape = shape;
        Ok(())
    }

    /// Adds the output to the tensor that the branch opens. Returns the state for the backward pass, if `keep`.
    ///
    /// # Shapes
    /// Result: `[batch, seq_local, hidden]`.
    ///
    /// # Errors
    /// A refused operation, or failed communication.
    pub fn forward(
        &self,
        input: BranchInput<'_>,
        keep: bool,
        pass: &ForwardPass<'_>,
    ) -> Result<(Tensor, Option<ShortConvSaved>), LayerError> {
        let (ws, (batch, tokens)) = (pass.workspace(), token_dims(input.x));
        let y = input.branch.open(input.x, pass)?;
        let channels = || ws.alloc((batch, tokens, self.shape.channels, 1));
        let projections = [channels()?, channels()?, channels()?];
        let outputs: Vec<_> = self.input.iter().zip(&projections).collect();
        input.project(&outputs, pass)?;
        let [b, c, v] = &projections;
        let gated = channels()?;
        glu::forward(Identity, b, v, &gated)?;
        let (gated, convolved) = self.convolve(gated, pass)?;
        for tile in pass.ctx.token_tiles() {
            let product = product(c, &convolved, &tile, pass)?;
            self.out.forward(&product, &token_rows(&y, &tile)?, true, pass)?;
            pass.recycle([product]);
        }
        let saved = ShortConvSaved { projections, gated, convolved };
        if keep {
            return Ok((y, Some(saved)));
        }
        saved.recycle(pass);
        Ok((y, None))
    }

    /// Backward of [`forward`](Self::forward): also adds to the gradients of the parameters.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn backward(
        &self,
        input: BranchInput<'_>,
        saved: ShortConvSaved,
        BranchGradients { dy, dx }: BranchGradients<'_>,
        pass: &BackwardPass<'_>,
    ) -> Result<(), LayerError> {
        let (forward, ws) = (&pass.forward, pass.forward.workspace());
        let ShortConvSaved { projections: [b, c, v], gated, convolved } = saved;
        let like = |tensor: &Tensor| ws.alloc(tensor.dims());
        let (dc, dconvolved) = (like(&c)?, like(&convolved)?);
        for tile in forward.ctx.token_tiles() {
            let dy = token_rows(dy, &tile)?;
            let product = product(&c, &convolved, &tile, forward)?;
            self.out.backward_weight(&dy, &product, pass)?;
            let dproduct = like(&product)?;
            self.out.backward_input(&dy, &dproduct, false, forward)?;
            let parts = [&c, &convolved, &dc, &dconvolved].map(|tensor| token_rows(tensor, &tile));
            let [c, convolved, dc, dconvolved] = parts;
            glu::backward(Identity, &dproduct, &c?, &convolved?, &dc?, &dconvolved?)?;
            forward.recycle([product, dproduct]);
        }
        forward.recycle([c, convolved]);
        let dgated = self.backward_convolve(dconvolved, gated, pass)?;
        let (db, dv) = (like(&b)?, like(&v)?);
        glu::backward(Identity, &dgated, &b, &v, &db, &dv)?;
        forward.recycle([b, v, dgated]);
        let gradients = [db, dc, dv];
        let outputs: Vec<_> = self.input.iter().zip(&gradients).collect();
        input.backward_project(&outputs, dx, pass)?;
        forward.recycle(gradients);
        Ok(())
    }

    /// The convolution of this rank's tokens: what it read, for the backward pass, and its output.
    fn convolve(&self, gated: Tensor, pass: &ForwardPass<'_>) -> Result<(Tensor, Tensor), LayerError> {
        if let Some(extended) = self.extended_tokens(pass)? {
            let read = extended.extend(std::slice::from_ref(&gated), pass.workspace())?.remove(0);
            pass.recycle([gated]);
            let all = self.conv.forward(&read, &(0..self.shape.channels), extended.convolved(), pass)?;
            return Ok((read, extended.within(all, pass.workspace())?));
        }
        let gated = self.exchange(gated, HeadTransfer::Inputs, pass)?;
        let convolved = self.conv.forward(&gated, &self.own_channels(pass), pass.ctx.documents(), pass)?;
        let convolved = self.exchange(convolved, HeadTransfer::Output, pass)?;
        Ok((gated, convolved))
    }

    /// Backward of [`convolve`](Self::convolve); the tensors are recycled.
    fn backward_convolve(
        &self,
        dconvolved: Tensor,
        read: Tensor,
        pass: &BackwardPass<'_>,
    ) -> Result<Tensor, LayerError> {
        let forward = &pass.forward;
        if let Some(extended) = self.extended_tokens(forward)? {
            let dconvolved = extended.around(dconvolved, forward.workspace())?;
            let channels = 0..self.shape.channels;
            let dread = self.conv.backward(&dconvolved, &read, &channels, extended.convolved(), pass)?;
            forward.recycle([dconvolved, read]);
            let dgated = extended.reduce(std::slice::from_ref(&dread), forward.workspace())?.remove(0);
            forward.recycle([dread]);
            return Ok(dgated);
        }
        let dconvolved = self.exchange(dconvolved, HeadTransfer::OutputGradient, forward)?;
        let (channels, documents) = (self.own_channels(forward), forward.ctx.documents());
        let dgated = self.conv.backward(&dconvolved, &read, &channels, documents, pass)?;
        forward.recycle([dconvolved, read]);
        self.exchange(dgated, HeadTransfer::InputGradients, forward)
    }

    /// The extended tokens, if ranks pass tokens on instead of exchanging tokens for channels.
    fn extended_tokens(&self, pass: &ForwardPass<'_>) -> Result<Option<Arc<ExtendedTokens>>, LayerError> {
        let tokens_before = self.shape.taps - 1;
        pass.ctx.extended_tokens(&Reach { tokens_before, state_rows: 0, v_to_k: Vec::new() })
    }

    /// The channels of this rank, among those of its rank of tp.
    fn own_channels(&self, pass: &ForwardPass<'_>) -> Range<usize> {
        pass.ctx.head_exchange().share(self.shape.heads()).q
    }

    fn exchange(
        &self,
        x: Tensor,
        transfer: HeadTransfer,
        pass: &ForwardPass<'_>,
    ) -> Result<Tensor, LayerError> {
        pass.ctx.exchange_values(x, self.shape.heads(), transfer)
    }
}

/// `c · convolved` of a tile of tokens, `[tile, channels]`.
fn product(
    c: &Tensor,
    convolved: &Tensor,
    tile: &Range<usize>,
    pass: &ForwardPass<'_>,
) -> Result<Tensor, LayerError> {
    let c = token_rows(c, tile)?;
    let product = pass.workspace().alloc(c.dims())?;
    glu::forward(Identity, &c, &token_rows(convolved, tile)?, &product)?;
    Ok(product)
}
