//! Hardware, software and measured rates of the machine.

use super::{Finding, State};
use crate::bench::{BenchRank, BenchRanks, Case, Figure, cores, cpu_name, scratch_dir, square_gemm};
use crate::failure::Failure;
use anyhow::Result;
use candle_core::{DType, Device, Tensor};
use std::io::Write;
use std::path::Path;
use std::process::Command;
use ulysses::checkpoint::{LocalStorage, Storage};
use ulysses::kernels::linear::bf16_gemm;
use ulysses::kernels::strided_copy;
use ulysses::trainer::job::{JobRanks, launch_options, meminfo_bytes};

/// Measured repetitions of a rate.
pub(super) const REPEATS: u32 = 5;

const GIB: f64 = (1_u64 << 30) as f64;

/// Memory below which only the smallest presets fit.
const LOW_MEMORY_BYTES: f64 = 2.0 * GIB;

pub(super) fn cpu() -> Vec<Finding> {
    let (there, missing): (Vec<Feature>, Vec<Feature>) =
        features().into_iter().partition(|feature| feature.is_there);
    let [names, missing] =
        [there, missing].map(|of| of.iter().map(|feature| feature.name).collect::<Vec<_>>());
    // Without these the kernels use their slow baseline versions.
    let is_slow = cfg!(target_arch = "x86_64") && (missing.contains(&"avx2") || missing.contains(&"fma"));
    let state = if is_slow { State::Warning } else { State::Ok };
    let mut text = if names.is_empty() { "none that the kernels use".to_owned() } else { names.join(" ") };
    if !missing.is_empty() {
        text += &format!(" (missing: {})", missing.join(" "));
    }
    // `main` has reported an invalid environment variable before.
    let bf16 = bf16_gemm().ok().flatten().unwrap_or("none (computed in f32)");
    vec![
        Finding::ok("CPU", "model", cpu_name()),
        Finding::new("CPU", "vector features", state, text),
        Finding::ok("CPU", "bf16 GEMM", bf16),
        Finding::ok("CPU", "threads", cores().to_string()).with_value(cores() as f64),
    ]
}

/// A CPU feature.
struct Feature {
    name: &'static str,
    is_there: bool,
}

/// Returns the CPU features that select kernels.
fn features() -> Vec<Feature> {
    #[cfg(target_arch = "x86_64")]
    return vec![
        Feature { name: "avx2", is_there: is_x86_feature_detected!("avx2") },
        Feature { name: "fma", is_there: is_x86_feature_detected!("fma") },
        Feature { name: "avx512f", is_there: is_x86_feature_detected!("avx512f") },
        Feature { name: "avx512bf16", is_there: is_x86_feature_detected!("avx512bf16") },
    ];
    #[cfg(not(target_arch = "x86_64"))]
    return Vec::new();
}

pub(super) fn memory() -> Vec<Finding> {
    let finding = |name: &str, bytes: f64| {
        let state = if bytes < LOW_MEMORY_BYTES { State::Warning } else { State::Ok };
        Finding::new("memory", name, state, format!("{:.1} GiB", bytes / GIB)).with_value(bytes)
    };
    let lines = [("installed", "MemTotal:"), ("available", "MemAvailable:")];
    let line = |(name, label)| match meminfo_bytes(label) {
        Some(bytes) => finding(name, bytes),
        None => Finding::new("memory", name, State::Absent, "unknown on this system"),
    };
    lines.map(line).into()
}

pub(super) fn mpi() -> Vec<Finding> {
    let version = output(Command::new("mpirun").arg("--version"));
    // A build with MPI needs its launcher.
    let missing = if cfg!(feature = "mpi") { State::Warning } else { State::Absent };
    vec![
        feature("MPI", "mpi"),
        match version.as_deref().and_then(|version| version.lines().next()) {
            Some(version) => Finding::ok("MPI", "mpirun", version),
            None => Finding::new("MPI", "mpirun", missing, "not found"),
        },
    ]
}

/// Returns whether this build has a cargo feature.
pub(super) fn feature(section: &'static str, name: &'static str) -> Finding {
    let is_there = match name {
        "mpi" => cfg!(feature = "mpi"),
        "cuda" => cfg!(feature = "cuda"),
        _ => cfg!(feature = "nccl"),
    };
    let text = format!("not enabled in this build (--features {name})");
    match (format!("feature {name}"), is_there) {
        (name, true) => Finding::ok(section, name, "enabled"),
        (name, false) => Finding::new(section, name, State::Absent, text),
    }
}

/// Measures the GEMM rate and the copy rate on all threads.
pub(super) fn rates(mib: u16) -> Result<Vec<Finding>, Failure> {
    let options = launch_options(None, 1)?;
    let elems = usize::from(mib) << 18;
    let mut ranks = BenchRanks { on: &mut JobRanks::default(), count: 1, options };
    let figures = ranks.run(REPEATS, |bench| {
        let ones = || Tensor::ones(elems, DType::F32, &bench.device);
        let (from, to) = (ones()?, ones()?);
        let bytes = (elems * size_of::<f32>()) as f64;
        let copy = Case::new("memory copy", bytes, || strided_copy::copy(&from, &to));
        bench.take_turns(vec![square_gemm(DType::F32, &bench.device)?, copy])
    })?;
    let finding = |(figure, (name, unit)): (&Figure, (&str, &str))| {
        let rate = figure.rate();
        Finding::ok("rates", name, format!("{rate:.1} {unit}")).with_value(rate)
    };
    Ok(figures.iter().zip([("GEMM, f32", "GFLOP/s"), ("memory copy", "GB/s")]).map(finding).collect())
}

/// Measures the write rate to a directory, with fsync, as for checkpoints.
pub(super) fn disk(dir: &Path, mib: u16) -> Finding {
    let name = format!("write to {}", dir.display());
    match write_rate(dir, mib) {
        Ok(rate) => Finding::ok("disk", name, format!("{rate:.2} GB/s with fsync")).with_value(rate),
        Err(error) => Finding::failed("disk", name, error),
    }
}

fn write_rate(dir: &Path, mib: u16) -> Result<f64> {
    let scratch = scratch_dir(dir)?;
    let path = scratch.path().join("data");
    let data = vec![0x5a_u8; usize::from(mib) << 20];
    let options = ulysses::comm::LaunchOptions::default();
    let figures = ulysses::comm::launch(1, &options, |rank| {
        let write = Case::new("write", data.len() as f64, || {
            let mut file = LocalStorage.create(&path)?;
            file.write_all(&data)?;
            anyhow::Ok(file.sync()?)
        });
        BenchRank { rank: &rank, device: Device::Cpu, repeats: REPEATS }.take_turns(vec![write])
    })?;
    Ok(figures[0][0].rate())
}

pub(super) fn output(command: &mut Command) -> Option<String> {
    let output = command.output().ok().filter(|output| output.status.success())?;
    String::from_utf8(output.stdout).ok()
}
