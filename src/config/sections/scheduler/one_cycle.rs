//! The 1Cycle policy (Smith, <https://arxiv.org/abs/1803.09820>).

use crate::config_file::define::keys;
use crate::config_file::define::words::{below_1, count, flag, index, number};

keys! {
    /// One cycle from `cycle_min_lr` up to `cycle_max_lr` and back, then a decay below the minimum:
    /// `cycle_min_lr / (1 + decay_lr_rate × decay intervals)`. The optimizer's first beta moves inversely, from
    /// `cycle_max_mom` down and back, then `cycle_max_mom × (1 + decay_mom_rate × decay intervals)`: it *grows*, as in
    /// DeepSpeed, and eventually exceeds 1.
    #[derive(Clone, Debug, PartialEq)]
    pub struct OneCycle {
        /// Minimum learning rate of the cycle.
        pub cycle_min_lr: f64 = number().required(),
        /// Maximum learning rate of the cycle.
        pub cycle_max_lr: f64 = number().required(),
        /// Decay of the learning rate per interval after the cycle.
        pub decay_lr_rate: f64 = number().number(0.0),
        /// Steps of the rising half.
        pub cycle_first_step_size: u64 = count().integer(2000),
        /// Steps of the falling half.
        pub cycle_second_step_size: Option<u64> = index().derived("`cycle_first_step_size`").or_null(),
        /// Stairs of the rising half; 0 for a smooth one.
        pub cycle_first_stair_count: u64 = index().integer(0),
        /// Stairs of the falling half.
        pub cycle_second_stair_count: Option<u64> = index().derived("`cycle_first_stair_count`").or_null(),
        /// Steps per decay interval; 0 for no decay.
        pub decay_step_size: u64 = index().integer(0),
        /// Cycles the optimizer's first beta too.
        pub cycle_momentum: bool = flag().boolean(true),
        /// Minimum of the first beta.
        pub cycle_min_mom: f64 = below_1().number(0.8),
        /// Maximum of the first beta.
        pub cycle_max_mom: f64 = below_1().number(0.9),
        /// Growth of the first beta per interval after the cycle.
        pub decay_mom_rate: f64 = number().number(0.0),
    }
}

/// The second beta while the first one cycles, as in DeepSpeed.
const SECOND_BETA: f64 = 0.99;

impl OneCycle {
    pub(crate) fn lr_at(&self, step: u64) -> f64 {
        match self.phase(step) {
            Phase::Cycle { height } => self.cycle_min_lr + (self.cycle_max_lr - self.cycle_min_lr) * height,
            Phase::Decay { intervals } => self.cycle_min_lr / (1.0 + self.decay_lr_rate * intervals),
        }
    }

    pub(crate) fn betas_at(&self, step: u64) -> Option<[f64; 2]> {
        if !self.cycle_momentum {
            return None;
        }
        let beta = match self.phase(step) {
            // DeepSpeed starts at the minimum, and jumps to the maximum at the second step.
            Phase::Cycle { .. } if step == 0 => self.cycle_min_mom,
            Phase::Cycle { height } => {
                self.cycle_max_mom - (self.cycle_max_mom - self.cycle_min_mom) * height
            }
            Phase::Decay { intervals } => self.cycle_max_mom * (1.0 + self.decay_mom_rate * intervals),
        };
        Some([beta, SECOND_BETA])
    }

    /// Returns the first step at which the growing beta is not below 1.
    pub(crate) fn first_step_with_invalid_momentum(&self) -> Option<u64> {
        if self.decay_mom_rate == 0.0 || self.decay_step_size == 0 || self.cycle_max_mom == 0.0 {
            return None;
        }
        let intervals = (1.0 / self.cycle_max_mom - 1.0) / self.decay_mom_rate;
        let steps = (intervals * self.decay_step_size as f64).ceil() as u64;
        Some(self.cycle_steps().saturating_add(steps))
    }

    fn phase(&self, step: u64) -> Phase {
        match step.checked_sub(self.cycle_steps()) {
            None => Phase::Cycle { height: self.height_at(step) },
            // The cycle ends at its minimum, also if its second half has no steps.
            Some(0) => Phase::Cycle { height: 0.0 },
            Some(_) if self.decay_step_size == 0 => Phase::Decay { intervals: 0.0 },
            Some(steps) => Phase::Decay { intervals: steps as f64 / self.decay_step_size as f64 },
        }
    }

    /// Returns the height of a step within the cycle, from 0 to 1.
    fn height_at(&self, step: u64) -> f64 {
        let (position, length, stairs) = if step <= self.cycle_first_step_size {
            (step, self.cycle_first_step_size, self.cycle_first_stair_count)
        } else {
            let stairs = self.cycle_second_stair_count.unwrap_or(self.cycle_first_stair_count);
            (self.cycle_steps() - step, self.second_step_size(), stairs)
        };
        let (position, length, stairs) = (position as f64, length as f64, stairs as f64);
        if stairs == 0.0 { position / length } else { (position * stairs / length).floor() / stairs }
    }

    fn second_step_size(&self) -> u64 {
        self.cycle_second_step_size.unwrap_or(self.cycle_first_step_size)
    }

    fn cycle_steps(&self) -> u64 {
        self.cycle_first_step_size.saturating_add(self.second_step_size())
    }
}

/// The phase of the schedule.
enum Phase {
    /// The cycle, at a height from 0 (minimum) to 1 (maximum).
    Cycle { height: f64 },
    /// The decay, `intervals` after the end of the cycle.
    Decay { intervals: f64 },
}
