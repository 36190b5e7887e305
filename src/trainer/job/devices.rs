//! The device and the backend of a job's ranks, from its settings, the build and the GPUs of the machine.

use super::options::JobError;
use crate::comm::nccl::may_share_gpus;
use crate::comm::{LaunchError, LaunchOptions, RankContext, launch};
use crate::config::Backend;
use crate::kernels::device::{DeviceError, DeviceKind, gpu_count};
use crate::monitor::counted;
use candle_core::Device;
use std::error::Error;
use std::fmt::Display;

type BoxedError = Box<dyn Error + Send + Sync>;

/// The device, backend and number of ranks of a job.
#[derive(Debug, Clone, Copy)]
pub struct DeviceRequest {
    /// `None`: GPUs if the build and the machine have them, else the CPU.
    pub device: Option<DeviceKind>,
    /// The backend of a flag, the config or the launcher.
    pub backend: Option<Backend>,
    /// Number of ranks that are threads of this process; `None` if this process is one rank of a job.
    pub threads: Option<usize>,
}

/// The GPUs and libraries of the build and the machine.
struct Machine {
    /// Number of visible GPUs, or the reason why none can be used.
    gpus: Result<usize, String>,
    /// Whether the build has NCCL.
    has_nccl: bool,
    /// Whether the user allows NCCL several ranks per GPU.
    shares_gpus: bool,
}

impl Machine {
    fn detect() -> Self {
        let reason = |error: DeviceError| match error {
            DeviceError::NotBuilt { feature, .. } => format!("this build lacks the feature `{feature}`"),
            error => error.to_string(),
        };
        Self {
            gpus: gpu_count().map_err(reason),
            has_nccl: cfg!(feature = "nccl"),
            shares_gpus: may_share_gpus(),
        }
    }
}

/// Where ranks run, and how they communicate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DevicePlacement {
    device: DeviceKind,
    backend: Backend,
    /// Number of GPUs among which NCCL's ranks are divided.
    num_gpus: usize,
    /// The explanation, unless the user asked for the CPU.
    line: Option<String>,
    /// Whether the user left the choice of the device to the program.
    is_auto: bool,
}

impl Default for DevicePlacement {
    fn default() -> Self {
        Self::cpu()
    }
}

impl DevicePlacement {
    /// Places the ranks. `log` receives the line that explains the choice.
    ///
    /// # Errors
    /// A device or backend that the build or the machine lacks.
    pub fn new(request: DeviceRequest, log: fn(&str)) -> Result<Self, JobError> {
        let machine = match request {
            // The GPU of a process is opened when it joins its job.
            DeviceRequest { threads: None, .. } | DeviceRequest { device: Some(DeviceKind::Cpu), .. } => {
                Machine { gpus: Ok(0), has_nccl: cfg!(feature = "nccl"), shares_gpus: false }
            }
            _ => Machine::detect(),
        };
        let placement = place(request, &machine).map_err(JobError::usage)?;
        placement.line.iter().for_each(|line| log(&format!("device: {line}")));
        Ok(Self { is_auto: request.device.is_none(), ..placement })
    }

    /// Ranks on the CPU that are threads.
    pub fn cpu() -> Self {
        Self { device: DeviceKind::Cpu, backend: Backend::Thread, num_gpus: 0, line: None, is_auto: false }
    }

    /// A single rank on the same kind of device.
    pub fn alone(&self) -> Self {
        Self { device: self.device, is_auto: self.is_auto, ..Self::cpu() }
    }

    /// Returns the kind of device.
    pub fn device(&self) -> DeviceKind {
        self.device
    }

    /// Returns the backend.
    pub fn backend(&self) -> Backend {
        self.backend
    }

    /// Opens the device of a rank of the backend `thread`.
    fn open(&self) -> Result<Device, BoxedError> {
        self.device.open().map_err(|error| self.explain(error))
    }

    /// Adds the remedy to the error of a GPU that could not be opened, if the user has not asked for GPUs.
    fn explain(&self, error: impl Display) -> BoxedError {
        match self.is_auto && self.device == DeviceKind::Cuda {
            true => format!("{error}; use --device cpu to run without GPUs").into(),
            false => error.to_string().into(),
        }
    }

    /// Returns the name of the first GPU, if ranks run on GPUs.
    pub fn gpu_name(&self) -> Option<String> {
        (self.device == DeviceKind::Cuda).then(|| self.device.describe().ok()).flatten()
    }

    /// Returns how many of the ranks of this process share a GPU.
    pub fn ranks_per_gpu(&self, ranks_in_process: usize) -> usize {
        ranks_in_process.div_ceil(self.num_gpus.max(1))
    }

    /// Runs `run` on ranks that are threads of this process, with the device of their tensors.
    ///
    /// # Errors
    /// The first failure of a rank.
    pub fn launch<T: Send, E: Into<BoxedError>>(
        &self,
        world_size: usize,
        options: &LaunchOptions,
        run: impl Fn(&RankContext, Device) -> Result<T, E> + Sync,
    ) -> Result<Vec<T>, LaunchError> {
        match self.backend {
            #[cfg(feature = "nccl")]
            Backend::Nccl => {
                let gpus: Vec<usize> = (0..world_size).map(|rank| rank % self.num_gpus.max(1)).collect();
                let run = |rank: RankContext| run(&rank, rank.group.value_device());
                crate::comm::nccl::launch(&gpus, options, run).map_err(|error| match error {
                    LaunchError::Failed { rank, source } if source.is::<DeviceError>() => {
                        LaunchError::Failed { rank, source: self.explain(source) }
                    }
                    other => other,
                })
            }
            _ => launch(world_size, options, |rank| run(&rank, self.open()?).map_err(Into::into)),
        }
    }
}

/// Returns the device of ranks whose number is not known yet. Errors follow once it is.
pub fn likely_device(device: Option<DeviceKind>, backend: Option<Backend>) -> DeviceKind {
    let is_gpu = match (device, backend) {
        (Some(DeviceKind::Cuda), _) | (None, Some(Backend::Nccl)) => true,
        (Some(DeviceKind::Cpu), _) | (None, Some(Backend::Mpi)) => false,
        (None, _) => gpu_count().is_ok(),
    };
    if is_gpu { DeviceKind::Cuda } else { DeviceKind::Cpu }
}

fn place(request: DeviceRequest, machine: &Machine) -> Result<DevicePlacement, String> {
    let DeviceRequest { device, backend, threads } = request;
    let on_cpu = |backend, reason: Option<&str>| {
        let line = reason.map(|reason| format!("cpu ({reason})"));
        DevicePlacement { backend, line, ..DevicePlacement::cpu() }
    };
    match (device, backend) {
        (Some(DeviceKind::Cuda), Some(Backend::Mpi)) => Err(
            "--device cuda cannot be used with the backend mpi, which supports CPU tensors only: use nccl for GPUs".to_owned(),
        ),
        (Some(DeviceKind::Cpu), Some(Backend::Nccl)) => {
            Err("--device cpu cannot be used with the backend nccl, which supports GPU tensors only".to_owned())
        }
        (Some(DeviceKind::Cpu), backend) => Ok(on_cpu(backend.unwrap_or_default(), None)),
        (None, Some(Backend::Mpi)) => {
            Ok(on_cpu(Backend::Mpi, Some("the backend mpi supports CPU tensors only")))
        }
        (_, backend) => match (threads, &machine.gpus) {
            (None, _) => Ok(on_gpus(Backend::Nccl, 1, "one GPU per process, backend nccl".to_owned())),
            (Some(ranks), Ok(gpus)) => place_threads(ranks, *gpus, backend, machine),
            (_, Err(reason)) if backend == Some(Backend::Nccl) => Err(format!("the backend nccl needs GPUs: {reason}")),
            (_, Err(reason)) if device == Some(DeviceKind::Cuda) => Err(format!("--device cuda: {reason}; use --device cpu")),
            (_, Err(reason)) => Ok(on_cpu(backend.unwrap_or_default(), Some(reason))),
        },
    }
}

fn on_gpus(backend: Backend, num_gpus: usize, line: String) -> DevicePlacement {
    let line = Some(format!("cuda ({line})"));
    DevicePlacement { device: DeviceKind::Cuda, backend, num_gpus, line, is_auto: false }
}

/// Places ranks that are threads of this process on a machine with GPUs. The thread backend's ranks copy from each
/// other's tensors, so they share one GPU.
fn place_threads(
    ranks: usize,
    gpus: usize,
    backend: Option<Backend>,
    machine: &Machine,
) -> Result<DevicePlacement, String> {
    let uses_threads = backend == Some(Backend::Thread) || (backend.is_none() && (ranks == 1 || gpus == 1));
    if uses_threads {
        let reason = if ranks > 1 { ", which the ranks of the backend thread share" } else { "" };
        return Ok(on_gpus(
            Backend::Thread,
            1,
            format!("{} on GPU 0 of {gpus}{reason}", counted(ranks, "rank")),
        ));
    }
    if !machine.has_nccl {
        return Err(format!(
            "{ranks} ranks on {gpus} GPUs need NCCL, but this build lacks the feature `nccl`: build with --features nccl, \
             or use --device cpu, or CUDA_VISIBLE_DEVICES=0 to put all ranks on one GPU"
        ));
    }
    if ranks > gpus && !machine.shares_gpus {
        let alternative = match gpus {
            1 => "use the backend thread, whose ranks share one GPU, or --device cpu",
            _ => "set CUDA_VISIBLE_DEVICES=0 to put all ranks on one GPU, or use --device cpu",
        };
        return Err(format!(
            "{ranks} ranks, but {}: NCCL needs one GPU per rank; choose a mesh of at most {}, or {alternative}",
            counted(gpus, "GPU"),
            counted(gpus, "rank")
        ));
    }
    let used = ranks.min(gpus);
    Ok(on_gpus(
        Backend::Nccl,
        used,
        format!("{} on {used} of {}, backend nccl", counted(ranks, "rank"), counted(gpus, "GPU")),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use Backend::{Mpi, Nccl, Thread};

    const CPU: Option<DeviceKind> = Some(DeviceKind::Cpu);
    const CUDA: Option<DeviceKind> = Some(DeviceKind::Cuda);

    fn machine(gpus: Result<usize, &str>, has_nccl: bool) -> Machine {
        Machine { gpus: gpus.map_err(str::to_owned), has_nccl, shares_gpus: false }
    }

    /// The device, the backend and the line, or the error.
    fn placed(
        device: Option<DeviceKind>,
        backend: Option<Backend>,
        threads: Option<usize>,
        machine: &Machine,
    ) -> Result<(&'static str, Backend, String), String> {
        let placed = place(DeviceRequest { device, backend, threads }, machine)?;
        Ok((placed.device.name(), placed.backend, placed.line.unwrap_or_default()))
    }

    #[test]
    fn a_stated_device_decides_and_else_the_backend() {
        for backend in [None, Some(Nccl), Some(Mpi), Some(Thread)] {
            let devices = [CPU, CUDA].map(|device| likely_device(device, backend));
            assert_eq!(devices, [DeviceKind::Cpu, DeviceKind::Cuda], "{backend:?}");
        }
        let by_backend = [Nccl, Mpi].map(|backend| likely_device(None, Some(backend)));
        assert_eq!(by_backend, [DeviceKind::Cuda, DeviceKind::Cpu]);
    }

    #[test]
    fn without_gpus_auto_is_the_cpu_with_the_reason() {
        for reason in ["this build lacks the feature `cuda`", "no usable NVIDIA GPU: no driver"] {
            let none = machine(Err(reason), true);
            for threads in [1, 4] {
                let on_cpu = Ok(("cpu", Thread, format!("cpu ({reason})")));
                assert_eq!(placed(None, None, Some(threads), &none), on_cpu);
                assert_eq!(placed(None, Some(Thread), Some(threads), &none), on_cpu);
                let refused = placed(CUDA, None, Some(threads), &none).unwrap_err();
                assert_eq!(refused, format!("--device cuda: {reason}; use --device cpu"));
                let refused = placed(None, Some(Nccl), Some(threads), &none).unwrap_err();
                assert_eq!(refused, format!("the backend nccl needs GPUs: {reason}"));
            }
        }
    }

    #[test]
    fn the_cpu_is_used_if_it_is_asked_for_or_the_backend_is_mpi() {
        let gpus = machine(Ok(8), true);
        assert_eq!(placed(CPU, None, Some(4), &gpus), Ok(("cpu", Thread, String::new())));
        assert_eq!(placed(CPU, Some(Mpi), None, &gpus), Ok(("cpu", Mpi, String::new())));
        let line = "cpu (the backend mpi supports CPU tensors only)".to_owned();
        assert_eq!(placed(None, Some(Mpi), None, &gpus), Ok(("cpu", Mpi, line)));
        assert!(placed(CUDA, Some(Mpi), None, &gpus).unwrap_err().contains("use nccl for GPUs"));
        assert!(placed(CPU, Some(Nccl), Some(2), &gpus).unwrap_err().contains("--device cpu"));
    }

    #[test]
    fn ranks_on_several_gpus_use_nccl_and_others_share_the_first_gpu() {
        for device in [None, CUDA] {
            let on = |backend, ranks, gpus| placed(device, backend, Some(ranks), &machine(Ok(gpus), true));
            let line = |line: &str| format!("cuda ({line})");
            let of_one = ("cuda", Thread, line("1 rank on GPU 0 of 8"));
            assert_eq!(on(None, 1, 8), Ok(of_one));
            let shared = |gpus| {
                line(&format!("4 ranks on GPU 0 of {gpus}, which the ranks of the backend thread share"))
            };
            assert_eq!(on(None, 4, 1), Ok(("cuda", Thread, shared(1))));
            assert_eq!(on(Some(Thread), 4, 8), Ok(("cuda", Thread, shared(8))));
            let nccl = line("4 ranks on 4 of 8 GPUs, backend nccl");
            assert_eq!(on(None, 4, 8), Ok(("cuda", Nccl, nccl.clone())));
            assert_eq!(on(Some(Nccl), 4, 8), Ok(("cuda", Nccl, nccl)));
            assert_eq!(on(Some(Nccl), 1, 1), Ok(("cuda", Nccl, line("1 rank on 1 of 1 GPU, backend nccl"))));
            let process = placed(device, Some(Nccl), None, &machine(Ok(0), true));
            assert_eq!(process, Ok(("cuda", Nccl, line("one GPU per process, backend nccl"))));
        }
    }

    #[test]
    fn more_ranks_than_gpus_are_refused_unless_nccl_may_share_them() {
        let mut two = machine(Ok(2), true);
        for backend in [None, Some(Nccl)] {
            let refused = placed(None, backend, Some(4), &two).unwrap_err();
            assert!(refused.starts_with("4 ranks, but 2 GPUs: NCCL needs one GPU per rank"), "{refused}");
            assert!(
                refused
                    .ends_with("set CUDA_VISIBLE_DEVICES=0 to put all ranks on one GPU, or use --device cpu"),
                "{refused}"
            );
        }
        let of_one = placed(None, Some(Nccl), Some(2), &machine(Ok(1), true)).unwrap_err();
        assert!(
            of_one.ends_with("use the backend thread, whose ranks share one GPU, or --device cpu"),
            "{of_one}"
        );
        two.shares_gpus = true;
        let shared = placed(None, None, Some(4), &two);
        assert_eq!(shared, Ok(("cuda", Nccl, "cuda (4 ranks on 2 of 2 GPUs, backend nccl)".to_owned())));
    }

    #[test]
    fn several_gpus_without_nccl_in_the_build_name_the_feature() {
        let without = machine(Ok(8), false);
        let refused = placed(None, None, Some(4), &without).unwrap_err();
        assert!(
            refused.starts_with("4 ranks on 8 GPUs need NCCL, but this build lacks the feature `nccl`"),
            "{refused}"
        );
        assert!(placed(None, None, Some(1), &without).is_ok(), "one rank needs no NCCL");
        assert!(placed(None, Some(Thread), Some(4), &without).is_ok());
    }
}
