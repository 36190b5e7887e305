//! Offload stores for parameters, optimizer state and activation checkpoints, as configured.

use super::EngineError;
use crate::config::{Config, Offload};
use crate::zero::Storage;
use candle_core::{DType, Device, Shape, Tensor};
use std::path::Path;
use std::sync::Arc;
use ulysses_kernels::Workspace;
use ulysses_kernels::device::DeviceKind;
use ulysses_kernels::offload::{Extent, OffloadError, OffloadStore, StoreLabel};
use ulysses_kernels::tensor::TensorOptions;

/// A kind of tensor that may be offloaded.
#[derive(Clone, Copy)]
struct Offloaded {
    holds: &'static str,
    /// The key that enables it.
    key: &'static str,
    /// The key that names its file's directory.
    directory_key: &'static str,
}

const CHECKPOINTS: Offloaded = Offloaded {
    holds: "activation checkpoints",
    key: "activation_checkpointing.cpu_checkpointing",
    directory_key: "ulysses.offload_path",
};
const OPTIMIZER: Offloaded = Offloaded {
    holds: "optimizer state",
    key: "zero_optimization.offload_optimizer.device",
    directory_key: "zero_optimization.offload_optimizer.nvme_path",
};
const PARAMETERS: Offloaded = Offloaded {
    holds: "parameters",
    key: "zero_optimization.offload_param.device",
    directory_key: "zero_optimization.offload_param.nvme_path",
};

impl Offloaded {
    fn in_file(self, directory: Option<&Path>) -> Result<OffloadStore, OffloadError> {
        OffloadStore::in_file(StoreLabel { holds: self.holds, key: self.directory_key }, directory)
    }

    /// `None` if the tensors are in host memory already.
    fn in_host_memory(self, device: &Device) -> Result<Option<OffloadStore>, OffloadError> {
        OffloadStore::in_host_memory(StoreLabel { holds: self.holds, key: self.key }, device)
    }

    /// The store that the config selects.
    fn store(
        self,
        offload: &Offload,
        config: &Config,
        device: &Device,
    ) -> Result<Option<OffloadStore>, EngineError> {
        match offload {
            Offload::None => Ok(None),
            Offload::Cpu => Ok(self.in_host_memory(device)?),
            Offload::Nvme(path) => {
                self.check_device(offload, device.is_cpu())?;
                let directory = path.as_deref().map(Path::new).or(shared_directory(config));
                Ok(Some(self.in_file(directory)?))
            }
        }
    }

    fn check_device(self, offload: &Offload, is_cpu: bool) -> Result<(), EngineError> {
        if is_cpu || !offload.is_in_file() {
            return Ok(());
        }
        Err(EngineError::OffloadToFile { key: self.key, what: self.holds })
    }
}

/// One rank's store of activation checkpoints, between a layer's forward and backward pass.
pub(super) struct ActivationOffload(OffloadStore);

/// An offloaded checkpoint.
pub(super) struct OffloadedTensor {
    extent: Extent,
    shape: Shape,
    dtype: DType,
}

impl OffloadedTensor {
    /// A tensor of its shape and dtype: f32, or that of activations.
    fn alloc(&self, workspace: &Workspace) -> Result<Tensor, EngineError> {
        Ok(match self.dtype {
            DType::F32 => workspace.alloc_f32(self.shape.clone())?,
            _ => workspace.alloc(self.shape.clone())?,
        })
    }
}

impl ActivationOffload {
    /// Creates the store that the config asks for: a file for tensors on the CPU, host memory for tensors
    /// on a GPU. Each rank has its own.
    ///
    /// # Errors
    /// A directory that cannot be written to, or an error of the driver.
    pub(super) fn of(config: &Config, device: &Device) -> Result<Option<Self>, EngineError> {
        if !config.activation_checkpointing.cpu_checkpointing {
            return Ok(None);
        }
        let in_memory = CHECKPOINTS.in_host_memory(device)?;
        let store = in_memory.map_or_else(|| CHECKPOINTS.in_file(shared_directory(config)), Ok)?;
        Ok(Some(Self(store)))
    }

    /// Starts to write a tensor, which must have no other owner. First waits until the previous tensor is
    /// written and freed: each pending one is another hidden state in memory. They are not recycled, since
    /// the backward pass needs the memory.
    ///
    /// # Errors
    /// An earlier write that failed.
    pub(super) fn store(&self, tensor: Tensor) -> Result<OffloadedTensor, OffloadError> {
        self.0.settle()?;
        let extent = self.0.reserve(ulysses_kernels::tensor::bytes(&tensor));
        let (shape, dtype) = (tensor.shape().clone(), tensor.dtype());
        self.0.write(&extent, tensor)?;
        Ok(OffloadedTensor { extent, shape, dtype })
    }

    /// Starts to load tensors, so that a later [`load`](Self::load) need not wait.
    ///
    /// # Errors
    /// A copy that cannot be started.
    pub(super) fn read_ahead(
        &self,
        tensors: &[OffloadedTensor],
        workspace: &Workspace,
    ) -> Result<(), EngineError> {
        self.0.settle()?;
        tensors.iter().try_for_each(|stored| self.0.read_ahead(&stored.extent, || stored.alloc(workspace)))
    }

    /// Frees storage that no tensor uses.
    ///
    /// # Errors
    /// An earlier write that failed.
    pub(super) fn trim(&self) -> Result<(), OffloadError> {
        self.0.trim()
    }

    /// Loads a tensor and frees its extent.
    ///
    /// # Errors
    /// A write or read that failed.
    pub(super) fn load(&self, stored: OffloadedTensor, workspace: &Workspace) -> Result<Tensor, EngineError> {
        self.0.settle()?;
        self.0.read(&stored.extent, || stored.alloc(workspace))
    }
}

/// Checks that everything the config offloads can be offloaded, before any rank needs it.
///
/// # Errors
/// A directory that cannot be written to, or file offload for tensors on a GPU.
pub fn check_offload(config: &Config, device: DeviceKind) -> Result<(), EngineError> {
    if config.activation_checkpointing.cpu_checkpointing && device == DeviceKind::Cpu {
        CHECKPOINTS.in_file(shared_directory(config))?;
    }
    check_offload_device(config, device)?;
    OPTIMIZER.store(&config.zero.offload_optimizer, config, &Device::Cpu)?;
    PARAMETERS.store(&config.zero.offload_param, config, &Device::Cpu)?;
    Ok(())
}

/// Checks that ranks on this kind of device can offload as configured.
///
/// # Errors
/// File offload for tensors on a GPU.
pub fn check_offload_device(config: &Config, device: DeviceKind) -> Result<(), EngineError> {
    let is_cpu = device == DeviceKind::Cpu;
    OPTIMIZER.check_device(&config.zero.offload_optimizer, is_cpu)?;
    PARAMETERS.check_device(&config.zero.offload_param, is_cpu)
}

/// The configured storage of parameters and optimizer state.
///
/// # Errors
/// As [`check_offload`], or an error of the driver.
pub(super) fn storage(config: &Config, options: TensorOptions) -> Result<Storage, EngineError> {
    let store = |what: Offloaded, offload| {
        Ok::<_, EngineError>(what.store(offload, config, &options.device)?.map(Arc::new))
    };
    Ok(Storage {
        optimizer: store(OPTIMIZER, &config.zero.offload_optimizer)?,
        parameters: store(PARAMETERS, &config.zero.offload_param)?,
        options,
        gradient_dtype: config.gradient_communication(),
    })
}

/// The directory for offload files without one of their own.
fn shared_directory(config: &Config) -> Option<&Path> {
    config.ulysses.offload_path.as_deref().map(Path::new)
}
