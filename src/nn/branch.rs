//! The place of a module in the residual stream.

use super::linear::LinearRows;
use super::{
    BackwardPass, ForwardPass, LayerError, Linear, Norm, NormConfig, ParameterList, token_dims, token_rows,
};
use candle_core::Tensor;
use std::ops::Range;
use ulysses_kernels::{elementwise, strided_copy};

/// `y = x + multiplier · after(module(before(x)))`, where both norms may be missing.
///
/// If nothing is between the module and the sum, the module adds to a copy of `x` in its last matmul.
#[derive(Debug)]
pub struct Branch {
    before: Option<Norm>,
    after: Option<Norm>,
    multiplier: f64,
    residual: Residual,
}

/// Who adds the residual: the input of a branch to its output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Residual {
    /// The module, in its last matmul if nothing is in between.
    Module,
    /// The branch, after the module.
    Branch,
    /// The caller of the module, which is called alone.
    Caller,
}

/// The tokens that a module gets: those of the residual stream, through the branch around it.
#[derive(Debug, Clone, Copy)]
pub struct BranchInput<'a> {
    /// The branch.
    pub branch: &'a Branch,
    /// The residual stream, `[batch, seq_local, hidden]`.
    pub x: &'a Tensor,
}

/// The gradients around a module in a backward pass.
///
/// # Shapes
/// Both: `[batch, seq_local, hidden]`.
#[derive(Debug, Clone, Copy)]
pub struct BranchGradients<'a> {
    /// The gradient of the module's output.
    pub dy: &'a Tensor,
    /// In a branch, also [beside](Branch::module_beside) another one: the gradient of the result, to which the module adds that of its
    /// input.
    ///
    /// Of a module [alone](Branch::residual_by_caller): overwritten with the gradient of its input. It may be the tensor `dy`.
    ///
    /// An [`Mlp`](super::Mlp) reads the gradient of its result from it instead of `dy`, since it joins its branch itself.
    pub dx: &'a Tensor,
}

/// Names of a branch's norms, which are parameters of the layer.
#[derive(Debug, Clone, Copy)]
pub struct BranchNorms {
    /// The norm of the module's input.
    pub before: Option<&'static str>,
    /// The norm of the module's output.
    pub after: Option<&'static str>,
}

impl Branch {
    /// Adds the norms, of `hidden_size` elements.
    pub fn new(
        parameters: &mut ParameterList,
        names: BranchNorms,
        hidden_size: usize,
        norm: NormConfig,
        multiplier: f64,
    ) -> Self {
        let mut add = |name| Norm::new(parameters, name, hidden_size, norm);
        Self {
            before: names.before.map(&mut add),
            after: names.after.map(add),
            multiplier,
            residual: Residual::Module,
        }
    }

    /// A module alone, `y = module(x)`: its caller adds the residual.
    pub fn residual_by_caller() -> Self {
        Self { before: None, after: None, multiplier: 1.0, residual: Residual::Caller }
    }

    /// The same branch around a module that is called [alone](Self::residual_by_caller): the branch adds the residual.
    #[must_use]
    pub fn residual_by_branch(self) -> Self {
        Self { residual: Residual::Branch, ..self }
    }

    /// The input of the module, from the residual stream `x`.
    pub fn input<'a>(&'a self, x: &'a Tensor) -> BranchInput<'a> {
        BranchInput { branch: self, x }
    }

    /// Whether the [branch](Self::residual_by_branch) adds the residual, not its module.
    pub fn has_residual_by_branch(&self) -> bool {
        self.residual == Residual::Branch
    }

    /// A module alone behind the same norm: beside that of another branch, of which the sum has both.
    #[must_use]
    pub fn module_beside(&self) -> Self {
        Self { before: self.before.clone(), ..Self::residual_by_caller() }
    }

    /// Nothing is between the module and the sum.
    fn is_plain(&self) -> bool {
        self.after.is_none() && self.multiplier == 1.0
    }

    fn is_fused(&self) -> bool {
        self.is_plain() && self.residual == Residual::Module
    }

    /// The gradient of the module's output depends on that output.
    pub fn needs_output(&self) -> bool {
        self.after.is_some()
    }

    /// The input of the module, for some tokens: `x` itself without a norm. Writes their reciprocal root mean squares to
    /// `rstd`, if there is one.
    ///
    /// # Shapes
    /// `x`, result: `[…, hidden]`, `rstd`: `[…]`.
    ///
    /// # Errors
    /// Shapes that do not fit.
    pub fn enter(&self, x: &Tensor, rstd: &Tensor, pass: &ForwardPass<'_>) -> Result<Tensor, LayerError> {
        match &self.before {
            Some(norm) => norm.forward(x, rstd, pass),
            None => Ok(x.clone()),
        }
    }

    /// Backward of [`enter`](Self::enter): adds to `dx`, the gradient of `x`; overwrites it if the module is called alone.
    ///
    /// # Errors
    /// Shapes that do not fit.
    pub fn backward_enter(
        &self,
        dy: &Tensor,
        x: &Tensor,
        rstd: &Tensor,
        dx: &Tensor,
        pass: &BackwardPass<'_>,
    ) -> Result<(), LayerError> {
        match &self.before {
            Some(norm) => norm.backward(dy, x, rstd, dx, true, pass),
            None if self.residual == Residual::Caller => Ok(strided_copy::copy(dy, dx)?),
            None => Ok(elementwise::accumulate(dx, dy)?),
        }
    }

    /// The tensor to which the module adds its output.
    ///
    /// # Errors
    /// A refused operation.
    pub fn open(&self, x: &Tensor, pass: &ForwardPass<'_>) -> Result<Tensor, LayerError> {
        if self.is_fused() {
            return copy(x, pass);
        }
        let output = pass.workspace().alloc(x.dims())?;
        elementwise::fill(&output, 0.0)?;
        Ok(output)
    }

    /// The result of the branch, for the tensor of [`open`](Self::open) with the module's output; the same tensor if
    /// nothing is in between.
    ///
    /// # Errors
    /// Shapes that do not fit.
    pub fn join(&self, x: &Tensor, output: &Tensor, pass: &ForwardPass<'_>) -> Result<Tensor, LayerError> {
        if self.is_fused() || self.residual == Residual::Caller {
            return Ok(output.clone());
        }
        let y = match &self.after {
            Some(norm) => {
                let rstd = rstd_for(output, pass)?;
                let y = norm.forward(output, &rstd, pass)?;
                pass.recycle([rstd]);
                y
            }
            None => copy(output, pass)?,
        };
        self.multiply(&y)?;
        elementwise::accumulate(&y, x)?;
        Ok(y)
    }

    /// The gradient of the module's output from that of the result; the same tensor if nothing is in between. `output` is
    /// called if there is a norm, and its result recycled.
    ///
    /// # Errors
    /// Shapes that do not fit.
    pub fn backward_join(
        &self,
        output: impl FnOnce() -> Result<Tensor, LayerError>,
        dy: &Tensor,
        pass: &BackwardPass<'_>,
    ) -> Result<Tensor, LayerError> {
        if self.is_plain() {
            return Ok(dy.clone());
        }
        let forward = &pass.forward;
        let dnormed = copy(dy, forward)?;
        self.multiply(&dnormed)?;
        let Some(norm) = &self.after else { return Ok(dnormed) };
        let output = output()?;
        let rstd = rstd_for(&output, forward)?;
        let doutput = norm.forward(&output, &rstd, forward)?;
        norm.backward(&dnormed, &output, &rstd, &doutput, false, pass)?;
        forward.recycle([rstd, dnormed, output]);
        Ok(doutput)
    }

    fn multiply(&self, output: &Tensor) -> Result<(), LayerError> {
        match self.multiplier == 1.0 {
            true => Ok(()),
            false => Ok(elementwise::scale(output, self.multiplier as f32)?),
        }
    }
}

impl BranchInput<'_> {
    /// Calls `module` with the input of each tile of tokens, and its range. Writes the tokens' reciprocal root mean squares to `rstd`.
    ///
    /// # Shapes
    /// `rstd`: `[batch, seq_local]`, inputs: `[tile, hidden]`.
    ///
    /// # Errors
    /// Shapes that do not fit, or those of `module`.
    pub(super) fn for_each_tile(
        self,
        rstd: &Tensor,
        mut module: impl FnMut(&Tensor, &Range<usize>) -> Result<(), LayerError>,
        pass: &ForwardPass<'_>,
    ) -> Result<(), LayerError> {
        for tile in pass.ctx.token_tiles() {
            let x = token_rows(self.x, &tile)?;
            let normed = self.branch.enter(&x, &token_rows(rstd, &tile)?, pass)?;
            module(&normed, &tile)?;
            recycle_unless(normed, &x, pass);
        }
        Ok(())
    }

    /// Projects the inputs of the module, tile by tile: writes the output of each layer.
    ///
    /// # Shapes
    /// Outputs: `[batch, seq_local, …]`.
    ///
    /// # Errors
    /// Shapes that do not fit.
    pub(super) fn project(
        self,
        outputs: &[(&Linear, &Tensor)],
        pass: &ForwardPass<'_>,
    ) -> Result<(), LayerError> {
        let rstd = pass.workspace().alloc_f32(token_dims(self.x))?;
        let weights = weights(outputs, pass)?;
        let project = |normed: &Tensor, tile: &Range<usize>| {
            let mut outputs = weights.iter().zip(outputs);
            outputs.try_for_each(|(weights, (_, y))| {
                weights.forward(normed, &token_rows(y, tile)?, false, pass.workspace())
            })
        };
        self.for_each_tile(&rstd, project, pass)?;
        pass.recycle([rstd]);
        Ok(())
    }

    /// Backward of [`project`](Self::project), from the gradients of the outputs: adds to those of the layers, the norm and the
    /// residual stream `dx`; overwrites the last one if the module is called alone.
    ///
    /// # Errors
    /// As [`project`](Self::project).
    pub(super) fn backward_project(
        self,
        doutputs: &[(&Linear, &Tensor)],
        dx: &Tensor,
        pass: &BackwardPass<'_>,
    ) -> Result<(), LayerError> {
        let (forward, x) = (&pass.forward, self.x);
        let rstd = forward.workspace().alloc_f32(token_dims(x))?;
        let dnormed = forward.workspace().alloc(x.dims())?;
        let weights = weights(doutputs, forward)?;
        let backward = |normed: &Tensor, tile: &Range<usize>| {
            let dx = token_rows(&dnormed, tile)?;
            for (index, (linear, dy)) in doutputs.iter().enumerate() {
                let dy = token_rows(dy, tile)?;
                linear.backward_weight(&dy, normed, pass)?;
                weights[index].backward_input(&dy, &dx, index > 0)?;
            }
            Ok(())
        };
        self.for_each_tile(&rstd, backward, forward)?;
        self.branch.backward_enter(&dnormed, x, &rstd, dx, pass)?;
        forward.recycle([dnormed, rstd]);
        Ok(())
    }
}

/// The weights of layers, read once for all tiles: those that are interleaved in a parameter are copied.
fn weights(layers: &[(&Linear, &Tensor)], pass: &ForwardPass<'_>) -> Result<Vec<LinearRows>, LayerError> {
    layers.iter().map(|(linear, _)| linear.rows(&(0..linear.num_outputs()), pass)).collect()
}

/// Recycles a tensor, unless it is `other`.
pub(crate) fn recycle_unless(tensor: Tensor, other: &Tensor, pass: &ForwardPass<'_>) {
    if tensor.id() != other.id() {
        pass.recycle([tensor]);
    }
}

fn copy(x: &Tensor, pass: &ForwardPass<'_>) -> Result<Tensor, LayerError> {
    let copy = pass.workspace().alloc(x.dims())?;
    strided_copy::copy(x, &copy)?;
    Ok(copy)
}

/// One number per token.
fn rstd_for(x: &Tensor, pass: &ForwardPass<'_>) -> Result<Tensor, LayerError> {
    Ok(pass.workspace().alloc_f32(&x.dims()[..x.rank() - 1])?)
}
