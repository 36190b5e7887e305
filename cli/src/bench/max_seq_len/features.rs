//! The memory-saving features of a config, added one by one.

use ulysses::config::{Config, Offload, PartitionAxes, ZeroStage};

/// Returns the config without memory-saving features, then with one more of its own each time, up to all.
pub(super) fn cumulative(config: &Config) -> Vec<(String, Config)> {
    let mut now = config.clone();
    let ulysses = &mut now.ulysses;
    ulysses.activation_checkpointing = false;
    ulysses.save_attention_output = ulysses.save_attention_output.filter(|saves| !saves);
    (ulysses.activation_checkpointing_interval, ulysses.head_chunks, ulysses.tile_tokens) = (1, 1, None);
    now.activation_checkpointing.cpu_checkpointing = false;
    (now.zero.offload_optimizer, now.zero.offload_param) = (Offload::None, Offload::None);
    if config.zero.offload_optimizer != Offload::None || config.zero.offload_param != Offload::None {
        // The stage counts as a feature only if offload requires it.
        now.zero.stage = ZeroStage::Disabled;
    }
    now.ulysses.zero_partition_axes = PartitionAxes::Dp;
    let mut steps = vec![("none".to_owned(), now.clone())];
    let mut add = |feature: String, apply: &dyn Fn(&mut Config)| {
        let before = now.clone();
        apply(&mut now);
        if now != before {
            steps.push((feature, now.clone()));
        }
    };
    let (ulysses, zero) = (&config.ulysses, &config.zero);
    let of_layers = match ulysses.activation_checkpointing_interval {
        1 => String::new(),
        interval => format!(", `activation_checkpointing_interval: {interval}`"),
    };
    add(format!("`ulysses.activation_checkpointing`{of_layers}"), &|now| {
        now.ulysses.activation_checkpointing = ulysses.activation_checkpointing;
        now.ulysses.activation_checkpointing_interval = ulysses.activation_checkpointing_interval;
        now.ulysses.save_attention_output = ulysses.save_attention_output;
    });
    let tokens = ulysses.tile_tokens.map_or(0, usize::from);
    add(format!("`tile_tokens: {tokens}`"), &|now| now.ulysses.tile_tokens = ulysses.tile_tokens);
    let chunks = ulysses.head_chunks;
    add(format!("`head_chunks: {chunks}`"), &|now| now.ulysses.head_chunks = chunks);
    add("`activation_checkpointing.cpu_checkpointing`".to_owned(), &|now| {
        now.activation_checkpointing = config.activation_checkpointing.clone();
    });
    let stage = u8::from(zero.stage);
    add(format!("`zero_optimization.stage: {stage}`"), &|now| now.zero.stage = zero.stage);
    add("`ulysses.zero_partition_axes: dp, sp`".to_owned(), &|now| {
        now.ulysses.zero_partition_axes = ulysses.zero_partition_axes;
    });
    let device = zero.offload_optimizer.device();
    add(format!("`offload_optimizer: {device}`"), &|now| {
        now.zero.offload_optimizer = zero.offload_optimizer.clone();
    });
    let device = zero.offload_param.device();
    add(format!("`offload_param: {device}`"), &|now| now.zero.offload_param = zero.offload_param.clone());
    steps
}

#[cfg(test)]
mod tests {
    use super::*;

    fn features(text: &str) -> Vec<(String, Config)> {
        cumulative(&Config::from_json_str(text, "c.json").unwrap())
    }

    #[test]
    fn each_feature_is_added_once_up_to_the_whole_config() {
        let text = r#"{ "train_batch_size": 1, "activation_checkpointing": { "cpu_checkpointing": true },
            "zero_optimization": { "stage": 3, "offload_optimizer": { "device": "nvme" }, "offload_param": { "device": "nvme" } },
            "ulysses": { "activation_checkpointing": true, "tile_tokens": 512, "head_chunks": 4 } }"#;
        let steps = features(text);
        let names: Vec<_> = steps.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names.len(), 8, "{names:?}");
        assert_eq!(steps[7].1, Config::from_json_str(text, "c.json").unwrap());
        assert_eq!(
            (steps[0].1.zero.stage, steps[0].1.ulysses.activation_checkpointing),
            (ZeroStage::Disabled, false)
        );
        assert_eq!((steps[2].1.ulysses.head_chunks, steps[3].1.ulysses.head_chunks), (1, 4));
        // The written config of a step reads back unchanged.
        for (name, config) in &steps {
            let text = serde_json::to_string(config).unwrap();
            let read = Config::from_json_str(&text, "step.json").unwrap();
            let settings = |config| Config { notes: vec![], autos: vec![], ..config };
            assert_eq!(settings(read), settings(config.clone()), "{name}");
        }
    }

    #[test]
    fn partitions_over_sp_are_a_feature() {
        let text = r#"{ "train_batch_size": 1, "mesh_param": [1, 4], "zero_optimization": { "stage": 3 },
            "ulysses": { "zero_partition_axes": ["dp", "sp"] } }"#;
        let steps = features(text);
        let partitions: Vec<_> = steps.iter().map(|(_, config)| config.zero_world_size()).collect();
        assert_eq!((partitions, steps[1].0.as_str()), (vec![1, 4], "`ulysses.zero_partition_axes: dp, sp`"));
        assert_eq!(steps[1].1.zero.stage, ZeroStage::Parameters);
    }

    #[test]
    fn a_config_without_features_is_one_step() {
        let steps = features(r#"{ "train_batch_size": 1, "zero_optimization": { "stage": 2 } }"#);
        assert_eq!(steps.len(), 1);
        assert_eq!(steps[0].1.zero.stage, ZeroStage::Gradients);
    }
}
