//! What every optimizer must do.

use super::*;
use crate::config::Config;
use serde_json::json;

/// Enough for parameters that the first steps ignore.
const NUM_STEPS: u64 = 8;

fn optimizer(name: &str, params: &Map<String, Json>) -> OptimizerConfig {
    let json = json!({ "train_batch_size": 1, "optimizer": { "type": name, "params": params } });
    Config::from_json_str(&json.to_string(), "test.json").unwrap().optimizer
}

/// The parameters after [`NUM_STEPS`].
fn trained(config: &OptimizerConfig) -> [f32; 3] {
    let mut parameters = [1.0, -0.5, 2.0];
    let initial = [config.params().initial_state() as f32; 3];
    let mut state = vec![initial; config.params().state_kinds().len()];
    let gradients = [[0.5, 0.3, -0.2], [-0.3, 0.2, -0.4], [0.3, -0.2, 0.1]];
    for (number, gradients) in (1..=NUM_STEPS).zip(gradients.iter().cycle()) {
        let rule = config.params().rule(Step { number, lr: 0.1, grad_scale: 1.0 }).by_element();
        let mut state: Vec<_> = state.iter_mut().map(<[f32; 3]>::as_mut_slice).collect();
        rule.apply_on_host(&mut parameters, gradients, &mut state).unwrap();
    }
    parameters
}

#[test]
fn every_parameter_changes_the_steps_of_an_optimizer_by_element() {
    let optimizers = OptimizerConfig::names().into_iter().map(|name| optimizer(name, &Map::new()));
    for config in optimizers.filter(OptimizerConfig::is_by_element) {
        let (name, mut params) = config.name_and_params();
        for value in params.values_mut().filter(|value| value.as_f64() == Some(0.0)) {
            *value = json!(0.25);
        }
        let expected = trained(&optimizer(name, &params));
        // The step has the learning rate.
        for key in params.keys().filter(|key| *key != "lr") {
            let mut other = params.clone();
            other[key] = match &params[key] {
                Json::Bool(value) => json!(!value),
                Json::Array(_) => json!([0.5, 0.6]),
                value => json!(value.as_f64().unwrap() * 0.5 + 0.1),
            };
            assert_ne!(trained(&optimizer(name, &other)), expected, "{name}: {key}");
        }
    }
}
