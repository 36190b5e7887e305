//! The backward pass of a ring: blocks travel as in the forward pass, and their gradients return.

use super::RingAttention;
use super::forward::Blocks;
use super::schedule::RingSchedule;
use super::sums::{add, downcast};
use super::transfer::{Addressed, Pair, Transfer};
use crate::sequence_parallel::{PendingExchange, SequenceParallelError};
use candle_core::Tensor;
use ulysses_kernels::attention::{AttentionError, QkvGradients, Upstream};
use ulysses_kernels::{OpError, Workspace};

/// One backward pass.
///
/// The gradients of a block are added in the order of the ranks after its owner, which adds its own last. A relayed block
/// has its sums passed from rank to rank, and the last one sends them to the owner; otherwise every rank sends its part to
/// the owner, which adds them.
pub(super) struct Backward<'a> {
    pub(super) ring: &'a RingAttention,
    pub(super) schedule: &'a RingSchedule,
    pub(super) q: &'a Tensor,
    pub(super) upstream: &'a Upstream<'a>,
    pub(super) workspace: &'a Workspace,
}

/// The transfer after a step, which sends the sums of that step's block.
struct Underway {
    sent: Option<Pair>,
    /// The sums of the next step's block, from the previous rank.
    passing: Option<Pair>,
    /// Gradients of this rank's own block.
    returned: Option<Pair>,
    pending: PendingExchange<()>,
}

/// Sums of gradients that have arrived, until they are needed.
#[derive(Default)]
struct Arrived {
    /// The gradients of the next block that this rank adds to.
    passed: Option<Pair>,
    /// The gradients of this rank's own block.
    returned: Option<Pair>,
}

impl Backward<'_> {
    /// Returns the gradients of the queries and of `own`, this rank's keys and values.
    pub(super) fn run(&self, own: Pair) -> Result<QkvGradients, AttentionError> {
        let dtype = self.q.dtype();
        let mut blocks = Blocks::new(self.ring, self.schedule, own.clone(), true);
        let (mut dq, mut own_gradients) = (None, None);
        let (mut arrived, mut under_way) = (Arrived::default(), None);
        while let Some((step, block)) = blocks.next(self.workspace)? {
            let mut gradients = None;
            if let Some(QkvGradients { dq: dq_part, dk, dv }) = self.block_gradients(step, block)? {
                dq = Some(self.first_or_sum(dq, dq_part)?);
                gradients = Some([dk, dv]);
            }
            if step == 0 {
                own_gradients = gradients;
                continue;
            }
            self.finish(under_way.take(), &mut arrived)?;
            under_way = Some(self.pass_on(step, arrived.passed.take(), gradients, &own)?);
        }
        self.finish(under_way, &mut arrived)?;
        let own_gradients = own_gradients.unwrap_or_else(|| unreachable!("a query sees its own key"));
        let [dk, dv] = match arrived.returned {
            None => own_gradients,
            returned => self.sums(returned, own_gradients)?,
        };
        let dq = dq.unwrap_or_else(|| unreachable!("a query sees its own key"));
        let round = |sum| downcast(sum, dtype, self.workspace);
        Ok(QkvGradients { dq: round(dq)?, dk: round(dk)?, dv: round(dv)? })
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
            None if self.schedule.steps().len() == 1 => Ok(part),
            sum => add(sum, part, self.workspace),
        }
    }

    /// Waits for the transfer after the previous step.
    fn finish(&self, transfer: Option<Underway>, arrived: &mut Arrived) -> Result<(), SequenceParallelError> {
        let Some(Underway { sent, passing, returned, pending }) = transfer else { return Ok(()) };
        pending.wait()?;
        sent.into_iter().flatten().for_each(|tensor| self.workspace.recycle(tensor));
        arrived.passed = passing;
        if let Some(returned) = returned {
            arrived.returned = Some(self.sums(arrived.returned.take(), returned)?);
        }
        Ok(())
    }

    /// Adds this rank's gradients of the block of `step` to those passed to it, and sends the sums on.
    fn pass_on(
        &self,
        step: usize,
        passed: Option<Pair>,
        gradients: Option<Pair>,
        own: &Pair,
    ) -> Result<Underway, SequenceParallelError> {
        let schedule = self.schedule;
        let sums = gradients.map(|gradients| self.sums(passed, gradients)).transpose()?;
        let passing = schedule.tokens_passed(step).map(|tokens| self.alloc(tokens, own)).transpose()?;
        let returns_from = schedule.returns_from(step);
        let returned = returns_from.map(|_| self.alloc(own[0].dims()[1], own)).transpose()?;
        let sent = sums.as_ref().map(|pair| Addressed { rank: schedule.gradients_to(step), pair });
        let received: Vec<Addressed<'_>> = (passing.iter())
            .map(|pair| Addressed { rank: schedule.rank_before(), pair })
            .chain(returns_from.zip(returned.as_ref()).map(|(rank, pair)| Addressed { rank, pair }))
            .collect();
        let sent = sent.as_slice();
        let transfer = Transfer { like: self.upstream.lse, sent, received: &received, is_backward: true };
        let span = tracing::trace_span!("ring_gradients");
        let pending = span.in_scope(|| transfer.start(&*self.ring.group))?;
        Ok(Underway { sent: sums, passing, returned, pending })
    }

    /// Adds the gradients of a block to the sums of other ranks.
    fn sums(&self, sums: Option<Pair>, [dk, dv]: Pair) -> Result<Pair, OpError> {
        let [dk_sum, dv_sum] = sums.map_or([None, None], |sums| sums.map(Some));
        Ok([add(dk_sum, dk, self.workspace)?, add(dv_sum, dv, self.workspace)?])
    }

    /// Sums of a block of `tokens` tokens.
    fn alloc(&self, tokens: usize, own: &Pair) -> Result<Pair, SequenceParallelError> {
        let [keys, values] = own.each_ref().map(|own| {
            let (batch, _, heads, head_dim) = own.dims4()?;
            Ok::<_, SequenceParallelError>(self.workspace.alloc_f32((batch, tokens, heads, head_dim))?)
        });
        Ok([keys?, values?])
    }
}
