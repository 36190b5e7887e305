//! The learning-rate range test (Smith, <https://arxiv.org/abs/1803.09820>).

use crate::config_file::define::keys;
use crate::config_file::define::words::{count, flag, number};

keys! {
    /// Multiplies the learning rate by `1 + lr_range_test_step_rate × intervals`.
    #[derive(Clone, Debug, PartialEq)]
    pub struct LrRangeTest {
        /// Initial learning rate.
        pub lr_range_test_min_lr: f64 = number().number(1e-3),
        /// Steps per interval.
        pub lr_range_test_step_size: u64 = count().integer(2000),
        /// Growth per interval.
        pub lr_range_test_step_rate: f64 = number().number(1.0),
        /// Grows once per interval instead of at every step.
        pub lr_range_test_staircase: bool = flag(),
    }
}

impl LrRangeTest {
    pub(crate) fn lr_at(&self, step: u64) -> f64 {
        let intervals = step as f64 / self.lr_range_test_step_size as f64;
        let intervals = if self.lr_range_test_staircase { intervals.floor() } else { intervals };
        self.lr_range_test_min_lr * (1.0 + self.lr_range_test_step_rate * intervals)
    }
}
