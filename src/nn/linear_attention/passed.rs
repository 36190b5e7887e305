//! Linear attention of this rank's tokens only: ranks pass states on.
//!
//! Per head of each sequence, the state after a range of tokens is `T·state + S` of the state before it. Ranks compute T and S
//! of their own ranges (up to two in a ring, else one), send both to all ranks with later ones, and compose those of earlier ones to the state
//! before their tokens. The backward pass is the same with Tᵀ, from the last range to the first. This is the scan of affine maps by which
//! linear recurrences are computed in parallel (Martin and Cundy 2018, arXiv 1709.04057), over ranks.
//!
//! The kernels know nothing of it: states are tokens. Those before a range have unit vectors as keys, and store the rows of
//! the state as their values, at rate 1. Those after have unit vectors as queries, and read them. T is what becomes of the unit matrix
//! if it is stored, and no value after it.

use super::LinearAttention;
use super::heads::RecurrenceOperands;
use super::mixed::Mixed;
use super::saved::{HeadsSaved, PassedStates};
use crate::nn::columns::{all_columns, columns, copy};
use crate::nn::shard::{AffineMap, Direction, ExtendedTokens, Reach, alloc};
use crate::nn::{BackwardPass, ForwardPass, HeadRanges, LayerError};
use candle_core::{DType, Tensor};
use std::sync::Arc;
use ulysses_kernels::cast::cast;
use ulysses_kernels::linear_attention::{self, Gradients};
use ulysses_kernels::strided_copy::copy_blocks;
use ulysses_kernels::{Workspace, elementwise};

/// A unit vector among keys and queries that the delta rule normalizes: next to its square, the number that is added is nothing.
const UNIT: f32 = 1024.0;

impl LinearAttention {
    /// The extended tokens, if ranks pass states on instead of exchanging tokens for heads.
    pub(super) fn extended_tokens(
        &self,
        pass: &ForwardPass<'_>,
    ) -> Result<Option<Arc<ExtendedTokens>>, LayerError> {
        pass.ctx.extended_tokens(&Reach {
            tokens_before: self.shape.conv_width - 1,
            state_rows: self.shape.key_head_dim,
            v_to_k: self.shape.heads().q_to_kv(),
        })
    }

    /// The output of all heads for this rank's tokens, with the state for the backward pass if `keep`. Collective.
    ///
    /// # Shapes
    /// `mixed`: `[batch, seq_local, heads, dim]`, result: `[batch, seq_local, value heads, value_head_dim]`.
    pub(super) fn forward_passed(
        &self,
        Mixed { qkv, b, a }: Mixed<Tensor>,
        extended: &ExtendedTokens,
        keep: bool,
        pass: &ForwardPass<'_>,
    ) -> Result<(Tensor, Option<HeadsSaved>), LayerError> {
        let ws = pass.workspace();
        let received = extended.extend(&qkv, ws)?;
        pass.recycle(qkv);
        let qkv = received.try_into().unwrap_or_else(|_| unreachable!("three tensors"));
        let mixed = Mixed { qkv, b, a };
        let operands = self.passed_operands(&mixed, extended, pass)?;
        let recur = || self.recur(&operands, keep, pass);
        let first = extended.is_first().then(recur).transpose()?;
        let mut own = match &first {
            Some((o, _)) => {
                extended.read_maps(o, self.shape.value_head_dim, self.query_scale().recip(), ws)?
            }
            None if extended.is_last() => vec![AffineMap::default()],
            None => self.affine_maps(&operands, extended, pass)?,
        };
        let before = extended.pass_on(&mut own, self.state_dims(&operands), Direction::Forward, ws)?;
        extended.store_before(&before, &operands.qkv[2])?;
        let (o, states) = first.map_or_else(recur, Ok)?;
        operands.recycle_all(pass);
        let out = in_dtype(extended.within(o, ws)?, ws.options().dtype, ws)?;
        let matrices = own.into_iter().map(|map| map.matrix).collect();
        let saved = HeadsSaved { mixed, states, passed: PassedStates { before, matrices } };
        if keep {
            return Ok((out, Some(saved)));
        }
        saved.recycle(pass);
        Ok((out, None))
    }

    /// Backward of [`forward_passed`](Self::forward_passed), as [`backward_heads`](Self::backward_heads); `dout` is recycled.
    /// Collective.
    pub(super) fn backward_passed(
        &self,
        HeadsSaved { mixed, states, passed: PassedStates { before, matrices } }: HeadsSaved,
        dout: Tensor,
        extended: &ExtendedTokens,
        pass: &BackwardPass<'_>,
    ) -> Result<Mixed<Tensor>, LayerError> {
        let (forward, ws) = (&pass.forward, pass.forward.workspace());
        let operands = self.passed_operands(&mixed, extended, forward)?;
        extended.store_before(&before, &operands.qkv[2])?;
        let dout = extended.around(in_dtype(dout, DType::F32, ws)?, ws)?;
        let like = |tensor: &Tensor| ws.alloc_f32(tensor.dims());
        let ([q, k, v], [g, beta]) = (&operands.qkv, &operands.gates);
        let (dqkv, dgates) = ([like(q)?, like(k)?, like(v)?], [like(g)?, like(beta)?]);
        let dskip = operands.rule.as_ref().skip().map(|_| like(beta)).transpose()?;
        let ([dq, dk, dv], [dg, dbeta]) = (&dqkv, &dgates);
        let gradients = Gradients { dq, dk, dv, dg, dbeta, dskip: dskip.as_ref() };
        let states = states.unwrap_or_else(|| unreachable!("every rank has all heads"));
        let backward = || linear_attention::backward(&operands.borrow(), &states, &dout, &gradients, ws);
        let mut own: Vec<_> =
            matrices.into_iter().map(|matrix| AffineMap { constant: None, matrix }).collect();
        if !extended.is_first() {
            // Without the gradients of the states after the tokens, which are not known yet.
            backward()?;
            let constants = extended.read_before(dv, ws)?;
            own.iter_mut().zip(constants).for_each(|(map, constant)| map.constant = constant);
        }
        let after = extended.pass_on(&mut own, self.state_dims(&operands), Direction::Backward, ws)?;
        forward.recycle(own.into_iter().filter_map(|map| map.matrix));
        if extended.is_first() || after.iter().any(Option::is_some) {
            for after in after.iter().flatten() {
                elementwise::scale(after, self.query_scale().recip())?;
            }
            extended.store_after(&after, &dout)?;
            forward.recycle(after.into_iter().flatten());
            backward()?;
        }
        operands.recycle_all(forward);
        forward.recycle([states, dout].into_iter().chain(before.into_iter().flatten()));

        let share = self.all_heads();
        self.backward_skip(dskip, &share, pass)?;
        let Mixed { qkv, b, a } = mixed;
        let [dg, dbeta] = dgates;
        let dgates = [extended.within(dg, ws)?, extended.within(dbeta, ws)?];
        let (da, db) = (ws.alloc(a.dims())?, b.as_ref().map(|b| ws.alloc(b.dims())).transpose()?);
        self.backward_gates([&a, &da], [&b, &db], &dgates, &share, pass)?;
        forward.recycle(dgates);
        forward.recycle([a].into_iter().chain(b));
        let mut dextended = Vec::new();
        for (((x, dy), channels), conv) in
            qkv.into_iter().zip(dqkv).zip(self.channels(&share)).zip(&self.convs)
        {
            extended.clear_around(&dy, ws)?;
            let dy = in_dtype(dy, x.dtype(), ws)?;
            dextended.push(conv.backward(&dy, &x, &channels, extended.convolved(), pass)?);
            forward.recycle([dy, x]);
        }
        let reduced = extended.reduce(&dextended, ws)?;
        forward.recycle(dextended);
        let qkv = reduced.try_into().unwrap_or_else(|_| unreachable!("three tensors"));
        Ok(Mixed { qkv, b: db, a: da })
    }

    /// The operands of the recurrence over extended tokens, in f32. The state before the tokens is zero.
    fn passed_operands(
        &self,
        Mixed { qkv, b, a }: &Mixed<Tensor>,
        extended: &ExtendedTokens,
        pass: &ForwardPass<'_>,
    ) -> Result<RecurrenceOperands, LayerError> {
        let (ws, share) = (pass.workspace(), self.all_heads());
        let channels = self.channels(&share);
        let conv = |part: usize| -> Result<Tensor, LayerError> {
            let y = self.convs[part].forward(&qkv[part], &channels[part], extended.convolved(), pass)?;
            let y = in_dtype(y, DType::F32, ws)?;
            extended.clear_around(&y, ws)?;
            Ok(y)
        };
        let qkv = [conv(0)?, conv(1)?, conv(2)?];
        let unit = if self.rule.is_delta() { UNIT } else { 1.0 };
        extended.write_units_before(unit, &qkv[1], 0, ws)?;
        extended.write_units_after(unit, &qkv[0], ws)?;
        let [g, beta] = self.gates(a, b.as_ref(), &share, pass)?;
        let gates = [extended.around(g, ws)?, extended.around(beta, ws)?];
        extended.write_ones_before(&gates[1], ws)?;
        let in_f32 = |skip| -> Result<Tensor, LayerError> {
            let in_f32 = ws.alloc_f32(pass[skip].dims())?;
            cast(&pass[skip], &in_f32)?;
            Ok(in_f32)
        };
        let rule = self.rule.try_map_skip(in_f32)?;
        Ok(RecurrenceOperands { qkv, gates, rule, layout: extended.recurrence().clone() })
    }

    /// The output over extended tokens, with the states at some of them for the backward pass if `keep`.
    fn recur(
        &self,
        operands: &RecurrenceOperands,
        keep: bool,
        pass: &ForwardPass<'_>,
    ) -> Result<(Tensor, Option<Tensor>), LayerError> {
        let ws = pass.workspace();
        let o = ws.alloc_f32(operands.qkv[2].dims())?;
        let shape = operands.layout.states_shape(self.shape.key_head_dim, self.shape.value_head_dim);
        let states = keep.then(|| ws.alloc_f32(shape.to_vec())).transpose()?;
        linear_attention::forward(&operands.borrow(), &o, states.as_ref(), ws)?;
        Ok((o, states))
    }

    /// S and T of this rank's ranges, each in some columns of the same values.
    fn affine_maps(
        &self,
        operands: &RecurrenceOperands,
        extended: &ExtendedTokens,
        pass: &ForwardPass<'_>,
    ) -> Result<Vec<AffineMap>, LayerError> {
        let (v, ws, scale) = (&operands.qkv[2], pass.workspace(), self.query_scale().recip());
        let (batch, rows, heads, value_dim) = v.dims4()?;
        if !extended.has_matrices() {
            let (o, _) = self.recur(operands, false, pass)?;
            let maps = extended.read_maps(&o, value_dim, scale, ws)?;
            ws.recycle(o);
            return Ok(maps);
        }
        let width = value_dim + self.shape.key_head_dim;
        let values = ws.alloc_f32((batch, rows, heads, width))?;
        elementwise::fill(&values, 0.0)?;
        copy_blocks(&[v], &[&values], &[copy(all_columns(0, v), columns(0, &values, 0..value_dim))])?;
        extended.write_units_before(1.0, &values, value_dim, ws)?;
        let o = ws.alloc_f32(values.dims())?;
        linear_attention::forward(&operands.with_values(&values), &o, None, ws)?;
        let maps = extended.read_maps(&o, value_dim, scale, ws)?;
        [values, o].into_iter().for_each(|tensor| ws.recycle(tensor));
        Ok(maps)
    }

    /// The dimensions of S.
    fn state_dims(&self, operands: &RecurrenceOperands) -> [usize; 4] {
        let (batch, shape) = (operands.layout.documents().batch(), &self.shape);
        [batch, shape.num_value_heads, shape.key_head_dim, shape.value_head_dim]
    }

    fn all_heads(&self) -> HeadRanges {
        self.shape.heads().on_sp_rank(1, 0)
    }

    /// The factor of the queries.
    fn query_scale(&self) -> f32 {
        if self.rule.is_delta() { 1.0 / (self.shape.key_head_dim as f32).sqrt() } else { 1.0 }
    }
}

/// The tensor in f32 or the type of the activations. One in another type is recycled.
fn in_dtype(tensor: Tensor, dtype: DType, ws: &Workspace) -> Result<Tensor, LayerError> {
    if tensor.dtype() == dtype {
        return Ok(tensor);
    }
    let other = alloc(tensor.dims(), dtype, ws)?;
    cast(&tensor, &other)?;
    ws.recycle(tensor);
    Ok(other)
}
