//! The device and the backend of a command's ranks, from its flags, the build and the GPUs of the machine.

use super::DeviceArg;
use crate::failure::{Failure, OrFail};
use crate::output::log_line;
use anyhow::anyhow;
use candle_core::Device;
use std::fmt::Display;
use ulysses::comm::nccl::may_share_gpus;
use ulysses::config::Backend;
use ulysses::device::{DeviceError, DeviceKind, gpu_count};
use ulysses::monitor::counted;

/// The device, backend and number of ranks of a command.
#[derive(Clone, Copy)]
pub(crate) struct Request {
    pub(crate) device: DeviceArg,
    /// The backend of a flag, the config or the launcher.
    pub(crate) backend: Option<Backend>,
    /// Number of ranks that are threads of this process; `None` if this process is one rank of a job.
    pub(crate) threads: Option<usize>,
}

/// The GPUs and libraries of the build and the machine.
pub(crate) struct Machine {
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
pub(crate) struct Placement {
    pub(crate) device: DeviceKind,
    pub(crate) backend: Backend,
    /// Number of GPUs among which NCCL's ranks are divided.
    num_gpus: usize,
    /// The explanation, unless the user asked for the CPU.
    line: Option<String>,
    /// Whether the user left the choice of the device to the program.
    is_auto: bool,
}

impl Placement {
    /// Places the ranks and prints the line that explains it.
    ///
    /// # Errors
    /// As for [`quiet`](Self::quiet).
    pub(crate) fn of(request: Request) -> Result<Self, Failure> {
        let placement = Self::quiet(request)?;
        placement.line.iter().for_each(|line| log_line(format_args!("device: {line}")));
        Ok(placement)
    }

    /// Places the ranks.
    ///
    /// # Errors
    /// A device or backend that the build or the machine lacks.
    pub(crate) fn quiet(request: Request) -> Result<Self, Failure> {
        let machine = match request {
            // The GPU of a process is opened when it joins its job.
            Request { threads: None, .. } | Request { device: DeviceArg::Cpu, .. } => {
                Machine { gpus: Ok(0), has_nccl: cfg!(feature = "nccl"), shares_gpus: false }
            }
            _ => Machine::detect(),
        };
        let placement = place(request, &machine).map_err(|message| anyhow!(message)).or_usage()?;
        Ok(Self { is_auto: matches!(request.device, DeviceArg::Auto), ..placement })
    }

    /// Ranks on the CPU that are threads.
    pub(crate) fn cpu() -> Self {
        Self { device: DeviceKind::Cpu, backend: Backend::Thread, num_gpus: 0, line: None, is_auto: false }
    }

    /// A single rank on the same kind of device.
    pub(crate) fn alone(&self) -> Self {
        Self { device: self.device, is_auto: self.is_auto, ..Self::cpu() }
    }

    /// Opens the device of a rank of the backend `thread`.
    pub(crate) fn open(&self) -> anyhow::Result<Device> {
        self.device.open().map_err(|error| self.explain(error))
    }

    /// Adds the remedy to the error of a GPU that could not be opened, if the user has not asked for GPUs.
    pub(crate) fn explain(&self, error: impl Display) -> anyhow::Error {
        match self.is_auto && self.device == DeviceKind::Cuda {
            true => anyhow!("{error}; use --device cpu to run without GPUs"),
            false => anyhow!("{error}"),
        }
    }

    /// Returns the name of the first GPU, if ranks run on GPUs.
    pub(crate) fn gpu_name(&self) -> Option<String> {
        (self.device == DeviceKind::Cuda).then(|| self.device.describe().ok()).flatten()
    }

    /// Returns how many of the ranks of this process share a GPU.
    pub(crate) fn ranks_per_gpu(&self, ranks_in_process: usize) -> usize {
        ranks_in_process.div_ceil(self.num_gpus.max(1))
    }

    /// Returns the GPU of each NCCL rank of this process.
    #[cfg(feature = "nccl")]
    pub(crate) fn gpus(&self, world_size: usize) -> Vec<usize> {
        (0..world_size).map(|rank| rank % self.num_gpus).collect()
    }
}

/// Returns the device of ranks whose number is not known yet. Errors follow once it is.
pub(crate) fn likely_device(device: DeviceArg, backend: Option<Backend>) -> DeviceKind {
    let is_gpu = match (device, backend) {
        (DeviceArg::Cuda, _) | (DeviceArg::Auto, Some(Backend::Nccl)) => true,
        (DeviceArg::Cpu, _) | (DeviceArg::Auto, Some(Backend::Mpi)) => false,
        (DeviceArg::Auto, _) => gpu_count().is_ok(),
    };
    if is_gpu { DeviceKind::Cuda } else { DeviceKind::Cpu }
}

fn place(request: Request, machine: &Machine) -> Result<Placement, String> {
    let Request { device, backend, threads } = request;
    let on_cpu = |backend, reason: Option<&str>| {
        let line = reason.map(|reason| format!("cpu ({reason})"));
        Placement { backend, line, ..Placement::cpu() }
    };
    match (device, backend) {
        (DeviceArg::Cuda, Some(Backend::Mpi)) => Err(
            "--device cuda cannot be used with the backend mpi, which supports CPU tensors only: use nccl for GPUs".to_owned(),
        ),
        (DeviceArg::Cpu, Some(Backend::Nccl)) => {
            Err("--device cpu cannot be used with the backend nccl, which supports GPU tensors only".to_owned())
        }
        (DeviceArg::Cpu, backend) => Ok(on_cpu(backend.unwrap_or_default(), None)),
        (DeviceArg::Auto, Some(Backend::Mpi)) => {
            Ok(on_cpu(Backend::Mpi, Some("the backend mpi supports CPU tensors only")))
        }
        (_, backend) => match (threads, &machine.gpus) {
            (None, _) => Ok(on_gpus(Backend::Nccl, 1, "one GPU per process, backend nccl".to_owned())),
            (Some(ranks), Ok(gpus)) => place_threads(ranks, *gpus, backend, machine),
            (_, Err(reason)) if backend == Some(Backend::Nccl) => Err(format!("the backend nccl needs GPUs: {reason}")),
            (_, Err(reason)) if device == DeviceArg::Cuda => Err(format!("--device cuda: {reason}; use --device cpu")),
            (_, Err(reason)) => Ok(on_cpu(backend.unwrap_or_default(), Some(reason))),
        },
    }
}

fn on_gpus(backend: Backend, num_gpus: usize, line: String) -> Placement {
    let line = Some(format!("cuda ({line})"));
    Placement { device: DeviceKind::Cuda, backend, num_gpus, line, is_auto: false }
}

/// Places ranks that are threads of this process on a machine with GPUs. The thread backend's ranks copy from each
/// other's tensors, so they share one GPU.
fn place_threads(
    ranks: usize,
    gpus: usize,
    backend: Option<Backend>,
    machine: &Machine,
) -> Result<Placement, String> {
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
    use DeviceArg::{Auto, Cpu, Cuda};

    fn machine(gpus: Result<usize, &str>, has_nccl: bool) -> Machine {
        Machine { gpus: gpus.map_err(str::to_owned), has_nccl, shares_gpus: false }
    }

    /// The device, the backend and the line, or the error.
    fn placed(
        device: DeviceArg,
        backend: Option<Backend>,
        threads: Option<usize>,
        machine: &Machine,
    ) -> Result<(&'static str, Backend, String), String> {
        let placed = place(Request { device, backend, threads }, machine)?;
        Ok((placed.device.name(), placed.backend, placed.line.unwrap_or_default()))
    }

    #[test]
    fn a_stated_device_decides_and_else_the_backend() {
        use DeviceKind as Kind;
        for backend in [None, Some(Nccl), Some(Mpi), Some(Thread)] {
            let devices = [Cpu, Cuda].map(|device| likely_device(device, backend));
            assert_eq!(devices, [Kind::Cpu, Kind::Cuda], "{backend:?}");
        }
        let by_backend = [Nccl, Mpi].map(|backend| likely_device(Auto, Some(backend)));
        assert_eq!(by_backend, [Kind::Cuda, Kind::Cpu]);
    }

    #[test]
    fn without_gpus_auto_is_the_cpu_with_the_reason() {
        for reason in ["this build lacks the feature `cuda`", "no usable NVIDIA GPU: no driver"] {
            let none = machine(Err(reason), true);
            for threads in [1, 4] {
                let on_cpu = Ok(("cpu", Thread, format!("cpu ({reason})")));
                assert_eq!(placed(Auto, None, Some(threads), &none), on_cpu);
                assert_eq!(placed(Auto, Some(Thread), Some(threads), &none), on_cpu);
                let refused = placed(Cuda, None, Some(threads), &none).unwrap_err();
                assert_eq!(refused, format!("--device cuda: {reason}; use --device cpu"));
                let refused = placed(Auto, Some(Nccl), Some(threads), &none).unwrap_err();
                assert_eq!(refused, format!("the backend nccl needs GPUs: {reason}"));
            }
        }
    }

    #[test]
    fn the_cpu_is_used_if_it_is_asked_for_or_the_backend_is_mpi() {
        let gpus = machine(Ok(8), true);
        assert_eq!(placed(Cpu, None, Some(4), &gpus), Ok(("cpu", Thread, String::new())));
        assert_eq!(placed(Cpu, Some(Mpi), None, &gpus), Ok(("cpu", Mpi, String::new())));
        let line = "cpu (the backend mpi supports CPU tensors only)".to_owned();
        assert_eq!(placed(Auto, Some(Mpi), None, &gpus), Ok(("cpu", Mpi, line)));
        assert!(placed(Cuda, Some(Mpi), None, &gpus).unwrap_err().contains("use nccl for GPUs"));
        assert!(placed(Cpu, Some(Nccl), Some(2), &gpus).unwrap_err().contains("--device cpu"));
    }

    #[test]
    fn ranks_on_several_gpus_use_nccl_and_others_share_the_first_gpu() {
        for device in [Auto, Cuda] {
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
            let refused = placed(Auto, backend, Some(4), &two).unwrap_err();
            assert!(refused.starts_with("4 ranks, but 2 GPUs: NCCL needs one GPU per rank"), "{refused}");
            assert!(
                refused
                    .ends_with("set CUDA_VISIBLE_DEVICES=0 to put all ranks on one GPU, or use --device cpu"),
                "{refused}"
            );
        }
        let of_one = placed(Auto, Some(Nccl), Some(2), &machine(Ok(1), true)).unwrap_err();
        assert!(
            of_one.ends_with("use the backend thread, whose ranks share one GPU, or --device cpu"),
            "{of_one}"
        );
        two.shares_gpus = true;
        let shared = placed(Auto, None, Some(4), &two);
        assert_eq!(shared, Ok(("cuda", Nccl, "cuda (4 ranks on 2 of 2 GPUs, backend nccl)".to_owned())));
    }

    #[test]
    fn several_gpus_without_nccl_in_the_build_name_the_feature() {
        let without = machine(Ok(8), false);
        let refused = placed(Auto, None, Some(4), &without).unwrap_err();
        assert!(
            refused.starts_with("4 ranks on 8 GPUs need NCCL, but this build lacks the feature `nccl`"),
            "{refused}"
        );
        assert!(placed(Auto, None, Some(1), &without).is_ok(), "one rank needs no NCCL");
        assert!(placed(Auto, Some(Thread), Some(4), &without).is_ok());
    }
}
