//! The peak FLOP rate of all ranks together, the reference for a step's FLOP rate.

use candle_core::{DType, Device, Tensor};
use std::time::{Duration, Instant};
use ulysses::comm::{ProcessGroup, ProcessGroupExt, ReduceOp};
use ulysses::kernels::linear;

/// Rows and columns of the matrices: large enough for nearly the peak rate, at 3 MiB per rank on a CPU.
const SIZE: usize = 512;
const SIZE_ON_GPU: usize = 8192;

/// Minimum duration of the measurement.
const DURATION: Duration = Duration::from_millis(20);

/// Dense peak in TFLOP/s, from NVIDIA's data sheets: words of the GPU's name, f32 without TF32, and bf16 or f16 with
/// f32 sums on tensor cores. The first match counts.
const GPUS: [(&str, f64, f64); 14] = [
    ("GB200", 80.0, 2500.0),
    ("B200", 75.0, 2250.0),
    ("H200 NVL", 60.0, 835.5),
    ("H200", 66.9, 989.4),
    ("H100 PCIe", 51.2, 756.4),
    ("H100 NVL", 60.0, 835.5),
    ("H100", 66.9, 989.4),
    ("H800", 66.9, 989.4),
    ("A100", 19.5, 311.8),
    ("A800", 19.5, 311.8),
    ("L40S", 91.6, 362.0),
    ("L40", 90.5, 181.0),
    ("A10G", 31.5, 70.0),
    ("L4", 30.3, 121.0),
];

/// Returns the peak FLOP/s of `dtype` on all ranks: the sum of `known`, this rank's part of the data sheet's, or measured
/// with GEMMs on all ranks at the same time. Collective.
pub(super) fn measure(
    all: &dyn ProcessGroup,
    device: &Device,
    dtype: DType,
    known: Option<f64>,
) -> anyhow::Result<f64> {
    let rate = match known {
        Some(rate) => rate,
        None => gemm_rate(all, device, dtype)?,
    };
    Ok(all.all_reduce_values(&[rate], ReduceOp::Sum)?[0])
}

/// Returns the peak FLOP/s of a GPU, by its name.
pub(super) fn data_sheet(name: &str, dtype: DType) -> Option<f64> {
    // A part of a GPU (MIG) has a part of its peak.
    if name.contains("MIG") {
        return None;
    }
    let words = format!(" {} ", name.replace('-', " "));
    let (_, f32, half) = GPUS.into_iter().find(|(model, ..)| words.contains(&format!(" {model} ")))?;
    Some(1e12 * if dtype == DType::F32 { f32 } else { half })
}

fn gemm_rate(all: &dyn ProcessGroup, device: &Device, dtype: DType) -> anyhow::Result<f64> {
    let size = if device.is_cpu() { SIZE } else { SIZE_ON_GPU };
    let matrix = || Tensor::ones((size, size), dtype, device);
    let (x, weight, y) = (matrix()?, matrix()?, matrix()?);
    linear::forward(&x, &weight, &y, false)?;
    device.synchronize()?;
    all.barrier()?;
    let (start, mut num_gemms) = (Instant::now(), 0_u32);
    while start.elapsed() < DURATION {
        linear::forward(&x, &weight, &y, false)?;
        device.synchronize()?;
        num_gemms += 1;
    }
    let flops = f64::from(num_gemms) * 2.0 * (size as f64).powi(3);
    Ok(flops / start.elapsed().as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peak_of_a_gpu_depends_on_its_name_and_the_dtype() {
        let tera = |name: &str, dtype| data_sheet(name, dtype).map(|rate| rate / 1e12);
        assert_eq!(tera("NVIDIA H100 80GB HBM3", DType::BF16), Some(989.4));
        assert_eq!(tera("NVIDIA H100 80GB HBM3", DType::F32), Some(66.9));
        assert_eq!(tera("NVIDIA H100 PCIe", DType::F16), Some(756.4));
        assert_eq!(tera("NVIDIA A100-SXM4-80GB", DType::BF16), Some(311.8));
        assert_eq!(tera("NVIDIA L40S", DType::BF16), Some(362.0));
        assert_eq!(tera("NVIDIA GB200", DType::BF16), Some(2500.0));
        for unknown in ["NVIDIA GeForce RTX 9999", "NVIDIA RTX A1000", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"] {
            assert_eq!(tera(unknown, DType::BF16), None, "{unknown}");
        }
    }

    #[test]
    fn an_unknown_device_is_measured() {
        let rates = ulysses::comm::launch(2, &ulysses::comm::LaunchOptions::default(), |rank| {
            measure(&*rank.group, &Device::Cpu, DType::F32, data_sheet("unknown", DType::F32))
        });
        let rates = rates.unwrap();
        assert!(rates[0] > 0.0 && rates[0] == rates[1], "{rates:?}");
    }
}
