//! How long a rank is in the collectives of its groups, whatever carries them.

use super::{CollectiveArgs, CollectiveOp, CommError, GroupWrapper, Pending, ProcessGroup};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// One rank's stopwatch, shared by its groups.
///
/// A call's time is what the rank's thread spent in `start_*` and in [`Pending::wait`]: time in which it did
/// nothing else. What an operation does while the rank computes is not in it.
#[derive(Debug, Default)]
pub struct CommTimer {
    calls: Mutex<BTreeMap<Kind, Times>>,
    /// Seconds of each call, in order, where they are kept.
    each: Option<Mutex<SecondsOfCalls>>,
    is_verbose: bool,
}

/// By axis and operation.
type SecondsOfCalls = BTreeMap<(&'static str, CollectiveOp), Vec<f32>>;

/// Calls that are counted together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Kind {
    axis: &'static str,
    op: CollectiveOp,
    ranks: usize,
    input_bytes: u64,
}

#[derive(Debug, Clone, Copy, Default)]
struct Times {
    calls: u64,
    total: Duration,
}

/// Equal calls of one rank: the same operation along the same axis with messages of one size.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CallTimes {
    /// The axis of the mesh.
    pub axis: String,
    /// The operation.
    pub op: CollectiveOp,
    /// Members of the group.
    pub ranks: usize,
    /// Bytes of the tensors that this rank put into each call.
    pub input_bytes: u64,
    /// How often.
    pub calls: u64,
    /// Time that the rank spent in them.
    pub seconds: f64,
}

/// Every call of one rank to an operation along an axis, in order. Its peers' are as many, one by one.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EachCall {
    /// The axis of the mesh.
    pub axis: String,
    /// The operation.
    pub op: CollectiveOp,
    /// Time that the rank spent in each.
    pub seconds: Vec<f32>,
}

/// Seconds by what they were spent in.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct CommSeconds {
    /// All-to-alls, along any axis.
    pub all_to_all: f64,
    /// Other operations along any other axis than sp: dp, ZeRO's partitions and their replicas.
    pub dp: f64,
    /// Other operations along sp.
    pub sp: f64,
}

impl CommSeconds {
    /// All of them.
    pub fn total(self) -> f64 {
        self.all_to_all + self.dp + self.sp
    }
}

impl std::ops::Sub for CommSeconds {
    type Output = Self;

    fn sub(self, earlier: Self) -> Self {
        Self {
            all_to_all: self.all_to_all - earlier.all_to_all,
            dp: self.dp - earlier.dp,
            sp: self.sp - earlier.sp,
        }
    }
}

impl std::ops::AddAssign for CommSeconds {
    fn add_assign(&mut self, other: Self) {
        self.all_to_all += other.all_to_all;
        self.dp += other.dp;
        self.sp += other.sp;
    }
}

impl CommTimer {
    /// A timer that keeps the time of each single call besides, four bytes each: what it takes to tell who was
    /// late. `is_verbose`: it also logs each when it is complete.
    pub fn recording_calls(is_verbose: bool) -> Self {
        Self { each: Some(Mutex::default()), is_verbose, ..Self::default() }
    }

    /// `group` with its calls timed, as those along `axis`. A group of one rank moves nothing and stays as it is.
    pub fn wrap(
        self: &Arc<Self>,
        axis: &'static str,
        group: Arc<dyn ProcessGroup>,
    ) -> Arc<dyn ProcessGroup> {
        if group.world_size() == 1 {
            return group;
        }
        Arc::new(TimedGroup { inner: group, axis, timer: self.clone(), issued: AtomicU64::new(0) })
    }

    /// Time spent so far.
    pub fn seconds(&self) -> CommSeconds {
        let mut sum = CommSeconds::default();
        for (kind, times) in &*self.calls.lock() {
            let seconds = times.total.as_secs_f64();
            match (kind.op, kind.axis) {
                (CollectiveOp::AllToAll | CollectiveOp::AllToAllStrided, _) => sum.all_to_all += seconds,
                (_, "sp") => sum.sp += seconds,
                _ => sum.dp += seconds,
            }
        }
        sum
    }

    /// All calls so far, by axis, operation and size.
    pub fn calls(&self) -> Vec<CallTimes> {
        let calls = self.calls.lock();
        let reported = calls.iter().map(|(kind, times)| CallTimes {
            axis: kind.axis.to_owned(),
            op: kind.op,
            ranks: kind.ranks,
            input_bytes: kind.input_bytes,
            calls: times.calls,
            seconds: times.total.as_secs_f64(),
        });
        reported.collect()
    }

    /// Each single call, if the timer keeps them.
    pub fn each_call(&self) -> Vec<EachCall> {
        let Some(each) = &self.each else { return Vec::new() };
        let reported = |(&(axis, op), seconds): (&(&str, _), &Vec<f32>)| EachCall {
            axis: axis.to_owned(),
            op,
            seconds: seconds.clone(),
        };
        each.lock().iter().map(reported).collect()
    }

    fn add(&self, kind: Kind, time: Duration) {
        let Kind { axis, op, input_bytes, .. } = kind;
        let mut calls = self.calls.lock();
        let times = calls.entry(kind).or_default();
        times.calls += 1;
        times.total += time;
        if let Some(each) = &self.each {
            each.lock().entry((axis, op)).or_default().push(time.as_secs_f32());
        }
        if self.is_verbose {
            tracing::info!(axis, %op, input_bytes, milliseconds = 1e3 * time.as_secs_f64(), "collective");
        }
    }
}

/// Times the collectives.
#[derive(Debug)]
struct TimedGroup {
    inner: Arc<dyn ProcessGroup>,
    axis: &'static str,
    timer: Arc<CommTimer>,
    /// Collectives begun: the same on all ranks, so that a trace finds those that belong together.
    issued: AtomicU64,
}

impl GroupWrapper for TimedGroup {
    fn inner(&self) -> &Arc<dyn ProcessGroup> {
        &self.inner
    }

    fn start(&self, call: CollectiveArgs<'_>) -> Result<Pending, CommError> {
        if call.op().is_message() {
            // Messages are not the group's: other ranks do not count them, so they have no sequence number.
            return self.inner.start(call);
        }
        let op = call.op();
        let input_bytes = call.inputs().iter().map(ulysses_kernels::tensor::bytes).sum::<usize>() as u64;
        let kind = Kind { axis: self.axis, op, ranks: self.inner.world_size(), input_bytes };
        let sequence = self.issued.fetch_add(1, Ordering::Relaxed);
        let first = self.inner.global_ranks()[0];
        let begun = Instant::now();
        let pending = {
            let _start =
                tracing::trace_span!("start", axis = self.axis, %op, input_bytes, first, sequence).entered();
            self.inner.start(call)?
        };
        let starting = begun.elapsed();
        let (timer, group) = (self.timer.clone(), self.inner.clone());
        let complete = move || {
            let begun = Instant::now();
            let waiting =
                tracing::trace_span!("wait", axis = kind.axis, %op, input_bytes, first, sequence).entered();
            pending.wait()?;
            drop(waiting);
            timer.add(kind, starting + begun.elapsed());
            Ok(())
        };
        Ok(Pending::new(complete, move |error| group.abort(&error.to_string())))
    }
}

#[cfg(test)]
mod tests {
    use super::super::{LaunchOptions, ProcessGroupExt, ReduceOp, launch};
    use super::*;
    use candle_core::Device;

    #[test]
    fn a_rank_that_waits_for_a_late_one_is_charged_with_the_time_and_the_late_one_is_not() {
        const LATE: Duration = Duration::from_millis(60);
        let calls = launch(2, &LaunchOptions::default(), |rank| -> Result<_, CommError> {
            let timer = Arc::new(CommTimer::recording_calls(false));
            let group = timer.wrap("dp", rank.group.clone());
            if rank.rank == 1 {
                std::thread::sleep(LATE);
            }
            assert_eq!(group.all_reduce_values(&[1.0_f32, 2.0], ReduceOp::Sum)?, [2.0, 4.0]);
            assert!(timer.seconds().dp > 0.0 && timer.seconds().all_to_all == 0.0);
            assert_eq!(timer.each_call().iter().map(|call| call.seconds.len()).collect::<Vec<_>>(), [1]);
            Ok(timer.calls())
        });
        let calls = calls.unwrap();
        let of_first = &calls[0][0];
        assert_eq!((of_first.axis.as_str(), of_first.op), ("dp", CollectiveOp::AllReduce));
        assert_eq!((of_first.ranks, of_first.input_bytes, of_first.calls), (2, 8, 1));
        assert!(of_first.seconds > calls[1][0].seconds, "{calls:?}");
    }

    #[test]
    fn an_operation_under_way_costs_nothing_while_the_rank_does_something_else() {
        const BUSY: Duration = Duration::from_millis(200);
        let seconds = launch(2, &LaunchOptions::default(), |rank| -> Result<_, CommError> {
            let timer = Arc::new(CommTimer::default());
            let group = timer.wrap("sp", rank.group.clone());
            let tensor = ulysses_kernels::tensor::from_slice(&[1.0_f32; 8], &Device::Cpu)?;
            let pending = group.start_all_reduce(&tensor, ReduceOp::Sum)?;
            assert!(timer.calls().is_empty(), "not complete yet");
            std::thread::sleep(BUSY);
            pending.wait()?;
            // Both slept as long, so what they waited for each other is less than that sleep.
            assert!(timer.each_call().is_empty());
            Ok((timer.seconds(), timer.calls()))
        });
        for (seconds, calls) in seconds.unwrap() {
            assert!(seconds.sp > 0.0 && seconds.dp == 0.0);
            assert_eq!(calls[0].calls, 1);
        }
    }

    #[test]
    fn a_group_of_one_rank_is_left_alone() {
        launch(1, &LaunchOptions::default(), |rank| -> Result<_, CommError> {
            let group = Arc::new(CommTimer::default()).wrap("dp", rank.group.clone());
            assert!(Arc::ptr_eq(&group, &rank.group));
            Ok(())
        })
        .unwrap();
    }
}
