//! The gate and the norm of linear attention's output.

use crate::nn::{BackwardPass, ForwardPass, HeadDivision, LayerError, Norm, ParameterList, TensorRank};
use candle_core::Tensor;
use std::ops::Range;
use ulysses_kernels::glu::{self, Activation, Activation::Silu};
use ulysses_kernels::strided_copy::{BlockCopy, StridedBlock, copy_blocks};

/// A norm and a gate.
#[derive(Debug)]
pub(super) enum GatedNorm {
    /// `norm(o) · act(z)`, with one norm for all heads.
    OfHeads(Norm, Activation),
    /// `norm(o · silu(z))`, with a norm for each group of equally many neighboring elements.
    OfGroups(Vec<Norm>),
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
    /// `out`, `z`: `[tokens, values]`, as heads of `head_dim` elements.
    pub(super) fn forward(
        &self,
        [out, z]: [&Tensor; 2],
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
                let inner = split_columns(gated, norms.len(), pass)?;
                let (mut normed, mut rstds) = (Vec::new(), Vec::new());
                for (norm, group) in norms.iter().zip(&inner) {
                    let rstd = ws.alloc_f32(group.dims()[0])?;
                    normed.push(norm.forward(group, &rstd, pass)?);
                    rstds.push(rstd);
                }
                Ok(Gated { rows: join_columns(normed, pass)?, inner, rstds })
            }
        }
    }

    /// Backward of [`forward`](Self::forward): writes the gradients of `out` and `z`, adds to those of the weights, and recycles all
    /// that it computed.
    pub(super) fn backward(
        &self,
        (dgated_rows, gated): (Tensor, Gated),
        [out, z]: [&Tensor; 2],
        [dout, dz]: [&Tensor; 2],
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
                let (dnormed, mut dgroups) = (split_columns(dgated_rows, norms.len(), forward)?, Vec::new());
                for (((norm, dy), x), rstd) in norms.iter().zip(&dnormed).zip(&gated.inner).zip(&gated.rstds)
                {
                    let dx = forward.workspace().alloc(x.dims())?;
                    norm.backward(dy, x, rstd, &dx, false, pass)?;
                    dgroups.push(dx);
                }
                let dproduct = join_columns(dgroups, forward)?;
                glu::backward(Silu, &dproduct, z, out, dz, dout)?;
                forward.recycle(dnormed);
                forward.recycle([dproduct]);
            }
        }
        gated.recycle(forward);
        Ok(())
    }

    /// Keeps the elements of one rank of tp, whose value heads have the elements `values` of every rank.
    pub(super) fn divide(
        &mut self,
        parameters: &mut ParameterList,
        heads: &HeadDivision,
        values: &[Range<usize>],
        tp: TensorRank,
    ) -> Result<(), LayerError> {
        match self {
            Self::OfHeads(..) => Ok(()),
            Self::OfGroups(norms) => match &mut norms[..] {
                [norm] => norm.divide(parameters, values, tp.rank),
                _ => {
                    Norm::divide_group(parameters, norms, &heads.kv, tp.rank);
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

/// Equal parts of the columns of a matrix, which is recycled unless it is the only part.
fn split_columns(rows: Tensor, parts: usize, pass: &ForwardPass<'_>) -> Result<Vec<Tensor>, LayerError> {
    if parts == 1 {
        return Ok(vec![rows]);
    }
    let (tokens, width) = rows.dims2()?;
    let split = (0..parts).map(|_| pass.workspace().alloc((tokens, width / parts)));
    let split = split.collect::<Result<Vec<_>, _>>()?;
    let copies =
        blocks(&split, width).map(|[part, columns]| BlockCopy { from: columns, to: part, accumulate: false });
    copy_blocks(&[&rows], &split.iter().collect::<Vec<_>>(), &copies.collect::<Vec<_>>())?;
    pass.recycle([rows]);
    Ok(split)
}

/// The inverse of [`split_columns`].
fn join_columns(mut parts: Vec<Tensor>, pass: &ForwardPass<'_>) -> Result<Tensor, LayerError> {
    if parts.len() == 1 {
        return Ok(parts.remove(0));
    }
    let (tokens, part) = parts[0].dims2()?;
    let width = part * parts.len();
    let rows = pass.workspace().alloc((tokens, width))?;
    let copies =
        blocks(&parts, width).map(|[part, columns]| BlockCopy { from: part, to: columns, accumulate: false });
    copy_blocks(&parts.iter().collect::<Vec<_>>(), &[&rows], &copies.collect::<Vec<_>>())?;
    pass.recycle(parts);
    Ok(rows)
}

/// Each part, by itself and within a matrix of `width` columns.
fn blocks(parts: &[Tensor], width: usize) -> impl Iterator<Item = [StridedBlock; 2]> {
    let run = width / parts.len();
    parts.iter().enumerate().map(move |(index, part)| {
        let rows = part.elem_count() / run.max(1);
        let within = |tensor, offset, row_stride| StridedBlock {
            tensor,
            offset,
            batch: 1,
            batch_stride: 0,
            rows,
            row_stride,
            run,
        };
        [within(index, 0, run), within(0, index * run, width)]
    })
}
