//! Reassembles tensors that are sharded over the mesh, for checks.

use super::{Engine, EngineError};
use crate::comm::ProcessGroupExt;
use candle_core::{DType, Device, Tensor};

impl Engine {
    /// Gathers a per-token tensor of the global batch on every rank. Collective.
    ///
    /// # Shapes
    /// `local`: `[micro_batch, seq_local, width]` → `[micro_batch · dp, seq, width]`.
    ///
    /// # Errors
    /// Failed communication.
    pub fn assemble_tokens(&self, local: &Tensor) -> Result<Tensor, EngineError> {
        let (batch, _, width) = local.dims3()?;
        let local = ulysses_kernels::tensor::to_vec::<f32>(&local.to_dtype(DType::F32)?)?;
        let shards = self.groups.sp.all_gather_varied(&local)?;
        let shards = shards.into_iter().map(|shard| {
            let seq_len_local = shard.len() / (batch * width).max(1);
            Tensor::from_vec(shard, (batch, seq_len_local, width), &Device::Cpu)
        });
        let sequences = Tensor::cat(&shards.collect::<candle_core::Result<Vec<_>>>()?, 1)?;
        let seq_len = sequences.dim(1)?;
        let sharding = self.config.seq_sharding();
        let in_rank_order = (0..sharding.sp_size())
            .flat_map(|rank| sharding.tokens(seq_len, rank).positions().collect::<Vec<_>>());
        let mut index = vec![0; seq_len];
        in_rank_order.zip(0u32..).for_each(|(position, at)| index[position] = at);
        let sequences = sequences.index_select(&Tensor::new(index, &Device::Cpu)?, 1)?;
        let all = self.groups.dp.all_gather_values(&ulysses_kernels::tensor::to_vec::<f32>(&sequences)?)?;
        Ok(Tensor::from_vec(all, (batch * self.config.mesh.dp_size, seq_len, width), &Device::Cpu)?)
    }
}
