//! The forward pass of a ring.

use super::RingAttention;
use super::schedule::RingSchedule;
use super::sums::{downcast, upcast};
use super::transfer::{Pair, start_transfer};
use crate::sequence_parallel::{PendingExchange, SequenceParallelError};
use candle_core::Tensor;
use ulysses_kernels::Workspace;
use ulysses_kernels::attention::{AttentionError, merge};

/// One forward pass.
pub(super) struct Forward<'a> {
    pub(super) ring: &'a RingAttention,
    pub(super) schedule: &'a RingSchedule,
    pub(super) q: &'a Tensor,
    pub(super) workspace: &'a Workspace,
}

impl Forward<'_> {
    /// Returns `o` and `lse` over all blocks; `own` are this rank's keys and values.
    pub(super) fn run(&self, own: Pair) -> Result<(Tensor, Tensor), AttentionError> {
        let mut blocks = Blocks::new(self.ring, self.schedule, own, false);
        let mut merged: Option<(Tensor, Tensor)> = None;
        while let Some((step, block)) = blocks.next(self.workspace)? {
            let (Some([k, v]), Some(layout)) = (block, self.schedule.block(step)) else { continue };
            let (o, lse) = self.ring.local.attend([self.q, &k, &v], layout, self.workspace)?;
            merged = Some(match merged {
                None if self.schedule.num_hops() == 0 => (o, lse),
                None => (upcast(o, self.workspace)?, lse),
                Some((sum, sum_lse)) => {
                    merge([&sum, &sum_lse], [&o, &lse])?;
                    [o, lse].into_iter().for_each(|part| self.workspace.recycle(part));
                    (sum, sum_lse)
                }
            });
        }
        let (o, lse) = merged.unwrap_or_else(|| unreachable!("a query sees its own key"));
        Ok((downcast(o, self.q.dtype(), self.workspace)?, lse))
    }
}

/// The blocks that reach a rank: that of each step, while that of the next is received.
pub(super) struct Blocks<'a> {
    ring: &'a RingAttention,
    schedule: &'a RingSchedule,
    own: Pair,
    is_backward: bool,
    next_step: usize,
    current: Option<Pair>,
    /// The block of the next step, and the transfer that writes it and reads the current block.
    arriving: Option<(Option<Pair>, PendingExchange<()>)>,
}

impl<'a> Blocks<'a> {
    pub(super) fn new(
        ring: &'a RingAttention,
        schedule: &'a RingSchedule,
        own: Pair,
        is_backward: bool,
    ) -> Self {
        let current = Some(own.clone());
        Self { ring, schedule, own, is_backward, next_step: 0, current, arriving: None }
    }

    /// Waits for the block of the next step, and starts the transfer after it. Returns the step and its block, if the
    /// rank has one then.
    pub(super) fn next(
        &mut self,
        workspace: &Workspace,
    ) -> Result<Option<(usize, Option<Pair>)>, SequenceParallelError> {
        let (step, num_hops) = (self.next_step, self.schedule.num_hops());
        let arrived = match self.arriving.take() {
            Some((block, transfer)) => transfer.wait().map(|()| block)?,
            None => None,
        };
        if step > 0 {
            let passed = std::mem::replace(&mut self.current, arrived);
            // The first block is the caller's.
            passed.into_iter().flatten().filter(|_| step > 1).for_each(|tensor| workspace.recycle(tensor));
        }
        if step > num_hops {
            return Ok(None);
        }
        if step < num_hops {
            self.arriving = Some(self.start_hop(step, workspace)?);
        }
        self.next_step += 1;
        Ok(Some((step, self.current.clone())))
    }

    /// Sends the block of `step` on, and receives that of the next step.
    fn start_hop(
        &self,
        step: usize,
        workspace: &Workspace,
    ) -> Result<(Option<Pair>, PendingExchange<()>), SequenceParallelError> {
        let schedule = self.schedule;
        let received = match schedule.tokens(step + 1) {
            Some(tokens) => Some(self.alloc(tokens, workspace)?),
            None => None,
        };
        let is_sent = step < schedule.hops(step);
        let sent = self.current.as_ref().filter(|_| is_sent).map(|block| (schedule.rank_after(1), block));
        let from = received.iter().map(|block| (schedule.previous(), block)).collect::<Vec<_>>();
        let span = tracing::trace_span!("ring_block");
        let transfer =
            start_transfer(&*self.ring.group, &self.own[0], sent, &from, (span, self.is_backward))?;
        Ok((received, transfer))
    }

    /// Keys and values of another rank's tokens.
    fn alloc(&self, tokens: usize, workspace: &Workspace) -> Result<Pair, SequenceParallelError> {
        let (batch, _, heads, head_dim) = self.own[0].dims4()?;
        let block = || workspace.alloc((batch, tokens, heads, head_dim));
        Ok([block()?, block()?])
    }
}
