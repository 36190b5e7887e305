//! Gradients of weights that a later pass computes.

use super::LayerError;
use candle_core::{DType, Tensor, TensorId};
use parking_lot::Mutex;
use ulysses_kernels::device::dry;
use ulysses_kernels::{Workspace, strided_copy};

/// The products of a layer's backward pass that are still to be added to the gradients of its linear layers: the schedule
/// `zero_bubble` of a pipeline computes them when the previous stage has its gradient already.
///
/// Their operands are copies, since layers recycle and overwrite theirs within the backward pass. They come from the workspace
/// and return to it.
#[derive(Default)]
pub struct DeferredGradients {
    products: Mutex<Vec<WeightProduct>>,
}

/// Adds the product of `dy` and `x` to one of a layer's gradients.
type AddProduct =
    dyn FnOnce(&[Option<Tensor>], &Tensor, &Tensor, &Workspace) -> Result<(), LayerError> + Send;

/// `dweight += dyᵀ·x`, of a part of a weight.
struct WeightProduct {
    add: Box<AddProduct>,
    /// `[tokens, out]`
    dy: Tensor,
    /// `[tokens, in]`, shared by adjacent products of one input.
    x: Tensor,
    /// The tensor that `x` is a copy of.
    source: TensorId,
}

impl DeferredGradients {
    /// Keeps a product for later. Layers with the same input pass the same tensor, unchanged, one after another.
    pub(super) fn defer(
        &self,
        add: Box<AddProduct>,
        dy: &Tensor,
        x: &Tensor,
        ws: &Workspace,
    ) -> Result<(), LayerError> {
        let mut products = self.products.lock();
        let (dy, source) = (copy_of(dy, ws)?, x.id());
        let x = match products.last().filter(|last| last.source == source) {
            Some(last) => last.x.clone(),
            None => copy_of(x, ws)?,
        };
        products.push(WeightProduct { add, dy, x, source });
        Ok(())
    }

    /// Adds the products to the gradients, once, in the order in which the backward pass came to them. `grads` are those of the
    /// layer, as in [`Layer::backward`](super::Layer::backward).
    ///
    /// # Errors
    /// A refused operation.
    pub fn add_to(&self, grads: &[Option<Tensor>], ws: &Workspace) -> Result<(), LayerError> {
        let mut products = std::mem::take(&mut *self.products.lock()).into_iter().peekable();
        while let Some(WeightProduct { add, dy, x, source }) = products.next() {
            add(grads, &dy, &x, ws)?;
            ws.recycle(dy);
            if products.peek().is_none_or(|next| next.source != source) {
                ws.recycle(x);
            }
        }
        Ok(())
    }
}

fn copy_of(tensor: &Tensor, ws: &Workspace) -> Result<Tensor, LayerError> {
    let copy = match tensor.dtype() {
        DType::F32 => ws.alloc_f32(tensor.dims())?,
        _ => ws.alloc(tensor.dims())?,
    };
    strided_copy::copy(tensor, &copy)?;
    dry::report_elementwise([tensor, &copy]);
    Ok(copy)
}
