//! Each rule against its reference, on every target.

mod adagrad;
mod adamw;
mod lion;
mod sgd;

use super::adagrad::AdagradParams;
use super::adamw::AdamParams;
use super::lion::LionParams;
use super::sgd::SgdParams;
use crate::OpError;
use crate::testing::{random, read, tensor};
use candle_core::Tensor;

/// One step on tensors, and the same on slices; param, grad and two state tensors.
type Steps<'a> = (&'a dyn Fn([&Tensor; 4]), &'a dyn Fn([&mut [f32]; 4]) -> Result<(), OpError>);

#[test]
fn a_step_on_the_host_gives_the_bits_of_a_step_on_tensors() {
    let (lr, beta1, beta2, eps, weight_decay, step, grad_scale) = (1e-2, 0.9, 0.95, 1e-8, 0.1, 3, 0.5);
    let (decoupled, bias_correction) = (true, true);
    let adam =
        AdamParams { lr, beta1, beta2, eps, weight_decay, decoupled, bias_correction, step, grad_scale };
    let lion = LionParams { lr, beta1, beta2, weight_decay, grad_scale };
    let adagrad = AdagradParams { lr, lr_decay: 0.1, eps, weight_decay, step, grad_scale };
    let sgd = SgdParams { lr, momentum: 0.9, nesterov: true, weight_decay, step, grad_scale };
    let plain = SgdParams { momentum: 0.0, nesterov: false, ..sgd };
    let steps: [Steps<'_>; 5] = [
        (&|[p, g, m, v]| super::adamw::step(p, g, m, v, &adam).unwrap(), &|[p, g, m, v]| {
            super::adamw::step_on_host(p, g, m, v, &adam)
        }),
        (&|[p, g, m, _]| super::lion::step(p, g, m, &lion).unwrap(), &|[p, g, m, _]| {
            super::lion::step_on_host(p, g, m, &lion)
        }),
        (&|[p, g, _, v]| super::adagrad::step(p, g, v, &adagrad).unwrap(), &|[p, g, _, v]| {
            super::adagrad::step_on_host(p, g, v, &adagrad)
        }),
        (&|[p, g, m, _]| super::sgd::step(p, g, Some(m), &sgd).unwrap(), &|[p, g, m, _]| {
            super::sgd::step_on_host(p, g, Some(m), &sgd)
        }),
        (&|[p, g, ..]| super::sgd::step(p, g, None, &plain).unwrap(), &|[p, g, ..]| {
            super::sgd::step_on_host(p, g, None, &plain)
        }),
    ];
    for len in [0, 1, 31, 1003] {
        let data = [1, 2, 3, 4].map(|seed| random(seed, len).into_iter().map(f32::abs).collect::<Vec<_>>());
        for (rule, (on_tensors, on_host)) in steps.iter().enumerate() {
            let tensors = data.each_ref().map(|data| tensor(data, &[len]));
            on_tensors(tensors.each_ref());
            let mut slices = data.clone();
            on_host(slices.each_mut().map(Vec::as_mut_slice)).unwrap();
            assert_eq!(slices, tensors.each_ref().map(read), "rule {rule}, {len} elements");
            assert!(len == 0 || slices[0] != data[0], "rule {rule} moves parameters");
        }
    }
}

#[test]
fn slices_of_another_length_are_named() {
    let params =
        SgdParams { lr: 0.1, momentum: 0.9, nesterov: false, weight_decay: 0.0, step: 1, grad_scale: 1.0 };
    let error = super::sgd::step_on_host(&mut [0.0; 3], &[0.0; 3], Some(&mut [0.0; 2]), &params).unwrap_err();
    let expected = "sgd::step: `momentum_buffer` is 2, expected as many elements as `grad`";
    assert_eq!(error.to_string(), expected);
    let error = super::sgd::step_on_host(&mut [0.0; 3], &[0.0; 3], None, &params).unwrap_err();
    assert!(error.to_string().contains("there is no momentum buffer"), "{error}");
}
