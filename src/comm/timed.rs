//! Time that a rank spends in collectives, for any backend.

use super::{Call, CollectiveOp, CommError, GroupWrapper, Pending, ProcessGroup};
use crate::mesh::{PP_AXIS, RING_AXIS, TP_AXIS};
use candle_core::Device;
use parking_lot::{Mutex, MutexGuard};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use ulysses_kernels::device::{DeviceTimes, TimeStamp};

/// A timer of one rank, shared by its groups.
///
/// The time of a call is what the rank spent in `start_*` and in [`Pending::wait`], where it did nothing else:
/// on the CPU its thread, on a GPU the stream of its tensors, which packs, waits for the stream of the collectives,
/// and unpacks. Communication that overlaps with compute is not included. On a GPU a call is counted when its
/// time is read, at the latest by the methods that return times.
#[derive(Debug)]
pub struct CommTimer {
    device: Device,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// The phase of the steps that completed calls belong to.
    phase: &'static str,
    /// Calls that a GPU may not have done yet.
    running: DeviceTimes<(Kind, &'static str), 2>,
    totals: Totals,
}

#[derive(Debug, Default)]
struct Totals {
    calls: BTreeMap<Kind, Times>,
    /// Since they were last taken.
    by_phase: BTreeMap<&'static str, CommSeconds>,
    /// Along pp, in the phases of steps.
    pp_seconds: f64,
    /// Seconds of each call, in order, if calls are recorded individually.
    each: Option<SecondsOfCalls>,
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
    seconds: f64,
}

/// The total time of similar calls of one rank: same operation, axis and message size.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CallTimes {
    /// The axis of the mesh.
    pub axis: String,
    /// The operation.
    pub op: CollectiveOp,
    /// Number of ranks in the group.
    pub ranks: usize,
    /// Input bytes of this rank per call.
    pub input_bytes: u64,
    /// Number of calls.
    pub calls: u64,
    /// Total time that the rank spent in them.
    pub seconds: f64,
}

/// The time of each call of one operation along an axis, on one rank, in order. All its peers have the same number.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EachCall {
    /// The axis of the mesh.
    pub axis: String,
    /// The operation.
    pub op: CollectiveOp,
    /// Time of each call on this rank.
    pub seconds: Vec<f32>,
}

/// Seconds by kind of communication.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct CommSeconds {
    /// All-to-alls of the Ulysses exchange: along any axis but ring, tp and pp.
    pub all_to_all: f64,
    /// The part of them in the waits of exchanges: communication that compute did not hide.
    pub exposed_exchange: f64,
    /// Hops of a ring: all-to-alls along it.
    pub ring: f64,
    /// The part of them in the waits for blocks and gradients.
    pub exposed_ring: f64,
    /// All operations along pp: waiting for messages of other pipeline stages, and sending to them.
    pub pp: f64,
    /// All operations along tp: gathers and sums around the modules that its ranks divide.
    pub tp: f64,
    /// Other operations along any axis but sp: dp, ZeRO partitions and their replicas.
    pub dp: f64,
    /// Other operations along sp.
    pub sp: f64,
}

impl CommSeconds {
    /// The total.
    pub fn total(self) -> f64 {
        self.all_to_all + self.ring + self.pp + self.tp + self.dp + self.sp
    }
}

impl std::ops::AddAssign for CommSeconds {
    fn add_assign(&mut self, other: Self) {
        self.all_to_all += other.all_to_all;
        self.exposed_exchange += other.exposed_exchange;
        self.ring += other.ring;
        self.exposed_ring += other.exposed_ring;
        self.pp += other.pp;
        self.tp += other.tp;
        self.dp += other.dp;
        self.sp += other.sp;
    }
}

impl CommTimer {
    /// Creates a timer of a rank whose tensors are on `device`.
    pub fn new(device: &Device) -> Self {
        Self { device: device.clone(), state: Mutex::default() }
    }

    /// Creates a timer that also records each call, at four bytes each, which shows which rank was
    /// late. With `is_verbose` it also logs each call when its time is read.
    pub fn recording_calls(device: &Device, is_verbose: bool) -> Self {
        let totals = Totals { each: Some(BTreeMap::new()), is_verbose, ..Totals::default() };
        Self { device: device.clone(), state: Mutex::new(State { totals, ..State::default() }) }
    }

    /// Wraps `group` so that its calls are timed under `axis`. A group of one rank is returned as it is.
    pub fn wrap(self: &Arc<Self>, axis: &'static str, group: Arc<dyn ProcessGroup>) -> Arc<dyn ProcessGroup> {
        if group.world_size() == 1 {
            return group;
        }
        Arc::new(TimedGroup { inner: group, axis, timer: self.clone(), issued: AtomicU64::new(0) })
    }

    /// Counts calls that complete from now on under `phase`.
    pub fn set_phase(&self, phase: &'static str) {
        self.state.lock().phase = phase;
    }

    /// Returns the time spent since the last call of this method, by phase. Waits for a GPU.
    ///
    /// # Errors
    /// A GPU that failed.
    pub fn take_seconds(&self) -> candle_core::Result<BTreeMap<&'static str, CommSeconds>> {
        let mut state = self.state.lock();
        state.settle()?;
        Ok(std::mem::take(&mut state.totals.by_phase))
    }

    /// Returns the time along pp in all steps so far.
    pub fn pp_seconds(&self) -> f64 {
        self.settled().totals.pp_seconds
    }

    /// Returns the calls so far, by axis, operation and size, without messages; without those that a failed GPU has not done.
    pub fn calls(&self) -> Vec<CallTimes> {
        let calls = &self.settled().totals.calls;
        let reported = calls.iter().map(|(kind, times)| CallTimes {
            axis: kind.axis.to_owned(),
            op: kind.op,
            ranks: kind.ranks,
            input_bytes: kind.input_bytes,
            calls: times.calls,
            seconds: times.seconds,
        });
        reported.collect()
    }

    /// Returns the times of each call, if the timer records them; as [`calls`](Self::calls).
    pub fn each_call(&self) -> Vec<EachCall> {
        let reported = |(&(axis, op), seconds): (&(&str, _), &Vec<f32>)| EachCall {
            axis: axis.to_owned(),
            op,
            seconds: seconds.clone(),
        };
        self.settled().totals.each.iter().flatten().map(reported).collect()
    }

    fn settled(&self) -> MutexGuard<'_, State> {
        let mut state = self.state.lock();
        if let Err(error) = state.settle() {
            tracing::debug!("times of collectives are missing: {error}");
        }
        state
    }

    fn now(&self) -> candle_core::Result<TimeStamp> {
        TimeStamp::now(&self.device)
    }

    fn add(&self, kind: Kind, intervals: [[TimeStamp; 2]; 2]) -> candle_core::Result<()> {
        let State { phase, running, totals } = &mut *self.state.lock();
        running.add((kind, *phase), intervals, |(kind, phase), [starting, waiting]| {
            totals.count(kind, phase, starting, waiting)
        })
    }
}

impl State {
    fn settle(&mut self) -> candle_core::Result<()> {
        let Self { running, totals, .. } = self;
        running.settle(|(kind, phase), [starting, waiting]| totals.count(kind, phase, starting, waiting))
    }
}

impl Totals {
    fn count(&mut self, kind: Kind, phase: &'static str, starting: f64, waiting: f64) {
        let seconds = starting + waiting;
        let Kind { axis, op, input_bytes, .. } = kind;
        let of_phase = self.by_phase.entry(phase).or_default();
        if axis == PP_AXIS {
            of_phase.pp += seconds;
            self.pp_seconds += if phase.is_empty() { 0.0 } else { seconds };
        }
        if op.is_message() {
            return;
        }
        let times = self.calls.entry(kind).or_default();
        times.calls += 1;
        times.seconds += seconds;
        match (op, axis) {
            (_, PP_AXIS) => {}
            (_, TP_AXIS) => of_phase.tp += seconds,
            (CollectiveOp::AllToAll | CollectiveOp::AllToAllStrided, RING_AXIS) => of_phase.ring += seconds,
            (CollectiveOp::AllToAll | CollectiveOp::AllToAllStrided, _) => of_phase.all_to_all += seconds,
            (_, "sp") => of_phase.sp += seconds,
            _ => of_phase.dp += seconds,
        }
        match (op, axis) {
            (_, TP_AXIS) => {}
            (CollectiveOp::AllToAllStrided, RING_AXIS) => of_phase.exposed_ring += waiting,
            (CollectiveOp::AllToAllStrided, _) => of_phase.exposed_exchange += waiting,
            _ => {}
        }
        if let Some(each) = &mut self.each {
            each.entry((axis, op)).or_default().push(seconds as f32);
        }
        if self.is_verbose {
            tracing::info!(axis, %op, input_bytes, milliseconds = 1e3 * seconds, "collective");
        }
    }
}

/// A wrapper that times the collectives of a group.
#[derive(Debug)]
struct TimedGroup {
    inner: Arc<dyn ProcessGroup>,
    axis: &'static str,
    timer: Arc<CommTimer>,
    /// Number of collectives started. It is equal on all ranks, so a trace can match them.
    issued: AtomicU64,
}

impl GroupWrapper for TimedGroup {
    fn inner(&self) -> &Arc<dyn ProcessGroup> {
        &self.inner
    }

    fn start(&self, call: Call<'_>) -> Result<Pending, CommError> {
        let op = call.op();
        let input_bytes = call.inputs.iter().map(ulysses_kernels::tensor::bytes).sum::<usize>() as u64;
        let kind = Kind { axis: self.axis, op, ranks: self.inner.world_size(), input_bytes };
        // Messages involve two ranks only, so they have no sequence number in the group, and no place in a trace.
        let is_traced = !op.is_message();
        let sequence = if is_traced { self.issued.fetch_add(1, Ordering::Relaxed) } else { 0 };
        let first = self.inner.global_ranks()[0];
        let begun = self.timer.now()?;
        let pending = {
            let _start = is_traced.then(|| {
                tracing::trace_span!("start", axis = self.axis, %op, input_bytes, first, sequence).entered()
            });
            self.inner.start(call)?
        };
        let starting = [begun, self.timer.now()?];
        let timer = self.timer.clone();
        Ok(pending.around(move |complete| {
            let begun = timer.now()?;
            let waiting = is_traced.then(|| {
                tracing::trace_span!("wait", axis = kind.axis, %op, input_bytes, first, sequence).entered()
            });
            complete()?;
            drop(waiting);
            let waited = [begun, timer.now()?];
            Ok(timer.add(kind, [starting, waited])?)
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::super::{
        LaunchOptions, ProcessGroupExt, RecvBlock, ReduceOp, StridedBlock, StridedPlan, launch,
    };
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_rank_that_waits_for_a_late_one_is_charged_with_the_time_and_the_late_one_is_not() {
        const LATE: Duration = Duration::from_millis(60);
        let calls = launch(2, &LaunchOptions::default(), |rank| -> Result<_, CommError> {
            let timer = Arc::new(CommTimer::recording_calls(&Device::Cpu, false));
            let group = timer.wrap("dp", rank.group.clone());
            if rank.rank == 1 {
                std::thread::sleep(LATE);
            }
            assert_eq!(group.all_reduce_values(&[1.0_f32, 2.0], ReduceOp::Sum)?, [2.0, 4.0]);
            let seconds = timer.take_seconds()?[""];
            assert!(seconds.dp > 0.0 && seconds.all_to_all == 0.0);
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
            let timer = Arc::new(CommTimer::new(&Device::Cpu));
            let group = timer.wrap("sp", rank.group.clone());
            timer.set_phase("forward");
            let tensor = ulysses_kernels::tensor::from_slice(&[1.0_f32; 8], &Device::Cpu)?;
            let pending = group.start_all_reduce(&tensor, ReduceOp::Sum)?;
            assert!(timer.calls().is_empty(), "not complete yet");
            std::thread::sleep(BUSY);
            timer.set_phase("backward");
            pending.wait()?;
            // Both sleep for the same time, so their waits for each other are shorter than that.
            assert!(timer.each_call().is_empty());
            let seconds = timer.take_seconds()?;
            assert!(timer.take_seconds()?.is_empty(), "taken");
            Ok((seconds, timer.calls()))
        });
        for (seconds, calls) in seconds.unwrap() {
            let phases: Vec<_> = seconds.keys().copied().collect();
            assert_eq!(phases, ["backward"], "the phase in which it completes");
            assert!(seconds["backward"].sp > 0.0 && seconds["backward"].dp == 0.0);
            assert_eq!(calls[0].calls, 1);
        }
    }

    #[test]
    fn the_wait_of_an_exchange_is_exposed_and_its_start_is_not() {
        let mut totals = Totals::default();
        let kind = |axis, op| Kind { axis, op, ranks: 2, input_bytes: 8 };
        totals.count(kind("sp", CollectiveOp::AllToAllStrided), "forward", 1.0, 2.0);
        totals.count(kind("sp", CollectiveOp::AllToAll), "forward", 4.0, 8.0);
        totals.count(kind("sp", CollectiveOp::AllReduce), "forward", 16.0, 32.0);
        totals.count(kind(RING_AXIS, CollectiveOp::AllToAllStrided), "forward", 64.0, 128.0);
        totals.count(kind("ulysses", CollectiveOp::AllToAllStrided), "forward", 0.25, 0.5);
        totals.count(kind(TP_AXIS, CollectiveOp::AllToAllStrided), "forward", 256.0, 512.0);
        totals.count(kind(TP_AXIS, CollectiveOp::AllReduce), "forward", 0.125, 0.125);
        totals.count(kind(PP_AXIS, CollectiveOp::Recv), "forward", 0.5, 1.0);
        totals.count(kind(PP_AXIS, CollectiveOp::AllReduce), "", 2.0, 4.0);
        let expected = CommSeconds {
            all_to_all: 15.75,
            exposed_exchange: 2.5,
            ring: 192.0,
            exposed_ring: 128.0,
            pp: 1.5,
            tp: 768.25,
            dp: 0.0,
            sp: 48.0,
        };
        assert_eq!(totals.by_phase["forward"], expected);
        assert_eq!(expected.total(), 15.75 + 192.0 + 1.5 + 768.25 + 48.0);
        // Those outside of steps are none of theirs, and messages are no collectives.
        assert_eq!((totals.pp_seconds, totals.by_phase[""].pp), (1.5, 6.0));
        assert!(totals.calls.keys().all(|kind| kind.op != CollectiveOp::Recv));
    }

    #[test]
    fn an_exchange_is_exposed_from_its_wait_on() {
        let seconds = launch(2, &LaunchOptions::default(), |rank| -> Result<_, CommError> {
            let timer = Arc::new(CommTimer::new(&Device::Cpu));
            let group = timer.wrap("sp", rank.group.clone());
            let tensor = ulysses_kernels::tensor::from_slice(&[1.0_f32; 2], &Device::Cpu)?;
            let received = tensor.zeros_like()?;
            let send = (0..2).map(|peer| vec![StridedBlock::contiguous(0, peer, 1)]).collect();
            let to = |peer| RecvBlock { block: StridedBlock::contiguous(0, peer, 1), accumulate: false };
            let recv = (0..2).map(|peer| vec![to(peer)]).collect();
            let plan = Arc::new(StridedPlan { send, recv });
            let pending = group.start_all_to_all_strided(&[tensor], &[received], &plan)?;
            assert!(timer.take_seconds()?.is_empty());
            pending.wait()?;
            Ok(timer.take_seconds()?[""])
        });
        for seconds in seconds.unwrap() {
            assert!(
                0.0 < seconds.exposed_exchange && seconds.exposed_exchange < seconds.all_to_all,
                "{seconds:?}"
            );
            assert_eq!(seconds.total(), seconds.all_to_all);
        }
    }

    #[test]
    fn a_group_of_one_rank_is_left_alone() {
        launch(1, &LaunchOptions::default(), |rank| -> Result<_, CommError> {
            let group = Arc::new(CommTimer::new(&Device::Cpu)).wrap("dp", rank.group.clone());
            assert!(Arc::ptr_eq(&group, &rank.group));
            Ok(())
        })
        .unwrap();
    }
}
