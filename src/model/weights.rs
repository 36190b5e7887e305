//! Where parameters' initial values come from.

use super::{Init, ModelError, ParameterSpec};
use crate::fnv1a;
use rand::{RngCore, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::ops::Range;

/// Initial values of parameters, element by element: a rank asks only for what it keeps.
pub trait WeightSource: Send + Sync {
    /// Writes elements `range` (row-major, within the whole parameter) to `out`, which is as
    /// long as the range.
    ///
    /// # Errors
    /// A parameter that the source does not have in this shape.
    fn read(&self, spec: &ParameterSpec, range: Range<usize>, out: &mut [f32]) -> Result<(), ModelError>;
}

/// Random values that do not know the mesh: each element is a function of
/// (seed, parameter name, index), whoever asks for it.
#[derive(Debug, Clone, Copy)]
pub struct RandomWeights {
    /// Seed of the run.
    pub seed: u64,
}

/// 32-bit words of the generator that one element consumes.
const WORDS_PER_ELEMENT: u128 = 2;

impl WeightSource for RandomWeights {
    fn read(&self, spec: &ParameterSpec, range: Range<usize>, out: &mut [f32]) -> Result<(), ModelError> {
        match spec.init {
            Init::Ones => out.fill(1.0),
            Init::Zeros => out.fill(0.0),
            Init::Normal { std } => {
                let mut generator = self.generator(&spec.name);
                generator.set_word_pos(range.start as u128 * WORDS_PER_ELEMENT);
                out.iter_mut().for_each(|element| *element = (std * standard_normal(&mut generator)) as f32);
            }
        }
        Ok(())
    }
}

impl RandomWeights {
    /// A counter-based stream of its own for every parameter.
    fn generator(&self, name: &str) -> ChaCha8Rng {
        let mut key = [0; 32];
        key[..8].copy_from_slice(&self.seed.to_le_bytes());
        // Two parameters with equal names are the same parameter, so the name's bytes folded
        // into the key tell all parameters of a model apart.
        key[8..16].copy_from_slice(&fnv1a::hash(name.as_bytes()).to_le_bytes());
        ChaCha8Rng::from_seed(key)
    }
}

/// Box–Muller, of which only the cosine is used: every element stands alone.
fn standard_normal(generator: &mut ChaCha8Rng) -> f64 {
    // (0, 1]: the logarithm must not see a zero.
    let radius = (f64::from(generator.next_u32()) + 1.0) / 4_294_967_296.0;
    let angle = f64::from(generator.next_u32()) / 4_294_967_296.0 * std::f64::consts::TAU;
    (-2.0 * radius.ln()).sqrt() * angle.cos()
}
