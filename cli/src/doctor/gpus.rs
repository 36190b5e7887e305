//! GPUs, their driver and libraries, and short tests on them.

use super::machine::{feature, output};
use super::{DoctorArgs, Finding, State, collectives};
use crate::bench::TrainingArgs;
use crate::failure::Failure;
use anyhow::Result;
use candle_core::DType;
use std::path::Path;
use std::process::Command;
use std::time::Duration;
use ulysses::comm::{LaunchOptions, RankContext, launch};
use ulysses::config::Backend;
use ulysses::device::{DeviceKind, Gpu, driver_cuda_version, gpu, gpu_count, open_gpu};
use ulysses::kernels::attention::{AttentionKernels, CheckedKernels};
use ulysses::trainer::job::{DevicePlacement, DeviceRequest};

const GIB: f64 = (1_u64 << 30) as f64;

/// A CUDA release; later ones are greater.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct CudaVersion {
    major: u32,
    minor: u32,
}

/// The oldest CUDA release that has all functions in use.
const OLDEST_CUDA: CudaVersion = CudaVersion { major: 12, minor: 4 };

/// Libraries of a CUDA build.
const LIBRARIES: [&str; 6] = ["libcuda", "libcudart", "libcublas", "libcublasLt", "libnvrtc", "libcurand"];

/// A collective that hangs must not block the checks after it.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Describes the GPUs, and tests them if this build can use them.
pub(super) fn check(args: &DoctorArgs) -> Vec<Finding> {
    let mut findings = vec![feature("GPU", "cuda"), feature("GPU", "nccl"), driver()];
    let gpus = match gpu_count().and_then(|gpus| (0..gpus).map(gpu).collect::<Result<Vec<_>, _>>()) {
        Ok(gpus) => gpus,
        Err(error) => {
            findings.extend(listed());
            if cfg!(feature = "cuda") {
                // A CUDA build without a GPU still trains on the CPU.
                findings.push(Finding::new("GPU", "GPUs", State::Warning, error.to_string()));
            }
            return findings;
        }
    };
    findings.extend(gpus.iter().enumerate().map(|(ordinal, gpu)| {
        let text = describe(gpu, gpus.len());
        Finding::ok("GPU", format!("GPU {ordinal}"), text).with_value(gpu.total_bytes as f64)
    }));
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let driver = driver_cuda_version().ok();
    findings.extend(driver.map(|(major, minor)| cuda_version(CudaVersion { major, minor }, &maps)));
    findings.extend(LIBRARIES.into_iter().filter_map(|name| library(&maps, name)));
    findings.extend(nccl(&maps));
    findings.extend((0..gpus.len()).map(attention));
    findings.extend((0..gpus.len()).map(training));
    findings.extend(communication(gpus.len(), args));
    findings
}

fn driver() -> Finding {
    let driver = std::fs::read_to_string("/proc/driver/nvidia/version").unwrap_or_default();
    match driver.lines().next() {
        Some(line) => Finding::ok("GPU", "driver", line.trim_start_matches("NVRM version:").trim()),
        None => Finding::new("GPU", "driver", State::Absent, "no NVIDIA driver is loaded"),
    }
}

/// The GPUs that `nvidia-smi` lists, for builds that cannot use them.
fn listed() -> Vec<Finding> {
    let query = ["--query-gpu=name,memory.total", "--format=csv,noheader"];
    let listed = output(Command::new("nvidia-smi").args(query)).unwrap_or_default();
    let gpus = listed.lines().enumerate();
    gpus.map(|(ordinal, line)| Finding::ok("GPU", format!("GPU {ordinal}"), line)).collect()
}

fn describe(gpu: &Gpu, num_gpus: usize) -> String {
    let peers = match (gpu.peers.len(), num_gpus) {
        (_, 1) => String::new(),
        (0, _) => ", no peer access: copies to other GPUs pass through host memory".to_owned(),
        (peers, all) if peers + 1 == all => ", peer access to all others".to_owned(),
        _ => format!(", peer access to {:?} only", gpu.peers),
    };
    format!("{}, {:.1} GiB{peers}", gpu.name, gpu.total_bytes as f64 / GIB)
}

/// Compares the CUDA version of the driver with the version that the libraries of this process need.
fn cuda_version(driver: CudaVersion, maps: &str) -> Finding {
    let is_cuda_13 = file_of(maps, "libcublas").is_some_and(|file| file.contains(".so.13"));
    let needed = if is_cuda_13 { CudaVersion { major: 13, minor: 0 } } else { OLDEST_CUDA };
    let text = format!("the driver supports CUDA {}.{}", driver.major, driver.minor);
    if driver >= needed {
        return Finding::ok("GPU", "CUDA version", text);
    }
    let CudaVersion { major, minor } = needed;
    let advice = "update the driver, or build with the toolkit of an older CUDA release";
    let text = format!("{text}, but this build needs {major}.{minor}: {advice}");
    Finding::new("GPU", "CUDA version", State::Failed, text)
}

/// Returns the file of a loaded library.
fn file_of<'a>(maps: &'a str, library: &str) -> Option<&'a str> {
    let mut paths = maps.lines().filter_map(|line| line.find('/').map(|start| &line[start..]));
    let is_it = |path: &&str| {
        let name = Path::new(path).file_name().and_then(|name| name.to_str()).unwrap_or_default();
        name.strip_prefix(library).is_some_and(|rest| rest.starts_with(".so"))
    };
    paths.find(is_it)
}

/// Without a library that it links, the program does not start; others are not needed.
fn library(maps: &str, name: &'static str) -> Option<Finding> {
    Some(Finding::ok("GPU", name, file_of(maps, name)?))
}

#[cfg(feature = "nccl")]
fn nccl(maps: &str) -> Option<Finding> {
    Some(match ulysses::comm::nccl::version() {
        Ok([major, minor, patch]) => {
            let file = file_of(maps, "libnccl").unwrap_or("linked statically");
            Finding::ok("GPU", "NCCL", format!("{major}.{minor}.{patch}, {file}"))
        }
        Err(error) => Finding::new("GPU", "NCCL", State::Failed, error.to_string()),
    })
}

#[cfg(not(feature = "nccl"))]
fn nccl(_: &str) -> Option<Finding> {
    None
}

/// Compares the fused attention kernels with the tiled ones on a GPU, although an earlier result may be cached.
fn attention(ordinal: usize) -> Finding {
    let name = format!("attention on GPU {ordinal}");
    let checked = || -> Result<_> { Ok(AttentionKernels::check(&open_gpu(ordinal)?, DType::BF16)?) };
    match checked() {
        Ok(checked) => {
            let is_ok = checked.iter().all(|checked| checked.refused.is_empty());
            let state = if is_ok { State::Ok } else { State::Warning };
            let kernels: Vec<String> = checked.iter().map(describe_kernels).collect();
            Finding::new("GPU", name, state, format!("in bf16, {}", kernels.join("; ")))
        }
        Err(error) => Finding::failed("GPU", name, error),
    }
}

/// The kernels of a head dimension, and how much their outputs differ from those of the tiled ones.
fn describe_kernels(checked: &CheckedKernels) -> String {
    let chosen = match checked.kernels {
        AttentionKernels::Tiled => "tiled kernels",
        AttentionKernels::Wgmma => "fused kernels with wgmma",
        _ => "fused kernels",
    };
    let percent = |(output, share): &(&str, f64)| format!("{output} {:.0} %", 100.0 * share);
    let errors: Vec<String> = checked.errors.iter().map(percent).collect();
    let errors = match errors.is_empty() {
        true => String::new(),
        false => format!(" (largest errors, as a share of the tolerance: {})", errors.join(", ")),
    };
    let text = format!("head dimension {}: {chosen}{errors}", checked.head_dim);
    [&[text], &checked.refused[..]].concat().join(", but ")
}

/// Trains two steps on a GPU, which compiles and loads all kernels.
fn training(ordinal: usize) -> Finding {
    let name = format!("training on GPU {ordinal}");
    match train(ordinal) {
        Ok(loss) if loss.is_finite() => {
            Finding::ok("GPU", name, format!("2 steps of a small model, loss {loss:.4}"))
        }
        Ok(loss) => Finding::new("GPU", name, State::Failed, format!("the loss is {loss}")),
        Err(Failure::Usage(error) | Failure::Run(error)) => Finding::failed("GPU", name, error),
        Err(Failure::Stopped { .. } | Failure::Ended { .. }) => {
            Finding::new("GPU", name, State::Failed, "stopped by a signal")
        }
    }
}

fn train(ordinal: usize) -> Result<f64, Failure> {
    let training = TrainingArgs::small().prepare(128)?;
    let steps = |rank: &RankContext| {
        let device = open_gpu(ordinal)?;
        let mut rank = training.start(rank, &device)?;
        rank.step()?;
        anyhow::Ok(rank.step()?.loss)
    };
    let losses = launch(1, &LaunchOptions::default(), |rank| steps(&rank));
    losses.map(|losses| losses.into_iter().sum()).map_err(|error| Failure::Run(error.into()))
}

/// Tests the collectives between GPUs with NCCL, or between ranks that share the only GPU.
fn communication(num_gpus: usize, args: &DoctorArgs) -> Vec<Finding> {
    let section = "collectives on GPUs";
    let ranks = usize::from(args.ranks).min(num_gpus.max(2));
    let backend = (num_gpus == 1).then_some(Backend::Thread);
    let request = DeviceRequest { device: Some(DeviceKind::Cuda), backend, threads: Some(ranks) };
    let options = LaunchOptions { timeout: TIMEOUT, ..LaunchOptions::default() };
    match DevicePlacement::new(request, |_| ()) {
        Ok(placement) => collectives::check(section, placement, ranks, &options, args.mib),
        Err(error) => vec![Finding::new(section, "all", State::Warning, error.to_string())],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &str = "\
7f00-7f01 r--p 00000000 08:01 12 /usr/lib/x86_64-linux-gnu/libcublasLt.so.13\n\
7f01-7f02 r-xp 00001000 08:01 12 /opt/my cuda/lib64/libcublas.so.13.0.2\n\
7f02-7f03 rw-p 00000000 00:00 0 [heap]\n";

    #[test]
    fn libraries_are_found_by_their_whole_name() {
        assert_eq!(file_of(MAPS, "libcublas"), Some("/opt/my cuda/lib64/libcublas.so.13.0.2"));
        assert_eq!(file_of(MAPS, "libcublasLt"), Some("/usr/lib/x86_64-linux-gnu/libcublasLt.so.13"));
        assert_eq!(file_of(MAPS, "libcu"), None);
        assert!(library(MAPS, "libcublas").is_some() && library(MAPS, "libnvrtc").is_none());
    }

    #[test]
    fn the_driver_must_support_the_cuda_release_of_the_libraries() {
        let state = |major, minor, maps: &str| cuda_version(CudaVersion { major, minor }, maps).state;
        let cuda_12 = MAPS.replace(".so.13", ".so.12");
        assert_eq!(state(12, 4, &cuda_12), State::Ok);
        assert_eq!(state(12, 2, &cuda_12), State::Failed);
        assert_eq!(state(13, 0, MAPS), State::Ok);
        assert_eq!(state(12, 8, MAPS), State::Failed);
    }

    #[test]
    fn peers_are_described_as_far_as_there_are_other_gpus() {
        let gpu =
            |peers: &[usize]| Gpu { name: "G".to_owned(), total_bytes: 80 << 30, peers: peers.to_vec() };
        let described = [(vec![], 1), (vec![], 2), (vec![1, 2], 3), (vec![1], 3)];
        let texts = described.map(|(peers, num_gpus)| describe(&gpu(&peers), num_gpus));
        assert_eq!(texts[0], "G, 80.0 GiB");
        assert!(texts[1].contains("no peer access"), "{texts:?}");
        assert!(texts[2].ends_with("peer access to all others"), "{texts:?}");
        assert!(texts[3].ends_with("peer access to [1] only"), "{texts:?}");
    }
}
