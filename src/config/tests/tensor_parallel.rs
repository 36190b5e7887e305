//! The size of tp, and what it refuses.

use super::*;
use crate::mesh::MeshSpec;

/// Resolves a file of these keys and a batch size.
fn resolve(keys: &str, overrides: &Overrides) -> Result<Config, ConfigError> {
    let text = format!(r#"{{"train_batch_size": 8, {keys}}}"#);
    RawConfig::from_json_str(&text, "c.json")?.resolve(overrides)
}

fn by_flag(mesh: &str) -> Overrides {
    Overrides::default().with_mesh(&StatedMesh::parse(mesh, None).unwrap())
}

fn refusal(keys: &str, overrides: &Overrides) -> String {
    resolve(keys, overrides).unwrap_err().to_string()
}

#[test]
fn the_size_comes_from_our_key_from_deepspeeds_or_from_the_mesh() {
    let none = Overrides::default();
    for (keys, overrides, [dp, sp, tp]) in [
        (r#""tensor_parallel_size": 2"#, &none, [1, 1, 2]),
        (r#""tensor_parallel": {"autotp_size": 4}, "data_parallel_size": 2"#, &none, [2, 1, 4]),
        (r#""tensor_parallel": {"autotp_size": 2}, "tensor_parallel_size": 2"#, &none, [1, 1, 2]),
        (r#""tensor_parallel": {"autotp_size": 0}, "tensor_parallel_size": 2"#, &none, [1, 1, 2]),
        (r#""ulysses": {"mesh": "2x2x2"}"#, &none, [2, 2, 2]),
        (r#""ulysses": {"mesh": {"intra": {"tp": 2, "sp": 2}, "inter": {"dp": 2}}}"#, &none, [2, 2, 2]),
        (r#""seed": 1"#, &by_flag("dp=2,ring=2,ulysses=1,tp=2"), [2, 2, 2]),
        (r#""seed": 1"#, &by_flag("tp=4"), [1, 1, 4]),
    ] {
        let config = resolve(keys, overrides).unwrap();
        assert_eq!(config.mesh, MeshShape { pp: 1, dp, sp, tp }.into(), "{keys}");
        assert_eq!(config.world_size(), dp * sp * tp);
        let mesh = config.placed_mesh(None).unwrap().mesh;
        assert_eq!((mesh.axis_names(), mesh.shape()), (vec!["dp", "sp", "tp"], vec![dp, sp, tp]));
        let written = serde_json::to_string(&config).unwrap();
        assert_eq!(Config::from_json_str(&written, "c.json").unwrap().mesh, config.mesh, "{written}");
    }
    assert_eq!(resolve(r#""seed": 1"#, &none).unwrap().placed_mesh(None).unwrap().mesh.axis_names().len(), 2);
}

#[test]
fn dp_is_the_rest_of_the_world_and_the_batch_does_not_count_tp() {
    let of_world = |ranks| Overrides { world_size: Some(ranks), ..Overrides::default() };
    let keys = r#""sequence_parallel_size": 2, "tensor_parallel_size": 2"#;
    let config = resolve(keys, &of_world(16)).unwrap();
    assert_eq!((config.mesh.dp_size, config.micro_batch_size), (4, 2));
    assert_eq!(
        refusal(keys, &of_world(6)),
        "c.json: a world of 6 ranks does not divide into groups of sp 2 × tp 2 ranks"
    );
    assert_eq!(
        refusal(&format!(r#""data_parallel_size": 2, {keys}"#), &of_world(16)),
        "c.json: the mesh of dp 2 × sp 2 × tp 2 = 8 ranks does not fill a world of 16 ranks"
    );
    let unset =
        r#""train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "tensor_parallel_size": 2"#;
    let refused = refusal(unset, &Overrides::default());
    assert!(refused.contains("pass --mesh 2x1x2"), "{refused}");
}

#[test]
fn sizes_that_contradict_each_other_are_an_error_and_a_flag_replaces_them() {
    let keys = r#""tensor_parallel": {"autotp_size": 4}, "tensor_parallel_size": 2"#;
    let refused = refusal(keys, &Overrides::default());
    assert!(
        refused.contains("tp is 4 by `tensor_parallel.autotp_size` (line 1, column")
            && refused.contains("but 2 by `tensor_parallel_size` (line 1, column"),
        "{refused}"
    );
    let refused = refusal(r#""tensor_parallel_size": 2, "ulysses": {"mesh": "2x2"}"#, &Overrides::default());
    assert!(refused.contains("but 1 by `ulysses.mesh`"), "{refused}");
    let config = resolve(keys, &by_flag("2x1x2")).unwrap();
    assert_eq!(config.mesh.tp_size, 2);
    let notes: Vec<_> =
        config.notes.iter().filter(|note| note.contains("--mesh sets tp 2 instead of 4")).collect();
    assert_eq!(notes.len(), 1, "{:?}", config.notes);
    assert_eq!(resolve(keys, &by_flag("2x2")).unwrap().mesh.tp_size, 1);
}

#[test]
fn keys_of_autotp_without_effect_are_those_of_their_section() {
    let keys =
        r#""vocab_parallel_lm_head": true, "vocab_parallel_ce_backend": "liger", "kernel_inject": false"#;
    let given = resolve(&format!(r#""tensor_parallel": {{{keys}}}"#), &Overrides::default()).unwrap();
    assert!(
        given.notes.iter().any(|note| note.contains("tensor_parallel.vocab_parallel_lm_head")),
        "{:?}",
        given.notes
    );
    let spec = format!(
        r#""tensor_parallel": {{"partition_config": {{"layer_specs": [{{"patterns": ["a"], {keys}}}]}}}}"#
    );
    let refused = refusal(&spec, &Overrides::default());
    assert!(refused.contains("layer_specs[0].vocab_parallel_lm_head"), "{refused}");
}

#[test]
fn specs_without_patterns_are_refused() {
    for none in ["[]", "\"auto\""] {
        let spec = format!(
            r#""tensor_parallel": {{"partition_config": {{"layer_specs": [{{"patterns": {none}}}]}}}}"#
        );
        let refused = refusal(&spec, &Overrides::default());
        assert!(refused.contains("layer_specs[0].patterns") && refused.contains("1 to 100"), "{refused}");
    }
    let spec = r#""tensor_parallel": {"partition_config": {"layer_specs": [{"patterns": ["a", 3, "b"]}]}}"#;
    let refused = refusal(spec, &Overrides::default());
    assert!(
        refused.contains("layer_specs[0].patterns[1]`: expected a non-empty string, found 3"),
        "{refused}"
    );
}

#[test]
fn features_without_tensor_parallelism_are_refused_by_name() {
    let tp = r#""tensor_parallel_size": 2"#;
    for (keys, feature) in [
        (r#""ulysses": {"flexible_sp": true}"#, "`ulysses.flexible_sp` does not"),
        (
            r#""mesh_param": [2, 2], "zero_optimization": {"stage": 3}, "ulysses": {"zero_partition_axes": ["dp", "sp"]}"#,
            "`ulysses.zero_partition_axes` does not",
        ),
        (
            r#""mesh_param": [4, 1], "zero_optimization": {"stage": 3, "mics_shard_size": 2}"#,
            "ZeRO's shard size, 2, does not",
        ),
        (r#""checkpoint": {"memory_interval": 2}"#, "`checkpoint.memory_interval` does not"),
    ] {
        resolve(keys, &Overrides::default()).unwrap();
        let refused = refusal(&format!("{keys}, {tp}"), &Overrides::default());
        assert!(refused.starts_with("c.json: tp is 2, but ") && refused.contains(feature), "{refused}");
    }
    // DeepSpeed's axes of a file with the size of sp alone do not apply.
    let sp = format!(r#""sequence_parallel_size": 2, "zero_optimization": {{"stage": 3}}, {tp}"#);
    assert_eq!(resolve(&sp, &Overrides::default()).unwrap().zero_shards(), None);
}

#[test]
fn tp_is_the_last_axis_of_a_mesh() {
    let parse = |text: &str| MeshSpec::parse(text).and_then(|spec| spec.training_shape());
    for text in ["tp=2,dp=2", "dp=2,tp=2,sp=2"] {
        let refused = parse(text).unwrap_err().to_string();
        assert!(refused.contains("and, last, tp; got "), "{refused}");
    }
    assert_eq!(parse("dp=2,sp=2,tp=2@0,1,2,3,4,5,7,6").map(|shape| shape.sizes.tp), Ok(2));
}
