//! RMSNorm (arXiv 1910.07467) and LayerNorm (arXiv 1607.06450).

use super::heads::one_each;
use super::tensor_parallel::are_shared;
use super::{
    BackwardPass, ForwardPass, Init, LayerError, Parameter, ParameterList, add_bias, add_bias_gradient,
};
use candle_core::Tensor;
use std::ops::Range;
use ulysses_kernels::elementwise;
use ulysses_kernels::rms_norm::{self, Gain, WholeRows};

/// The constants of a model's norms.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NormConfig {
    /// Added to the mean square.
    pub eps: f64,
    /// Added to the weight: 0, or 1 for weights around 0.
    pub offset: f64,
    /// Whether the mean is subtracted first: LayerNorm.
    pub centered: bool,
    /// Whether a bias is added last.
    pub bias: bool,
}

impl From<f64> for NormConfig {
    fn from(eps: f64) -> Self {
        Self { eps, offset: 0.0, centered: false, bias: false }
    }
}

impl NormConfig {
    /// Initial weights: a gain of 1.
    pub fn init(&self) -> Init {
        if self.offset == 0.0 { Init::Ones } else { Init::Zeros }
    }

    /// The gain of a weight.
    pub fn gain<'a>(&self, weight: &'a Tensor) -> Gain<'a> {
        Gain { weight, offset: self.offset as f32, centered: self.centered }
    }
}

/// `y = x / sqrt(mean(x²) + eps) · (offset + w) + b`, over the last dimension; of x without its mean if it is centered.
#[derive(Debug, Clone)]
pub struct Norm {
    /// `None` for a gain of 1.
    weight: Option<Parameter>,
    bias: Option<Parameter>,
    config: NormConfig,
    /// Its elements of the weight, if these are not all.
    elements: Option<Range<usize>>,
    part: Option<RowPart>,
}

/// Rows of which one rank of tp has some elements.
#[derive(Debug, Clone)]
struct RowPart {
    /// Elements of a whole row.
    width: usize,
    /// Whether no lower rank has them too. Sums over whole rows count them once.
    is_first: bool,
}

impl Norm {
    /// Adds the parameter `name.weight`, `[size]`, and `name.bias` if there is one.
    pub fn new(parameters: &mut ParameterList, name: &str, size: usize, config: NormConfig) -> Self {
        let weight = Some(parameters.add(&format!("{name}.weight"), [size], config.init()));
        let bias = config.bias.then(|| parameters.add(&format!("{name}.bias"), [size], Init::Zeros));
        Self { weight, bias, config, elements: None, part: None }
    }

    /// Norms with one parameter: each has as many elements of it.
    pub(super) fn group(
        parameters: &mut ParameterList,
        name: &str,
        [groups, size]: [usize; 2],
        config: NormConfig,
    ) -> Vec<Self> {
        let all = Self::new(parameters, name, groups * size, config);
        let elements = |group: usize| (groups > 1).then(|| group * size..(group + 1) * size);
        (0..groups).map(|group| Self { elements: elements(group), ..all.clone() }).collect()
    }

    /// Keeps the norms of one rank of tp, of those of every rank.
    pub(super) fn divide_group(
        parameters: &mut ParameterList,
        norms: &mut Vec<Self>,
        ranks: &[Range<usize>],
        rank: usize,
    ) {
        let elements: Vec<_> = norms.iter().filter_map(|norm| norm.elements.clone()).collect();
        let of_rank = |own: &Range<usize>| elements[own.clone()].to_vec();
        if let Some(weight) = norms.first().and_then(|norm| norm.weight) {
            parameters.shard(weight, 0, ranks.iter().map(of_rank).collect(), rank);
        }
        let own = ranks[rank].clone();
        norms.truncate(own.len());
        norms.iter_mut().zip(elements).for_each(|(norm, elements)| norm.elements = Some(elements));
    }

    /// A norm without parameters.
    pub fn without_weight(eps: f64) -> Self {
        Self { weight: None, bias: None, config: eps.into(), elements: None, part: None }
    }

    /// The weights of this rank's rows, of which each has `size` elements.
    fn weights(&self, size: usize, pass: &ForwardPass<'_>) -> Result<Tensor, LayerError> {
        let Some(weight) = self.weight else {
            let ones = pass.workspace().alloc(size)?;
            elementwise::fill(&ones, 1.0)?;
            return Ok(ones);
        };
        self.own(&pass[weight])
    }

    /// Recycles [`weights`](Self::weights) that are no parameter.
    fn recycle(&self, weights: Tensor, pass: &ForwardPass<'_>) {
        if self.weight.is_none() {
            pass.recycle([weights]);
        }
    }

    /// Keeps the elements of one rank of tp, of those of every rank. The weight stays whole if ranks share elements; their
    /// gradients are then partial sums, as those of the weight.
    ///
    /// # Errors
    /// A norm that is centered, or has a bias or no weight.
    pub(super) fn divide(
        &mut self,
        parameters: &mut ParameterList,
        ranks: &[Range<usize>],
        rank: usize,
    ) -> Result<(), LayerError> {
        let Some(weight) = self.weight.filter(|_| !self.config.centered && self.bias.is_none()) else {
            return Err(LayerError::NoTensorParallelism { layer: parameters.layer().to_owned() });
        };
        let own = ranks[rank].clone();
        let is_shared = are_shared(ranks);
        let elements = if is_shared { own.clone() } else { 0..own.len() };
        if !is_shared {
            parameters.shard(weight, 0, one_each(ranks), rank);
        }
        let width = ranks.iter().map(|own| own.end).max().unwrap_or_default();
        self.elements = Some(elements);
        self.part = Some(RowPart { width, is_first: !ranks[..rank].contains(&own) });
        Ok(())
    }

    /// The elements of weights, or of their gradients, that are its own.
    fn own(&self, weights: &Tensor) -> Result<Tensor, LayerError> {
        match &self.elements {
            None => Ok(weights.clone()),
            Some(elements) => Ok(weights.narrow(0, elements.start, elements.len())?),
        }
    }

    /// Returns the normalized `x`, and writes the reciprocal root mean squares to `rstd`. Collective over tp if that divides the
    /// rows.
    ///
    /// # Shapes
    /// `x`, result: `[…, size]`, `rstd`: `[…]`.
    ///
    /// # Errors
    /// Shapes that do not fit, or failed communication.
    pub fn forward(&self, x: &Tensor, rstd: &Tensor, pass: &ForwardPass<'_>) -> Result<Tensor, LayerError> {
        let size = x.dims().last().copied().unwrap_or_default();
        let (y, weight) = (pass.workspace().alloc(x.dims())?, self.weights(size, pass)?);
        let gain = self.config.gain(&weight);
        match &self.part {
            None => rms_norm::forward(x, gain, self.config.eps, &y, rstd)?,
            Some(part) => {
                let sums = pass.workspace().alloc_f32(rstd.dims())?;
                rms_norm::squares(x, &sums)?;
                if !part.is_first {
                    elementwise::fill(&sums, 0.0)?;
                }
                pass.ctx.token_exchange(pass.layer)?.all_reduce(&sums)?;
                let whole = WholeRows { width: part.width, sums: &sums };
                rms_norm::forward_part(x, gain, self.config.eps, whole, &y, rstd)?;
                pass.recycle([sums]);
            }
        }
        self.recycle(weight, pass);
        if let Some(bias) = self.bias {
            add_bias(&pass[bias], &y, true, pass.workspace())?;
        }
        Ok(y)
    }

    /// Adds to the gradients of weight and bias, unless they are frozen, and writes the gradient of `x`, or adds to it. Collective
    /// over tp if that divides the rows.
    ///
    /// # Shapes
    /// `dy`, `x`, `dx`: `[…, size]`; `rstd`: `[…]`, as the forward pass wrote it.
    ///
    /// # Errors
    /// Shapes that do not fit, or failed communication.
    pub fn backward(
        &self,
        dy: &Tensor,
        x: &Tensor,
        rstd: &Tensor,
        dx: &Tensor,
        accumulate: bool,
        pass: &BackwardPass<'_>,
    ) -> Result<(), LayerError> {
        if let Some(dbias) = self.bias.and_then(|bias| pass.gradient(bias)) {
            add_bias_gradient(dy, dbias, pass.ctx().workspace())?;
        }
        let forward = &pass.forward;
        let weight = self.weights(x.dims().last().copied().unwrap_or_default(), forward)?;
        let dweight = self.weight.and_then(|weight| pass.gradient(weight));
        let dweight = dweight.map(|gradient| self.own(gradient)).transpose()?;
        let gain = self.config.gain(&weight);
        let Some(part) = &self.part else {
            rms_norm::backward(dy, x, gain, rstd, dx, accumulate, dweight.as_ref())?;
            self.recycle(weight, forward);
            return Ok(());
        };
        let sums = forward.workspace().alloc_f32(rstd.dims())?;
        rms_norm::products(dy, x, gain, &sums)?;
        forward.ctx.token_exchange(forward.layer)?.all_reduce(&sums)?;
        if !part.is_first {
            // The ranks that share elements have partial sums of their gradients: one of them has this term.
            elementwise::fill(&sums, 0.0)?;
        }
        let whole = WholeRows { width: part.width, sums: &sums };
        let gradients = rms_norm::Gradients { dx, accumulate_dx: accumulate, dweight: dweight.as_ref() };
        rms_norm::backward_part(dy, x, gain, rstd, whole, &gradients)?;
        forward.recycle([sums]);
        Ok(())
    }
}
