//! The schedules that warm up first: WarmupLR, WarmupDecayLR, WarmupCosineLR.

use crate::config_file::define::words::{choice, count, fraction, index, number};
use crate::config_file::define::{choices, keys};
use crate::config_file::vocabulary::{Key, Literal};
use std::f64::consts::PI;

const MIN_LR: Key = number().number(0.0).auto(Literal::Number(0.0));

/// `"auto"` is the Trainer's `warmup_steps`, 0 by default; every schedule warms up for at least 2 steps.
const NUM_STEPS: Key = index().integer(1000).auto(Literal::Integer(0));

const TOTAL_NUM_STEPS: Key =
    count().required().auto_derived("the number of steps: `ulysses.steps` or `--steps`");

const FROM_OPTIMIZER: &str = "the optimizer's `lr`";

choices! {
    /// The shape of the warm-up.
    pub enum WarmupType {
        /// `ln(t + 1) / ln(warmup_num_steps)`.
        #[default]
        Log = "log",
        /// `t / warmup_num_steps`.
        Linear = "linear",
    }
}

impl WarmupType {
    /// Returns the progress of the warm-up at `iteration`, from 0 to 1; `None` after its end.
    fn progress(self, iteration: u64, num_steps: u64) -> Option<f64> {
        let num_steps = effective_warmup(num_steps);
        (iteration < num_steps).then(|| match self {
            Self::Log => (iteration as f64 + 1.0).ln() / (num_steps as f64).ln(),
            Self::Linear => iteration as f64 / num_steps as f64,
        })
    }
}

/// DeepSpeed warms up for at least two steps, because the formula divides by the logarithm.
fn effective_warmup(num_steps: u64) -> u64 {
    num_steps.max(2)
}

keys! {
    /// Warms up from `warmup_min_lr` to `warmup_max_lr`, then stays constant.
    #[derive(Clone, Debug, PartialEq)]
    pub struct WarmupLr {
        /// Initial learning rate.
        pub warmup_min_lr: f64 = MIN_LR,
        /// Learning rate after the warm-up.
        pub warmup_max_lr: Option<f64> = number().derived(FROM_OPTIMIZER),
        /// Warm-up steps; values below 2 count as 2. The first two steps have the initial rate, as in DeepSpeed.
        pub warmup_num_steps: u64 = NUM_STEPS,
        /// Shape of the warm-up.
        pub warmup_type: WarmupType = choice().text("log"),
    }
}

impl WarmupLr {
    pub(crate) fn lr_at(&self, step: u64, base_lr: f64) -> f64 {
        let max_lr = self.warmup_max_lr.unwrap_or(base_lr);
        let Some(iteration) = step.checked_sub(1) else { return self.warmup_min_lr };
        let progress = self.warmup_type.progress(iteration, self.warmup_num_steps).unwrap_or(1.0);
        self.warmup_min_lr + (max_lr - self.warmup_min_lr) * progress
    }
}

keys! {
    /// Warms up from `warmup_min_lr` to `warmup_max_lr`, then decays linearly to
    /// `warmup_min_lr` at `total_num_steps`.
    #[derive(Clone, Debug, PartialEq)]
    pub struct WarmupDecayLr {
        /// The step at which the decay ends.
        pub total_num_steps: u64 = TOTAL_NUM_STEPS,
        /// Initial learning rate.
        pub warmup_min_lr: f64 = MIN_LR,
        /// Learning rate after the warm-up.
        pub warmup_max_lr: f64 = number().number(1e-3).auto_derived(FROM_OPTIMIZER),
        /// Warm-up steps; values below 2 count as 2. The first two steps have the initial rate, as in DeepSpeed.
        pub warmup_num_steps: u64 = NUM_STEPS,
        /// Shape of the warm-up.
        pub warmup_type: WarmupType = choice().text("log"),
    }
}

impl WarmupDecayLr {
    pub(crate) fn lr_at(&self, step: u64) -> f64 {
        let Some(iteration) = step.checked_sub(1) else { return self.warmup_min_lr };
        let remaining = || {
            let decay_steps =
                self.total_num_steps.saturating_sub(effective_warmup(self.warmup_num_steps)).max(1);
            self.total_num_steps.saturating_sub(iteration) as f64 / decay_steps as f64
        };
        let progress = self.warmup_type.progress(iteration, self.warmup_num_steps).unwrap_or_else(remaining);
        self.warmup_min_lr + (self.warmup_max_lr - self.warmup_min_lr) * progress
    }
}

keys! {
    /// Warms up from `warmup_min_ratio` to 1, then decays along a half cosine to `cos_min_ratio`
    /// at `total_num_steps`; the ratios scale the optimizer's `lr`. The first step is 0, as in DeepSpeed.
    #[derive(Clone, Debug, PartialEq)]
    pub struct WarmupCosineLr {
        /// The step at which the decay ends.
        pub total_num_steps: u64 = TOTAL_NUM_STEPS,
        /// Initial ratio to the optimizer's `lr`.
        pub warmup_min_ratio: f64 = fraction().number(0.0),
        /// Warm-up steps; values below 2 count as 2. The first two steps have the initial rate, as in DeepSpeed.
        pub warmup_num_steps: u64 = NUM_STEPS,
        /// Final ratio to the optimizer's `lr`.
        pub cos_min_ratio: f64 = fraction().number(1e-4),
        /// Shape of the warm-up.
        pub warmup_type: WarmupType = choice().text("log"),
    }
}

impl WarmupCosineLr {
    pub(crate) fn lr_at(&self, step: u64, base_lr: f64) -> f64 {
        let Some(iteration) = step.checked_sub(1) else { return 0.0 };
        let ratio = match self.warmup_type.progress(iteration, self.warmup_num_steps) {
            Some(progress) => self.warmup_min_ratio + (1.0 - self.warmup_min_ratio) * progress,
            None => self.cos_min_ratio + (1.0 - self.cos_min_ratio) * self.half_cosine(iteration),
        };
        base_lr * ratio
    }

    /// Returns the cosine factor: 1 at the end of the warm-up, 0 from the end of the decay on.
    fn half_cosine(&self, iteration: u64) -> f64 {
        let warmup = effective_warmup(self.warmup_num_steps);
        let decay_steps = self.total_num_steps.saturating_sub(warmup).max(1);
        let progress = ((iteration - warmup) as f64 + 1.0) / decay_steps as f64;
        (1.0 + (PI * progress.min(1.0)).cos()) / 2.0
    }
}
