//! The sum over the ranks of tp as one candle autograd node.

use super::TokenExchange;
use super::attention_node::Computed;
#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::{CpuStorage, CustomOp1, Error, Layout, Result, Shape, Tensor};
use std::sync::Arc;

/// The sum of the ranks' tensors, on every rank. Collective, and so is its backward pass.
///
/// Each rank goes on with all tokens, but only its own enter its loss. So the gradient of a partial sum is the sum of the ranks'
/// gradients. (In Megatron-LM every rank has the whole gradient here: f and g of arXiv 1909.08053, section 3.)
pub(super) fn autograd_sum(exchange: &Arc<dyn TokenExchange>, partial: &Tensor) -> Result<Tensor> {
    let op = SumOp { exchange: exchange.clone(), computed: Computed::new(sum(&**exchange, partial)?) };
    partial.apply_op1(op)
}

fn sum(exchange: &dyn TokenExchange, partial: &Tensor) -> Result<Tensor> {
    let sum = partial.detach().contiguous()?.copy()?;
    exchange.all_reduce(&sum).map_err(Error::wrap)?;
    Ok(sum)
}

struct SumOp {
    exchange: Arc<dyn TokenExchange>,
    computed: Computed,
}

impl CustomOp1 for SumOp {
    fn name(&self) -> &'static str {
        "sum over tp"
    }

    fn cpu_fwd(&self, _partial: &CpuStorage, _layout: &Layout) -> Result<(CpuStorage, Shape)> {
        self.computed.take_cpu(self.name())
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, _partial: &CudaStorage, _layout: &Layout) -> Result<(CudaStorage, Shape)> {
        self.computed.take_cuda(self.name())
    }

    fn bwd(&self, _partial: &Tensor, _sum: &Tensor, dsum: &Tensor) -> Result<Option<Tensor>> {
        sum(&*self.exchange, dsum).map(Some)
    }
}
