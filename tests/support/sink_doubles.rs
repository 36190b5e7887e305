//! Layers with faulty sinks. The suite must detect each.

use super::mesh_run::llama;
use candle_core::Tensor;
use ulysses::model::{Model, ModelConfig};
use ulysses::nn::{Layer, LayerContext, LayerError, ParameterSpec, Saved};

/// A fault in the sinks of every layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SinkFault {
    None,
    /// They do not take part in the softmax.
    LeftOut,
    /// They take part twice: in the softmax of each of two blocks of a ring.
    OncePerHop,
    /// Their gradient is lost.
    NoGradient,
    /// Their gradient is added twice.
    GradientTwice,
}

/// The model of a description, with a fault in its sinks.
pub fn with_fault(config: &ModelConfig, fault: SinkFault) -> Model {
    let model = llama(config);
    let faulty = |inner| -> Box<dyn Layer> { Box::new(FaultySinks { inner, fault }) };
    Model { layers: model.layers.into_iter().map(faulty).collect(), ..model }
}

/// A layer with a fault in its sinks.
struct FaultySinks {
    inner: Box<dyn Layer>,
    fault: SinkFault,
}

impl FaultySinks {
    /// The place of the sinks among the parameters.
    fn sinks(&self) -> usize {
        let is_sinks = |spec: &ParameterSpec| spec.name.ends_with("self_attn.sinks");
        self.parameters().iter().position(is_sinks).expect("a layer with sinks")
    }

    /// The parameters as the layer uses them.
    fn used(&self, params: &[Tensor]) -> candle_core::Result<Vec<Tensor>> {
        let (at, mut params) = (self.sinks(), params.to_vec());
        match self.fault {
            SinkFault::LeftOut => params[at] = params[at].affine(1.0, -1e4)?,
            SinkFault::OncePerHop => params[at] = params[at].affine(1.0, 2f64.ln())?,
            SinkFault::None | SinkFault::NoGradient | SinkFault::GradientTwice => {}
        }
        Ok(params)
    }
}

impl Layer for FaultySinks {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn parameters(&self) -> &[ParameterSpec] {
        self.inner.parameters()
    }

    fn forward(
        &self,
        params: &[Tensor],
        x: &Tensor,
        ctx: &LayerContext,
    ) -> Result<(Tensor, Saved), LayerError> {
        self.inner.forward(&self.used(params)?, x, ctx)
    }

    fn backward(
        &self,
        params: &[Tensor],
        saved: Saved,
        dy: Tensor,
        grads: &[Option<Tensor>],
        ctx: &LayerContext,
    ) -> Result<Tensor, LayerError> {
        let (at, mut own) = (self.sinks(), grads.to_vec());
        if self.fault == SinkFault::NoGradient {
            own[at] = None;
        }
        let dx = self.inner.backward(&self.used(params)?, saved, dy, &own, ctx)?;
        if let (SinkFault::GradientTwice, Some(gradient)) = (self.fault, &grads[at]) {
            ulysses::kernels::elementwise::scale(gradient, 2.0)?;
        }
        Ok(dx)
    }
}
