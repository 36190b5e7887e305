//! The gate and the norm of linear attention's output.

use crate::nn::{
    BackwardPass, ForwardPass, LayerError, Norm, ParameterList, TensorRank, columns, token_rows,
};
use candle_core::Tensor;
use std::ops::Range;
use ulysses_kernels::Workspace;
use ulysses_kernels::glu::{self, Activation, Activation::Silu};

/// A norm and a gate.
#[derive(Debug)]
pub(super) enum GatedNorm {
    /// `norm(o) · act(z)`, with one norm for all heads.
    OfHeads(Norm, Activation),
    /// `norm(o · silu(z))`, with a norm for each group of equally many neighboring elements.
    OfGroups(Vec<Norm>),
}

/// The output of the heads and the projection for its gate, or their gradients.
pub(super) struct OutputAndGate {
    pub(super) out: Tensor,
    pub(super) z: Tensor,
}

impl OutputAndGate {
    /// A tile of tokens, `[tokens, values]`, sharing the storage.
    pub(super) fn rows(&self, tile: &Range<usize>) -> Result<Self, LayerError> {
        Ok(Self { out: token_rows(&self.out, tile)?, z: token_rows(&self.z, tile)? })
    }

    /// Tensors of the same sizes, with unspecified content.
    pub(super) fn alloc_like(&self, ws: &Workspace) -> Result<Self, LayerError> {
        Ok(Self { out: ws.alloc(self.out.dims())?, z: ws.alloc(self.z.dims())? })
    }

    pub(super) fn recycle(self, pass: &ForwardPass<'_>) {
        pass.recycle([self.out, self.z]);
    }
}

/// A gated output, and what its gradient needs.
pub(super) struct Gated {
    /// `[tokens, values]`
    pub(super) rows: Tensor,
    /// The normalized heads, or the gated elements of each group.
    inner: Vec<Tensor>,
    /// Reciprocal root mean squares, of each norm.
    rstds: Vec<Tensor>,
}

impl Gated {
    pub(super) fn recycle(self, pass: &ForwardPass<'_>) {
        pass.recycle([self.rows]);
        pass.recycle(self.inner);
        pass.recycle(self.rstds);
    }
}

impl GatedNorm {
    /// Computes the gated output of some tokens. Collective over tp if that divides the elements of a norm.
    ///
    /// # Shapes
    /// `outputs`: `[tokens, values]`, as heads of `head_dim` elements.
    pub(super) fn forward(
        &self,
        OutputAndGate { out, z }: &OutputAndGate,
        head_dim: usize,
        pass: &ForwardPass<'_>,
    ) -> Result<Gated, LayerError> {
        let ws = pass.workspace();
        let gated = ws.alloc(out.dims())?;
        match self {
            Self::OfHeads(norm, activation) => {
                let out = heads(out, head_dim)?;
                let rstd = ws.alloc_f32(out.dims()[0])?;
                let normed = norm.forward(&out, &rstd, pass)?;
                glu::forward(*activation, &heads(z, head_dim)?, &normed, &heads(&gated, head_dim)?)?;
                Ok(Gated { rows: gated, inner: vec![normed], rstds: vec![rstd] })
            }
            Self::OfGroups(norms) => {
                glu::forward(Silu, z, out, &gated)?;
                let inner = columns::split(gated, norms.len(), ws)?;
                let (mut normed, mut rstds) = (Vec::new(), Vec::new());
                for (norm, group) in norms.iter().zip(&inner) {
                    let rstd = ws.alloc_f32(group.dims()[0])?;
                    normed.push(norm.forward(group, &rstd, pass)?);
                    rstds.push(rstd);
                }
                Ok(Gated { rows: columns::join(normed, ws)?, inner, rstds })
            }
        }
    }

    /// Backward of [`forward`](Self::forward), for the gradient of the gated rows: writes those of `outputs`, adds to those of the weights,
    /// and recycles all that it computed.
    pub(super) fn backward(
        &self,
        dgated_rows: Tensor,
        gated: Gated,
        OutputAndGate { out, z }: &OutputAndGate,
        OutputAndGate { out: dout, z: dz }: &OutputAndGate,
        head_dim: usize,
        pass: &BackwardPass<'_>,
    ) -> Result<(), LayerError> {
        let forward = &pass.forward;
        match self {
            Self::OfHeads(norm, activation) => {
                // The gradient of the normalized heads takes the place of the gated rows.
                let tensors = [&dgated_rows, &gated.rows, out, z, dout, dz].map(|rows| heads(rows, head_dim));
                let [dgated, dnormed, out, z, dout, dz] = tensors;
                let (normed, rstd, dnormed) = (&gated.inner[0], &gated.rstds[0], dnormed?);
                glu::backward(*activation, &dgated?, &z?, normed, &dz?, &dnormed)?;
                norm.backward(&dnormed, &out?, rstd, &dout?, false, pass)?;
                forward.recycle([dgated_rows]);
            }
            Self::OfGroups(norms) => {
                let (dnormed, mut dgroups) =
                    (columns::split(dgated_rows, norms.len(), forward.workspace())?, Vec::new());
                for (((norm, dy), x), rstd) in norms.iter().zip(&dnormed).zip(&gated.inner).zip(&gated.rstds)
                {
                    let dx = forward.workspace().alloc(x.dims())?;
                    norm.backward(dy, x, rstd, &dx, false, pass)?;
                    dgroups.push(dx);
                }
                let dproduct = columns::join(dgroups, forward.workspace())?;
                glu::backward(Silu, &dproduct, z, out, dz, dout)?;
                forward.recycle(dnormed);
                forward.recycle([dproduct]);
            }
        }
        gated.recycle(forward);
        Ok(())
    }

    /// Keeps the elements of one rank of tp, of the key heads and the elements of value heads of every rank.
    pub(super) fn divide(
        &mut self,
        parameters: &mut ParameterList,
        keys: &[Range<usize>],
        values: &[Range<usize>],
        tp: TensorRank,
    ) -> Result<(), LayerError> {
        match self {
            Self::OfHeads(..) => Ok(()),
            Self::OfGroups(norms) => match &mut norms[..] {
                [norm] => norm.divide(parameters, values, tp.rank),
                _ => {
                    Norm::divide_group(parameters, norms, keys, tp.rank);
                    Ok(())
                }
            },
        }
    }
}

/// `[tokens, heads · head_dim]` → `[tokens · heads, head_dim]`, sharing the storage.
fn heads(rows: &Tensor, head_dim: usize) -> Result<Tensor, LayerError> {
    Ok(rows.reshape((rows.elem_count() / head_dim, head_dim))?)
}
