//! The comparison of the fused with the tiled kernels on the GPU that is to run them.

use super::fused::HEAD_DIMS;
use super::{
    AttentionError, AttentionKernels, AttentionLayout, Gradients, Operands, Upstream, backward, delta,
    forward,
};
use crate::OpError;
use crate::device::{DeviceError, Source, VerdictFile, kernel_refusal, sources};
use crate::tensor::{self, to_vec};
use candle_core::{DType, Device, DeviceLocation, Tensor};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::slice::from_ref;
use std::sync::{Arc, LazyLock};

/// Why the kernels are not to be used, if there is a reason.
pub(super) type Verdict = Option<String>;

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

/// The largest difference of `lse`, which is f32 and a sum of f32 in both.
const LSE_TOLERANCE: f32 = 1e-3;

/// The verdict on fused kernels on a GPU for an element type. Only the first call computes something.
pub(super) fn verdict(
    kernels: AttentionKernels,
    device: &Device,
    dtype: DType,
    reuse: Reuse,
) -> Result<Arc<Verdict>, AttentionError> {
    type Verdicts = HashMap<(bool, DeviceLocation, DType), Arc<Verdict>>;
    static VERDICTS: LazyLock<Mutex<Verdicts>> = LazyLock::new(Mutex::default);
    // Ranks of the same process wait here for the first one.
    let mut verdicts = VERDICTS.lock();
    let key = (kernels == AttentionKernels::Wgmma, device.location(), dtype);
    match verdicts.get(&key) {
        Some(verdict) if reuse == Reuse::Cached => return Ok(verdict.clone()),
        _ => {}
    }
    let verdict = Arc::new(determine(kernels, device, dtype, reuse)?);
    verdicts.insert(key, verdict.clone());
    Ok(verdict)
}

/// The verdict from the file of an earlier run, or from a comparison.
fn determine(
    kernels: AttentionKernels,
    device: &Device,
    dtype: DType,
    reuse: Reuse,
) -> Result<Verdict, AttentionError> {
    let files = files(kernels);
    let refusal = kernel_refusal(device, &files);
    // They are compiled again in every run, so this needs no file.
    if let Some(reason) = refusal.map_err(|source| OpError::Device { op: "attention", source })? {
        return Ok(Some(format!("they do not compile or load here: {reason}")));
    }
    let mut file = VerdictFile::new(&format!("attention-{}", dtype.as_str()), &files, device);
    let cached = |file: &Option<VerdictFile>| match reuse {
        Reuse::Cached => file.as_ref().and_then(VerdictFile::read),
        Reuse::Nothing => None,
    };
    match cached(&file) {
        Some(verdict) if verdict.as_deref() != Some(UNFINISHED) => return Ok(verdict),
        _ => {}
    }
    let is_locked = file.as_mut().is_some_and(VerdictFile::lock);
    // Another process may have compared them meanwhile.
    if let Some(verdict) = cached(&file) {
        return Ok(verdict);
    }
    tracing::info!(
        "comparing fused with tiled attention kernels in {}, once on this GPU model",
        dtype.as_str()
    );
    let earlier = file.as_ref().and_then(VerdictFile::read);
    // If the GPU or the process does not survive it, the next run uses other kernels.
    if is_locked && let Some(file) = &file {
        file.write(&Some(UNFINISHED.to_owned()));
    }
    let result = compare(kernels, device, dtype);
    let gpu_works = result.is_ok() || device.synchronize().is_ok();
    match (&file, &result) {
        (Some(file), Ok(verdict)) => file.write(verdict),
        (Some(file), Err(_)) if gpu_works => file.restore(&earlier),
        _ => {}
    }
    result.or_else(|error| match error {
        error if is_refusal(&error) && gpu_works => {
            Ok(Some(format!("they do not start here: {}", full(&error))))
        }
        error => Err(AttentionError::SelfCheck { source: Box::new(error) }),
    })
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

/// Runs small problems with fused and tiled kernels, forward and backward.
fn compare(kernels: AttentionKernels, device: &Device, dtype: DType) -> Result<Verdict, AttentionError> {
    for head_dim in HEAD_DIMS {
        for problem in Problem::all(head_dim, dtype, device)? {
            let (tiled, fused) = (problem.run(AttentionKernels::Tiled)?, problem.run(kernels)?);
            if let Some(found) = difference(&fused, &tiled, dtype) {
                let of = format!("{} elements, head dimension {head_dim}", dtype.as_str());
                return Ok(Some(format!("they disagree with the tiled kernels: {of}: {found}")));
            }
        }
    }
    Ok(None)
}

/// KV heads of both problems. Their unequal groups of query heads are launched apart.
const NUM_KV_HEADS: usize = 2;

struct Problem {
    layout: AttentionLayout,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
}

/// An output: its name, its elements, and the number of elements of a token. 0 stands for `lse`.
type Output = (&'static str, Vec<f32>, usize);

impl Problem {
    /// A sequence of so many keys that every stage of shared memory is used several times, with whole tiles that all
    /// queries see; and two short ones with documents and a window, of so many rows that backward uses its stages several
    /// times, too. The emulation takes seconds for both.
    fn all(head_dim: usize, dtype: DType, device: &Device) -> Result<[Self; 2], AttentionError> {
        let long = AttentionLayout::of_ranges(
            from_ref(&(636..700)),
            from_ref(&(0..700)),
            vec![vec![0, 90, 700]],
            [0, 1, 1],
            None,
        )?;
        let short = AttentionLayout::of_ranges(
            from_ref(&(60..124)),
            from_ref(&(0..200)),
            vec![vec![0, 90, 200], vec![0, 200]],
            [0, 1, 1, 1, 1, 1],
            Some(70),
        )?;
        Ok([Self::new(long, head_dim, dtype, device)?, Self::new(short, head_dim, dtype, device)?])
    }

    fn new(
        layout: AttentionLayout,
        head_dim: usize,
        dtype: DType,
        device: &Device,
    ) -> Result<Self, AttentionError> {
        let (num_queries, num_heads) = (layout.num_queries(), layout.q_to_kv().len());
        let draw = |seed, tokens, heads| -> Result<Tensor, AttentionError> {
            let shape = (layout.batch(), tokens, heads, head_dim);
            let numbers = numbers(seed, layout.batch() * tokens * heads * head_dim);
            Ok(Tensor::from_vec(numbers, shape, &Device::Cpu)?.to_dtype(dtype)?.to_device(device)?)
        };
        let (q, dout) = (draw(1, num_queries, num_heads)?, draw(4, num_queries, num_heads)?);
        let (k, v) = (draw(2, layout.num_keys(), NUM_KV_HEADS)?, draw(3, layout.num_keys(), NUM_KV_HEADS)?);
        Ok(Self { layout, q, k, v, dout })
    }

    fn operands(&self, kernels: AttentionKernels) -> Operands<'_> {
        let Self { layout, q, k, v, .. } = self;
        Operands { q, k, v, scale: 1.0 / (q.dims()[3] as f32).sqrt(), layout, kernels }
    }

    /// A tensor with an element per query and head.
    fn of_rows(&self) -> Result<Tensor, AttentionError> {
        let (batch, num_queries, num_heads, _) = self.q.dims4()?;
        Ok(tensor::zeros((batch, num_heads, num_queries), DType::F32, self.q.device())?)
    }

    fn forward(&self, kernels: AttentionKernels) -> Result<[Tensor; 2], AttentionError> {
        let (o, lse) = (self.q.zeros_like()?, self.of_rows()?);
        forward(&self.operands(kernels), &o, &lse)?;
        Ok([o, lse])
    }

    /// `o`, `lse`, `dq`, `dk` and `dv`.
    fn run(&self, kernels: AttentionKernels) -> Result<Vec<Output>, AttentionError> {
        let [o, lse] = self.forward(kernels)?;
        let delta_of_rows = self.of_rows()?;
        delta(&o, &self.dout, &delta_of_rows)?;
        let [dq, dk, dv] = [&self.q, &self.k, &self.v].map(Tensor::zeros_like);
        let (dq, dk, dv) = (dq?, dk?, dv?);
        let upstream = Upstream { dout: &self.dout, lse: &lse, delta: &delta_of_rows };
        backward(&self.operands(kernels), &upstream, &Gradients { dq: &dq, dk: &dk, dv: &dv })?;
        let mut outputs = outputs([o, lse])?;
        outputs.extend([of_tokens("dq", &dq)?, of_tokens("dk", &dk)?, of_tokens("dv", &dv)?]);
        Ok(outputs)
    }
}

/// Those of the forward pass.
fn outputs([o, lse]: [Tensor; 2]) -> Result<Vec<Output>, AttentionError> {
    Ok(vec![of_tokens("o", &o)?, ("lse", values(&lse)?, 0)])
}

/// An output `[b, s, h, d]`.
fn of_tokens(name: &'static str, tensor: &Tensor) -> Result<Output, AttentionError> {
    let (_, _, heads, head_dim) = tensor.dims4()?;
    Ok((name, values(tensor)?, heads * head_dim))
}

/// Numbers from -2 to 2, so that probabilities differ.
fn numbers(seed: u32, len: usize) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 22) as f32 - 2.0
    };
    (0..len).map(|_| next()).collect()
}

fn values(tensor: &Tensor) -> Result<Vec<f32>, AttentionError> {
    Ok(to_vec(&tensor.to_device(&Device::Cpu)?.to_dtype(DType::F32)?)?)
}

/// The first output that differs by more than rounding explains.
fn difference(fused: &[Output], tiled: &[Output], dtype: DType) -> Option<String> {
    fused.iter().zip(tiled).find_map(|((name, fused, of_token), (_, tiled, _))| match of_token {
        0 => difference_of_lse(fused, tiled),
        of_token => difference_of_tokens(name, fused, tiled, *of_token, dtype),
    })
}

fn difference_of_lse(fused: &[f32], tiled: &[f32]) -> Option<String> {
    let mut errors = fused
        .iter()
        .zip(tiled)
        .map(|(fused, tiled)| if fused == tiled { 0.0 } else { (fused - tiled).abs() });
    // NaN is not close, either.
    let is_close = |error: &f32| *error <= LSE_TOLERANCE;
    let error = errors.find(|error| !is_close(error))?;
    Some(format!("lse differs by {error:.1e}, at most {LSE_TOLERANCE:.0e} is rounding"))
}

/// Compares the root mean squares of a token's errors and of its elements: a fault of one tile affects few tokens.
fn difference_of_tokens(
    name: &str,
    fused: &[f32],
    tiled: &[f32],
    of_token: usize,
    dtype: DType,
) -> Option<String> {
    let rms = |squares: f64, count: usize| (squares / count as f64).sqrt();
    let square = |x: &f32| f64::from(*x).powi(2);
    let of_all = rms(tiled.iter().map(square).sum(), tiled.len());
    let mut tokens = fused.chunks(of_token).zip(tiled.chunks(of_token)).enumerate();
    tokens.find_map(|(token, (fused, tiled))| {
        let errors: f64 = fused.iter().zip(tiled).map(|(fused, tiled)| square(&(fused - tiled))).sum();
        let error = rms(errors, of_token);
        // Small elements may be differences of large ones.
        let size = rms(tiled.iter().map(square).sum(), of_token).max(of_all / 8.0);
        let is_close = error <= tolerance(dtype) * size;
        (!is_close).then(|| {
            format!("{name} differs by up to {error:.1e} at token {token}, where its elements are {size:.1e} (rms)")
        })
    })
}

/// The relative error that roundings of 16-bit elements and probabilities explain: 4 units.
fn tolerance(dtype: DType) -> f64 {
    if dtype == DType::F16 { 4.0 / 2048.0 } else { 4.0 / 256.0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    #[cfg(feature = "cuda")]
    use crate::device::fake_driver::{with_failure, with_fault};
    #[cfg(feature = "cuda")]
    use crate::testing::{device, on_a_gpu};

    #[test]
    fn a_difference_beyond_rounding_is_found_in_every_output() {
        let tiled = ["o", "lse", "dq", "dk", "dv"].map(|name| {
            let of_token = if name == "lse" { 0 } else { 4 };
            (name, [vec![1.0, -2.0, 0.5, 0.0], vec![100.0; 8]].concat(), of_token)
        });
        assert_eq!(difference(&tiled, &tiled, DType::BF16), None);
        for (output, name) in ["o", "lse", "dq", "dk", "dv"].iter().enumerate() {
            let of = |lse, other| if output == 1 { lse } else { other };
            // The other tokens' elements are larger, but not so much that they hide the difference.
            let cases =
                [(of(5e-4, 0.2), false), (of(2e-3, 0.5), true), (f32::NAN, true), (f32::INFINITY, true)];
            for (wrong, is_found) in cases {
                let mut fused = tiled.clone();
                fused[output].1[3] = wrong;
                let found = difference(&fused, &tiled, DType::BF16);
                assert_eq!(found.is_some_and(|text| text.starts_with(name)), is_found, "{name} {wrong}");
            }
        }
    }

    /// The names of the faults and the files that they are in.
    #[cfg(feature = "cuda")]
    fn faults() -> impl Iterator<Item = (&'static str, &'static str)> {
        let heads = include_str!("../../cuda/tests/attention_faults.txt").lines();
        heads.filter_map(|line| line.strip_prefix("@ ")?.split_once(' '))
    }

    /// How a fault shows in the outputs of bf16 kernels of head dimension 64, or stops a launch.
    #[cfg(feature = "cuda")]
    fn found(fault: &str, file: &str, cases: &[(Problem, Vec<Output>)]) -> Option<String> {
        cases.iter().find_map(|(problem, tiled)| {
            let run = || match file {
                "attention_fused_forward" => outputs(problem.forward(AttentionKernels::Fused)?),
                "attention_fused_forward_wgmma" => outputs(problem.forward(AttentionKernels::Wgmma)?),
                "attention_fused_backward_wgmma" => problem.run(AttentionKernels::Wgmma),
                _ => problem.run(AttentionKernels::Fused),
            };
            let (outputs, failure) = with_failure(|| with_fault(fault, run));
            failure.or_else(|| difference(&outputs.expect("kernels start"), tiled, DType::BF16))
        })
    }

    #[cfg(feature = "cuda")]
    #[test]
    fn every_seeded_fault_is_found_on_the_fake_driver() -> Result<(), AttentionError> {
        on_a_gpu(|| {
            let mut cases = Vec::new();
            for problem in Problem::all(64, DType::BF16, &device())? {
                let tiled = problem.run(AttentionKernels::Tiled)?;
                cases.push((problem, tiled));
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

    #[cfg(feature = "cuda")]
    #[test]
    fn fused_and_tiled_kernels_agree_on_a_gpu() -> Result<(), AttentionError> {
        on_a_gpu(|| {
            for (kernels, dtype) in
                [(AttentionKernels::Fused, DType::F16), (AttentionKernels::Wgmma, DType::BF16)]
            {
                assert_eq!(compare(kernels, &device(), dtype)?, None);
            }
            Ok(())
        })
    }
}
