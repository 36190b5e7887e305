//! The results of a run, written to a file or compared with another run.

use anyhow::{Context, ensure};
use candle_core::{Device, Tensor};
use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use ulysses::checkpoint::Difference;
use ulysses::config::{CommunicationDtype, Config, GroupRate, OptimizerConfig, ParameterGroup, Precision};
use ulysses::engine::BatchOutcome;
use ulysses::regular_file;

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
    // It would write through a link.
    regular_file::create(path).with_context(|| format!("cannot write {}", path.display()))?;
    candle_core::safetensors::save(&tensors, path)
        .with_context(|| format!("cannot write {}", path.display()))?;
    Ok(tensors.len())
}

/// The default tolerance: sums of 16-bit numbers, or of gradients that are sent as such, depend on the mesh.
pub(super) fn default_tolerance(config: &Config) -> f64 {
    let dtypes = (config.precision, config.gradient_communication());
    if dtypes == (Precision::F32, CommunicationDtype::Fp32) { 2e-5 } else { 2e-2 }
}

/// The definition of an error. `docs/commands.md` explains it to users.
pub(super) struct ErrorRule<'a> {
    pub(super) tolerance: f64,
    pub(super) config: &'a Config,
}

impl ErrorRule<'_> {
    /// Gradients smaller than this part of the model's largest gradient are rounding, if they would be 0 in exact
    /// arithmetic.
    const SMALLEST_SCALE: f64 = 0.01;

    /// Returns the maximum error of every tensor in descending order; infinite where a value is not finite.
    pub(super) fn compare(
        &self,
        outcome: &BatchOutcome,
        expected: &BatchOutcome,
        batch_size: usize,
    ) -> anyhow::Result<Vec<(String, f64)>> {
        let gradients: BTreeMap<&str, Vec<f32>> = expected
            .gradients
            .iter()
            .map(|(name, gradient)| Ok((name.as_str(), elements(gradient)?)))
            .collect::<anyhow::Result<_>>()?;
        let least =
            Self::SMALLEST_SCALE * gradients.values().map(|of_one| largest(of_one)).fold(0.0, f64::max);
        let steps = outcome.reports.len() as f64;
        let learning_rates: f64 = outcome.reports.iter().map(|report| report.lr).sum();
        let (outcome, expected) = (named(outcome, batch_size)?, named(expected, batch_size)?);
        ensure!(
            outcome.len() == expected.len(),
            "{} results compared with {}",
            outcome.len(),
            expected.len()
        );
        let mut errors = Vec::with_capacity(expected.len());
        for ((name, actual), (expected_name, expected)) in outcome.into_iter().zip(expected) {
            let shapes = (actual.dims().to_vec(), expected.dims().to_vec());
            let is_same = name == expected_name && shapes.0 == shapes.1;
            ensure!(is_same, "{name} {:?} compared with {expected_name} {:?}", shapes.0, shapes.1);
            let (mut actual, expected) = (elements(&actual)?, elements(&expected)?);
            let is_gradient = name.starts_with("grad.");
            if let Some((parameter, gradient)) =
                name.strip_prefix("param.").and_then(|parameter| Some((parameter, gradients.get(parameter)?)))
            {
                let moved = learning_rates * self.rate_factor(parameter);
                // Later gradients are those of parameters that differ by the noise of earlier steps.
                let noise = self.tolerance * steps * largest(gradient).max(least);
                remove_noise(&mut actual, &expected, gradient, noise, moved);
            }
            errors.push((name, relative_error(&actual, &expected, if is_gradient { least } else { 0.0 })));
        }
        errors.sort_by(|a, b| b.1.total_cmp(&a.1));
        Ok(errors)
    }

    /// The learning rate of a parameter over the optimizer's; 0 if updates are proportional to gradients.
    fn rate_factor(&self, parameter: &str) -> f64 {
        match (&self.config.optimizer, ParameterGroup::of(&self.config.ulysses.parameter_groups, parameter)) {
            (OptimizerConfig::Sgd(_), _) => 0.0,
            (_, None) => 1.0,
            (optimizer, Some(group)) => match group.rate() {
                GroupRate::Scaled(scale) => scale,
                GroupRate::Own(lr) => lr / optimizer.lr(),
            },
        }
    }
}

/// Removes the part of each difference that `noise` in a gradient explains. Optimizers but SGD divide a gradient by its
/// magnitude: an entry within the noise of 0 moves by the learning rate in either direction; `moved` sums these rates.
fn remove_noise(actual: &mut [f32], expected: &[f32], gradient: &[f32], noise: f64, moved: f64) {
    for ((actual, expected), gradient) in actual.iter_mut().zip(expected).zip(gradient) {
        let difference = f64::from(*actual) - f64::from(*expected);
        if noise > 0.0 && difference.is_finite() {
            let explained = moved * (noise / f64::from(gradient.abs())).min(2.0);
            let rest = (difference.abs() - explained).max(0.0);
            *actual = (f64::from(*expected) + rest.copysign(difference)) as f32;
        }
    }
}

fn elements(tensor: &Tensor) -> anyhow::Result<Vec<f32>> {
    Ok(tensor.flatten_all()?.to_vec1()?)
}

fn largest(values: &[f32]) -> f64 {
    values.iter().fold(0.0, |max, value| max.max(f64::from(value.abs())))
}

/// The largest difference over the largest expected entry, which counts as `least` at least.
fn relative_error(actual: &[f32], expected: &[f32], least: f64) -> f64 {
    let (difference, scale) = (Difference::between(actual, expected), largest(expected).max(least));
    match difference.non_finite {
        0 if scale > 0.0 => difference.largest / scale,
        0 => difference.largest,
        _ => f64::INFINITY,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_relative_to_the_largest_entry() {
        assert_eq!(relative_error(&[1.0, -4.0, 0.5], &[1.0, -4.0, 0.0], 0.0), 0.125);
        assert_eq!(relative_error(&[0.25], &[0.0], 0.0), 0.25);
        assert!((relative_error(&[2e-9], &[-1e-9], 1e-3) - 3e-6).abs() < 1e-12);
    }

    #[test]
    fn a_value_that_is_not_finite_is_an_infinite_error_even_if_both_sides_have_it() {
        for wrong in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for (actual, expected) in
                [([wrong, 1.0], [0.0, 1.0]), ([0.0, 1.0], [wrong, 1.0]), ([wrong; 2], [wrong; 2])]
            {
                assert_eq!(relative_error(&actual, &expected, 1.0), f64::INFINITY, "{actual:?} {expected:?}");
            }
        }
    }

    #[test]
    fn only_entries_whose_gradient_is_rounding_may_move_by_the_learning_rate() {
        let (expected, mut actual) = ([1.0; 4], [1.0 + 2e-3, 1.0 - 2e-3, 1.0 + 1e-3, f32::NAN]);
        remove_noise(&mut actual, &expected, &[1e-9, 0.0, 0.5, 0.0], 2e-5, 1e-3);
        assert_eq!(actual[..2], [1.0; 2]);
        assert!((actual[2] - 1.001).abs() < 1e-6 && actual[3].is_nan(), "{actual:?}");
    }
}
