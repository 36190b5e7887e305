//! The comparison of the fused with the tiled kernels on the GPU that is to run them.

use super::fused::HEAD_DIMS;
use super::{
    AttentionError, AttentionKernels, AttentionLayout, Gradients, Operands, Upstream, backward, delta,
    forward, grouped_heads,
};
use crate::device::{VerdictFile, sources};
use crate::tensor::{self, to_vec};
use candle_core::{DType, Device, DeviceLocation, Tensor};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::slice::from_ref;
use std::sync::{Arc, LazyLock};

/// The difference between the kernels, if there is one.
pub(super) type Verdict = Option<String>;

/// Tokens of the sequence: several tiles, and a last one that is not full.
const TOKENS: u32 = 200;
/// Query heads, two for each KV head.
const HEADS: usize = 4;

/// The verdict on fused kernels on a GPU for an element type. Only the first call computes something.
pub(super) fn verdict(
    kernels: AttentionKernels,
    device: &Device,
    dtype: DType,
) -> Result<Arc<Verdict>, AttentionError> {
    type Verdicts = HashMap<(bool, DeviceLocation, DType), Arc<Verdict>>;
    static VERDICTS: LazyLock<Mutex<Verdicts>> = LazyLock::new(Mutex::default);
    // Ranks of the same process wait here for the first one.
    let mut verdicts = VERDICTS.lock();
    let is_wgmma = kernels == AttentionKernels::Wgmma;
    let key = (is_wgmma, device.location(), dtype);
    if let Some(verdict) = verdicts.get(&key) {
        return Ok(verdict.clone());
    }
    let mut files =
        vec![&sources::ATTENTION_FUSED_FORWARD, &sources::ATTENTION_FUSED_BACKWARD, &sources::ATTENTION];
    if is_wgmma {
        files.push(&sources::ATTENTION_FUSED_FORWARD_WGMMA);
    }
    let file = VerdictFile::new(&format!("attention-{}", dtype.as_str()), &files, device);
    let verdict = match file.as_ref().and_then(VerdictFile::read) {
        Some(verdict) => verdict,
        None => {
            let verdict = compare(kernels, device, dtype)?;
            if let Some(file) = file {
                file.write(&verdict);
            }
            verdict
        }
    };
    let verdict = Arc::new(verdict);
    verdicts.insert(key, verdict.clone());
    Ok(verdict)
}

/// Runs small problems with fused and tiled kernels, forward and backward.
fn compare(kernels: AttentionKernels, device: &Device, dtype: DType) -> Result<Verdict, AttentionError> {
    for head_dim in HEAD_DIMS {
        let problem = Problem::new(head_dim, dtype, device)?;
        let tiled = problem.run(AttentionKernels::Tiled)?;
        let found = match problem.run(kernels) {
            Ok(fused) => difference(&fused, &tiled, dtype),
            Err(error) => Some(error.to_string()),
        };
        if let Some(found) = found {
            return Ok(Some(format!("{} elements, head dimension {head_dim}: {found}", dtype.as_str())));
        }
    }
    Ok(None)
}

/// A packed sequence of two documents.
struct Problem {
    layout: AttentionLayout,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
}

impl Problem {
    fn new(head_dim: usize, dtype: DType, device: &Device) -> Result<Self, AttentionError> {
        let kv_heads = HEADS / 2;
        let tokens = 0..TOKENS as usize;
        let layout = AttentionLayout::of_ranges(
            from_ref(&tokens),
            from_ref(&tokens),
            vec![vec![0, TOKENS / 3, TOKENS]],
            grouped_heads(HEADS, kv_heads),
            None,
        )?;
        let draw = |seed, heads| -> Result<Tensor, AttentionError> {
            let shape = (1, TOKENS as usize, heads, head_dim);
            let numbers = numbers(seed, shape.1 * heads * head_dim);
            Ok(Tensor::from_vec(numbers, shape, &Device::Cpu)?.to_dtype(dtype)?.to_device(device)?)
        };
        let (q, k, v, dout) = (draw(1, HEADS)?, draw(2, kv_heads)?, draw(3, kv_heads)?, draw(4, HEADS)?);
        Ok(Self { layout, q, k, v, dout })
    }

    /// `o`, `lse`, `dq`, `dk` and `dv`.
    fn run(&self, kernels: AttentionKernels) -> Result<[Vec<f32>; 5], AttentionError> {
        let Self { layout, q, k, v, dout } = self;
        let scale = 1.0 / (q.dims()[3] as f32).sqrt();
        let operands = Operands { q, k, v, scale, layout, kernels };
        let of_rows = || tensor::zeros((1, HEADS, TOKENS as usize), DType::F32, q.device());
        let (o, lse, delta_of_rows) = (q.zeros_like()?, of_rows()?, of_rows()?);
        forward(&operands, &o, &lse)?;
        delta(&o, dout, &delta_of_rows)?;
        let [dq, dk, dv] = [q, k, v].map(Tensor::zeros_like);
        let (dq, dk, dv) = (dq?, dk?, dv?);
        let upstream = Upstream { dout, lse: &lse, delta: &delta_of_rows };
        backward(&operands, &upstream, &Gradients { dq: &dq, dk: &dk, dv: &dv })?;
        Ok([values(&o)?, values(&lse)?, values(&dq)?, values(&dk)?, values(&dv)?])
    }
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

/// The first output that differs by more than rounding explains: a few units in the last place of its largest element.
fn difference(fused: &[Vec<f32>; 5], tiled: &[Vec<f32>; 5], dtype: DType) -> Option<String> {
    let rounding = if dtype == DType::F16 { 1.0 / 1024.0 } else { 1.0 / 128.0 };
    let names = ["o", "lse", "dq", "dk", "dv"].iter();
    names.zip(fused.iter().zip(tiled)).find_map(|(name, (fused, tiled))| {
        let size = tiled.iter().fold(0.0, |size: f32, value| size.max(value.abs()));
        let errors = fused.iter().zip(tiled).map(|(fused, tiled)| (fused - tiled).abs());
        // NaN counts as the largest difference.
        let error = errors.fold(0.0, |max: f32, error| if error <= max { max } else { error });
        let is_close = error <= 4.0 * rounding * size;
        (!is_close).then(|| format!("{name} differs by up to {error:.1e}, its largest element is {size:.1e}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_difference_beyond_rounding_is_found_in_every_output() {
        let tiled: [Vec<f32>; 5] = std::array::from_fn(|_| vec![1.0, -8.0, 0.0]);
        assert_eq!(difference(&tiled, &tiled, DType::BF16), None);
        for (output, name) in ["o", "lse", "dq", "dk", "dv"].iter().enumerate() {
            for (wrong, is_found) in [(0.2, false), (0.3, true), (f32::NAN, true), (f32::INFINITY, true)] {
                let mut fused = tiled.clone();
                fused[output][2] = wrong;
                let found = difference(&fused, &tiled, DType::BF16);
                assert_eq!(found.is_some_and(|text| text.starts_with(name)), is_found, "{name} {wrong}");
            }
        }
    }

    #[cfg(feature = "kernel-emulation")]
    #[test]
    fn the_emulated_kernels_agree() -> Result<(), AttentionError> {
        for kernels in [AttentionKernels::Fused, AttentionKernels::Wgmma] {
            for dtype in [DType::BF16, DType::F16] {
                assert_eq!(crate::device::emulate(|| compare(kernels, &Device::Cpu, dtype))?, None);
            }
        }
        Ok(())
    }
}
