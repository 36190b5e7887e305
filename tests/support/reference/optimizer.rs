//! Optimizers with the formulas of their papers or of torch, and clipping, one tensor at a time in f64.

use super::weights::{Tensors, Weights};
use anyhow::{Context, Result};
use candle_core::{Tensor, Var};
use serde::Deserialize;

/// Replaces the weights by those after one update.
pub trait Optimizer {
    fn step(&mut self, weights: &mut Weights, grads: &Tensors) -> Result<()>;
}

/// `torch.optim.SGD`: decay is added to the gradient, and the first momentum is the gradient itself.
pub struct Sgd {
    pub lr: f64,
    pub momentum: f64,
    pub weight_decay: f64,
    velocity: Tensors,
}

impl Sgd {
    pub fn new(lr: f64, momentum: f64, weight_decay: f64) -> Self {
        Self { lr, momentum, weight_decay, velocity: Tensors::new() }
    }
}

impl Optimizer for Sgd {
    fn step(&mut self, weights: &mut Weights, grads: &Tensors) -> Result<()> {
        for (name, weight) in weights {
            let p = weight.as_detached_tensor();
            let g = (gradient(grads, name)? + (&p * self.weight_decay)?)?;
            let velocity = match self.velocity.get(name) {
                Some(velocity) => ((velocity * self.momentum)? + g)?,
                None => g,
            };
            *weight = Var::from_tensor(&(p - (&velocity * self.lr)?)?)?;
            self.velocity.insert(name.clone(), velocity);
        }
        Ok(())
    }
}

/// Hyperparameters of [`AdamW`].
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
pub struct AdamWConfig {
    pub lr: f64,
    pub betas: (f64, f64),
    pub eps: f64,
    pub weight_decay: f64,
}

/// `torch.optim.AdamW`, decay on every parameter.
pub struct AdamW {
    pub config: AdamWConfig,
    num_steps: i32,
    first_moments: Tensors,
    second_moments: Tensors,
}

impl AdamW {
    pub fn new(config: AdamWConfig) -> Self {
        Self { config, num_steps: 0, first_moments: Tensors::new(), second_moments: Tensors::new() }
    }
}

impl Optimizer for AdamW {
    fn step(&mut self, weights: &mut Weights, grads: &Tensors) -> Result<()> {
        let AdamWConfig { lr, betas: (beta1, beta2), eps, weight_decay } = self.config;
        self.num_steps += 1;
        let correction1 = 1.0 - beta1.powi(self.num_steps);
        let correction2 = 1.0 - beta2.powi(self.num_steps);
        for (name, weight) in weights {
            let g = gradient(grads, name)?;
            let m = blend(self.first_moments.get(name), beta1, g)?;
            let v = blend(self.second_moments.get(name), beta2, &g.sqr()?)?;
            let denominator = ((v.sqrt()? / correction2.sqrt())? + eps)?;
            let decayed = (weight.as_detached_tensor() * (1.0 - lr * weight_decay))?;
            let update = ((&m / denominator)? * (lr / correction1))?;
            *weight = Var::from_tensor(&(decayed - update)?)?;
            self.first_moments.insert(name.clone(), m);
            self.second_moments.insert(name.clone(), v);
        }
        Ok(())
    }
}

/// Hyperparameters of [`Lion`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LionConfig {
    pub lr: f64,
    pub betas: (f64, f64),
    pub weight_decay: f64,
}

/// Algorithm 2 of "Symbolic Discovery of Optimization Algorithms" (arXiv 2302.06675).
pub struct Lion {
    pub config: LionConfig,
    momenta: Tensors,
}

impl Lion {
    pub fn new(config: LionConfig) -> Self {
        Self { config, momenta: Tensors::new() }
    }
}

impl Optimizer for Lion {
    fn step(&mut self, weights: &mut Weights, grads: &Tensors) -> Result<()> {
        let LionConfig { lr, betas: (beta1, beta2), weight_decay } = self.config;
        for (name, weight) in weights {
            let (g, p) = (gradient(grads, name)?, weight.as_detached_tensor());
            let momentum = self.momenta.get(name);
            let direction = blend(momentum, beta1, g)?.sign()?;
            let step = ((direction + (&p * weight_decay)?)? * lr)?;
            let momentum = blend(momentum, beta2, g)?;
            *weight = Var::from_tensor(&(p - step)?)?;
            self.momenta.insert(name.clone(), momentum);
        }
        Ok(())
    }
}

/// Hyperparameters of [`Adagrad`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdagradConfig {
    pub lr: f64,
    pub lr_decay: f64,
    pub eps: f64,
    pub weight_decay: f64,
    pub initial_accumulator_value: f64,
}

/// `torch.optim.Adagrad`.
pub struct Adagrad {
    pub config: AdagradConfig,
    num_steps: u32,
    sums: Tensors,
}

impl Adagrad {
    pub fn new(config: AdagradConfig) -> Self {
        Self { config, num_steps: 0, sums: Tensors::new() }
    }
}

impl Optimizer for Adagrad {
    fn step(&mut self, weights: &mut Weights, grads: &Tensors) -> Result<()> {
        let AdagradConfig { lr, lr_decay, eps, weight_decay, initial_accumulator_value } = self.config;
        let lr = lr / (1.0 + f64::from(self.num_steps) * lr_decay);
        self.num_steps += 1;
        for (name, weight) in weights {
            let p = weight.as_detached_tensor();
            let g = (gradient(grads, name)? + (&p * weight_decay)?)?;
            let sum = match self.sums.get(name) {
                Some(sum) => (sum + g.sqr()?)?,
                None => (g.sqr()? + initial_accumulator_value)?,
            };
            let step = (g / (sum.sqrt()? + eps)?)?;
            *weight = Var::from_tensor(&(p - (step * lr)?)?)?;
            self.sums.insert(name.clone(), sum);
        }
        Ok(())
    }
}

/// Hyperparameters of [`Lamb`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LambConfig {
    pub lr: f64,
    pub betas: (f64, f64),
    pub eps: f64,
    pub weight_decay: f64,
    /// Bounds of the trust ratio.
    pub coefficients: (f64, f64),
}

/// Algorithm 2 of "Large Batch Optimization for Deep Learning" (arXiv 1904.00962) with φ the identity, as DeepSpeed's
/// `csrc/lamb/fused_lamb_cuda_kernel.cu` computes it: the trust ratio has bounds and is that of the moments without
/// bias correction, which scales the step.
pub struct Lamb {
    pub config: LambConfig,
    num_steps: i32,
    first_moments: Tensors,
    second_moments: Tensors,
}

impl Lamb {
    pub fn new(config: LambConfig) -> Self {
        Self { config, num_steps: 0, first_moments: Tensors::new(), second_moments: Tensors::new() }
    }
}

impl Optimizer for Lamb {
    fn step(&mut self, weights: &mut Weights, grads: &Tensors) -> Result<()> {
        let LambConfig { lr, betas: (beta1, beta2), eps, weight_decay, coefficients: (min, max) } =
            self.config;
        self.num_steps += 1;
        for (name, weight) in weights {
            let (g, p) = (gradient(grads, name)?, weight.as_detached_tensor());
            let m = blend(self.first_moments.get(name), beta1, g)?;
            let v = blend(self.second_moments.get(name), beta2, &g.sqr()?)?;
            let step_size =
                lr * (1.0 - beta2.powi(self.num_steps)).sqrt() / (1.0 - beta1.powi(self.num_steps));
            let direction = ((&m / (v.sqrt()? + eps)?)? + (&p * weight_decay)?)?;
            let norm = |tensor: &Tensor| tensor.sqr()?.sum_all()?.to_scalar::<f64>();
            let (of_weight, of_direction) = (norm(&p)?.sqrt(), norm(&direction)?.sqrt());
            let has_ratio = of_weight > 0.0 && of_direction > 0.0;
            let trust = if has_ratio { (of_weight / of_direction).clamp(min, max) } else { 1.0 };
            *weight = Var::from_tensor(&(p - (direction * (step_size * trust))?)?)?;
            self.first_moments.insert(name.clone(), m);
            self.second_moments.insert(name.clone(), v);
        }
        Ok(())
    }
}

/// `beta · average + (1 − beta) · value`, from an average that starts at 0.
fn blend(average: Option<&Tensor>, beta: f64, value: &Tensor) -> Result<Tensor> {
    let value = (value * (1.0 - beta))?;
    Ok(match average {
        Some(average) => ((average * beta)? + value)?,
        None => value,
    })
}

fn gradient<'a>(grads: &'a Tensors, name: &str) -> Result<&'a Tensor> {
    grads.get(name).with_context(|| format!("no gradient for {name}"))
}

/// Euclidean norm of all gradients taken together.
pub fn global_norm(grads: &Tensors) -> Result<f64> {
    let mut sum_of_squares = 0.0;
    for grad in grads.values() {
        sum_of_squares += grad.sqr()?.sum_all()?.to_scalar::<f64>()?;
    }
    Ok(sum_of_squares.sqrt())
}

/// The gradients scaled by `min(1, max_norm / (norm + 1e-6))`, as `torch.nn.utils.clip_grad_norm_` does.
pub fn clip_by_global_norm(grads: &Tensors, max_norm: f64) -> Result<Tensors> {
    let coefficient = (max_norm / (global_norm(grads)? + 1e-6)).min(1.0);
    grads.iter().map(|(name, grad)| Ok((name.clone(), (grad * coefficient)?))).collect()
}
