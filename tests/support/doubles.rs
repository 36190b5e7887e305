//! Wrong implementations at the library's trait seams. The suite must notice each.

use candle_core::{DType, Tensor};
use std::sync::Arc;
use ulysses::comm::{CommError, GroupStats, Pending, ProcessGroup, ReduceOp, StridedPlan};
use ulysses::ops::Workspace;
use ulysses::ops::attention::{Attention, AttentionError, FlashAttention, Geometry, SavedAttention};

/// What a [`FaultyGroup`] does to the f32 sums that it is asked for: the gradients.
#[derive(Debug, Clone, Copy)]
pub enum Fault {
    /// Leaves every rank with its own (part).
    SkipsTheSum,
    /// Multiplies the sum by the number of ranks (DeepSpeed at stages 0 to 2).
    ScalesByWorldSize,
}

/// A process group that does everything right but summing gradients.
#[derive(Debug)]
pub struct FaultyGroup {
    inner: Arc<dyn ProcessGroup>,
    fault: Fault,
}

impl FaultyGroup {
    pub fn wrap(inner: Arc<dyn ProcessGroup>, fault: Fault) -> Arc<dyn ProcessGroup> {
        Arc::new(Self { inner, fault })
    }
}

impl ProcessGroup for FaultyGroup {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn global_ranks(&self) -> &[usize] {
        self.inner.global_ranks()
    }

    fn start_all_reduce(&self, tensor: &Tensor, op: ReduceOp) -> Result<Pending, CommError> {
        if tensor.dtype() != DType::F32 {
            return self.inner.start_all_reduce(tensor, op);
        }
        match self.fault {
            Fault::SkipsTheSum => Ok(Pending::ready()),
            Fault::ScalesByWorldSize => {
                let pending = self.inner.start_all_reduce(tensor, op)?;
                let (sum, factor) = (tensor.clone(), self.world_size() as f32);
                Ok(pending.then(move || {
                    ulysses::ops::reduce::scale(&sum, factor)
                        .map_err(|error| CommError::Tensor(error.to_string()))
                }))
            }
        }
    }

    fn start_reduce_scatter(
        &self,
        input: &Tensor,
        output: &Tensor,
        op: ReduceOp,
    ) -> Result<Pending, CommError> {
        match self.fault {
            Fault::SkipsTheSum => {
                let own = input.narrow(0, self.rank() * output.elem_count(), output.elem_count())?;
                ulysses::ops::reduce::copy(output, &own)
                    .map_err(|error| CommError::Tensor(error.to_string()))?;
                Ok(Pending::ready())
            }
            Fault::ScalesByWorldSize => self.inner.start_reduce_scatter(input, output, op),
        }
    }

    fn start_all_gather(&self, input: &Tensor, output: &Tensor) -> Result<Pending, CommError> {
        self.inner.start_all_gather(input, output)
    }

    fn start_all_to_all(
        &self,
        input: &Tensor,
        output: &Tensor,
        send_counts: &[usize],
        recv_counts: &[usize],
    ) -> Result<Pending, CommError> {
        self.inner.start_all_to_all(input, output, send_counts, recv_counts)
    }

    fn start_all_to_all_strided(
        &self,
        inputs: &[Tensor],
        outputs: &[Tensor],
        plan: &Arc<StridedPlan>,
    ) -> Result<Pending, CommError> {
        self.inner.start_all_to_all_strided(inputs, outputs, plan)
    }

    fn start_broadcast(&self, tensor: &Tensor, root: usize) -> Result<Pending, CommError> {
        self.inner.start_broadcast(tensor, root)
    }

    fn start_send(&self, tensor: &Tensor, dst: usize) -> Result<Pending, CommError> {
        self.inner.start_send(tensor, dst)
    }

    fn start_recv(&self, tensor: &Tensor, src: usize) -> Result<Pending, CommError> {
        self.inner.start_recv(tensor, src)
    }

    fn start_barrier(&self) -> Result<Pending, CommError> {
        self.inner.start_barrier()
    }

    fn split(
        &self,
        name: &str,
        color: Option<usize>,
        key: usize,
    ) -> Result<Option<Arc<dyn ProcessGroup>>, CommError> {
        self.inner.split(name, color, key)
    }

    fn stats(&self) -> GroupStats {
        self.inner.stats()
    }

    fn abort(&self, reason: &str) {
        self.inner.abort(reason);
    }
}

/// Runs the right attention on a wrong geometry.
pub struct WrongGeometry(pub fn(&Geometry) -> Geometry);

impl WrongGeometry {
    /// Attends across documents.
    pub fn ignores_cu_seqlens() -> Self {
        Self(|geometry| {
            let whole_rows = geometry.cu_seqlens().iter().map(|row| vec![0, row[row.len() - 1]]).collect();
            rebuilt(geometry, whole_rows, geometry.q_to_kv().to_vec())
        })
    }

    /// Takes the KV head to be `h / group`, as if heads were shared evenly.
    pub fn divides_heads_by_group() -> Self {
        Self(|geometry| {
            let num_heads = geometry.q_to_kv().len();
            let num_kv_heads = geometry.q_to_kv().iter().max().map_or(1, |kv| kv + 1);
            let group = num_heads.div_ceil(num_kv_heads);
            let q_to_kv = (0..num_heads).map(|head| head / group).collect();
            rebuilt(geometry, geometry.cu_seqlens().to_vec(), q_to_kv)
        })
    }
}

fn rebuilt(geometry: &Geometry, cu_seqlens: Vec<Vec<u32>>, q_to_kv: Vec<usize>) -> Geometry {
    let (q, kv) = (geometry.q_positions().clone(), geometry.kv_positions().clone());
    Geometry::new(q, kv, cu_seqlens, q_to_kv, geometry.window()).expect("a valid, if wrong, geometry")
}

impl Attention for WrongGeometry {
    fn forward(
        &self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        geometry: &Geometry,
        workspace: &Workspace,
    ) -> Result<(Tensor, SavedAttention), AttentionError> {
        FlashAttention.forward(q, k, v, &self.0(geometry), workspace)
    }

    fn backward(
        &self,
        saved: SavedAttention,
        dout: &Tensor,
        geometry: &Geometry,
        workspace: &Workspace,
    ) -> Result<(Tensor, Tensor, Tensor), AttentionError> {
        FlashAttention.backward(saved, dout, &self.0(geometry), workspace)
    }
}
