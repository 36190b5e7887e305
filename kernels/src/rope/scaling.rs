//! Rotary frequencies, scaled for longer contexts than a model was originally trained on.
//!
//! The formulas are those of Hugging Face's `modeling_rope_utils.py`, in f64.

use std::f64::consts::TAU;
use std::sync::{Mutex, PoisonError};

/// The rotary embedding of a model's description.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rope {
    /// Base: without scaling, pair i rotates by position · θ^(−2i/rotary_dim).
    pub theta: f64,
    /// The scaling.
    pub scaling: Scaling,
    /// The part of a head that rotates: its first elements. The others pass.
    pub partial_rotary_factor: f64,
    /// Whether neighboring elements form a pair (2i and 2i + 1; GPT-J, GLM, Cohere), not those half of the rotating
    /// part apart.
    pub interleaved: bool,
    /// The β of the factor `1 + β · ln(1 + ⌊position / original_len⌋)` on queries, which grow with their position (Ministral 3; Llama 4
    /// without rotation); 0 without it. It needs a scaling with an original length.
    pub query_growth: f64,
}

/// A scaling of the frequencies θ^(−2i/rotary_dim). `original_len` is the number of positions of the model
/// before it was extended (`original_max_position_embeddings`).
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Scaling {
    /// No scaling (`default`).
    None,
    /// No rotation, only a growth of queries, which counts positions from 1 (Llama 4's attention temperature).
    Unrotated {
        /// Positions with the same growth.
        original_len: u32,
    },
    /// Positions are divided by the factor (`linear`; Chen et al. 2023, arXiv 2306.15595).
    Linear {
        /// The factor, at least 1 for longer contexts.
        factor: f64,
    },
    /// θ grows with documents that are longer than the original (`dynamic`, "NTK-aware").
    Dynamic {
        /// Weight of the growth.
        factor: f64,
        /// Documents up to this length are not scaled.
        original_len: u32,
    },
    /// Divides low frequencies, keeps high ones, and interpolates in between (`llama3`).
    Llama3 {
        /// Divisor of low frequencies.
        factor: f64,
        /// Pairs with fewer rotations within `original_len` are low.
        low_freq_factor: f64,
        /// Pairs with more rotations within `original_len` are high.
        high_freq_factor: f64,
        /// Number of positions before the extension.
        original_len: u32,
    },
    /// As `Llama3`, with a ramp over the pairs' indices, and a factor on the rotation itself (`yarn`; Peng et
    /// al. 2023, arXiv 2309.00071).
    Yarn {
        /// Divisor of low frequencies.
        factor: f64,
        /// Pairs with more rotations within `original_len` are kept.
        beta_fast: f64,
        /// Pairs with fewer rotations within `original_len` are divided.
        beta_slow: f64,
        /// Whether the ramp begins and ends at whole pairs.
        truncate: bool,
        /// Factor on cosines and sines; scores grow by its square.
        attention_factor: f64,
        /// Number of positions before the extension.
        original_len: u32,
    },
    /// The first pairs rotate, with the frequencies of whole heads (`proportional`; Gemma 4). The others pass.
    Proportional {
        /// The part of the pairs that rotates.
        part: f64,
        /// Divisor of the frequencies.
        factor: f64,
    },
    /// Divides each frequency by a factor of its own (`longrope`; Ding et al. 2024, arXiv 2402.13753).
    LongRope {
        /// The divisors in documents of up to `original_len` tokens, one per pair.
        short_factor: &'static [f64],
        /// The divisors in longer ones.
        long_factor: &'static [f64],
        /// Factor on cosines and sines in all documents; scores grow by its square.
        attention_factor: f64,
        /// Number of positions before the extension.
        original_len: u32,
    },
}

impl Scaling {
    /// The number of positions before the extension, if the scaling has it.
    #[must_use]
    pub fn original_len(self) -> Option<u32> {
        match self {
            Self::None | Self::Linear { .. } | Self::Proportional { .. } => None,
            Self::Unrotated { original_len }
            | Self::Dynamic { original_len, .. }
            | Self::Llama3 { original_len, .. }
            | Self::Yarn { original_len, .. }
            | Self::LongRope { original_len, .. } => Some(original_len),
        }
    }
}

/// Keeps a list, such as the factors of [`Scaling::LongRope`], until the program ends, so that descriptions can be copied.
/// Equal lists share their memory.
#[must_use]
pub fn kept_list(list: &[f64]) -> &'static [f64] {
    static LISTS: Mutex<Vec<&'static [f64]>> = Mutex::new(Vec::new());
    let mut lists = LISTS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(known) = lists.iter().find(|known| **known == list) {
        return known;
    }
    let kept: &'static [f64] = Box::leak(list.into());
    lists.push(kept);
    kept
}

impl From<f64> for Rope {
    /// θ without scaling, for whole heads, whose halves form pairs.
    fn from(theta: f64) -> Self {
        Self {
            theta,
            scaling: Scaling::None,
            partial_rotary_factor: 1.0,
            interleaved: false,
            query_growth: 0.0,
        }
    }
}

/// An invalid value: (argument, value, what would be valid).
pub type Refused = (&'static str, f64, &'static str);

impl Rope {
    /// The first value, if any, for which heads of `head_dim` elements have no frequencies.
    #[must_use]
    pub fn refused(&self, head_dim: usize) -> Option<Refused> {
        let positive = |name, value: f64| {
            let valid = value > 0.0 && value.is_finite();
            (!valid).then_some((name, value, "a positive finite number"))
        };
        let len = |value: u32| positive("original_max_position_embeddings", f64::from(value));
        let even = |size: usize| size > 0 && size.is_multiple_of(2);
        let shape = (!even(head_dim)).then_some(("head_dim", head_dim as f64, "a positive even number"));
        let (part, rotary_dim) = (self.partial_rotary_factor, self.rotary_dim(head_dim));
        let uneven_part = || {
            let valid = part <= 1.0 && even(rotary_dim);
            let expected = "at most 1, for a positive even number of a head's elements";
            (!valid).then_some(("partial_rotary_factor", part, expected))
        };
        let unscaled = shape.or_else(uneven_part).or_else(|| positive("theta", self.theta));
        let refused = unscaled.or_else(|| match self.scaling {
            Scaling::None => None,
            Scaling::Unrotated { original_len } => len(original_len),
            Scaling::Linear { factor } => positive("factor", factor),
            Scaling::Proportional { part, factor } => {
                let valid = (0.0..=1.0).contains(&part);
                let refused = (!valid).then_some(("partial_rotary_factor", part, "from 0 to 1"));
                refused.or_else(|| positive("factor", factor))
            }
            Scaling::Dynamic { factor, original_len } => {
                let too_small = || (rotary_dim == 2).then_some(("head_dim", 2.0, "at least 4"));
                let less = || (factor < 1.0).then_some(("factor", factor, "at least 1"));
                positive("factor", factor).or_else(less).or_else(|| len(original_len)).or_else(too_small)
            }
            Scaling::Llama3 { factor, low_freq_factor: low, high_freq_factor: high, original_len } => {
                let order = || (high <= low).then_some(("high_freq_factor", high, "above low_freq_factor"));
                let low = positive("factor", factor).or_else(|| positive("low_freq_factor", low));
                low.or_else(|| positive("high_freq_factor", high))
                    .or_else(order)
                    .or_else(|| len(original_len))
            }
            Scaling::Yarn { factor, beta_fast, beta_slow, attention_factor, original_len, .. } => {
                // The ramp is computed with ln θ.
                let base = (self.theta <= 1.0).then_some(("theta", self.theta, "above 1"));
                let order =
                    || (beta_fast < beta_slow).then_some(("beta_fast", beta_fast, "at least beta_slow"));
                let betas = || positive("beta_fast", beta_fast).or_else(|| positive("beta_slow", beta_slow));
                let factors =
                    || positive("factor", factor).or_else(|| positive("attention_factor", attention_factor));
                base.or_else(factors).or_else(betas).or_else(order).or_else(|| len(original_len))
            }
            Scaling::LongRope { short_factor, long_factor, attention_factor, original_len } => {
                let list = |name, list: &[f64]| {
                    let other_len = list.len() != rotary_dim / 2;
                    let expected = "a number for each pair of a head's elements that rotates";
                    let first = other_len.then_some((name, list.len() as f64, expected));
                    first.or_else(|| list.iter().find_map(|factor| positive(name, *factor)))
                };
                let lists = list("short_factor", short_factor).or_else(|| list("long_factor", long_factor));
                lists.or_else(|| positive("attention_factor", attention_factor)).or_else(|| len(original_len))
            }
        });
        refused.or_else(|| {
            let growth = self.query_growth;
            // Elements that do not rotate would not grow.
            let valid = growth.is_finite() && rotary_dim == head_dim && self.scaling.original_len().is_some();
            let expected = "a finite number, for whole heads and a scaling with an original length";
            (growth != 0.0 && !valid).then_some(("query_growth", growth, expected))
        })
    }

    /// Whether anything rotates.
    #[must_use]
    pub fn rotates(&self) -> bool {
        !matches!(self.scaling, Scaling::Unrotated { .. })
    }

    /// The rotary embedding of keys: as that of queries, without their growth.
    #[must_use]
    pub fn of_keys(self) -> Self {
        Self { query_growth: 0.0, ..self }
    }

    /// The factor on cosines and sines at a position.
    #[must_use]
    pub fn amplitude(&self, position: u32) -> f64 {
        let amplitude = match self.scaling {
            Scaling::Yarn { attention_factor, .. } | Scaling::LongRope { attention_factor, .. } => {
                attention_factor
            }
            _ => 1.0,
        };
        let position = match self.scaling {
            Scaling::Unrotated { .. } => position.saturating_add(1),
            _ => position,
        };
        match self.scaling.original_len().filter(|_| self.query_growth != 0.0) {
            Some(len) => amplitude * (1.0 + self.query_growth * f64::from(position / len).ln_1p()),
            None => amplitude,
        }
    }

    /// The document length that determines the frequencies; documents with equal values share theirs.
    #[must_use]
    pub fn scaled_len(&self, document_len: u32) -> u32 {
        match self.scaling {
            Scaling::Dynamic { original_len, .. } => document_len.max(original_len),
            Scaling::LongRope { original_len, .. } => {
                document_len.clamp(original_len, original_len.saturating_add(1))
            }
            _ => 0,
        }
    }

    /// Whether the frequencies depend on the length of the document. It is that of the whole document, so neither packing nor
    /// the mesh matters.
    #[must_use]
    pub fn depends_on_length(&self) -> bool {
        matches!(self.scaling, Scaling::Dynamic { .. } | Scaling::LongRope { .. })
    }

    /// The number of a head's elements that rotate.
    #[must_use]
    pub fn rotary_dim(&self, head_dim: usize) -> usize {
        (head_dim as f64 * self.partial_rotary_factor) as usize
    }

    /// Radians per position of each pair, in documents of `document_len` tokens.
    #[must_use]
    pub fn frequencies(&self, head_dim: usize, document_len: u32) -> Vec<f64> {
        let dim = self.rotary_dim(head_dim);
        let unscaled = |theta: f64| -> Vec<f64> {
            (0..dim / 2).map(|i| theta.powf(-2.0 * i as f64 / dim as f64)).collect()
        };
        match self.scaling {
            Scaling::None => unscaled(self.theta),
            Scaling::Unrotated { .. } => vec![0.0; dim / 2],
            Scaling::Linear { factor } => unscaled(self.theta).into_iter().map(|f| f / factor).collect(),
            Scaling::Proportional { part, factor } => {
                let rotating = (part * dim as f64 / 2.0) as usize;
                let of_pair = |(pair, frequency)| if pair < rotating { frequency / factor } else { 0.0 };
                unscaled(self.theta).into_iter().enumerate().map(of_pair).collect()
            }
            Scaling::Dynamic { factor, original_len } => {
                let growth = f64::from(self.scaled_len(document_len)) / f64::from(original_len);
                let exponent = dim as f64 / (dim as f64 - 2.0);
                unscaled(self.theta * (factor * growth - (factor - 1.0)).powf(exponent))
            }
            Scaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_len } => {
                let scaled = |frequency: f64| {
                    let turns = f64::from(original_len) * frequency / TAU;
                    let kept = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
                    blend(frequency, factor, kept)
                };
                unscaled(self.theta).into_iter().map(scaled).collect()
            }
            Scaling::Yarn { factor, beta_fast, beta_slow, truncate, original_len, .. } => {
                let pair_of = |turns| pair_that_turns(turns, self.theta, dim, original_len);
                let (first, last) = (pair_of(beta_fast), pair_of(beta_slow));
                let (first, last) = if truncate { (first.floor(), last.ceil()) } else { (first, last) };
                let (first, last) = (first.max(0.0), last.min(dim as f64 - 1.0));
                // A ramp of length 0 would divide by zero.
                let length = if first == last { 0.001 } else { last - first };
                let scaled =
                    |(pair, frequency)| blend(frequency, factor, 1.0 - (pair as f64 - first) / length);
                unscaled(self.theta).into_iter().enumerate().map(scaled).collect()
            }
            Scaling::LongRope { short_factor, long_factor, original_len, .. } => {
                let factors = if document_len > original_len { long_factor } else { short_factor };
                let unscaled = unscaled(self.theta).into_iter();
                unscaled.zip(factors).map(|(frequency, factor)| frequency / factor).collect()
            }
        }
    }
}

/// Keeps the fraction `kept`, clamped to 0..=1, of the frequency and divides the rest by `factor`.
fn blend(frequency: f64, factor: f64, kept: f64) -> f64 {
    let kept = kept.clamp(0.0, 1.0);
    frequency * kept + frequency / factor * (1.0 - kept)
}

/// The (fractional) index of the pair that rotates `turns` times within `len` positions.
fn pair_that_turns(turns: f64, theta: f64, dim: usize, len: u32) -> f64 {
    dim as f64 * (f64::from(len) / (turns * TAU)).ln() / (2.0 * theta.ln())
}
