//! Each rule against its reference, on every target.

mod adagrad;
mod adamw;
mod lion;
mod sgd;

use super::ElementStep;
use super::adagrad::AdagradParams;
use super::adamw::AdamParams;
use super::lion::LionParams;
use super::sgd::SgdParams;
use crate::testing::{random, read, tensor};

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
    let rules: [(&dyn ElementStep, usize); 5] =
        [(&adam, 2), (&lion, 1), (&adagrad, 1), (&sgd, 1), (&plain, 0)];
    for len in [0, 1, 31, 1003] {
        let data = [1, 2, 3, 4].map(|seed| random(seed, len).into_iter().map(f32::abs).collect::<Vec<_>>());
        for (index, (rule, num_state)) in rules.into_iter().enumerate() {
            let [param, grad, state @ ..] = &data.each_ref().map(|data| tensor(data, &[len]));
            rule.step(param, grad, &state[..num_state]).unwrap();
            let mut slices = data.clone();
            let [on_host, gradients, mut rest @ ..] = slices.each_mut().map(Vec::as_mut_slice);
            rule.step_on_host(on_host, gradients, &mut rest[..num_state]).unwrap();
            let tensors = [param, grad, &state[0], &state[1]];
            assert_eq!(slices, tensors.map(read), "rule {index}, {len} elements");
            assert!(len == 0 || slices[0] != data[0], "rule {index} moves parameters");
        }
    }
}

#[test]
fn slices_of_another_length_are_named() {
    let params =
        SgdParams { lr: 0.1, momentum: 0.9, nesterov: false, weight_decay: 0.0, step: 1, grad_scale: 1.0 };
    let error = params.step_on_host(&mut [0.0; 3], &[0.0; 3], &mut [&mut [0.0; 2]]).unwrap_err();
    let expected = "sgd::step: `momentum_buffer` is 2, expected as many elements as `grad`";
    assert_eq!(error.to_string(), expected);
    let error = params.step_on_host(&mut [0.0; 3], &[0.0; 3], &mut []).unwrap_err();
    assert!(error.to_string().contains("there is no momentum buffer"), "{error}");
}
