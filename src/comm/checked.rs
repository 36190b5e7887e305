//! The comparison of calls for backends that have none of their own, such as NCCL.

use super::call::{Call, compare};
use super::{
    CollectiveOp, CommError, GroupStats, GroupWrapper, Pending, ProcessGroup, ProcessGroupExt, StartCall,
    StridedPlan,
};
use candle_core::{DType, Tensor};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A group whose ranks tell each other what they call before any data moves. Ranks that diverge get
/// [`CommError::Desync`], with both calls. Messages are not compared: they have two ranks each.
///
/// What the ranks tell travels in a group of its own, so that it is not in the statistics; every collective waits
/// for it.
#[derive(Debug)]
pub(super) struct Checked {
    inner: Arc<dyn ProcessGroup>,
    /// The same ranks.
    side: Arc<dyn ProcessGroup>,
    sequence: AtomicU64,
}

impl Checked {
    /// Collective.
    pub(super) fn over(inner: Arc<dyn ProcessGroup>) -> Result<Arc<dyn ProcessGroup>, CommError> {
        let name = format!("{} (calls)", inner.name());
        let Some(side) = inner.split(&name, Some(0), inner.rank())? else { return Ok(inner) };
        Ok(Arc::new(Self { inner, side, sequence: AtomicU64::new(0) }))
    }

    /// Goes on where all ranks have made a call that fits this one.
    fn agree(&self, call: &Call) -> Result<(), CommError> {
        let sequence = self.sequence.fetch_add(1, Ordering::Relaxed);
        if self.world_size() == 1 {
            return Ok(());
        }
        let unreadable = |error: serde_json::Error| CommError::Tensor(format!("a rank's call: {error}"));
        let told = self.side.all_gather_varied(&serde_json::to_vec(call).map_err(unreadable)?)?;
        let calls = told.iter().map(|told| serde_json::from_slice(told)).collect::<Result<Vec<Call>, _>>();
        let calls = calls.map_err(unreadable)?;
        compare(&calls.iter().collect::<Vec<_>>()).map_err(|divergence| {
            let error = divergence.into_error(self.name(), sequence, self.global_ranks());
            self.inner.abort(&error.to_string());
            error
        })
    }
}

impl GroupWrapper for Checked {
    fn inner(&self) -> &Arc<dyn ProcessGroup> {
        &self.inner
    }

    fn start(&self, call: StartCall<'_>) -> Result<Pending, CommError> {
        if let Some(told) = without_data(call) {
            self.agree(&told)?;
        }
        call.on(&*self.inner)
    }

    fn split(
        &self,
        name: &str,
        color: Option<usize>,
        key: usize,
    ) -> Result<Option<Arc<dyn ProcessGroup>>, CommError> {
        self.agree(&Call::Split { name: name.to_owned(), color, key })?;
        self.inner.split(name, color, key)?.map(Self::over).transpose()
    }

    fn stats(&self) -> GroupStats {
        // The group that the calls are told in is not the caller's.
        let mut stats = self.inner.stats();
        if let Some(split) = stats.ops.get_mut(&CollectiveOp::Split) {
            split.calls = split.calls.saturating_sub(1);
        }
        stats.ops.retain(|_, op| op.calls > 0);
        stats
    }
}

/// What a rank tells of a call; nothing of messages.
fn without_data(call: StartCall<'_>) -> Option<Call> {
    Some(match call {
        StartCall::AllReduce { tensor, op } => {
            Call::AllReduce { op, dtype: tensor.dtype(), count: tensor.elem_count() }
        }
        StartCall::ReduceScatter { input, output, op } => {
            Call::ReduceScatter { op, dtype: input.dtype(), chunk: output.elem_count() }
        }
        StartCall::AllGather { input, .. } => {
            Call::AllGather { dtype: input.dtype(), count: input.elem_count() }
        }
        StartCall::AllToAll { input, send_counts, recv_counts, .. } => {
            let (send, recv) = (send_counts.to_vec(), recv_counts.to_vec());
            Call::AllToAll { dtype: input.dtype(), send, recv }
        }
        StartCall::AllToAllStrided { inputs, plan, .. } => strided_without_data(inputs, plan),
        StartCall::Broadcast { tensor, root } => {
            Call::Broadcast { dtype: tensor.dtype(), count: tensor.elem_count(), root }
        }
        StartCall::Barrier => Call::Barrier,
        StartCall::Send { .. } | StartCall::Recv { .. } => return None,
    })
}

/// One call for all tensors: the elements that go to each rank and come from it.
fn strided_without_data(inputs: &[Tensor], plan: &StridedPlan) -> Call {
    let elems = |batch: usize, rows: usize, run: usize| batch.saturating_mul(rows).saturating_mul(run);
    let sent = plan
        .send
        .iter()
        .map(|blocks| blocks.iter().map(|block| elems(block.batch, block.rows, block.run)).sum());
    let received = plan.recv.iter().map(|blocks| {
        blocks.iter().map(|recv| elems(recv.block.batch, recv.block.rows, recv.block.run)).sum()
    });
    let dtype = inputs.first().map_or(DType::F32, Tensor::dtype);
    Call::AllToAll { dtype, send: sent.collect(), recv: received.collect() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::{LaunchOptions, ReduceOp, launch};
    use candle_core::Device;

    fn on_ranks<T: Send>(
        run: impl Fn(usize, Arc<dyn ProcessGroup>) -> Result<T, CommError> + Sync,
    ) -> Result<Vec<T>, CommError> {
        let outcome =
            launch(3, &LaunchOptions::default(), |context| run(context.rank, Checked::over(context.group)?));
        outcome.map_err(|error| error.comm_error().unwrap_or_else(|| panic!("{error}")).clone())
    }

    #[test]
    fn calls_that_agree_do_what_they_do_without_the_check() {
        let results = on_ranks(|rank, group| {
            let pair = group.split("pair", (rank < 2).then_some(0), rank)?;
            let sum = group.all_reduce_values(&[10_f32.powi(rank as i32)], ReduceOp::Sum)?[0];
            let of_pair = pair.map(|pair| pair.all_gather_values(&[rank as u32])).transpose()?;
            assert_eq!(group.stats().get(CollectiveOp::AllReduce).calls, 1);
            assert_eq!(group.stats().get(CollectiveOp::AllGather).calls, 0, "what is told is not counted");
            assert_eq!(group.stats().get(CollectiveOp::Split).calls, 1);
            Ok((sum, of_pair))
        });
        let pair = Some(vec![0, 1]);
        assert_eq!(results, Ok(vec![(111.0, pair.clone()), (111.0, pair), (111.0, None)]));
    }

    #[test]
    fn the_rank_that_calls_something_else_is_named_with_both_calls() {
        let error = on_ranks(|rank, group| {
            group.barrier()?;
            if rank == 1 {
                group.barrier()
            } else {
                group.all_reduce_values(&[0_f32; 4], ReduceOp::Sum).map(drop)
            }
        });
        let Err(CommError::Desync { rank, sequence, called, others_called, .. }) = error else {
            panic!("{error:?}")
        };
        assert_eq!((rank, sequence), (1, 1), "the place among the caller's own calls");
        assert_eq!((called.as_str(), others_called.as_str()), ("barrier", "all_reduce(Sum, 4 × f32)"));
    }

    #[test]
    fn an_exchange_whose_counts_do_not_fit_is_refused_before_data_moves() {
        let error = on_ranks(|rank, group| {
            let send = if rank == 2 { [2, 1, 1] } else { [1, 1, 1] };
            let input = Tensor::zeros(send.iter().sum::<usize>(), DType::F32, &Device::Cpu)?;
            let output = Tensor::zeros(3, DType::F32, &Device::Cpu)?;
            group.start_all_to_all(&input, &output, &send, &[1, 1, 1])?.wait()
        });
        assert!(matches!(error, Err(CommError::Desync { rank: 2, .. })), "{error:?}");
    }
}
