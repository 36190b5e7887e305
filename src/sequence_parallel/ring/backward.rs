//! The backward pass of a ring: blocks travel as in the forward pass, and their gradients follow them.

use super::RingAttention;
use super::forward::Blocks;
use super::schedule::RingSchedule;
use super::sums::{add, downcast};
use super::transfer::{Addressed, Pair, start_transfer};
use crate::sequence_parallel::{PendingExchange, SequenceParallelError};
use candle_core::Tensor;
use ulysses_kernels::attention::{AttentionError, QkvGradients, Upstream};
use ulysses_kernels::elementwise::fill;
use ulysses_kernels::{OpError, Workspace};

/// One backward pass.
///
/// The gradients of a block begin on the rank after its owner and are added in the order of the ring; the last rank
/// sends them to the owner, which adds its own.
pub(super) struct Backward<'a> {
    pub(super) ring: &'a RingAttention,
    pub(super) schedule: &'a RingSchedule,
    pub(super) q: &'a Tensor,
    pub(super) upstream: &'a Upstream<'a>,
    pub(super) workspace: &'a Workspace,
}

/// The transfer after a step, which sends the sums of that step's block.
struct Transfer {
    sent: Option<Pair>,
    /// The sums of the next step's block, from the previous rank.
    passing: Option<Pair>,
    /// The sums of this rank's own block, from the last rank that saw it.
    returned: Option<Pair>,
    pending: PendingExchange<()>,
}

impl Backward<'_> {
    /// Returns the gradients of the queries and of `own`, this rank's keys and values.
    pub(super) fn run(&self, own: Pair) -> Result<QkvGradients, AttentionError> {
        let dtype = self.q.dtype();
        let mut blocks = Blocks::new(self.ring, self.schedule, own.clone(), true);
        let (mut dq, mut own_gradients) = (None, None);
        let (mut returned, mut under_way) = (None, None);
        while let Some((step, block)) = blocks.next(self.workspace)? {
            let mut gradients = None;
            if let Some((dq_part, dk, dv)) = self.block_gradients(step, block)? {
                dq = Some(self.first_or_sum(dq, dq_part)?);
                gradients = Some([dk, dv]);
            }
            if step == 0 {
                own_gradients = gradients;
                continue;
            }
            let passed = self.finish(under_way.take(), &mut returned)?;
            under_way = Some(self.pass_on(step, passed, gradients, &own)?);
        }
        self.finish(under_way, &mut returned)?;
        let [dk, dv] = own_gradients.unwrap_or_else(|| unreachable!("a query sees its own key"));
        let [dk, dv] = match returned {
            None => [dk, dv],
            Some([dk_sum, dv_sum]) => {
                [add(Some(dk_sum), dk, self.workspace)?, add(Some(dv_sum), dv, self.workspace)?]
            }
        };
        let dq = dq.unwrap_or_else(|| unreachable!("a query sees its own key"));
        let round = |sum| downcast(sum, dtype, self.workspace);
        Ok((round(dq)?, round(dk)?, round(dv)?))
    }

    fn block_gradients(
        &self,
        step: usize,
        block: Option<Pair>,
    ) -> Result<Option<QkvGradients>, AttentionError> {
        let (Some([k, v]), Some(layout)) = (block, self.schedule.block(step)) else { return Ok(None) };
        let local = &self.ring.local;
        Ok(Some(local.attend_backward([self.q, &k, &v], self.upstream, layout, self.workspace)?))
    }

    /// Adds the queries' gradient from one more block. That of the only block is the result, and stays as it is.
    fn first_or_sum(&self, sum: Option<Tensor>, part: Tensor) -> Result<Tensor, OpError> {
        match sum {
            None if self.schedule.num_hops() == 0 => Ok(part),
            sum => add(sum, part, self.workspace),
        }
    }

    /// Waits for the transfer after the previous step. Returns the sums of this step's block so far, and keeps those of
    /// this rank's own block.
    fn finish(
        &self,
        transfer: Option<Transfer>,
        own_sums: &mut Option<Pair>,
    ) -> Result<Option<Pair>, SequenceParallelError> {
        let Some(Transfer { sent, passing, returned, pending }) = transfer else { return Ok(None) };
        pending.wait()?;
        sent.into_iter().flatten().for_each(|tensor| self.workspace.recycle(tensor));
        if returned.is_some() {
            *own_sums = returned;
        }
        Ok(passing)
    }

    /// Adds this rank's gradients of the block of `step` to those passed to it, and sends the sums on: to the next rank,
    /// or to the block's owner if no further rank sees it.
    fn pass_on(
        &self,
        step: usize,
        passed: Option<Pair>,
        gradients: Option<Pair>,
        own: &Pair,
    ) -> Result<Transfer, SequenceParallelError> {
        let schedule = self.schedule;
        let sums = match schedule.tokens(step) {
            Some(tokens) => Some(self.sums((passed, gradients), tokens, own)?),
            None => None,
        };
        let to = if step < schedule.hops(step) { schedule.rank_after(1) } else { schedule.owner(step) };
        let passing = schedule.tokens(step + 1).map(|tokens| self.alloc(tokens, own)).transpose()?;
        let returns = schedule.hops(0) == step;
        let returned = returns.then(|| self.alloc(own[0].dims()[1], own)).transpose()?;
        let received: Vec<Addressed<'_>> = (passing.iter().map(|pair| (schedule.previous(), pair)))
            .chain(returned.iter().map(|pair| (schedule.rank_after(step), pair)))
            .collect();
        let span = tracing::trace_span!("ring_gradients");
        let sent = sums.as_ref().map(|sums| (to, sums));
        let pending = start_transfer(&*self.ring.group, self.upstream.lse, sent, &received, (span, true))?;
        Ok(Transfer { sent: sums, passing, returned, pending })
    }

    /// The sums of a block that has `tokens` tokens: those passed to this rank, plus its own gradients.
    fn sums(
        &self,
        (passed, gradients): (Option<Pair>, Option<Pair>),
        tokens: usize,
        own: &Pair,
    ) -> Result<Pair, SequenceParallelError> {
        let Some([dk, dv]) = gradients else {
            return passed.map_or_else(|| self.zeros(tokens, own), Ok);
        };
        let [dk_sum, dv_sum] = passed.map_or([None, None], |sums| sums.map(Some));
        Ok([add(dk_sum, dk, self.workspace)?, add(dv_sum, dv, self.workspace)?])
    }

    fn zeros(&self, tokens: usize, own: &Pair) -> Result<Pair, SequenceParallelError> {
        let sums = self.alloc(tokens, own)?;
        for sum in &sums {
            fill(sum, 0.0)?;
        }
        Ok(sums)
    }

    /// Sums of a block of `tokens` tokens.
    fn alloc(&self, tokens: usize, own: &Pair) -> Result<Pair, SequenceParallelError> {
        let (batch, _, heads, head_dim) = own[0].dims4()?;
        let sum = || self.workspace.alloc_f32((batch, tokens, heads, head_dim));
        Ok([sum()?, sum()?])
    }
}
