//! Initial values of parameters.

use super::ModelError;
use crate::fnv1a;
use crate::nn::{Init, ParameterSpec};
use rand::{RngCore, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rayon::prelude::*;
use std::ops::Range;

/// A source of initial parameter values. A rank reads only the elements that it keeps.
pub trait WeightSource: Send + Sync {
    /// Writes elements `range` (row-major, within the whole parameter) to `out`, of the same length.
    ///
    /// # Errors
    /// A parameter that the source does not have in this shape.
    fn read(&self, spec: &ParameterSpec, range: Range<usize>, out: &mut [f32]) -> Result<(), ModelError>;

    /// As [`read`](Self::read), of the part that this rank has.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    fn read_shard(
        &self,
        spec: &ParameterSpec,
        range: Range<usize>,
        out: &mut [f32],
    ) -> Result<(), ModelError> {
        let Some(shard) = &spec.shard else { return self.read(spec, range, out) };
        let whole = spec.whole();
        shard.runs(&spec.shape, range.clone()).into_iter().try_for_each(|run| {
            let at = run.local - range.start;
            self.read(&whole, run.whole..run.whole + run.len, &mut out[at..at + run.len])
        })
    }
}

/// Random values that do not depend on the mesh: each element is a function of (seed, parameter name, index).
#[derive(Debug, Clone, Copy)]
pub struct RandomWeights {
    /// Seed of the run.
    pub seed: u64,
}

/// 32-bit words of the generator per element.
const WORDS_PER_ELEMENT: u128 = 2;

/// Elements that a thread draws at a time.
const ELEMENTS_PER_TASK: usize = 1 << 14;

impl WeightSource for RandomWeights {
    fn read(&self, spec: &ParameterSpec, range: Range<usize>, out: &mut [f32]) -> Result<(), ModelError> {
        match spec.init {
            Init::Ones => out.fill(1.0),
            Init::Zeros => out.fill(0.0),
            Init::Normal { std } => self.draw(spec, range, out, |generator| std * standard_normal(generator)),
            Init::LogUniform { bounds: [low, high] } => {
                self.draw(spec, range, out, |generator| (low + (high - low) * uniform(generator)).ln())
            }
            Init::TimeSteps { bounds, floor } => {
                let [low, high] = bounds.map(|bound| bound.max(f64::MIN_POSITIVE).ln());
                self.draw(spec, range, out, |generator| {
                    let step = (low + (high - low) * uniform(generator)).exp().max(floor);
                    // The inverse of softplus.
                    step + (-(-step).exp_m1()).ln()
                });
            }
        }
        Ok(())
    }
}

impl RandomWeights {
    /// Draws elements, each from its own words of the parameter's stream.
    fn draw(
        &self,
        spec: &ParameterSpec,
        range: Range<usize>,
        out: &mut [f32],
        element: impl Fn(&mut ChaCha8Rng) -> f64 + Sync,
    ) {
        let generator = self.generator(&spec.name);
        out.par_chunks_mut(ELEMENTS_PER_TASK).enumerate().for_each(|(task, elements)| {
            let mut generator = generator.clone();
            let first = range.start + task * ELEMENTS_PER_TASK;
            generator.set_word_pos(first as u128 * WORDS_PER_ELEMENT);
            elements.fill_with(|| element(&mut generator) as f32);
        });
    }

    /// A separate counter-based stream for every parameter.
    fn generator(&self, name: &str) -> ChaCha8Rng {
        let mut key = [0; 32];
        key[..8].copy_from_slice(&self.seed.to_le_bytes());
        // Parameter names are unique, so the hash of the name makes the key unique within a model.
        key[8..16].copy_from_slice(&fnv1a::hash(name.as_bytes()).to_le_bytes());
        ChaCha8Rng::from_seed(key)
    }
}

/// Box–Muller with the cosine only, so that elements are independent of each other.
fn standard_normal(generator: &mut ChaCha8Rng) -> f64 {
    // (0, 1]: avoids the logarithm of zero.
    let radius = (f64::from(generator.next_u32()) + 1.0) / 4_294_967_296.0;
    let angle = f64::from(generator.next_u32()) / 4_294_967_296.0 * std::f64::consts::TAU;
    (-2.0 * radius.ln()).sqrt() * angle.cos()
}

/// Of 64 bits, between 0 and 1.
fn uniform(generator: &mut ChaCha8Rng) -> f64 {
    (generator.next_u64() as f64 + 0.5) / 18_446_744_073_709_551_616.0
}
