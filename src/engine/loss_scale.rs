//! The loss scale of fp16 training.

use crate::checkpoint::LossScalerState;
use crate::config::{DynamicLossScale, LossScale, Precision};

/// DeepSpeed's dynamic loss scaler (`runtime/fp16/loss_scaler.py`), step for step, or a static scale.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct LossScaler {
    rule: Option<DynamicLossScale>,
    state: LossScalerState,
}

impl LossScaler {
    /// The scaler of a config: 1 unless the precision is fp16.
    pub(super) fn of(precision: Precision) -> Self {
        match precision {
            Precision::F32 | Precision::Bf16 { .. } => Self::fixed(1.0),
            Precision::Fp16 { loss_scale: LossScale::Static(scale) } => Self::fixed(scale),
            Precision::Fp16 { loss_scale: LossScale::Dynamic(rule) } => Self::dynamic(rule),
        }
    }

    fn fixed(scale: f64) -> Self {
        let state = LossScalerState { scale, good_steps: 0, hysteresis: 1 };
        Self { rule: None, state }
    }

    fn dynamic(rule: DynamicLossScale) -> Self {
        let scale = f64::from(rule.initial_scale_power).exp2();
        let state = LossScalerState { scale, good_steps: 0, hysteresis: rule.hysteresis };
        Self { rule: Some(rule), state }
    }

    /// The loss scale of the next step.
    pub(super) fn scale(&self) -> f64 {
        self.state.scale
    }

    /// State for a checkpoint; none for a static scale.
    pub(super) fn state(&self) -> Option<LossScalerState> {
        self.rule.is_some().then_some(self.state)
    }

    /// Restores a checkpoint's state; a static scale stays as configured.
    pub(super) fn restore(&mut self, state: LossScalerState) {
        if self.rule.is_some() {
            self.state = state;
        }
    }

    /// Records whether a step's gradient overflowed. Returns false if it did and the scale is at its
    /// minimum.
    #[must_use]
    pub(super) fn update(&mut self, overflow: bool) -> bool {
        let Some(rule) = self.rule else { return true };
        let min_scale = rule.min_loss_scale as f64;
        let state = &mut self.state;
        if overflow {
            state.good_steps = 0;
            if state.hysteresis > 1 {
                state.hysteresis -= 1;
                return true;
            }
            let is_at_minimum = state.scale <= min_scale;
            state.scale = (state.scale / 2.0).max(min_scale);
            return !is_at_minimum;
        }
        if rule.consecutive_hysteresis {
            state.hysteresis = rule.hysteresis;
        }
        // DeepSpeed counts neither the first step after an overflow nor the very first step.
        let counted = state.good_steps;
        state.good_steps += 1;
        if counted > 0 && counted.is_multiple_of(rule.loss_scale_window) {
            state.scale *= 2.0;
            state.hysteresis = rule.hysteresis;
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Deserialize;

    #[derive(Deserialize)]
    struct Golden {
        traces: Vec<Trace>,
    }

    #[derive(Deserialize)]
    struct Trace {
        params: Params,
        overflow: Vec<u8>,
        scale_used_at_step: Vec<f64>,
        hysteresis_before_step: Vec<u64>,
        final_scale: f64,
        raised_at_step: Option<usize>,
    }

    #[derive(Deserialize)]
    struct Params {
        init_scale: f64,
        scale_window: u64,
        min_scale: u64,
        delayed_shift: u64,
        consecutive_hysteresis: bool,
        raise_error_at_min_scale: bool,
    }

    #[test]
    fn the_scale_moves_as_deepspeeds_does() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/loss_scaler.json");
        let golden: Golden = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        assert_eq!(golden.traces.len(), 25);
        for trace in golden.traces {
            let params = &trace.params;
            let rule = DynamicLossScale {
                initial_scale_power: params.init_scale.log2() as u32,
                loss_scale_window: params.scale_window,
                hysteresis: params.delayed_shift,
                consecutive_hysteresis: params.consecutive_hysteresis,
                min_loss_scale: params.min_scale,
            };
            let mut scaler = LossScaler::dynamic(rule);
            let mut raised_at_step = None;
            for (step, overflow) in trace.overflow.iter().take(trace.scale_used_at_step.len()).enumerate() {
                assert_eq!(scaler.scale(), trace.scale_used_at_step[step]);
                assert_eq!(scaler.state.hysteresis, trace.hysteresis_before_step[step]);
                let can_go_on = scaler.update(*overflow == 1);
                if !can_go_on && trace.params.raise_error_at_min_scale {
                    raised_at_step = Some(step);
                    break;
                }
            }
            assert_eq!(raised_at_step, trace.raised_at_step);
            assert_eq!(scaler.scale(), trace.final_scale);
        }
    }

    #[test]
    fn a_fixed_scale_stands() {
        let mut scaler = LossScaler::fixed(128.0);
        assert!(scaler.update(false) && scaler.update(true));
        assert_eq!(scaler.scale(), 128.0);
    }
}
