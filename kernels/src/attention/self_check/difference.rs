//! How much the outputs of two kernels differ, relative to what rounding explains.

use candle_core::DType;

/// The largest difference of `lse`, which is f32 and a sum of f32 in both.
const LSE_TOLERANCE: f32 = 1e-3;

/// An output of kernels.
#[derive(Clone)]
pub(super) struct Output {
    pub(super) name: &'static str,
    pub(super) elements: Vec<f32>,
    /// Elements of a token; `None` for `lse`.
    pub(super) token_elems: Option<usize>,
}

/// The largest error of an output.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Deviation {
    pub(super) output: &'static str,
    /// The error as a share of what rounding explains: more than 1 is a fault. Infinite if it is NaN.
    pub(super) share: f64,
    /// Where it is, and how large.
    pub(super) text: String,
}

impl Deviation {
    /// Returns whether rounding explains it.
    pub(super) fn is_rounding(&self) -> bool {
        self.share <= 1.0
    }
}

/// The largest error of each output of the fused kernels.
pub(super) fn deviations(fused: &[Output], tiled: &[Output], dtype: DType) -> Vec<Deviation> {
    let deviation = |(fused, tiled): (&Output, &Output)| match fused.token_elems {
        None => lse_deviation(&fused.elements, &tiled.elements),
        Some(count) => token_deviation(fused.name, &fused.elements, &tiled.elements, count, dtype),
    };
    fused.iter().zip(tiled).map(deviation).collect()
}

/// The first output that differs in a bit.
pub(super) fn first_unequal(first: &[Output], again: &[Output]) -> Option<&'static str> {
    let is_equal = |(first, again): (&f32, &f32)| first.to_bits() == again.to_bits();
    let mut pairs = first.iter().zip(again);
    let unequal = pairs.find(|(first, again)| !first.elements.iter().zip(&again.elements).all(is_equal));
    unequal.map(|(first, _)| first.name)
}

/// Whether `a` is the larger one. NaN is the largest.
fn is_larger(a: f64, b: f64) -> bool {
    a.is_nan() || a > b
}

/// `share`, with infinity for NaN, which is not close to anything.
fn known(share: f64) -> f64 {
    if share.is_nan() { f64::INFINITY } else { share }
}

fn lse_deviation(fused: &[f32], tiled: &[f32]) -> Deviation {
    // Equal infinities do not differ.
    let error = |(fused, tiled): (&f32, &f32)| if fused == tiled { 0.0 } else { (fused - tiled).abs() };
    let errors = fused.iter().zip(tiled).map(error);
    let worst =
        errors.fold(0.0, |worst, error| if is_larger(error.into(), worst) { error.into() } else { worst });
    let share = known(worst / f64::from(LSE_TOLERANCE));
    let text = format!("lse differs by {worst:.1e}, at most {LSE_TOLERANCE:.0e} is rounding");
    Deviation { output: "lse", share, text }
}

/// Compares the root mean squares of a token's errors and of its elements: a fault of one tile affects few tokens.
fn token_deviation(
    output: &'static str,
    fused: &[f32],
    tiled: &[f32],
    token_elems: usize,
    dtype: DType,
) -> Deviation {
    let rms = |squares: f64, count: usize| (squares / count as f64).sqrt();
    let square = |x: &f32| f64::from(*x).powi(2);
    let of_all = rms(tiled.iter().map(square).sum(), tiled.len());
    let mut worst = Deviation { output, share: 0.0, text: String::new() };
    for (token, (fused, tiled)) in fused.chunks(token_elems).zip(tiled.chunks(token_elems)).enumerate() {
        let errors: f64 = fused.iter().zip(tiled).map(|(fused, tiled)| square(&(fused - tiled))).sum();
        let error = rms(errors, token_elems);
        if error == 0.0 {
            continue;
        }
        // Small elements may be differences of large ones.
        let size = rms(tiled.iter().map(square).sum(), token_elems).max(of_all / 8.0);
        let share = error / (tolerance(dtype) * size);
        if is_larger(share, worst.share) && worst.share.is_finite() {
            let text = format!(
                "{output} differs by up to {error:.1e} at token {token}, where its elements are {size:.1e} (rms)"
            );
            worst = Deviation { output, share: known(share), text };
        }
    }
    worst
}

/// The relative error that roundings of 16-bit elements and probabilities explain: 4 units.
fn tolerance(dtype: DType) -> f64 {
    if dtype == DType::F16 { 4.0 / 2048.0 } else { 4.0 / 256.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_different_bit_is_found() {
        let elements = vec![0.0, f32::NAN, 1.0];
        let first =
            ["o", "lse", "dq"].map(|name| Output { name, elements: elements.clone(), token_elems: Some(1) });
        assert_eq!(first_unequal(&first, &first), None);
        let mut again = first.clone();
        again[2].elements[0] = -0.0;
        assert_eq!(first_unequal(&first, &again), Some("dq"));
    }

    #[test]
    fn a_difference_beyond_rounding_is_found_in_every_output() {
        let tiled = ["o", "lse", "dq", "dk", "dv"].map(|name| {
            let elements = [vec![1.0, -2.0, 0.5, 0.0], vec![100.0; 8]].concat();
            Output { name, elements, token_elems: (name != "lse").then_some(4) }
        });
        assert!(deviations(&tiled, &tiled, DType::BF16).iter().all(|found| found.share == 0.0));
        for (output, name) in ["o", "lse", "dq", "dk", "dv"].iter().enumerate() {
            let of = |lse, other| if output == 1 { lse } else { other };
            // The other tokens' elements are larger, but not so much that they hide the difference.
            let cases =
                [(of(5e-4, 0.2), false), (of(2e-3, 0.5), true), (f32::NAN, true), (f32::INFINITY, true)];
            for (wrong, is_found) in cases {
                let mut fused = tiled.clone();
                fused[output].elements[3] = wrong;
                for (at, found) in deviations(&fused, &tiled, DType::BF16).iter().enumerate() {
                    assert_eq!(!found.is_rounding(), is_found && at == output, "{name} {wrong}: {found:?}");
                    assert!(found.is_rounding() || found.text.starts_with(name), "{name} {wrong}: {found:?}");
                }
            }
        }
    }
}
