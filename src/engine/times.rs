//! Time of a step by phase, on this rank.

use crate::comm::CommSeconds;
use crate::monitor::TimeShares;
use candle_core::Device;
use ulysses_kernels::device::{DeviceTimes, TimeStamp};

/// Time of one phase of the steps.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct PhaseTimes {
    /// Wall time; on a GPU, that of its stream.
    pub seconds: f64,
    /// The part of it spent in collectives.
    pub comm: CommSeconds,
}

/// Times of the steps that [`Engine::train_batch`](super::Engine::train_batch) has run. On a GPU these are times of its stream, between events:
/// the host launches work ahead of it.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct StepTimes {
    /// All forward passes.
    pub forward: PhaseTimes,
    /// All backward passes, with the reduction of gradients.
    pub backward: PhaseTimes,
    /// Norm, clipping, update, and the all-gather of parameters.
    pub update: PhaseTimes,
}

impl StepTimes {
    /// Time in collectives, over all phases.
    pub fn comm(&self) -> CommSeconds {
        let mut sum = self.forward.comm;
        sum += self.backward.comm;
        sum += self.update.comm;
        sum
    }

    /// Time shares of a step that took `step_seconds`, of which the rank waited `data_seconds` for data.
    pub fn shares(&self, step_seconds: f64, data_seconds: f64) -> TimeShares {
        let comm = self.comm();
        TimeShares {
            forward_seconds: self.forward.seconds,
            backward_seconds: self.backward.seconds,
            update_seconds: self.update.seconds,
            reduce_seconds: self.backward.comm.dp + self.backward.comm.sp,
            all_to_all_seconds: comm.all_to_all,
            exposed_exchange_seconds: comm.exposed_exchange,
            ring_seconds: comm.ring,
            exposed_ring_seconds: comm.exposed_ring,
            pp_comm_seconds: comm.pp,
            tp_comm_seconds: comm.tp,
            dp_comm_seconds: comm.dp,
            sp_comm_seconds: comm.sp,
            compute_seconds: (step_seconds - data_seconds - comm.total()).max(0.0),
        }
    }
}

/// The phases of a step.
#[derive(Debug, Clone, Copy)]
pub(super) enum StepPhase {
    Forward,
    Backward,
    Update,
}

impl StepPhase {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::Backward => "backward",
            Self::Update => "update",
        }
    }
}

/// Measures the steps of one rank.
#[derive(Debug)]
pub(super) struct StepTimer {
    device: Device,
    /// Intervals that a GPU may not have ended yet.
    running: DeviceTimes<StepPhase, 1>,
    /// Since they were last taken.
    times: StepTimes,
}

impl StepTimer {
    pub(super) fn new(device: &Device) -> Self {
        Self { device: device.clone(), running: DeviceTimes::default(), times: StepTimes::default() }
    }

    pub(super) fn now(&self) -> candle_core::Result<TimeStamp> {
        TimeStamp::now(&self.device)
    }

    /// Adds the time since `begin`.
    pub(super) fn add(&mut self, phase: StepPhase, begin: TimeStamp) -> candle_core::Result<()> {
        let interval = [begin, self.now()?];
        let times = &mut self.times;
        self.running.add(phase, [interval], |phase, [seconds]| times.count(phase, seconds))
    }

    pub(super) fn take(&mut self) -> candle_core::Result<StepTimes> {
        let times = &mut self.times;
        self.running.settle(|phase, [seconds]| times.count(phase, seconds))?;
        Ok(std::mem::take(times))
    }
}

impl StepTimes {
    fn count(&mut self, phase: StepPhase, seconds: f64) {
        let of_phase = match phase {
            StepPhase::Forward => &mut self.forward,
            StepPhase::Backward => &mut self.backward,
            StepPhase::Update => &mut self.update,
        };
        of_phase.seconds += seconds;
    }
}
