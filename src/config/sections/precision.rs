//! The `fp16` and `bf16` sections, and the dtype of gradients in reductions.

use crate::config_file::define::words::{count, flag, integer, number, section};
use crate::config_file::define::{FieldValue, Keys, choices, keys};
use crate::config_file::reader::Section;
use crate::config_file::vocabulary::{Key, Literal};
use candle_core::DType;
use serde_json::{Map, Value as Json, json};

/// The dtype of parameters and activations. Gradients, master weights and optimizer state are
/// always f32.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Precision {
    /// f32 throughout.
    #[default]
    F32,
    /// `bf16`: same range as f32, so the loss needs no scale.
    Bf16 {
        /// Whether a step with a non-finite gradient is skipped; default true.
        check_grad_overflow: bool,
    },
    /// `fp16`: the loss is scaled so that small gradients do not underflow.
    Fp16 {
        /// The loss scale.
        loss_scale: LossScale,
    },
}

choices! {
    /// The dtype in which ranks send their gradients to be summed. Sums are f32.
    pub enum CommunicationDtype {
        /// f32: exact.
        #[default]
        Fp32 = "fp32",
        /// bf16: each rank's gradient is rounded once.
        Bf16 = "bf16",
    }
}

/// The factor that multiplies the loss before the backward pass.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum LossScale {
    /// A constant: `loss_scale` above 0.
    Static(f64),
    /// A scale that adapts to overflows: `loss_scale` 0.
    Dynamic(DynamicLossScale),
}

keys! {
    /// The dynamic loss scale: doubled after a window without overflow, halved by overflows.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct DynamicLossScale {
        /// Initial dynamic loss scale, as a power of 2.
        pub initial_scale_power: u32 = integer(0, 127).integer(16),
        /// Steps without overflow before the scale doubles.
        pub loss_scale_window: u64 = count().integer(1000),
        /// Overflows before the scale is halved.
        pub hysteresis: u64 = count().integer(2),
        /// Resets the hysteresis at every step without overflow.
        pub consecutive_hysteresis: bool = flag(),
        /// Minimum dynamic loss scale.
        pub min_loss_scale: u64 = count().integer(1),
    }
}

impl Precision {
    /// Returns the section that enables this precision; `None` for f32.
    pub fn section(self) -> Option<&'static str> {
        match self {
            Self::F32 => None,
            Self::Bf16 { .. } => Some("bf16"),
            Self::Fp16 { .. } => Some("fp16"),
        }
    }

    /// Returns the dtype of parameters and activations.
    pub fn dtype(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::Bf16 { .. } => DType::BF16,
            Self::Fp16 { .. } => DType::F16,
        }
    }

    /// Returns whether a step with a non-finite gradient is skipped; otherwise it is an error.
    pub fn skips_overflow(self) -> bool {
        match self {
            Self::F32 => false,
            Self::Bf16 { check_grad_overflow } => check_grad_overflow,
            Self::Fp16 { .. } => true,
        }
    }

    /// Reports two enabled precisions, and a loss scale whose reciprocal f32 cannot represent.
    pub(crate) fn check(root: &Section<'_>) {
        let (fp16, bf16) = (root.section("fp16"), root.section("bf16"));
        let [is_fp16, is_bf16] = [&fp16, &bf16].map(|section| section.get("enabled").unwrap_or(false));
        if is_fp16 && is_bf16 {
            bf16.contradiction("enabled", "false (`fp16.enabled` is true too: enable only one)");
        }
        // The reciprocal unscales gradients, in f32.
        let is_extreme = |scale: f64| scale > 0.0 && !(1e-30..=1e30).contains(&scale);
        if is_fp16 && !is_bf16 && fp16.get("loss_scale").is_some_and(is_extreme) {
            fp16.contradiction("loss_scale", "0, or a number from 1e-30 to 1e30");
        }
    }
}

keys! {
    struct PrecisionSections {
        /// Training in fp16.
        fp16: Fp16Section = section(),
        /// Training in bf16.
        bf16: Bf16Section = section(),
    }
}

keys! {
    struct Fp16Section {
        /// Trains in fp16 with a scaled loss.
        enabled: bool = flag().auto(Literal::Boolean(false)),
        /// The loss scale; 0 for a dynamic one.
        loss_scale: f64 = number().number(0.0),
        /// The dynamic loss scale.
        rule: DynamicLossScale,
    }
}

keys! {
    struct Bf16Section {
        /// Trains in bf16.
        enabled: bool = flag().auto(Literal::Boolean(false)),
        /// Skips steps with a non-finite gradient.
        check_grad_overflow: bool = flag().boolean(true),
    }
}

impl Keys for Precision {
    fn declare(path: &str) -> Vec<Key> {
        PrecisionSections::declare(path)
    }

    fn from_section(section: &Section<'_>) -> Self {
        let PrecisionSections { fp16, bf16 } = PrecisionSections::from_section(section);
        match (fp16.enabled, bf16.enabled) {
            (true, false) if fp16.loss_scale > 0.0 => {
                Self::Fp16 { loss_scale: LossScale::Static(fp16.loss_scale) }
            }
            (true, false) => Self::Fp16 { loss_scale: LossScale::Dynamic(fp16.rule) },
            (false, true) => Self::Bf16 { check_grad_overflow: bf16.check_grad_overflow },
            (false, false) | (true, true) => Self::F32, // the latter has been reported
        }
    }

    fn write_into(&self, object: &mut Map<String, Json>) {
        let enabled = true;
        let section = match *self {
            Self::F32 => None,
            Self::Bf16 { check_grad_overflow } => Bf16Section { enabled, check_grad_overflow }.written(),
            Self::Fp16 { loss_scale: LossScale::Static(loss_scale) } => {
                Some(json!({ "enabled": enabled, "loss_scale": loss_scale }))
            }
            Self::Fp16 { loss_scale: LossScale::Dynamic(rule) } => {
                Fp16Section { enabled, loss_scale: 0.0, rule }.written()
            }
        };
        object.extend(self.section().map(str::to_owned).zip(section));
    }
}
