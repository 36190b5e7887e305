//! The MLP of a block with its norm and residual, in tiles of tokens.

use super::heads::even_ranges;
use super::{
    BackwardPass, BranchInput, ForwardPass, GroupNames, LayerError, Linear, ModuleWeights, ParameterList,
    TensorRank, recycle_unless, token_rows,
};
use candle_core::Tensor;
use std::ops::Range;
use ulysses_kernels::elementwise;
use ulysses_kernels::glu::{self, Activation};

/// `down(activation(gate(x)) · up(x))` (arXiv 2002.05202), or `down(activation(gate(x)))` without an up projection: the MLP of
/// the first transformers.
///
/// The backward pass recomputes the normalized input and the product, each in one pass over memory.
#[derive(Debug)]
pub struct Mlp {
    activation: Activation,
    gate: Linear,
    up: Option<Linear>,
    down: Linear,
}

/// Size and activation of an MLP.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MlpConfig {
    /// Elements per token between its projections.
    pub intermediate_size: usize,
    /// The activation, that of the gate if there is one.
    pub activation: Activation,
}

/// The projections of an MLP, by the names of their parameters.
#[derive(Debug, Clone, Copy)]
pub enum MlpProjections {
    /// Gate, up and down projection.
    Gated([&'static str; 3]),
    /// One for the gate and up projections, and the down projection.
    FusedGated([&'static str; 2]),
    /// The first and the second projection of an MLP without a gate.
    Plain([&'static str; 2]),
}

/// Outputs of the gate and up projections.
struct GateUp {
    gate: Tensor,
    up: Option<Tensor>,
}

/// State saved for the backward pass.
pub struct MlpSaved {
    projections: GateUp,
    /// The output, if its gradient depends on it.
    output: Option<Tensor>,
}

impl MlpSaved {
    /// Bytes of the tensors.
    pub fn bytes(&self) -> usize {
        let GateUp { gate, up } = &self.projections;
        [gate].into_iter().chain(up).chain(&self.output).map(ulysses_kernels::tensor::bytes).sum()
    }

    /// Recycles all tensors.
    pub fn recycle(self, pass: &ForwardPass<'_>) {
        pass.recycle(self.projections.into_tensors().chain(self.output));
    }
}

impl Mlp {
    /// Adds the gate and up projections, then the down projection.
    pub fn new(
        parameters: &mut ParameterList,
        projections: MlpProjections,
        hidden_size: usize,
        MlpConfig { intermediate_size: size, activation }: MlpConfig,
        weights: ModuleWeights,
    ) -> Self {
        let (gate, up) = match projections {
            MlpProjections::Plain([gate, _]) => {
                (Linear::new(parameters, gate, [size, hidden_size], weights.input), None)
            }
            MlpProjections::Gated(_) | MlpProjections::FusedGated(_) => {
                let names = projections.gate_up();
                let [gate, up] = Linear::group(parameters, names, [size; 2], hidden_size, weights.input);
                (gate, Some(up))
            }
        };
        let down = Linear::new(parameters, projections.down(), [hidden_size, size], weights.output);
        Self { activation, gate, up, down }
    }

    /// Adds biases to all projections.
    pub fn add_biases(&mut self, parameters: &mut ParameterList, projections: MlpProjections) {
        match (&mut self.up, projections) {
            (None, MlpProjections::Plain([gate, _])) => self.gate.add_bias(parameters, gate),
            (Some(up), _) => Linear::add_group_bias(parameters, projections.gate_up(), [&mut self.gate, up]),
            (None, _) => {}
        }
        self.down.add_bias(parameters, projections.down());
    }

    /// Keeps the intermediate elements of one rank of tp; the output is then a partial sum.
    ///
    /// # Errors
    /// More ranks than intermediate elements.
    pub fn divide(&mut self, parameters: &mut ParameterList, tp: TensorRank) -> Result<(), LayerError> {
        let own = even_ranges(parameters.layer(), self.gate.num_outputs(), tp)?;
        match &mut self.up {
            Some(up) => Linear::divide_outputs(parameters, [&mut self.gate, up], [&own, &own], tp.rank),
            None => Linear::divide_outputs(parameters, [&mut self.gate], [&own], tp.rank),
        }
        self.down.divide_inputs(parameters, &own, tp.rank);
        Ok(())
    }

    /// Computes the branch of the MLP. With `keep` and without tiles, also returns the state for the backward pass.
    ///
    /// # Shapes
    /// Result: `[batch, seq_local, hidden]`.
    ///
    /// # Errors
    /// A refused operation.
    pub fn forward(
        &self,
        input: BranchInput<'_>,
        keep: bool,
        pass: &ForwardPass<'_>,
    ) -> Result<(Tensor, Option<MlpSaved>), LayerError> {
        let (ws, BranchInput { branch, x }) = (pass.workspace(), input);
        let keep = keep && pass.ctx.tiling().tile_tokens.is_none();
        let output = branch.open(x, pass)?;
        let mut saved = None;
        for tile in pass.ctx.token_tiles() {
            let projections = self.gate_up(input, &tile, pass)?;
            let product = self.product(&projections, pass)?;
            self.down.forward(&product, &token_rows(&output, &tile)?, true, pass)?;
            ws.recycle(product);
            if keep {
                saved = Some(projections);
            } else {
                pass.recycle(projections.into_tensors());
            }
        }
        let y = branch.join(x, &output, pass)?;
        let mut output = Some(output);
        let saved = saved.map(|projections| {
            let output = if branch.needs_output() { output.take() } else { None };
            MlpSaved { projections, output }
        });
        if let Some(output) = output {
            recycle_unless(output, &y, pass);
        }
        Ok((y, saved))
    }

    /// Backward of [`forward`](Self::forward). `dx` is that of [`BranchGradients`](super::BranchGradients): the gradient of the result
    /// becomes that of `input.x`. What the forward pass did not save is recomputed, tile by tile.
    ///
    /// # Shapes
    /// `dx`: `[batch, seq_local, hidden]`.
    ///
    /// # Errors
    /// A refused operation.
    pub fn backward(
        &self,
        input: BranchInput<'_>,
        mut saved: Option<MlpSaved>,
        dx: &Tensor,
        pass: &BackwardPass<'_>,
    ) -> Result<(), LayerError> {
        for tile in pass.ctx().token_tiles() {
            let saved = match saved.take() {
                Some(saved) => saved,
                None => {
                    let projections = self.gate_up(input, &tile, &pass.forward)?;
                    MlpSaved { projections, output: None }
                }
            };
            let x = token_rows(input.x, &tile)?;
            self.backward_tile(input.branch.input(&x), saved, &token_rows(dx, &tile)?, pass)?;
        }
        Ok(())
    }

    /// [`backward`](Self::backward) of one tile.
    fn backward_tile(
        &self,
        BranchInput { branch, x }: BranchInput<'_>,
        MlpSaved { projections, output }: MlpSaved,
        dx: &Tensor,
        pass: &BackwardPass<'_>,
    ) -> Result<(), LayerError> {
        let (forward, ws) = (&pass.forward, pass.forward.workspace());
        let product = self.product(&projections, forward)?;
        let output = || match output {
            Some(output) => Ok(output.reshape(dx.shape())?),
            None => {
                let output = ws.alloc(dx.dims())?;
                self.down.forward(&product, &output, false, forward)?;
                Ok(output)
            }
        };
        let doutput = branch.backward_join(output, dx, pass)?;
        self.down.backward_weight(&doutput, &product, pass)?;
        let dproduct = product;
        self.down.backward_input(&doutput, &dproduct, false, forward)?;
        recycle_unless(doutput, dx, forward);
        let GateUp { gate, up } = projections;
        let up = up.map_or_else(|| ones(&gate, forward), Ok)?;
        let (dgate, dup) = (ws.alloc(gate.dims())?, ws.alloc(gate.dims())?);
        glu::backward(self.activation, &dproduct, &gate, &up, &dgate, &dup)?;
        forward.recycle([dproduct, gate, up]);

        let rstd = ws.alloc_f32(x.dims()[0])?;
        let normed = branch.enter(x, &rstd, forward)?;
        self.gate.backward_weight(&dgate, &normed, pass)?;
        if let Some(up) = &self.up {
            up.backward_weight(&dup, &normed, pass)?;
        }
        let dnormed = if normed.id() == x.id() { ws.alloc(x.dims())? } else { normed };
        self.gate.backward_input(&dgate, &dnormed, false, forward)?;
        if let Some(up) = &self.up {
            up.backward_input(&dup, &dnormed, true, forward)?;
        }
        branch.backward_enter(&dnormed, x, &rstd, dx, pass)?;
        forward.recycle([dgate, dup, dnormed, rstd]);
        Ok(())
    }

    /// Gate and up projections of a tile of tokens, `[tile, intermediate]`.
    fn gate_up(
        &self,
        BranchInput { branch, x }: BranchInput<'_>,
        tile: &Range<usize>,
        pass: &ForwardPass<'_>,
    ) -> Result<GateUp, LayerError> {
        let ws = pass.workspace();
        let rstd = ws.alloc_f32(tile.len())?;
        let x = token_rows(x, tile)?;
        let normed = branch.enter(&x, &rstd, pass)?;
        let project = |linear: &Linear| {
            let y = ws.alloc((tile.len(), linear.num_outputs()))?;
            linear.forward(&normed, &y, false, pass)?;
            Ok::<_, LayerError>(y)
        };
        let projections =
            GateUp { gate: project(&self.gate)?, up: self.up.as_ref().map(project).transpose()? };
        recycle_unless(normed, &x, pass);
        pass.recycle([rstd]);
        Ok(projections)
    }

    /// `activation(gate) · up`
    fn product(&self, GateUp { gate, up }: &GateUp, pass: &ForwardPass<'_>) -> Result<Tensor, LayerError> {
        let product = pass.workspace().alloc(gate.dims())?;
        match up {
            Some(up) => glu::forward(self.activation, gate, up, &product)?,
            None => {
                let ones = ones(gate, pass)?;
                glu::forward(self.activation, gate, &ones, &product)?;
                pass.recycle([ones]);
            }
        }
        Ok(product)
    }
}

impl GateUp {
    fn into_tensors(self) -> impl Iterator<Item = Tensor> {
        [self.gate].into_iter().chain(self.up)
    }
}

impl MlpProjections {
    /// `gate_proj`, `up_proj` and `down_proj`, as in Llama.
    pub const LLAMA: Self = Self::Gated(["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]);

    /// As Llama, with `gate_up_proj` for the first two.
    pub const FUSED: Self = Self::FusedGated(["mlp.gate_up_proj", "mlp.down_proj"]);

    /// The names of the projections of gate and up.
    fn gate_up(self) -> GroupNames<'static, 2> {
        match self {
            Self::Gated([gate, up, _]) => GroupNames::Each([gate, up]),
            Self::FusedGated([first, _]) | Self::Plain([first, _]) => GroupNames::One(first),
        }
    }

    fn down(self) -> &'static str {
        match self {
            Self::Gated([.., down]) | Self::FusedGated([_, down]) | Self::Plain([_, down]) => down,
        }
    }
}

/// The output of an up projection that is not there: without a gate, the op multiplies by 1.
fn ones(gate: &Tensor, pass: &ForwardPass<'_>) -> Result<Tensor, LayerError> {
    let ones = pass.workspace().alloc(gate.dims())?;
    elementwise::fill(&ones, 1.0)?;
    Ok(ones)
}
