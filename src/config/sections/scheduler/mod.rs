//! Learning-rate schedules with DeepSpeed's names, parameters and values.
//!
//! Each schedule is a pure function of the optimizer step: step 0 is the first
//! update. DeepSpeed keeps state instead: its scheduler sets a first value when it
//! is constructed and steps *after* each update. So the value at step `n > 0` is
//! the one that its iteration `n − 1` computes, and the warm-up schedules start
//! with their minimum twice. A skipped step (overflow, no valid token) does not
//! count as an optimizer step.

mod one_cycle;
mod range_test;
mod warmup;

pub use one_cycle::OneCycle;
pub use range_test::LrRangeTest;
pub use warmup::{WarmupCosineLr, WarmupDecayLr, WarmupLr, WarmupType};

use super::optimizer::OptimizerConfig;
use crate::config::define::{Keys, declare_variants, variant, write_variant};
use crate::config::error::ConfigError;
use crate::config::reader::Section;
use crate::config::vocabulary::{Key, Variant};
use serde_json::{Map, Value as Json};

/// The `scheduler` section.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum SchedulerConfig {
    /// Warm up, then stay.
    WarmupLr(WarmupLr),
    /// Warm up, then fall linearly to where the warm-up began.
    WarmupDecayLr(WarmupDecayLr),
    /// Warm up, then fall along a half cosine.
    WarmupCosineLr(WarmupCosineLr),
    /// Rise and fall once, then decay.
    OneCycle(OneCycle),
    /// Grow without bound, to find the largest rate that trains.
    LrRangeTest(LrRangeTest),
}

impl Keys for SchedulerConfig {
    fn declare(path: &str) -> Vec<Key> {
        fn rule<T: Keys>(name: &'static str, path: &str) -> Variant {
            variant(name, path, &T::declare(path))
        }
        let variants = vec![
            rule::<WarmupLr>("WarmupLR", path),
            rule::<WarmupDecayLr>("WarmupDecayLR", path),
            rule::<WarmupCosineLr>("WarmupCosineLR", path),
            rule::<OneCycle>("OneCycle", path),
            rule::<LrRangeTest>("LRRangeTest", path),
        ];
        declare_variants(path, "The schedule.", variants)
    }

    fn from_section(section: &Section<'_>) -> Self {
        let params = &section.section("params");
        match section.variant() {
            Some("WarmupDecayLR") => Self::WarmupDecayLr(WarmupDecayLr::from_section(params)),
            Some("WarmupCosineLR") => Self::WarmupCosineLr(WarmupCosineLr::from_section(params)),
            Some("OneCycle") => Self::OneCycle(OneCycle::from_section(params)),
            Some("LRRangeTest") => Self::LrRangeTest(LrRangeTest::from_section(params)),
            _ => Self::WarmupLr(WarmupLr::from_section(params)),
        }
    }

    fn write_into(&self, object: &mut Map<String, Json>) {
        fn params(rule: &impl Keys) -> Map<String, Json> {
            let mut params = Map::new();
            rule.write_into(&mut params);
            params
        }
        let (name, params) = match self {
            Self::WarmupLr(rule) => ("WarmupLR", params(rule)),
            Self::WarmupDecayLr(rule) => ("WarmupDecayLR", params(rule)),
            Self::WarmupCosineLr(rule) => ("WarmupCosineLR", params(rule)),
            Self::OneCycle(rule) => ("OneCycle", params(rule)),
            Self::LrRangeTest(rule) => ("LRRangeTest", params(rule)),
        };
        write_variant(object, name, params);
    }
}

impl SchedulerConfig {
    /// The same with the optimizer's rate where the section leaves the highest one to `"auto"`.
    pub(crate) fn with_base_lr(self, section: &Section<'_>, base_lr: f64) -> Self {
        match self {
            Self::WarmupDecayLr(rule) if section.section("params").is_auto("warmup_max_lr") => {
                Self::WarmupDecayLr(WarmupDecayLr { warmup_max_lr: base_lr, ..rule })
            }
            other => other,
        }
    }

    /// The same schedule, its decay ending at `steps`.
    pub(crate) fn ending_at(self, steps: u64) -> Self {
        match self {
            Self::WarmupDecayLr(rule) => {
                Self::WarmupDecayLr(WarmupDecayLr { total_num_steps: steps, ..rule })
            }
            Self::WarmupCosineLr(rule) => {
                Self::WarmupCosineLr(WarmupCosineLr { total_num_steps: steps, ..rule })
            }
            other => other,
        }
    }

    /// Refuses `--lr` where the schedule has a highest rate of its own that is another one.
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
        let expected = format!(
            "{own}, the rate of the schedule (to change that one too: --set scheduler.params.{key}={lr})"
        );
        Err(ConfigError::InvalidFlag { flag: "lr", expected, found: lr.to_string() })
    }

    /// What a user of these parameters should know.
    pub(crate) fn notes(&self, optimizer: &OptimizerConfig) -> Vec<String> {
        let short = |total: u64, warmup: u64| {
            (total < warmup).then(|| {
                format!(
                    "`scheduler.params.total_num_steps` {total} ends before the warm-up of {warmup} steps"
                )
            })
        };
        let no_betas = |optimizer: &str| {
            format!("`scheduler.params.cycle_momentum` has no effect on {optimizer}: it cycles betas")
        };
        let note = match self {
            Self::WarmupDecayLr(rule) => short(rule.total_num_steps, rule.warmup_num_steps),
            Self::WarmupCosineLr(rule) => short(rule.total_num_steps, rule.warmup_num_steps),
            Self::OneCycle(rule) if rule.cycle_momentum => match optimizer {
                OptimizerConfig::Adam { .. } | OptimizerConfig::Lion { .. } | OptimizerConfig::Lamb { .. } => {
                    rule.first_step_with_invalid_momentum().map(|step| {
                        format!("`scheduler.params.decay_mom_rate` raises the first beta to 1 at step {step}: stop before")
                    })
                }
                OptimizerConfig::Sgd { .. } => Some(no_betas("SGD")),
                OptimizerConfig::Adagrad { .. } => Some(no_betas("Adagrad")),
            },
            _ => None,
        };
        note.into_iter().collect()
    }
}

/// The learning rate of every optimizer step.
#[derive(Clone, Debug, PartialEq)]
pub struct LrSchedule {
    scheduler: Option<SchedulerConfig>,
    base_lr: f64,
}

impl LrSchedule {
    /// The schedule of a `scheduler` section. `base_lr` is the optimizer's own rate, which
    /// WarmupCosineLR scales and WarmupLR takes for a missing `warmup_max_lr`.
    pub fn new(scheduler: &SchedulerConfig, base_lr: f64) -> Self {
        Self { scheduler: Some(scheduler.clone()), base_lr }
    }

    /// The same rate at every step.
    pub fn constant(base_lr: f64) -> Self {
        Self { scheduler: None, base_lr }
    }

    /// The learning rate of the optimizer step `step`, counted from 0.
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

    /// The optimizer's betas at the optimizer step `step`, where the schedule cycles them
    /// (OneCycle with `cycle_momentum`); otherwise the optimizer's own apply.
    pub fn momentum_at(&self, step: u64) -> Option<[f64; 2]> {
        match &self.scheduler {
            Some(SchedulerConfig::OneCycle(rule)) => rule.betas_at(step),
            _ => None,
        }
    }
}
