//! Optimizers and clipping with torch's semantics, one tensor at a time in f64.

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
