//! Time of a step by phase, on this rank.

use super::Engine;
use crate::comm::{CallTimes, CommSeconds, EachCall};
use crate::monitor::TimeShares;
use std::time::Instant;

/// Time of one phase of the steps.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct PhaseTimes {
    /// Wall time.
    pub seconds: f64,
    /// The part of it spent in collectives.
    pub comm: CommSeconds,
}

/// Times of the steps that [`Engine::train_batch`] has run. On a GPU these are host times: launching work
/// and waiting for values.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct StepTimes {
    /// All forward passes.
    pub forward: PhaseTimes,
    /// All backward passes, with the reduction of gradients.
    pub backward: PhaseTimes,
    /// Norm, clipping, update, and the all-gather of parameters.
    pub update: PhaseTimes,
    /// Layers in order, then the LM head with its loss.
    pub parts: Vec<PartTimes>,
}

/// Seconds of a part of the model, without gathers and reductions.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct PartTimes {
    /// Of its forward passes.
    pub forward: f64,
    /// Of its backward passes, including recomputation.
    pub backward: f64,
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
            dp_comm_seconds: comm.dp,
            sp_comm_seconds: comm.sp,
            compute_seconds: (step_seconds - data_seconds - comm.total()).max(0.0),
        }
    }
}

#[derive(Debug, Clone, Copy)]
pub(super) enum StepPhase {
    Forward,
    Backward,
    Update,
}

impl Engine {
    /// Returns the times of the steps that [`train_batch`](Self::train_batch) has run since the last
    /// call.
    pub fn take_times(&mut self) -> StepTimes {
        std::mem::take(&mut self.times)
    }

    /// Totals of this rank's collectives so far, by axis, operation and size, with their time.
    pub fn comm_calls(&self) -> Vec<CallTimes> {
        self.comm_timer.calls()
    }

    /// Every collective so far, if the config enables the communication log.
    pub fn each_comm_call(&self) -> Vec<EachCall> {
        self.comm_timer.each_call()
    }

    /// The times of layer `index`, or of the head after the last layer.
    pub(super) fn part_times(&mut self, index: usize) -> &mut PartTimes {
        let num_parts = self.model.layers.len() + 1;
        self.times.parts.resize(num_parts, PartTimes::default());
        &mut self.times.parts[index]
    }

    pub(super) fn timed<T>(&mut self, phase: StepPhase, run: impl FnOnce(&mut Self) -> T) -> T {
        let (start, comm) = (Instant::now(), self.comm_timer.seconds());
        let span = match phase {
            StepPhase::Forward => tracing::debug_span!("forward"),
            StepPhase::Backward => tracing::debug_span!("backward"),
            StepPhase::Update => tracing::debug_span!("update"),
        };
        let value = span.in_scope(|| run(self));
        let times = match phase {
            StepPhase::Forward => &mut self.times.forward,
            StepPhase::Backward => &mut self.times.backward,
            StepPhase::Update => &mut self.times.update,
        };
        times.seconds += start.elapsed().as_secs_f64();
        times.comm += self.comm_timer.seconds() - comm;
        value
    }
}
