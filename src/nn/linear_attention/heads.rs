//! Convolution and gated delta rule of one rank's heads, over whole sequences.

use super::LinearAttention;
use super::saved::HeadsSaved;
use crate::nn::{BackwardPass, ForwardPass, HeadShare, LayerError};
use candle_core::Tensor;
use std::ops::Range;
use ulysses_kernels::delta_gates;
use ulysses_kernels::gated_delta::{self, DeltaLayout};

/// The operands of the gated delta rule.
struct DeltaOperands {
    /// Queries, keys and values after the convolution.
    qkv: [Tensor; 3],
    /// Decay and rate, in f32.
    gates: [Tensor; 2],
    layout: DeltaLayout,
}

impl DeltaOperands {
    fn borrow(&self) -> gated_delta::Operands<'_> {
        let ([q, k, v], [g, beta]) = (&self.qkv, &self.gates);
        gated_delta::Operands { q, k, v, g, beta, layout: &self.layout }
    }

    fn recycle(self, pass: &ForwardPass<'_>) {
        pass.recycle(self.qkv);
        pass.recycle(self.gates);
    }
}

impl LinearAttention {
    /// The output of this rank's heads, with the state for the backward pass if `keep`.
    ///
    /// # Shapes
    /// `mixed`: `[batch, seq, heads_local, dim]`, result: `[batch, seq, value heads_local, value_head_dim]`.
    pub(super) fn forward_heads(
        &self,
        mixed: [Tensor; 5],
        keep: bool,
        pass: &ForwardPass<'_>,
    ) -> Result<(Tensor, Option<HeadsSaved>), LayerError> {
        let (ws, share) = (pass.workspace(), self.share(pass));
        let out = ws.alloc(mixed[2].dims())?;
        let mut states = None;
        if !share.values.is_empty() {
            let operands = self.delta_operands(&mixed, &share, pass)?;
            if keep {
                let shape = operands.layout.states_shape(self.shape.key_head_dim, self.shape.value_head_dim);
                states = Some(ws.alloc_f32(shape.to_vec())?);
            }
            gated_delta::forward(&operands.borrow(), &out, states.as_ref(), ws)?;
            operands.recycle(pass);
        }
        let saved = HeadsSaved { mixed, states };
        if keep {
            return Ok((out, Some(saved)));
        }
        saved.recycle(pass);
        Ok((out, None))
    }

    /// Adds to the gradients of convolution, `A_log` and `dt_bias`, and returns those of `mixed`.
    ///
    /// # Shapes
    /// `dout`: as the result of [`forward_heads`](Self::forward_heads).
    pub(super) fn backward_heads(
        &self,
        saved: HeadsSaved,
        dout: &Tensor,
        pass: &BackwardPass<'_>,
    ) -> Result<[Tensor; 5], LayerError> {
        let (forward, ws) = (&pass.forward, pass.forward.workspace());
        let share = self.share(forward);
        let HeadsSaved { mixed, states } = saved;
        let Some(states) = states else { return Ok(mixed) };
        let operands = self.delta_operands(&mixed, &share, forward)?;
        let like = |tensor: &Tensor| ws.alloc(tensor.dims());
        let [q, k, v] = &operands.qkv;
        let dqkv = [like(q)?, like(k)?, like(v)?];
        let [dg, dbeta] = [ws.alloc_f32(operands.gates[0].dims())?, ws.alloc_f32(operands.gates[1].dims())?];
        let [dq, dk, dv] = &dqkv;
        let gradients = gated_delta::Gradients { dq, dk, dv, dg: &dg, dbeta: &dbeta };
        gated_delta::backward(&operands.borrow(), &states, dout, &gradients, ws)?;
        operands.recycle(forward);
        forward.recycle([states]);

        let [q, k, v, b, a] = mixed;
        let [da, db] = [like(&a)?, like(&b)?];
        let part = |gradient: Option<&Tensor>| {
            gradient.map(|gradient| gradient.narrow(0, share.values.start, share.values.len())).transpose()
        };
        let (da_log, ddt_bias) = (part(pass.gradient(self.a_log))?, part(pass.gradient(self.dt_bias))?);
        let [a_log, dt_bias] = self.head_parameters(&share, forward)?;
        let operands =
            delta_gates::Operands { a: &rows(&a)?, b: &rows(&b)?, a_log: &a_log, dt_bias: &dt_bias };
        let gradients = delta_gates::Gradients {
            da: &rows(&da)?,
            db: &rows(&db)?,
            da_log: da_log.as_ref(),
            ddt_bias: ddt_bias.as_ref(),
        };
        delta_gates::backward(&operands, [&dg, &dbeta], &gradients)?;
        forward.recycle([dg, dbeta, a, b]);

        let mut results = Vec::new();
        for ((x, dy), channels) in [q, k, v].into_iter().zip(dqkv).zip(self.channels(&share)) {
            results.push(self.conv.backward(&dy, &x, &channels, pass)?);
            forward.recycle([dy, x]);
        }
        results.extend([db, da]);
        Ok(results.try_into().unwrap_or_else(|_| unreachable!("three convolutions and two projections")))
    }

    /// This rank's heads.
    fn share(&self, pass: &ForwardPass<'_>) -> HeadShare {
        pass.ctx.head_exchange().share(self.shape.heads())
    }

    fn delta_operands(
        &self,
        [q, k, v, b, a]: &[Tensor; 5],
        share: &HeadShare,
        pass: &ForwardPass<'_>,
    ) -> Result<DeltaOperands, LayerError> {
        let ws = pass.workspace();
        let channels = self.channels(share);
        let conv = |x: &Tensor, part: usize| self.conv.forward(x, &channels[part], pass);
        let qkv = [conv(q, 0)?, conv(k, 1)?, conv(v, 2)?];
        let (batch, seq_len, heads, _) = a.dims4()?;
        let gates = [ws.alloc_f32((batch, seq_len, heads))?, ws.alloc_f32((batch, seq_len, heads))?];
        let [a_log, dt_bias] = self.head_parameters(share, pass)?;
        let operands = delta_gates::Operands { a: &rows(a)?, b: &rows(b)?, a_log: &a_log, dt_bias: &dt_bias };
        delta_gates::forward(&operands, &gates[0], &gates[1])?;
        let layout = pass.ctx.delta_layout(&share.v_to_k(self.shape.heads()));
        Ok(DeltaOperands { qkv, gates, layout })
    }

    /// The parts of `A_log` and `dt_bias`.
    fn head_parameters(&self, share: &HeadShare, pass: &ForwardPass<'_>) -> Result<[Tensor; 2], LayerError> {
        let part = |parameter| pass[parameter].narrow(0, share.values.start, share.values.len());
        Ok([part(self.a_log)?, part(self.dt_bias)?])
    }

    /// The channels of the convolution of some heads' queries, keys and values.
    fn channels(&self, HeadShare { keys, values }: &HeadShare) -> [Range<usize>; 3] {
        let (key, value) = (self.shape.key_head_dim, self.shape.value_head_dim);
        let [q, k, v] = &self.channels;
        let of_heads = |all: &Range<usize>, heads: &Range<usize>, dim: usize| {
            all.start + heads.start * dim..all.start + heads.end * dim
        };
        [of_heads(q, keys, key), of_heads(k, keys, key), of_heads(v, values, value)]
    }
}

/// `[batch, seq, heads, 1]` → `[tokens, heads]`, sharing the storage.
fn rows(x: &Tensor) -> Result<Tensor, LayerError> {
    let (batch, seq_len, heads, _) = x.dims4()?;
    Ok(x.reshape((batch * seq_len, heads))?)
}
