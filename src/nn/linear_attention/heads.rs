//! Convolution and state of one rank's heads, over whole sequences.

use super::mixed::Mixed;
use super::saved::{HeadsSaved, PassedStates};
use super::{LinearAttention, LinearAttentionKind};
use crate::nn::{BackwardPass, ForwardPass, HeadRanges, Heads, LayerError, Parameter, add_bias_gradient};
use candle_core::Tensor;
use std::ops::Range;
use ulysses_kernels::decay_gates::{self, Rate};
use ulysses_kernels::linear_attention::{self, LinearAttentionLayout, Rule};

/// The operands of the recurrence.
pub(super) struct RecurrenceOperands {
    /// Queries, keys and values after the convolution.
    pub(super) qkv: [Tensor; 3],
    /// Decay and rate, in f32.
    pub(super) gates: [Tensor; 2],
    /// With the heads' skip connections.
    pub(super) rule: Rule<Tensor>,
    pub(super) layout: LinearAttentionLayout,
}

impl RecurrenceOperands {
    pub(super) fn borrow(&self) -> linear_attention::Operands<'_> {
        self.with_values(&self.qkv[2])
    }

    /// The operands with other values.
    pub(super) fn with_values<'a>(&'a self, v: &'a Tensor) -> linear_attention::Operands<'a> {
        let ([q, k, _], [g, beta]) = (&self.qkv, &self.gates);
        linear_attention::Operands { q, k, v, g, beta, rule: self.rule.as_ref(), layout: &self.layout }
    }

    /// Recycles all but the skip connections, which are those of the parameter.
    pub(super) fn recycle(self, pass: &ForwardPass<'_>) {
        pass.recycle(self.qkv);
        pass.recycle(self.gates);
    }

    /// Also recycles the skip connections, which are a copy.
    pub(super) fn recycle_all(self, pass: &ForwardPass<'_>) {
        pass.recycle(self.qkv);
        pass.recycle(self.gates);
        pass.recycle(self.rule.skip());
    }
}

impl LinearAttention {
    /// The output of this rank's heads, with the state for the backward pass if `keep`.
    ///
    /// # Shapes
    /// `mixed`: `[batch, seq, heads_local, dim]`, result: `[batch, seq, value heads_local, value_head_dim]`.
    pub(super) fn forward_heads(
        &self,
        mixed: Mixed<Tensor>,
        keep: bool,
        pass: &ForwardPass<'_>,
    ) -> Result<(Tensor, Option<HeadsSaved>), LayerError> {
        let (ws, share) = (pass.workspace(), self.share(pass));
        let [_, _, values] = &mixed.qkv;
        let out = ws.alloc(values.dims())?;
        let mut states = None;
        if !share.q.is_empty() {
            let operands = self.recurrence_operands(&mixed, &share, pass)?;
            if keep {
                let shape = operands.layout.states_shape(self.shape.key_head_dim, self.shape.value_head_dim);
                states = Some(ws.alloc_f32(shape.to_vec())?);
            }
            linear_attention::forward(&operands.borrow(), &out, states.as_ref(), ws)?;
            operands.recycle(pass);
        }
        let saved = HeadsSaved { mixed, states, passed: PassedStates::default() };
        if keep {
            return Ok((out, Some(saved)));
        }
        saved.recycle(pass);
        Ok((out, None))
    }

    /// Adds to the gradients of convolution, `A_log`, `dt_bias` and `D`, and returns those of `mixed`.
    ///
    /// # Shapes
    /// `dout`: as the result of [`forward_heads`](Self::forward_heads).
    pub(super) fn backward_heads(
        &self,
        saved: HeadsSaved,
        dout: &Tensor,
        pass: &BackwardPass<'_>,
    ) -> Result<Mixed<Tensor>, LayerError> {
        let (forward, ws) = (&pass.forward, pass.forward.workspace());
        let share = self.share(forward);
        let HeadsSaved { mixed, states, .. } = saved;
        let Some(states) = states else { return Ok(mixed) };
        let operands = self.recurrence_operands(&mixed, &share, forward)?;
        let like = |tensor: &Tensor| ws.alloc(tensor.dims());
        let [q, k, v] = &operands.qkv;
        let dqkv = [like(q)?, like(k)?, like(v)?];
        let gate = |like: &Tensor| ws.alloc_f32(like.dims());
        let dgates = [gate(&operands.gates[0])?, gate(&operands.gates[1])?];
        let ([dq, dk, dv], [dg, dbeta]) = (&dqkv, &dgates);
        let dskip = operands.rule.as_ref().skip().map(|_| gate(&operands.gates[1])).transpose()?;
        let gradients = linear_attention::Gradients { dq, dk, dv, dg, dbeta, dskip: dskip.as_ref() };
        linear_attention::backward(&operands.borrow(), &states, dout, &gradients, ws)?;
        operands.recycle(forward);
        forward.recycle([states]);
        self.backward_skip(dskip, &share, pass)?;

        let Mixed { qkv, b, a } = mixed;
        let (da, db) = (like(&a)?, b.as_ref().map(like).transpose()?);
        self.backward_gates([&a, &da], [&b, &db], &dgates, &share, pass)?;
        forward.recycle(dgates);
        forward.recycle([a].into_iter().chain(b));

        let mut results = Vec::new();
        for (((x, dy), channels), conv) in
            qkv.into_iter().zip(dqkv).zip(self.channels(&share)).zip(&self.convs)
        {
            results.push(conv.backward(&dy, &x, &channels, forward.ctx.documents(), pass)?);
            forward.recycle([dy, x]);
        }
        let qkv = results.try_into().unwrap_or_else(|_| unreachable!("three convolutions"));
        Ok(Mixed { qkv, b: db, a: da })
    }

    /// Adds the terms of all tokens to the gradient of the skip connection, and recycles them.
    pub(super) fn backward_skip(
        &self,
        dskip: Option<Tensor>,
        share: &HeadRanges,
        pass: &BackwardPass<'_>,
    ) -> Result<(), LayerError> {
        if let (Some(dskip), Some(skip)) = (&dskip, self.rule.skip()) {
            let gradient = self.head_gradient(skip, share, pass)?;
            gradient
                .map_or(Ok(()), |gradient| add_bias_gradient(dskip, &gradient, pass.forward.workspace()))?;
        }
        pass.forward.recycle(dskip);
        Ok(())
    }

    /// Backward of decay and rate: writes the gradients of their projections.
    pub(super) fn backward_gates(
        &self,
        [a, da]: [&Tensor; 2],
        [b, db]: [&Option<Tensor>; 2],
        [dg, dbeta]: &[Tensor; 2],
        share: &HeadRanges,
        pass: &BackwardPass<'_>,
    ) -> Result<(), LayerError> {
        let gradient = |parameter| self.head_gradient(parameter, share, pass);
        let (da_log, ddt_bias) = (gradient(self.a_log)?, gradient(self.dt_bias)?);
        let dg = dg.flatten_from(2)?;
        let [a_log, dt_bias] = self.gate_parameters(share, &pass.forward)?;
        let [b, db] = [b, db].map(|b| b.as_ref().map(rows).transpose());
        let (b, db) = (b?, db?);
        let operands = decay_gates::Operands {
            a: &rows(a)?,
            rate: self.rate(b.as_ref()),
            a_log: &a_log,
            dt_bias: &dt_bias,
        };
        let gradients = decay_gates::Gradients {
            da: &rows(da)?,
            db: db.as_ref(),
            da_log: da_log.as_ref(),
            ddt_bias: ddt_bias.as_ref(),
        };
        Ok(decay_gates::backward(&operands, &dg, dbeta, &gradients)?)
    }

    /// The rate of updates: the projection `b`, or the time step of Mamba 2.
    fn rate<'b>(&self, b: Option<&'b Tensor>) -> Rate<'b> {
        let limits = match self.shape.kind {
            LinearAttentionKind::Mamba2(mamba) => mamba.time_step_limits,
            LinearAttentionKind::GatedDeltaNet | LinearAttentionKind::KimiDelta => [0.0, f64::INFINITY],
        };
        b.map_or(Rate::TimeStep { limits }, Rate::Projection)
    }

    /// This rank's heads.
    fn share(&self, pass: &ForwardPass<'_>) -> HeadRanges {
        pass.ctx.head_exchange().share(self.shape.heads())
    }

    fn recurrence_operands(
        &self,
        Mixed { qkv: [q, k, v], b, a }: &Mixed<Tensor>,
        share: &HeadRanges,
        pass: &ForwardPass<'_>,
    ) -> Result<RecurrenceOperands, LayerError> {
        let channels = self.channels(share);
        let documents = pass.ctx.documents();
        let conv = |x: &Tensor, part: usize| self.convs[part].forward(x, &channels[part], documents, pass);
        let qkv = [conv(q, 0)?, conv(k, 1)?, conv(v, 2)?];
        let gates = self.gates(a, b.as_ref(), share, pass)?;
        let layout = pass.ctx.linear_attention_layout(&share.q_to_kv(self.shape.heads()));
        let rule = self.rule.try_map_skip(|skip| self.of_heads(&pass[skip], share))?;
        Ok(RecurrenceOperands { qkv, gates, rule, layout })
    }

    /// Decay and rate of some heads.
    ///
    /// # Shapes
    /// `a`, `b`: `[batch, seq, heads_local, 1]`, results: `[batch, seq, heads_local]` in f32. With decays per channel, `a` and they are
    /// `[batch, seq, heads_local, key_head_dim]`.
    pub(super) fn gates(
        &self,
        a: &Tensor,
        b: Option<&Tensor>,
        share: &HeadRanges,
        pass: &ForwardPass<'_>,
    ) -> Result<[Tensor; 2], LayerError> {
        let (ws, of_heads) = (pass.workspace(), &a.dims()[..3]);
        let of_decays = if self.shape.has_channel_decays() { a.dims() } else { of_heads };
        let gates = [ws.alloc_f32(of_decays)?, ws.alloc_f32(of_heads)?];
        let [a_log, dt_bias] = self.gate_parameters(share, pass)?;
        let b = b.map(rows).transpose()?;
        let (a, rate) = (&rows(a)?, self.rate(b.as_ref()));
        let operands = decay_gates::Operands { a, rate, a_log: &a_log, dt_bias: &dt_bias };
        decay_gates::forward(&operands, &gates[0].flatten_from(2)?, &gates[1])?;
        Ok(gates)
    }

    /// The parts of `A_log` and `dt_bias`.
    fn gate_parameters(&self, share: &HeadRanges, pass: &ForwardPass<'_>) -> Result<[Tensor; 2], LayerError> {
        Ok([self.of_heads(&pass[self.a_log], share)?, self.of_heads(&pass[self.dt_bias], share)?])
    }

    /// The gradient of some heads' part of a parameter, unless it is frozen.
    fn head_gradient(
        &self,
        parameter: Parameter,
        share: &HeadRanges,
        pass: &BackwardPass<'_>,
    ) -> Result<Option<Tensor>, LayerError> {
        pass.gradient(parameter).map(|gradient| self.of_heads(gradient, share)).transpose()
    }

    /// The elements of some value heads, of as many of each head.
    fn of_heads(
        &self,
        parameter: &Tensor,
        Heads { q: values, .. }: &HeadRanges,
    ) -> Result<Tensor, LayerError> {
        let per_head = parameter.elem_count() / self.shape.num_value_heads.max(1);
        Ok(parameter.flatten_all()?.narrow(0, values.start * per_head, values.len() * per_head)?)
    }

    /// The channels of the convolution of some heads' queries, keys and values.
    pub(super) fn channels(&self, Heads { q: values, kv: keys }: &HeadRanges) -> [Range<usize>; 3] {
        let (key, value) = (self.shape.key_head_dim, self.shape.value_head_dim);
        let [q, k, v] = &self.channels;
        let of_heads = |all: &Range<usize>, heads: &Range<usize>, dim: usize| {
            all.start + heads.start * dim..all.start + heads.end * dim
        };
        [of_heads(q, keys, key), of_heads(k, keys, key), of_heads(v, values, value)]
    }
}

/// `[batch, seq, heads, dim]` → `[tokens, heads · dim]`, sharing the storage.
fn rows(x: &Tensor) -> Result<Tensor, LayerError> {
    let (batch, seq_len, heads, dim) = x.dims4()?;
    Ok(x.reshape((batch * seq_len, heads * dim))?)
}
