//! The forward pass of a ring.

use super::RingAttention;
use super::schedule::{RingSchedule, Sent};
use super::sums::{downcast, upcast};
use super::transfer::{Addressed, Pair, Transfer};
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
                None if self.schedule.steps().len() == 1 => (o, lse),
                None => (upcast(o, self.workspace)?, lse),
                Some((sum, sum_lse)) => {
                    merge(&sum, &sum_lse, &o, &lse)?;
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
    next_step: Option<usize>,
    /// The block of the current step, if the rank attends it. That of step 0 is the caller's.
    current: Option<Pair>,
    /// The block of the next step, and the transfer that writes it and reads the own and the current block.
    arriving: Option<(Option<Pair>, PendingExchange<()>)>,
}

impl<'a> Blocks<'a> {
    pub(super) fn new(
        ring: &'a RingAttention,
        schedule: &'a RingSchedule,
        own: Pair,
        is_backward: bool,
    ) -> Self {
        Self { ring, schedule, own, is_backward, next_step: Some(0), current: None, arriving: None }
    }

    /// Waits for the block of the next step, and starts the transfer after it. Returns the step and its block, if the
    /// rank attends it.
    pub(super) fn next(
        &mut self,
        workspace: &Workspace,
    ) -> Result<Option<(usize, Option<Pair>)>, SequenceParallelError> {
        let arrived = match self.arriving.take() {
            Some((block, transfer)) => transfer.wait().map(|()| block)?,
            None => None,
        };
        let passed = std::mem::replace(&mut self.current, arrived);
        passed.into_iter().flatten().for_each(|tensor| workspace.recycle(tensor));
        let Some(step) = self.next_step else { return Ok(None) };
        self.next_step = self.schedule.next(step);
        if let Some(next) = self.next_step {
            self.arriving = Some(self.start_hop(step, next, workspace)?);
        }
        let block = if step == 0 { Some(self.own.clone()) } else { self.current.clone() };
        Ok(Some((step, block)))
    }

    /// Sends blocks in `step`, and receives that of the `next` step.
    fn start_hop(
        &self,
        step: usize,
        next: usize,
        workspace: &Workspace,
    ) -> Result<(Option<Pair>, PendingExchange<()>), SequenceParallelError> {
        let schedule = self.schedule;
        let block = match schedule.tokens(next) {
            Some(tokens) => Some(self.alloc(tokens, workspace)?),
            None => None,
        };
        let addressed = |sent: Sent| match sent {
            Sent::Own(rank) => Addressed { rank, pair: &self.own },
            Sent::Current(rank) => Addressed { rank, pair: self.current.as_ref().unwrap_or(&self.own) },
        };
        let sent: Vec<_> = schedule.sent(step).map(addressed).collect();
        let received = block.iter().map(|pair| Addressed { rank: schedule.sender(next), pair });
        let received: Vec<_> = received.collect();
        let (like, is_backward) = (&self.own[0], self.is_backward);
        let transfer = Transfer { like, sent: &sent, received: &received, is_backward };
        let pending = tracing::trace_span!("ring_block").in_scope(|| transfer.start(&*self.ring.group))?;
        Ok((block, pending))
    }

    /// Keys and values of another rank's tokens.
    fn alloc(&self, tokens: usize, workspace: &Workspace) -> Result<Pair, SequenceParallelError> {
        let [keys, values] = self.own.each_ref().map(|own| {
            let (batch, _, heads, head_dim) = own.dims4()?;
            Ok::<_, SequenceParallelError>(workspace.alloc((batch, tokens, heads, head_dim))?)
        });
        Ok([keys?, values?])
    }
}
