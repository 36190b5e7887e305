//! The desync check for backends that do not compare calls themselves, such as NCCL.

use super::{OpLabel, compare};
use crate::comm::{
    Call, CallSignature, CollectiveOp, CommError, GroupStats, GroupWrapper, Pending, ProcessGroup,
    ProcessGroupExt,
};
use std::fmt::Debug;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A group whose ranks compare their calls before any data moves. Ranks with different calls get
/// [`CommError::Desync`], with both calls. Messages are not compared, since they involve two ranks only.
///
/// The comparison uses a separate group, so that statistics do not include it; every collective waits
/// for it. A fingerprint of fixed size is sent first, and the full call where the fingerprint is not enough.
#[derive(Debug)]
pub(in crate::comm) struct DesyncCheck {
    inner: Arc<dyn ProcessGroup>,
    /// A second group of the same ranks, for the comparison.
    side: Arc<dyn ProcessGroup>,
    sequence: AtomicU64,
    log: Arc<dyn CallLog>,
}

/// A log of the calls of a rank, for hang reports.
pub(in crate::comm) trait CallLog: Send + Sync + Debug {
    /// Records a call that is about to be compared.
    fn called(&self, label: OpLabel, call: &CallSignature);

    /// Records that all ranks have joined the last call, so earlier calls are complete.
    fn agreed(&self);
}

/// A hash of a call, and a flag that is set if the hash is not enough to compare it.
type Fingerprint = [u8; 33];

fn fingerprint(call: &CallSignature, text: &[u8]) -> Fingerprint {
    let mut fingerprint = [0; 33];
    fingerprint[..32].copy_from_slice(blake3::hash(text).as_bytes());
    // What a rank sends must match what its peers expect, not what they send.
    fingerprint[32] =
        u8::from(matches!(call, CallSignature::AllToAll { .. } | CallSignature::AllToAllStrided { .. }));
    fingerprint
}

impl DesyncCheck {
    /// Wraps a group. Collective.
    pub(in crate::comm) fn over(
        inner: Arc<dyn ProcessGroup>,
        log: Arc<dyn CallLog>,
    ) -> Result<Arc<dyn ProcessGroup>, CommError> {
        let name = format!("{} (calls)", inner.name());
        let Some(side) = inner.split(&name, Some(0), inner.rank())? else { return Ok(inner) };
        Ok(Arc::new(Self { inner, side, sequence: AtomicU64::new(0), log }))
    }

    /// Returns `Ok` if all ranks have made a matching call.
    fn agree(&self, call: &CallSignature) -> Result<(), CommError> {
        let sequence = self.sequence.fetch_add(1, Ordering::Relaxed);
        if self.world_size() == 1 {
            return Ok(());
        }
        let label = OpLabel { group: self.membership().group.clone(), op: call.op(), sequence };
        self.log.called(label.clone(), call);
        let unreadable = |error: serde_json::Error| CommError::Tensor(format!("a rank's call: {error}"));
        let text = serde_json::to_vec(call).map_err(unreadable)?;
        let own = fingerprint(call, &text);
        let all = self.side.all_gather_values(&own)?;
        // All ranks see the same fingerprints, so all return here, or all send the full call.
        let is_enough = all.chunks(own.len()).all(|other| other == own && other[32] == 0);
        if !is_enough {
            let reported = self.side.all_gather_varied(&text)?;
            let calls = reported
                .iter()
                .map(|reported| serde_json::from_slice(reported))
                .collect::<Result<Vec<CallSignature>, _>>();
            let calls = calls.map_err(unreadable)?;
            compare(&calls.iter().collect::<Vec<_>>()).map_err(|divergence| {
                let error = divergence.error_in(&label);
                self.inner.abort(&error.to_string());
                error
            })?;
        }
        self.log.agreed();
        Ok(())
    }
}

impl GroupWrapper for DesyncCheck {
    fn inner(&self) -> &Arc<dyn ProcessGroup> {
        &self.inner
    }

    fn start(&self, call: Call<'_>) -> Result<Pending, CommError> {
        if !call.op().is_message() {
            // The arguments are valid: the ranks compare calls that can be made, and the comparison indexes the
            // counts of all ranks.
            call.check(self)?;
            self.agree(&call.signature)?;
        }
        self.inner.start(call)
    }

    fn split(
        &self,
        name: &str,
        color: Option<usize>,
        key: usize,
    ) -> Result<Option<Arc<dyn ProcessGroup>>, CommError> {
        self.agree(&CallSignature::Split { name: name.into(), color, key })?;
        let child = self.inner.split(name, color, key)?;
        child.map(|child| Self::over(child, self.log.clone())).transpose()
    }

    fn stats(&self) -> GroupStats {
        // The group of the comparison is internal.
        let mut stats = self.inner.stats();
        if let Some(split) = stats.ops.get_mut(&CollectiveOp::Split) {
            split.calls = split.calls.saturating_sub(1);
        }
        stats.ops.retain(|_, op| op.calls > 0);
        stats
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::{LaunchOptions, ReduceOp, StridedPlan, launch};
    use candle_core::{DType, Device, Tensor};
    use parking_lot::Mutex;

    /// The calls of a rank, and which of them are known to be complete.
    #[derive(Debug, Default)]
    struct Log(Mutex<Vec<String>>);

    impl CallLog for Log {
        fn called(&self, OpLabel { group, sequence, .. }: OpLabel, call: &CallSignature) {
            self.0.lock().push(format!("#{sequence} of {} {:?}: {call}", group.name, group.members));
        }

        fn agreed(&self) {
            self.0.lock().push("agreed".to_owned());
        }
    }

    fn on_ranks<T: Send>(
        run: impl Fn(usize, Arc<dyn ProcessGroup>) -> Result<T, CommError> + Sync,
    ) -> Result<Vec<T>, CommError> {
        on_ranks_with(&|| Arc::new(Log::default()), run)
    }

    fn on_ranks_with<T: Send>(
        log: &(dyn Fn() -> Arc<Log> + Sync),
        run: impl Fn(usize, Arc<dyn ProcessGroup>) -> Result<T, CommError> + Sync,
    ) -> Result<Vec<T>, CommError> {
        let outcome = launch(3, &LaunchOptions::default(), |context| {
            run(context.rank, DesyncCheck::over(context.group, log())?)
        });
        outcome.map_err(|error| error.comm_error().unwrap_or_else(|| panic!("{error}")).clone())
    }

    #[test]
    fn matching_calls_behave_as_without_the_check() {
        let results = on_ranks(|rank, group| {
            let pair = group.split("pair", (rank < 2).then_some(0), rank)?;
            let sum = group.all_reduce_values(&[10_f32.powi(rank as i32)], ReduceOp::Sum)?[0];
            let of_pair = pair.map(|pair| pair.all_gather_values(&[rank as u32])).transpose()?;
            assert_eq!(group.stats().get(CollectiveOp::AllReduce).calls, 1);
            assert_eq!(group.stats().get(CollectiveOp::AllGather).calls, 0, "the comparison is not counted");
            assert_eq!(group.stats().get(CollectiveOp::Split).calls, 1);
            Ok((sum, of_pair))
        });
        let pair = Some(vec![0, 1]);
        assert_eq!(results, Ok(vec![(111.0, pair.clone()), (111.0, pair), (111.0, None)]));
    }

    #[test]
    fn the_rank_with_a_different_call_is_named_with_both_calls() {
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
        assert_eq!((rank, sequence), (1, 1), "the sequence number among the caller's own calls");
        assert_eq!((called.as_str(), others_called.as_str()), ("barrier", "all_reduce(Sum, 4 × f32)"));
    }

    #[test]
    fn an_all_to_all_with_mismatched_counts_is_refused_before_data_moves() {
        let error = on_ranks(|rank, group| {
            let send = if rank == 2 { [2, 1, 1] } else { [1, 1, 1] };
            let input = Tensor::zeros(send.iter().sum::<usize>(), DType::F32, &Device::Cpu)?;
            let output = Tensor::zeros(3, DType::F32, &Device::Cpu)?;
            group.start_all_to_all(&input, &output, &send, &[1, 1, 1])?.wait()
        });
        assert!(matches!(error, Err(CommError::Desync { rank: 2, .. })), "{error:?}");
    }

    #[test]
    fn mismatched_counts_are_found_behind_equal_fingerprints() {
        let error = on_ranks(|_, group| {
            let (input, output) =
                (Tensor::zeros(6, DType::F32, &Device::Cpu)?, Tensor::zeros(6, DType::F32, &Device::Cpu)?);
            // All ranks call the same: they send 3 to rank 2 and expect 1 from rank 0.
            group.start_all_to_all(&input, &output, &[1, 2, 3], &[1, 2, 3])?.wait()
        });
        assert!(matches!(error, Err(CommError::Desync { .. })), "{error:?}");
    }

    #[test]
    fn calls_are_logged_with_their_sequence_before_they_are_compared() {
        let logs: [Arc<Log>; 3] = Default::default();
        let next = Mutex::new(logs.iter());
        let log = || next.lock().next().unwrap().clone();
        let error = on_ranks_with(&log, |rank, group| {
            group.barrier()?;
            if rank == 2 {
                group.all_reduce_values(&[0_f32], ReduceOp::Sum).map(drop)
            } else {
                group.barrier()
            }
        });
        assert!(matches!(error, Err(CommError::Desync { rank: 2, .. })), "{error:?}");
        let mut reported: Vec<String> = logs.iter().map(|log| log.0.lock().join("; ")).collect();
        reported.sort();
        let entry = |sequence: u64, call: &str| format!("#{sequence} of world [0, 1, 2]: {call}");
        let expected = |last: &str| format!("{}; agreed; {}", entry(0, "barrier"), entry(1, last));
        let barrier = expected("barrier");
        assert_eq!(reported, [expected("all_reduce(Sum, 1 × f32)"), barrier.clone(), barrier]);
    }

    #[test]
    fn invalid_arguments_are_refused_before_the_comparison() {
        let refused = on_ranks(|_, group| {
            let four = Tensor::zeros(4, DType::F32, &Device::Cpu)?;
            let plan = Arc::new(StridedPlan::default());
            let results = [
                group.start_all_to_all(&four, &four.zeros_like()?, &[4], &[2, 1, 1]).map(drop),
                group.start_all_to_all_strided(&[four], &[], &plan).map(drop),
            ];
            group.barrier()?;
            Ok(results.iter().all(|result| matches!(result, Err(CommError::InvalidArgument { .. }))))
        });
        assert_eq!(refused, Ok(vec![true; 3]));
    }

    #[test]
    fn a_rank_with_invalid_arguments_has_issued_no_call() {
        let refused = on_ranks(|rank, group| {
            let of = |elems: usize| Tensor::zeros(elems, DType::F32, &Device::Cpu);
            let (two, four, columns) = (of(2)?, of(4)?, of(4)?.reshape((2, 2))?.t()?);
            // The other ranks wait at the barrier, which is the first call of this rank.
            let refused = match rank {
                1 => vec![
                    group.start_all_reduce(&columns, ReduceOp::Sum),
                    group.start_reduce_scatter(&four, &two, ReduceOp::Sum),
                    group.start_all_gather(&two, &four),
                    group.start_all_to_all(&columns, &four, &[4, 0, 0], &[4, 0, 0]),
                    group.start_broadcast(&two, 3),
                ],
                _ => Vec::new(),
            };
            let refused =
                refused.iter().filter(|result| matches!(result, Err(CommError::InvalidArgument { .. })));
            let num_refused = refused.count();
            group.barrier()?;
            Ok(num_refused)
        });
        assert_eq!(refused, Ok(vec![0, 5, 0]));
    }
}
