//! The MLP of a block with its norm and residual, in tiles of tokens.

use super::{
    BackwardPass, Branch, ForwardPass, GroupNames, Init, LayerError, Linear, ParameterList, TensorRank,
    recycle_unless, token_rows,
};
use crate::mesh::shard_range;
use candle_core::Tensor;
use std::ops::Range;
use ulysses_kernels::glu::{self, Activation};

/// `down(activation(gate(x)) · up(x))` (arXiv 2002.05202).
///
/// The backward pass recomputes the normalized input and the product, each in one pass over memory.
#[derive(Debug)]
pub struct GatedMlp {
    activation: Activation,
    gate: Linear,
    up: Linear,
    down: Linear,
}

/// Outputs of the gate and up projections.
struct GateUp {
    gate: Tensor,
    up: Tensor,
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
        [gate, up].into_iter().chain(&self.output).map(ulysses_kernels::tensor::bytes).sum()
    }
}

impl GatedMlp {
    /// Adds `mlp.gate_proj` and `up_proj`, or if they are `fused` `gate_up_proj`, with initial values `init`, and
    /// `down_proj` with `down_init`.
    pub fn new(
        parameters: &mut ParameterList,
        fused: bool,
        activation: Activation,
        [hidden, intermediate]: [usize; 2],
        [init, down_init]: [Init; 2],
    ) -> Self {
        let names = if fused {
            GroupNames::One("mlp.gate_up_proj")
        } else {
            GroupNames::Each(["mlp.gate_proj", "mlp.up_proj"])
        };
        let [gate, up] = Linear::group(parameters, names, [intermediate; 2], hidden, init);
        let down = Linear::new(parameters, "mlp.down_proj", [hidden, intermediate], down_init);
        Self { activation, gate, up, down }
    }

    /// Keeps the intermediate elements of one rank of tp; the output is then a summand.
    ///
    /// # Errors
    /// More ranks than intermediate elements.
    pub fn divide(&mut self, parameters: &mut ParameterList, tp: TensorRank) -> Result<(), LayerError> {
        let (size, max_size) = (tp.size, self.gate.num_outputs());
        if size > max_size {
            return Err(LayerError::TensorRanks { layer: parameters.layer().to_owned(), size, max_size });
        }
        let own: Vec<_> = (0..size).map(|rank| shard_range(max_size, size, rank)).collect();
        Linear::divide_outputs(parameters, [&mut self.gate, &mut self.up], [&own, &own], tp.rank);
        self.down.divide_inputs(parameters, &own, tp.rank);
        Ok(())
    }

    /// Computes the branch of the MLP. With `keep` and without tiles, also returns the state for the backward pass.
    ///
    /// # Shapes
    /// `x`, result: `[batch, seq_local, hidden]`.
    ///
    /// # Errors
    /// A refused operation.
    pub fn forward(
        &self,
        branch: &Branch,
        x: &Tensor,
        keep: bool,
        pass: &ForwardPass<'_>,
    ) -> Result<(Tensor, Option<MlpSaved>), LayerError> {
        let ws = pass.workspace();
        let keep = keep && pass.ctx.tiling().tile_tokens.is_none();
        let output = branch.open(x, pass)?;
        let mut saved = None;
        for tile in pass.ctx.token_tiles() {
            let GateUp { gate, up } = self.gate_up(branch, x, &tile, pass)?;
            let product = ws.alloc(gate.dims())?;
            glu::forward(self.activation, &gate, &up, &product)?;
            self.down.forward(&product, &token_rows(&output, &tile)?, true, pass)?;
            ws.recycle(product);
            if keep {
                saved = Some(GateUp { gate, up });
            } else {
                pass.recycle([gate, up]);
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

    /// Backward of [`forward`](Self::forward). `dy` becomes the gradient of `x`. What the forward pass did not save is
    /// recomputed, tile by tile.
    ///
    /// # Shapes
    /// `x`, `dy`: `[batch, seq_local, hidden]`.
    ///
    /// # Errors
    /// A refused operation.
    pub fn backward(
        &self,
        branch: &Branch,
        x: &Tensor,
        mut saved: Option<MlpSaved>,
        dy: &Tensor,
        pass: &BackwardPass<'_>,
    ) -> Result<(), LayerError> {
        for tile in pass.ctx().token_tiles() {
            let saved = match saved.take() {
                Some(saved) => saved,
                None => {
                    let projections = self.gate_up(branch, x, &tile, &pass.forward)?;
                    MlpSaved { projections, output: None }
                }
            };
            self.backward_tile(branch, &token_rows(x, &tile)?, saved, &token_rows(dy, &tile)?, pass)?;
        }
        Ok(())
    }

    /// [`backward`](Self::backward) of one tile.
    fn backward_tile(
        &self,
        branch: &Branch,
        x: &Tensor,
        MlpSaved { projections: GateUp { gate, up }, output }: MlpSaved,
        dy: &Tensor,
        pass: &BackwardPass<'_>,
    ) -> Result<(), LayerError> {
        let (forward, ws) = (&pass.forward, pass.forward.workspace());
        let product = ws.alloc(gate.dims())?;
        glu::forward(self.activation, &gate, &up, &product)?;
        let output = || match output {
            Some(output) => Ok(output.reshape(dy.shape())?),
            None => {
                let output = ws.alloc(dy.dims())?;
                self.down.forward(&product, &output, false, forward)?;
                Ok(output)
            }
        };
        let doutput = branch.backward_join(output, dy, pass)?;
        self.down.backward_weight(&doutput, &product, pass)?;
        let dproduct = product;
        self.down.backward_input(&doutput, &dproduct, false, forward)?;
        recycle_unless(doutput, dy, forward);
        let (dgate, dup) = (ws.alloc(gate.dims())?, ws.alloc(gate.dims())?);
        glu::backward(self.activation, &dproduct, &gate, &up, &dgate, &dup)?;
        forward.recycle([dproduct, gate, up]);

        let rstd = ws.alloc_f32(x.dims()[0])?;
        let normed = branch.enter(x, &rstd, forward)?;
        self.gate.backward_weight(&dgate, &normed, pass)?;
        self.up.backward_weight(&dup, &normed, pass)?;
        let dnormed = if normed.id() == x.id() { ws.alloc(x.dims())? } else { normed };
        self.gate.backward_input(&dgate, &dnormed, false, forward)?;
        self.up.backward_input(&dup, &dnormed, true, forward)?;
        branch.backward_enter(&dnormed, x, &rstd, dy, pass)?;
        forward.recycle([dgate, dup, dnormed, rstd]);
        Ok(())
    }

    /// Gate and up projections of a tile of tokens, `[tile, intermediate]`.
    fn gate_up(
        &self,
        branch: &Branch,
        x: &Tensor,
        tile: &Range<usize>,
        pass: &ForwardPass<'_>,
    ) -> Result<GateUp, LayerError> {
        let ws = pass.workspace();
        let rstd = ws.alloc_f32(tile.len())?;
        let x = token_rows(x, tile)?;
        let normed = branch.enter(&x, &rstd, pass)?;
        let dims = (tile.len(), self.gate.num_outputs());
        let (gate, up) = (ws.alloc(dims)?, ws.alloc(dims)?);
        self.gate.forward(&normed, &gate, false, pass)?;
        self.up.forward(&normed, &up, false, pass)?;
        recycle_unless(normed, &x, pass);
        pass.recycle([rstd]);
        Ok(GateUp { gate, up })
    }
}
