//! The MLP of a block with its norm and residual, in tiles of tokens.

use super::{BackwardPass, ForwardPass, Init, LayerError, Linear, ParameterList, RmsNorm, token_rows};
use candle_core::Tensor;
use std::ops::Range;
use ulysses_kernels::{strided_copy, swiglu};

/// `down(silu(gate(x)) · up(x))` (SwiGLU, arXiv 2002.05202).
///
/// The backward pass recomputes the normalized input and the product, each in one pass over memory.
#[derive(Debug)]
pub struct GatedMlp {
    gate: Linear,
    up: Linear,
    down: Linear,
}

/// Outputs of the gate and up projections.
pub struct GateUp {
    gate: Tensor,
    up: Tensor,
}

impl GateUp {
    /// Bytes of the tensors.
    pub fn bytes(&self) -> usize {
        [&self.gate, &self.up].into_iter().map(ulysses_kernels::tensor::bytes).sum()
    }
}

impl GatedMlp {
    /// Adds `mlp.gate_proj` and `mlp.up_proj`, with initial values `init`, and `mlp.down_proj` with `down_init`.
    pub fn new(
        parameters: &mut ParameterList,
        hidden: usize,
        intermediate: usize,
        init: Init,
        down_init: Init,
    ) -> Self {
        Self {
            gate: Linear::new(parameters, "mlp.gate_proj", [intermediate, hidden], init),
            up: Linear::new(parameters, "mlp.up_proj", [intermediate, hidden], init),
            down: Linear::new(parameters, "mlp.down_proj", [hidden, intermediate], down_init),
        }
    }

    /// Computes `x + mlp(norm(x))`. With `keep` and without tiles, also returns the projections.
    ///
    /// # Shapes
    /// `x`, result: `[batch, seq_local, hidden]`.
    ///
    /// # Errors
    /// A refused operation.
    pub fn forward(
        &self,
        norm: &RmsNorm,
        x: &Tensor,
        keep: bool,
        pass: &ForwardPass<'_>,
    ) -> Result<(Tensor, Option<GateUp>), LayerError> {
        let ws = pass.workspace();
        let keep = keep && pass.ctx.tiling().tile_tokens.is_none();
        let y = ws.alloc(x.dims())?;
        strided_copy::copy(x, &y)?;
        let mut saved = None;
        for tile in pass.ctx.token_tiles() {
            let GateUp { gate, up } = self.gate_up(norm, x, &tile, pass)?;
            let product = ws.alloc(gate.dims())?;
            swiglu::forward(&gate, &up, &product)?;
            self.down.forward(&product, &token_rows(&y, &tile)?, true, pass)?;
            ws.recycle(product);
            if keep {
                saved = Some(GateUp { gate, up });
            } else {
                pass.recycle([gate, up]);
            }
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
        norm: &RmsNorm,
        x: &Tensor,
        mut saved: Option<GateUp>,
        dy: &Tensor,
        pass: &BackwardPass<'_>,
    ) -> Result<(), LayerError> {
        for tile in pass.ctx().token_tiles() {
            let projections = match saved.take() {
                Some(saved) => saved,
                None => self.gate_up(norm, x, &tile, &pass.forward)?,
            };
            self.backward_tile(norm, &token_rows(x, &tile)?, projections, &token_rows(dy, &tile)?, pass)?;
        }
        Ok(())
    }

    /// [`backward`](Self::backward) of one tile.
    fn backward_tile(
        &self,
        norm: &RmsNorm,
        x: &Tensor,
        GateUp { gate, up }: GateUp,
        dy: &Tensor,
        pass: &BackwardPass<'_>,
    ) -> Result<(), LayerError> {
        let (forward, ws) = (&pass.forward, pass.forward.workspace());
        let product = ws.alloc(gate.dims())?;
        swiglu::forward(&gate, &up, &product)?;
        self.down.backward_weight(dy, &product, pass)?;
        let dproduct = product;
        self.down.backward_input(dy, &dproduct, false, forward)?;
        let (dgate, dup) = (ws.alloc(gate.dims())?, ws.alloc(gate.dims())?);
        swiglu::backward(&dproduct, &gate, &up, &dgate, &dup)?;
        forward.recycle([dproduct, gate, up]);

        let rstd = ws.alloc_f32(x.dims()[0])?;
        let normed = norm.forward(x, &rstd, forward)?;
        self.gate.backward_weight(&dgate, &normed, pass)?;
        self.up.backward_weight(&dup, &normed, pass)?;
        let dnormed = normed;
        self.gate.backward_input(&dgate, &dnormed, false, forward)?;
        self.up.backward_input(&dup, &dnormed, true, forward)?;
        norm.backward(&dnormed, x, &rstd, (dy, true), pass)?;
        forward.recycle([dgate, dup, dnormed, rstd]);
        Ok(())
    }

    /// Gate and up projections of a tile of tokens, `[tile, intermediate]`.
    fn gate_up(
        &self,
        norm: &RmsNorm,
        x: &Tensor,
        tile: &Range<usize>,
        pass: &ForwardPass<'_>,
    ) -> Result<GateUp, LayerError> {
        let ws = pass.workspace();
        let rstd = ws.alloc_f32(tile.len())?;
        let normed = norm.forward(&token_rows(x, tile)?, &rstd, pass)?;
        let dims = (tile.len(), self.gate.num_outputs());
        let (gate, up) = (ws.alloc(dims)?, ws.alloc(dims)?);
        self.gate.forward(&normed, &gate, false, pass)?;
        self.up.forward(&normed, &up, false, pass)?;
        pass.recycle([normed, rstd]);
        Ok(GateUp { gate, up })
    }
}
