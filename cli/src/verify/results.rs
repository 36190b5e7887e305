//! The results of a run, written to a file or compared with another run.

use anyhow::{Context, ensure};
use candle_core::{Device, Tensor};
use std::collections::HashMap;
use std::path::Path;
use ulysses::engine::BatchOutcome;

/// Returns every result with its name in the output file, without padding sequences.
pub(super) fn named(outcome: &BatchOutcome, batch_size: usize) -> anyhow::Result<Vec<(String, Tensor)>> {
    let loss = Tensor::from_slice(&[outcome.loss as f32], 1, &Device::Cpu)?;
    let mut all =
        vec![("loss".to_owned(), loss), ("logits".to_owned(), outcome.logits.narrow(0, 0, batch_size)?)];
    let prefixed =
        |prefix: &str, (name, tensor): &(String, Tensor)| (format!("{prefix}.{name}"), tensor.clone());
    all.extend(outcome.gradients.iter().map(|gradient| prefixed("grad", gradient)));
    if !outcome.reports.is_empty() {
        all.extend(outcome.parameters.iter().map(|parameter| prefixed("param", parameter)));
    }
    Ok(all)
}

/// Checks in advance that the output file can be created.
pub(super) fn check_output(path: &Path) -> anyhow::Result<()> {
    ensure!(!path.is_dir(), "--output {}: expected a file, found a directory", path.display());
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    let exists = parent.is_none_or(Path::is_dir);
    ensure!(exists, "--output {}: its directory does not exist", path.display());
    Ok(())
}

/// Writes all results and returns the number of tensors.
pub(super) fn write(outcome: &BatchOutcome, batch_size: usize, path: &Path) -> anyhow::Result<usize> {
    let tensors: HashMap<String, Tensor> = named(outcome, batch_size)?
        .into_iter()
        .map(|(name, tensor)| Ok((name, tensor.contiguous()?)))
        .collect::<anyhow::Result<_>>()?;
    candle_core::safetensors::save(&tensors, path)
        .with_context(|| format!("cannot write {}", path.display()))?;
    Ok(tensors.len())
}

/// Returns the maximum error of every tensor, relative to its largest entry, in descending order.
pub(super) fn compare(
    outcome: &BatchOutcome,
    expected: &BatchOutcome,
    batch_size: usize,
) -> anyhow::Result<Vec<(String, f64)>> {
    let (outcome, expected) = (named(outcome, batch_size)?, named(expected, batch_size)?);
    ensure!(outcome.len() == expected.len(), "{} results compared with {}", outcome.len(), expected.len());
    let mut errors = Vec::with_capacity(expected.len());
    for ((name, actual), (expected_name, expected)) in outcome.into_iter().zip(expected) {
        ensure!(
            name == expected_name && actual.dims() == expected.dims(),
            "{name} {:?} compared with {expected_name} {:?}",
            actual.dims(),
            expected.dims()
        );
        let error =
            largest_relative_error(&actual.flatten_all()?.to_vec1()?, &expected.flatten_all()?.to_vec1()?);
        errors.push((name, error));
    }
    errors.sort_by(|a, b| b.1.total_cmp(&a.1));
    Ok(errors)
}

fn largest_relative_error(actual: &[f32], expected: &[f32]) -> f64 {
    let largest = expected.iter().fold(0.0_f64, |max, value| max.max(f64::from(value.abs())));
    let worst = actual.iter().zip(expected).fold(0.0_f64, |max, (a, e)| {
        let error = f64::from((a - e).abs());
        // A NaN on either side must not pass as zero.
        if error.is_finite() { max.max(error) } else { f64::INFINITY }
    });
    if largest > 0.0 { worst / largest } else { worst }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_relative_to_the_largest_entry() {
        assert_eq!(largest_relative_error(&[1.0, -4.0, 0.5], &[1.0, -4.0, 0.0]), 0.125);
        assert_eq!(largest_relative_error(&[0.25], &[0.0]), 0.25);
    }

    #[test]
    fn nan_on_either_side_is_an_infinite_error() {
        for (actual, expected) in [([f32::NAN, 1.0], [0.0, 1.0]), ([0.0, 1.0], [f32::NAN, 1.0])] {
            assert_eq!(largest_relative_error(&actual, &expected), f64::INFINITY);
        }
    }
}
