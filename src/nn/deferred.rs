//! Gradients of weights that a later pass computes.

use super::linear::WeightPart;
use super::{LayerError, Parameter};
use candle_core::{DType, Tensor};
use parking_lot::Mutex;
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

/// `dweight += dyᵀ·x`, of a part of a weight.
struct WeightProduct {
    weight: Parameter,
    part: WeightPart,
    /// `[tokens, out]`
    dy: Tensor,
    /// `[tokens, in]`
    x: Tensor,
}

impl DeferredGradients {
    pub(super) fn defer(
        &self,
        (weight, part): (Parameter, WeightPart),
        [dy, x]: [&Tensor; 2],
        ws: &Workspace,
    ) -> Result<(), LayerError> {
        let [dy, x] = [copy_of(dy, ws)?, copy_of(x, ws)?];
        self.products.lock().push(WeightProduct { weight, part, dy, x });
        Ok(())
    }

    /// Adds the products to the gradients, once, in the order in which the backward pass came to them. `grads` are those of the
    /// layer, as in [`Layer::backward`](super::Layer::backward).
    ///
    /// # Errors
    /// A refused operation.
    pub fn add_to(&self, grads: &[Option<Tensor>], ws: &Workspace) -> Result<(), LayerError> {
        for WeightProduct { weight, part, dy, x } in std::mem::take(&mut *self.products.lock()) {
            if let Some(gradient) = weight.gradient_in(grads) {
                part.add_product(gradient, [&dy, &x], ws)?;
            }
            [dy, x].into_iter().for_each(|operand| ws.recycle(operand));
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
    Ok(copy)
}
