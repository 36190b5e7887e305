//! The files that a config asks for, and checkpoints of layers in one of them.

use super::EngineError;
use crate::config::{Config, Offload};
use crate::offload::{Extent, OffloadError, OffloadFile, Use};
use crate::ops::Workspace;
use crate::tensor::TensorOptions;
use crate::zero::Storage;
use candle_core::{Device, Shape, Tensor};
use std::path::Path;
use std::sync::Arc;

const CHECKPOINTS: Use = Use { holds: "checkpoints of activations", key: "ulysses.offload_path" };
const OPTIMIZER: Use = Use { holds: "optimizer state", key: "zero_optimization.offload_optimizer.nvme_path" };
const PARAMETERS: Use = Use { holds: "parameters", key: "zero_optimization.offload_param.nvme_path" };

/// One rank's file of checkpoints of layers, between their forward and their backward pass.
pub(super) struct CheckpointFile(OffloadFile);

/// A checkpoint in the file.
pub(super) struct OffloadedTensor {
    extent: Extent,
    shape: Shape,
}

impl CheckpointFile {
    /// The file that the config asks for. Each rank has its own.
    ///
    /// # Errors
    /// A directory that cannot be written to, or tensors on a device.
    pub(super) fn of(config: &Config, device: &Device) -> Result<Option<Self>, EngineError> {
        let (key, what) = ("activation_checkpointing.cpu_checkpointing", "checkpoints");
        if !config.memory.offload_checkpoints {
            return Ok(None);
        }
        if !device.is_cpu() {
            return Err(EngineError::OffloadFromDevice { key, what, off: "false" });
        }
        Ok(Some(Self(OffloadFile::create(CHECKPOINTS, shared_directory(config))?)))
    }

    /// Starts to write a tensor, which nobody else may hold. The one before is written and freed first: each is one
    /// hidden state more that the forward pass holds, and recycled it would be spare when the backward pass needs the
    /// memory.
    ///
    /// # Errors
    /// An earlier write that failed.
    pub(super) fn store(&self, tensor: Tensor) -> Result<OffloadedTensor, OffloadError> {
        self.0.settle()?;
        let extent = self.0.reserve(crate::tensor::bytes(&tensor));
        let shape = tensor.shape().clone();
        self.0.write(&extent, tensor)?;
        Ok(OffloadedTensor { extent, shape })
    }

    /// Starts to bring tensors to where [`load`](Self::load) finds them fast.
    ///
    /// # Errors
    /// When the file's thread has ended.
    pub(super) fn read_ahead(&self, tensors: &[OffloadedTensor]) -> Result<(), OffloadError> {
        tensors.iter().try_for_each(|stored| self.0.read_ahead(&stored.extent))
    }

    /// Reads a tensor back and frees its extent.
    ///
    /// # Errors
    /// A write or read that failed.
    pub(super) fn load(&self, stored: OffloadedTensor, workspace: &Workspace) -> Result<Tensor, EngineError> {
        self.0.settle()?;
        let OffloadedTensor { extent, shape } = stored;
        let tensor = workspace.take(shape)?;
        self.0.read(&extent, &tensor)?;
        Ok(tensor)
    }
}

/// Whether every file that the config asks for can be made, before any rank needs it.
///
/// # Errors
/// A directory that cannot be written to.
pub fn check_offload(config: &Config) -> Result<(), OffloadError> {
    let memory = &config.memory;
    if memory.offload_checkpoints {
        OffloadFile::create(CHECKPOINTS, shared_directory(config))?;
    }
    state_file(config, &memory.offload_optimizer, OPTIMIZER)?;
    state_file(config, &memory.offload_parameters, PARAMETERS)?;
    Ok(())
}

/// Where the config wants parameters and optimizer state to be.
///
/// # Errors
/// A directory that cannot be written to, or tensors on a device.
pub(super) fn storage(config: &Config, options: TensorOptions) -> Result<Storage, EngineError> {
    let file = |offload: &Offload, use_: Use, key| {
        if *offload != Offload::None && !options.device.is_cpu() {
            return Err(EngineError::OffloadFromDevice { key, what: use_.holds, off: "\"none\"" });
        }
        Ok(state_file(config, offload, use_)?.map(Arc::new))
    };
    let memory = &config.memory;
    Ok(Storage {
        optimizer: file(&memory.offload_optimizer, OPTIMIZER, "zero_optimization.offload_optimizer.device")?,
        parameters: file(&memory.offload_parameters, PARAMETERS, "zero_optimization.offload_param.device")?,
        options,
    })
}

/// The file that state is offloaded to, if it is.
fn state_file(config: &Config, offload: &Offload, use_: Use) -> Result<Option<OffloadFile>, OffloadError> {
    let Offload::Nvme(path) = offload else { return Ok(None) };
    let directory = path.as_deref().map(Path::new).or(shared_directory(config));
    OffloadFile::create(use_, directory).map(Some)
}

/// Where files go that have no directory of their own.
fn shared_directory(config: &Config) -> Option<&Path> {
    config.memory.offload_path.as_deref().map(Path::new)
}
