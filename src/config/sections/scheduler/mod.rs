//! Learning-rate schedules with DeepSpeed's names, parameters and values.
//!
//! Each schedule is a pure function of the optimizer step; step 0 is the first
//! update. DeepSpeed's schedulers are stateful: they set a first value when they
//! are constructed, and step *after* each update. The value at step `n > 0` is
//! therefore that of DeepSpeed's iteration `n − 1`, and warm-up schedules start
//! with their minimum twice. A skipped step (overflow, no valid token) is not an
//! optimizer step.

mod one_cycle;
mod range_test;
mod warmup;

pub use one_cycle::OneCycle;
pub use range_test::LrRangeTest;
pub use warmup::{WarmupCosineLr, WarmupDecayLr, WarmupLr, WarmupType};

use crate::config::error::ConfigError;
use crate::config_file::define::{Keys, declare_variants, variants, write_variant};
use crate::config_file::reader::Section;
use crate::config_file::vocabulary::Key;
use crate::optim::OptimizerConfig;
use serde_json::{Map, Value as Json};

variants! {
    /// The `scheduler` section.
    #[derive(Clone, Debug, PartialEq)]
    #[non_exhaustive]
    pub enum SchedulerConfig {
        /// Warm-up, then constant.
        WarmupLr(WarmupLr) = "WarmupLR",
        /// Warm-up, then linear decay.
        WarmupDecayLr(WarmupDecayLr) = "WarmupDecayLR",
        /// Warm-up, then cosine decay.
        WarmupCosineLr(WarmupCosineLr) = "WarmupCosineLR",
        /// One cycle up and down, then decay.
        OneCycle(OneCycle) = "OneCycle",
        /// Unbounded growth, to find the largest usable rate.
        LrRangeTest(LrRangeTest) = "LRRangeTest",
    }
}

impl Keys for SchedulerConfig {
    fn declare(path: &str) -> Vec<Key> {
        declare_variants(path, "The schedule.", Self::variants(path))
    }

    fn from_section(section: &Section<'_>) -> Self {
        let params = &section.section("params");
        let named = section.variant().and_then(|name| Self::of_type(name, params));
        // The error of another type has been reported.
        named.unwrap_or_else(|| Self::WarmupLr(WarmupLr::from_section(params)))
    }

    fn write_into(&self, object: &mut Map<String, Json>) {
        let (name, params) = self.name_and_params();
        write_variant(object, name, params);
    }
}

impl SchedulerConfig {
    /// Sets a maximum rate of `"auto"` to the optimizer's rate.
    pub(crate) fn set_base_lr(&mut self, section: &Section<'_>, base_lr: f64) {
        if let Self::WarmupDecayLr(rule) = self
            && section.section("params").is_auto("warmup_max_lr")
        {
            rule.warmup_max_lr = base_lr;
        }
    }

    /// Sets the step at which the decay ends.
    pub(crate) fn end_at(&mut self, steps: u64) {
        match self {
            Self::WarmupDecayLr(rule) => rule.total_num_steps = steps,
            Self::WarmupCosineLr(rule) => rule.total_num_steps = steps,
            _ => {}
        }
    }

    /// Rejects an `--lr` that differs from the rate of the schedule.
    pub(crate) fn check_lr(&self, lr: f64) -> Result<(), ConfigError> {
        let (key, own) = match self {
            Self::WarmupLr(rule) => ("warmup_max_lr", rule.warmup_max_lr.unwrap_or(lr)),
            Self::WarmupDecayLr(rule) => ("warmup_max_lr", rule.warmup_max_lr),
            Self::WarmupCosineLr(_) => return Ok(()),
            Self::OneCycle(rule) => ("cycle_max_lr", rule.cycle_max_lr),
            Self::LrRangeTest(rule) => ("lr_range_test_min_lr", rule.lr_range_test_min_lr),
        };
        if own == lr {
            return Ok(());
        }
        let expected =
            format!("{own}, the rate of the schedule (to change both: --set scheduler.params.{key}={lr})");
        Err(ConfigError::InvalidFlag { flag: "lr", expected, found: lr.to_string() })
    }

    /// Returns a note on parameters that are valid, but hardly meant.
    pub(crate) fn note(&self, optimizer: &OptimizerConfig) -> Option<String> {
        let short = |total: u64, warmup: u64| {
            (total < warmup).then(|| {
                format!(
                    "`scheduler.params.total_num_steps` {total} is less than the warm-up of {warmup} steps"
                )
            })
        };
        match self {
            Self::WarmupDecayLr(rule) => short(rule.total_num_steps, rule.warmup_num_steps),
            Self::WarmupCosineLr(rule) => short(rule.total_num_steps, rule.warmup_num_steps),
            Self::OneCycle(rule) if rule.cycle_momentum => match optimizer.name_without_betas() {
                None => rule.first_step_with_invalid_momentum().map(|step| {
                    format!("`scheduler.params.decay_mom_rate` raises the first beta to 1 at step {step}: train fewer steps")
                }),
                Some(name) => Some(format!(
                    "`scheduler.params.cycle_momentum` has no effect: it cycles betas, which {name} does not have"
                )),
            },
            _ => None,
        }
    }
}

/// The learning rate as a function of the optimizer step.
#[derive(Clone, Debug, PartialEq)]
pub struct LrSchedule {
    scheduler: Option<SchedulerConfig>,
    base_lr: f64,
}

impl LrSchedule {
    /// Creates the schedule of a `scheduler` section. `base_lr` is the optimizer's `lr`, which
    /// WarmupCosineLR scales and which is WarmupLR's default for `warmup_max_lr`.
    pub fn new(scheduler: &SchedulerConfig, base_lr: f64) -> Self {
        Self { scheduler: Some(scheduler.clone()), base_lr }
    }

    /// Creates a constant schedule.
    pub fn constant(base_lr: f64) -> Self {
        Self { scheduler: None, base_lr }
    }

    /// Returns the learning rate of the optimizer step `step`, counted from 0.
    pub fn lr_at(&self, step: u64) -> f64 {
        match &self.scheduler {
            None => self.base_lr,
            Some(SchedulerConfig::WarmupLr(rule)) => rule.lr_at(step, self.base_lr),
            Some(SchedulerConfig::WarmupDecayLr(rule)) => rule.lr_at(step),
            Some(SchedulerConfig::WarmupCosineLr(rule)) => rule.lr_at(step, self.base_lr),
            Some(SchedulerConfig::OneCycle(rule)) => rule.lr_at(step),
            Some(SchedulerConfig::LrRangeTest(rule)) => rule.lr_at(step),
        }
    }

    /// Returns the betas at the optimizer step `step`, if the schedule cycles them (OneCycle with
    /// `cycle_momentum`); otherwise the optimizer's betas apply.
    pub fn momentum_at(&self, step: u64) -> Option<[f64; 2]> {
        match &self.scheduler {
            Some(SchedulerConfig::OneCycle(rule)) => rule.betas_at(step),
            _ => None,
        }
    }
}
