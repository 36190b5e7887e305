//! The features of a config that save memory, one after another.

use ulysses::config::{Config, MemoryConfig, Offload, ZeroStage};

/// The config without any feature that saves memory, then with one more of its own each time, up to all of them.
pub(super) fn cumulative(config: &Config) -> Vec<(String, Config)> {
    let mut now = config.clone();
    now.activation_checkpointing = false;
    now.memory = MemoryConfig { offload_path: config.memory.offload_path.clone(), ..MemoryConfig::default() };
    if config.memory.offload_optimizer != Offload::None || config.memory.offload_parameters != Offload::None {
        // The stage is a feature only where it is for the sake of offload.
        now.zero_stage = ZeroStage::Disabled;
    }
    let mut steps = vec![("none".to_owned(), now.clone())];
    let mut add = |feature: String, apply: &dyn Fn(&mut Config)| {
        let before = now.clone();
        apply(&mut now);
        if now != before {
            steps.push((feature, now.clone()));
        }
    };
    let memory = &config.memory;
    let of_layers = match memory.checkpointing_interval {
        1 => String::new(),
        interval => format!(", `activation_checkpointing_interval: {interval}`"),
    };
    add(format!("`ulysses.activation_checkpointing`{of_layers}"), &|now| {
        now.activation_checkpointing = config.activation_checkpointing;
        now.memory.checkpointing_interval = memory.checkpointing_interval;
    });
    let tokens = memory.tile_tokens.map_or(0, usize::from);
    add(format!("`tile_tokens: {tokens}`"), &|now| now.memory.tile_tokens = memory.tile_tokens);
    add(format!("`head_chunks: {}`", memory.head_chunks), &|now| now.memory.head_chunks = memory.head_chunks);
    add("`activation_checkpointing.cpu_checkpointing`".to_owned(), &|now| {
        now.memory.offload_checkpoints = memory.offload_checkpoints;
    });
    let stage = u8::from(config.zero_stage);
    add(format!("`zero_optimization.stage: {stage}`"), &|now| now.zero_stage = config.zero_stage);
    let device = memory.offload_optimizer.device();
    add(format!("`offload_optimizer: {device}`"), &|now| {
        now.memory.offload_optimizer = memory.offload_optimizer.clone();
    });
    let device = memory.offload_parameters.device();
    add(format!("`offload_param: {device}`"), &|now| {
        now.memory.offload_parameters = memory.offload_parameters.clone();
    });
    steps
}

#[cfg(test)]
mod tests {
    use super::*;

    fn features(text: &str) -> Vec<(String, Config)> {
        cumulative(&Config::from_json_str(text, "c.json").unwrap())
    }

    #[test]
    fn every_feature_of_the_config_is_added_once_and_the_last_config_is_the_whole() {
        let text = r#"{ "train_batch_size": 1, "activation_checkpointing": { "cpu_checkpointing": true },
            "zero_optimization": { "stage": 3, "offload_optimizer": { "device": "nvme" }, "offload_param": { "device": "nvme" } },
            "ulysses": { "activation_checkpointing": true, "tile_tokens": 512, "head_chunks": 4 } }"#;
        let steps = features(text);
        let names: Vec<_> = steps.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names.len(), 8, "{names:?}");
        assert_eq!(steps[7].1, Config::from_json_str(text, "c.json").unwrap());
        assert_eq!(
            (steps[0].1.zero_stage, steps[0].1.activation_checkpointing),
            (ZeroStage::Disabled, false)
        );
        assert_eq!((steps[2].1.memory.head_chunks, steps[3].1.memory.head_chunks), (1, 4));
        // What is written for a step reads back as the same.
        for (name, config) in &steps {
            let text = serde_json::to_string(config).unwrap();
            let read = Config::from_json_str(&text, "step.json").unwrap();
            assert_eq!((&read.memory, read.zero_stage), (&config.memory, config.zero_stage), "{name}");
        }
    }

    #[test]
    fn a_config_without_features_is_one_step() {
        let steps = features(r#"{ "train_batch_size": 1, "zero_optimization": { "stage": 2 } }"#);
        assert_eq!(steps.len(), 1);
        assert_eq!(steps[0].1.zero_stage, ZeroStage::Gradients);
    }
}
