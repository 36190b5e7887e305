//! The comparison of the fused with the tiled kernels on the GPU that is to run them.

mod difference;
mod problem;

use super::{AttentionError, AttentionKernels};
use crate::OpError;
use crate::device::{DeviceError, Source, VerdictFile, kernel_refusal, sources};
use candle_core::{DType, Device, DeviceLocation};
use difference::{Output, deviations, first_unequal};
use parking_lot::Mutex;
use problem::Problem;
use std::collections::HashMap;
use std::sync::{Arc, LazyLock};

/// Whether kernels are to be used.
#[derive(Debug, Default)]
pub(super) struct Verdict {
    /// Why not, if there is a reason.
    pub(super) refusal: Option<String>,
    /// Whether another GPU of the same model may differ.
    pub(super) is_card_specific: bool,
    /// The largest error of each output as a share of what rounding explains; none if the verdict is an earlier one.
    pub(super) errors: Vec<(&'static str, f64)>,
}

/// The results that a verdict may be taken from, besides a new comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reuse {
    /// An earlier comparison.
    Cached,
    Nothing,
}

/// The verdict while kernels are compared.
const UNFINISHED: &str = "an earlier comparison with the tiled kernels did not end, because the GPU failed or the \
                          process was killed; `ulysses doctor` compares again";

/// Runs of the problem that fills the GPU.
const RUNS: usize = 20;

/// Fused kernels on a GPU for an element type and a head dimension, to be compared with the tiled ones.
#[derive(Clone, Copy)]
pub(super) struct Compared<'a> {
    pub(super) kernels: AttentionKernels,
    pub(super) device: &'a Device,
    pub(super) dtype: DType,
    pub(super) head_dim: usize,
}

impl Compared<'_> {
    /// The verdict. Only the first call computes something.
    pub(super) fn verdict(self, reuse: Reuse) -> Result<Arc<Verdict>, AttentionError> {
        type Verdicts = HashMap<(bool, DeviceLocation, DType, usize), Arc<Verdict>>;
        static VERDICTS: LazyLock<Mutex<Verdicts>> = LazyLock::new(Mutex::default);
        // Ranks of the same process wait here for the first one.
        let mut verdicts = VERDICTS.lock();
        let Self { kernels, device, dtype, head_dim } = self;
        let key = (kernels == AttentionKernels::Wgmma, device.location(), dtype, head_dim);
        match verdicts.get(&key) {
            Some(verdict) if reuse == Reuse::Cached => return Ok(verdict.clone()),
            _ => {}
        }
        let verdict = Arc::new(self.determine(reuse)?);
        verdicts.insert(key, verdict.clone());
        Ok(verdict)
    }

    /// The verdict from the file of an earlier run, or from a comparison.
    fn determine(self, reuse: Reuse) -> Result<Verdict, AttentionError> {
        let Self { kernels, device, dtype, head_dim } = self;
        let refused = |refusal| Verdict { refusal, ..Verdict::default() };
        let files = files(kernels);
        let refusal = kernel_refusal(device, &files);
        // They are compiled again in every run, so this needs no file.
        if let Some(reason) = refusal.map_err(|source| OpError::Device { op: "attention", source })? {
            return Ok(refused(Some(format!("they do not compile or load here: {reason}"))));
        }
        let mut file = VerdictFile::new(&format!("attention-{}-{head_dim}", dtype.as_str()), &files, device);
        let cached = |file: &Option<VerdictFile>| match reuse {
            Reuse::Cached => file.as_ref().and_then(VerdictFile::read),
            Reuse::Nothing => None,
        };
        match cached(&file) {
            Some(verdict) if verdict.as_deref() != Some(UNFINISHED) => return Ok(refused(verdict)),
            _ => {}
        }
        let is_locked = file.as_mut().is_some_and(VerdictFile::lock);
        // Another process may have compared them meanwhile.
        if let Some(verdict) = cached(&file) {
            return Ok(refused(verdict));
        }
        tracing::info!(
            "comparing fused with tiled attention kernels in {} for heads of {head_dim}, once on this GPU model",
            dtype.as_str()
        );
        let earlier = file.as_ref().and_then(VerdictFile::read);
        // If the GPU or the process does not survive it, the next run uses other kernels.
        if is_locked && let Some(file) = &file {
            file.write(&Some(UNFINISHED.to_owned()));
        }
        let result = self.compare();
        let gpu_works = result.is_ok() || device.synchronize().is_ok();
        match (&file, &result) {
            (Some(file), Ok(verdict)) if !verdict.is_card_specific => file.write(&verdict.refusal),
            (Some(file), _) if gpu_works => file.restore(&earlier),
            _ => {}
        }
        result.or_else(|error| match error {
            error if is_refusal(&error) && gpu_works => {
                Ok(refused(Some(format!("they do not start here: {}", full(&error)))))
            }
            error => Err(AttentionError::SelfCheck { source: Box::new(error) }),
        })
    }

    /// Runs small problems with fused and tiled kernels, forward and backward; then the fused ones alone on the whole GPU, several
    /// times.
    fn compare(self) -> Result<Verdict, AttentionError> {
        let Self { kernels, device, dtype, head_dim } = self;
        let of = format!("{} elements", dtype.as_str());
        let (mut errors, mut wrong) = (Vec::<(&str, f64)>::new(), Vec::new());
        for problem in Problem::all(head_dim, dtype, device)? {
            let (tiled, fused) = (problem.run(AttentionKernels::Tiled)?, problem.run(kernels)?);
            for (output, found) in deviations(&fused, &tiled, dtype).into_iter().enumerate() {
                match errors.get_mut(output) {
                    Some((_, share)) => *share = share.max(found.share),
                    None => errors.push((found.output, found.share)),
                }
                wrong.extend((!found.is_rounding()).then_some(found.text));
            }
        }
        if !wrong.is_empty() {
            let refusal = format!("they disagree with the tiled kernels: {of}: {}", wrong.join(", "));
            return Ok(Verdict { refusal: Some(refusal), is_card_specific: false, errors });
        }
        let problem = Problem::full_grid(head_dim, dtype, device)?;
        let refusal = unequal_output(|| problem.run(kernels))?
            .map(|output| format!("equal runs differ in {output}: {of}"));
        Ok(Verdict { is_card_specific: refusal.is_some(), refusal, errors })
    }
}

/// The files of all kernels that are compared.
fn files(kernels: AttentionKernels) -> Vec<&'static Source> {
    let mut files =
        vec![&sources::ATTENTION_FUSED_FORWARD, &sources::ATTENTION_FUSED_BACKWARD, &sources::ATTENTION];
    if kernels == AttentionKernels::Wgmma {
        files.extend([&sources::ATTENTION_FUSED_FORWARD_WGMMA, &sources::ATTENTION_FUSED_BACKWARD_WGMMA]);
    }
    files
}

/// Whether the driver refused to start a kernel.
fn is_refusal(error: &AttentionError) -> bool {
    let AttentionError::Op(OpError::Device { source, .. }) = error else { return false };
    matches!(source, DeviceError::Launch { .. } | DeviceError::TensorMap { .. })
}

/// The message with those of all causes.
fn full(error: &AttentionError) -> String {
    let first: &dyn std::error::Error = error;
    let causes = std::iter::successors(Some(first), |error| error.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

/// The first output that is not the same, bit by bit, in all of `RUNS` runs.
fn unequal_output(
    mut run: impl FnMut() -> Result<Vec<Output>, AttentionError>,
) -> Result<Option<&'static str>, AttentionError> {
    let first = run()?;
    for _ in 1..RUNS {
        if let Some(output) = first_unequal(&first, &run()?) {
            return Ok(Some(output));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod unequal_runs {
    use super::*;

    #[test]
    fn the_last_run_counts_too() -> Result<(), AttentionError> {
        for different in [1, RUNS, RUNS + 1] {
            let mut runs = 0;
            let found = unequal_output(|| {
                runs += 1;
                let value = if runs == different { 2.0 } else { 1.0 };
                let output = |name, value| Output { name, elements: vec![value], token_elems: Some(1) };
                Ok(vec![output("o", 1.0), output("dk", value)])
            })?;
            assert_eq!(found, (different <= RUNS).then_some("dk"), "run {different}");
        }
        Ok(())
    }
}

#[cfg(all(test, feature = "cuda"))]
mod tests {
    use super::problem::outputs;
    use super::*;
    use crate::attention::fused::{HEAD_DIMS, HEAD_DIMS_OF_WGMMA};
    use crate::device::fake_driver::{with_failure, with_fault};
    use crate::testing::{device, on_a_gpu};

    /// The names of the faults and the files that they are in.
    fn faults() -> impl Iterator<Item = (&'static str, &'static str)> {
        let heads = include_str!("../../../cuda/tests/attention_faults.txt").lines();
        heads.filter_map(|line| line.strip_prefix("@ ")?.split_once(' '))
    }

    /// A problem and what the tiled kernels compute.
    struct Case {
        problem: Problem,
        tiled: Vec<Output>,
    }

    /// How a fault shows in the outputs of bf16 kernels of head dimension 64, or stops a launch.
    fn found(fault: &str, file: &str, cases: &[Case]) -> Option<String> {
        cases.iter().find_map(|Case { problem, tiled }| {
            let run = || match file {
                "attention_fused_forward" => outputs(problem.forward(AttentionKernels::Fused)?),
                "attention_fused_forward_wgmma" => outputs(problem.forward(AttentionKernels::Wgmma)?),
                "attention_fused_backward_wgmma" => problem.run(AttentionKernels::Wgmma),
                _ => problem.run(AttentionKernels::Fused),
            };
            let (outputs, failure) = with_failure(|| with_fault(fault, run));
            let wrong = |outputs: Vec<Output>| {
                deviations(&outputs, tiled, DType::BF16).into_iter().find(|found| !found.is_rounding())
            };
            failure.or_else(|| wrong(outputs.expect("kernels start")).map(|found| found.text))
        })
    }

    #[test]
    fn every_seeded_fault_is_found_on_the_fake_driver() -> Result<(), AttentionError> {
        on_a_gpu(|| {
            let mut cases = Vec::new();
            for problem in Problem::all(64, DType::BF16, &device())? {
                let tiled = problem.run(AttentionKernels::Tiled)?;
                cases.push(Case { problem, tiled });
            }
            assert!(faults().count() > 30);
            for (fault, file) in faults() {
                let found = found(fault, file, &cases).unwrap_or_else(|| panic!("{fault} is not found"));
                // A wrong tile among right ones stops no launch: only its numbers show it.
                assert!(!fault.ends_with("tile") || found.contains(" differs by "), "{fault}: {found}");
            }
            Ok(())
        })
    }

    #[test]
    fn fused_and_tiled_kernels_agree_on_a_gpu() -> Result<(), AttentionError> {
        on_a_gpu(|| {
            let fused = HEAD_DIMS.map(|head_dim| (AttentionKernels::Fused, DType::F16, head_dim));
            let wgmma = HEAD_DIMS_OF_WGMMA.map(|head_dim| (AttentionKernels::Wgmma, DType::BF16, head_dim));
            for (kernels, dtype, head_dim) in fused.into_iter().chain(wgmma) {
                let verdict = Compared { kernels, device: &device(), dtype, head_dim }.compare()?;
                assert_eq!(verdict.refusal, None, "{head_dim}");
                let outputs: Vec<&str> = verdict.errors.iter().map(|(output, _)| *output).collect();
                assert_eq!(outputs, ["o", "lse", "dq", "dk", "dv"]);
            }
            Ok(())
        })
    }
}
