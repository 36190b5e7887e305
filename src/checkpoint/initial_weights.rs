//! The weights that a run started from, for exports of frozen parameters.

use crate::model::{Model, WeightSource};
use crate::nn::ParameterSpec;
use crate::zero::FlatParameter;
use half::{bf16, f16};
use std::collections::HashMap;

/// The weights that a run started from. A run in 16 bits has its frozen parameters in 16 bits only, so an export takes
/// them from here.
pub struct InitialWeights<'a> {
    specs: HashMap<String, ParameterSpec>,
    weights: &'a dyn WeightSource,
}

impl<'a> InitialWeights<'a> {
    /// The weights of `model`.
    pub fn new(model: &Model, weights: &'a dyn WeightSource) -> Self {
        let specs = model.units().into_iter().flat_map(|unit| unit.parameters);
        Self { specs: specs.map(|spec| (spec.name.clone(), spec)).collect(), weights }
    }

    /// Returns the elements of a parameter, if `rounded` is what `rounding` makes of them. Otherwise these are no longer
    /// the weights that the run started from.
    pub(super) fn unrounded(
        &self,
        parameter: &FlatParameter,
        rounded: &[f32],
        rounding: fn(f32) -> f32,
    ) -> Option<Vec<f32>> {
        let spec = self.specs.get(&parameter.name).filter(|spec| spec.shape == parameter.shape)?;
        let mut elements = vec![0.0; rounded.len()];
        self.weights.read(spec, 0..rounded.len(), &mut elements).ok()?;
        let is_same = |(element, rounded): (&f32, &f32)| rounding(*element).to_bits() == rounded.to_bits();
        elements.iter().zip(rounded).all(is_same).then_some(elements)
    }
}

/// Returns how a run rounds its parameters, by the manifest's name of its precision; `None` if it does not.
pub(super) fn rounding(precision: Option<&str>) -> Option<fn(f32) -> f32> {
    match precision? {
        "bf16" => Some(|element| bf16::from_f32(element).to_f32()),
        "fp16" => Some(|element| f16::from_f32(element).to_f32()),
        _ => None,
    }
}
