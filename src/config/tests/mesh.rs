//! `ulysses.mesh`, and the rules of `ulysses.mesh_rules`.

use super::*;
use crate::config::sections::zero::ZeroStage;
use crate::mesh::{MeshSpec, RankHosts, SpGroups};

fn sizes(config: &Config) -> (usize, usize) {
    (config.mesh.dp_size, config.mesh.sp_size)
}

fn of_job(text: &str, ranks: usize, ranks_per_node: usize) -> Result<Config, ConfigError> {
    let overrides = Overrides {
        world_size: Some(ranks),
        ranks_per_node: Some(ranks_per_node),
        mesh_selector: Some("small".to_owned()),
        ..Overrides::default()
    };
    RawConfig::from_json_str(text, "c.json")?.resolve(&overrides)
}

#[test]
fn a_hybrid_mesh_gives_sizes_and_the_order_of_the_ranks() {
    for mesh in [
        r#"{"intra": {"sp": 2, "dp": 2}, "inter": {"dp": 2}}"#,
        r#"{"dcn": {"data_parallel": 2}, "ici": {"dp": 2, "sequence_parallel": 2}}"#,
        r#""intra:dp=2,sp=2/inter:dp=2""#,
    ] {
        let config = config_with(&format!(r#""ulysses": {{"mesh": {mesh}}}"#));
        assert_eq!(sizes(&config), (4, 2), "{mesh}");
        let spec = MeshSpec::parse("intra:dp=2,sp=2/inter:dp=2,sp=1").unwrap();
        assert_eq!(config.ulysses.mesh, Some(spec), "{mesh}");
        // The resolved config reads back.
        let written = serde_json::to_string(&config).unwrap();
        let read = Config::from_json_str(&written, "c.json").unwrap();
        assert_eq!(read.ulysses.mesh, config.ulysses.mesh);
    }
    let across = r#""ulysses": {"mesh": {"intra": {"dp": 2}, "inter": {"sp": 2}}}"#;
    let placed = config_with(across).placed_mesh(None).unwrap();
    assert_eq!((placed.mesh.ranks(), placed.sp_groups), (&[0, 2, 1, 3][..], SpGroups::Compact));
    let hosts = RankHosts::new(&["b", "a", "b", "a"]);
    let placed = config_with(across).placed_mesh(Some(&hosts)).unwrap();
    assert_eq!(placed.mesh.all_groups("sp").unwrap(), [[0, 1], [2, 3]]);
    let map = config_with(r#""ulysses": {"mesh": "dp=2,sp=2@3,2,1,0"}"#);
    assert_eq!(map.placed_mesh(None).unwrap().mesh.ranks(), [3, 2, 1, 0]);
}

#[test]
fn open_sizes_of_a_hybrid_mesh_follow_from_the_job() {
    let text = r#"{"train_micro_batch_size_per_gpu": 1,
        "ulysses": {"mesh": {"intra": {"sp": -1}, "inter": {"dp": -1}}}}"#;
    assert_eq!(sizes(&of_job(text, 8, 4).unwrap()), (2, 4));
    assert_eq!(sizes(&of_job(text, 8, 8).unwrap()), (1, 8));
    let error = message(text);
    assert!(error.contains("`ulysses.mesh` is invalid: axis `sp` has size -1"), "{error}");
}

#[test]
fn a_mesh_that_contradicts_other_sizes_or_the_stage_is_an_error() {
    let hybrid = r#""ulysses": {"mesh": {"intra": {"sp": 2}, "inter": {"dp": 2}}}"#;
    let contradiction = message(&format!(r#"{{"train_batch_size": 4, "mesh_param": [4, 1], {hybrid}}}"#));
    assert!(contradiction.contains("but 2 by `ulysses.mesh` (line 1"), "{contradiction}");
    let preset = r#"{"train_batch_size": 4, "ulysses": {"mesh": "hsdp=2x2"}}"#;
    let stage = message(preset);
    assert!(stage.contains("`ulysses.mesh` \"hsdp\" is data parallelism at ZeRO stage 3"), "{stage}");
    let sharded = r#""zero_optimization": {"stage": 3}, "ulysses": {"mesh": "hsdp=2x2"}"#;
    assert_eq!(config_with(sharded).zero.mics_shard_size, Some(2));
}

#[test]
fn an_invalid_mesh_is_reported_at_its_position() {
    let refuse = |mesh: &str, expected: &str| {
        let text = format!("{{\"train_batch_size\": 1, \"ulysses\": {{\n  \"mesh\": {mesh}}}}}");
        let message = message(&text);
        assert!(
            message.starts_with("c.json:2:11: `ulysses.mesh`: ") && message.contains(expected),
            "{message}"
        );
    };
    refuse(r#"{"intra": {"sp": 2}, "outer": {"dp": 2}}"#, "`outer` is not `intra` or `inter`");
    refuse(r#"{"intra": {"sp": 0}}"#, "axis `sp` has size 0");
    refuse(r#"{"intra": {"sp": 1.5}}"#, "`1.5` is not a size");
    refuse(r#"{"intra": {"ep": 2}}"#, "the axes are, first, pp, dp (or ");
    refuse(r#""tp=2,dp=2""#, "and, last, tp; got tp, dp");
    refuse(r#"{"intra": 2}"#, "expected a mesh such as \"2x4\", or an object");
    refuse("[2, 2]", "expected a mesh such as \"2x4\", or an object");
    refuse(r#""2x""#, "invalid mesh `2x`");
    refuse(r#""axlearn:3x4""#, "write the sizes within a node and between nodes, `intra:…/inter:…`");
}

/// A file with one rule for the machine `small`.
fn with_rule(keys: &str) -> String {
    format!(
        r#"{{"train_micro_batch_size_per_gpu": 1, "mesh_param": [2, 2], "optimizer": {{"type": "SGD", "params": {{"lr": 0.5, "momentum": 0.5}}}},
  "ulysses": {{"head_chunks": 1, "seq_len": 64, "mesh_rules": [["big", "8x8"],
    ["small", {{"intra": {{"sp": 4}}}}, {keys}]
]}}}}"#
    )
}

#[test]
fn a_rule_overrides_other_keys_of_the_file() {
    let keys = r#"{"zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW"}, "seed": 7,
        "ulysses": {"head_chunks": 2, "activation_checkpointing": true}}"#;
    let config = of_job(&with_rule(keys), 4, 4).unwrap();
    assert_eq!(sizes(&config), (1, 4));
    assert_eq!((config.zero.stage, config.seed), (ZeroStage::Gradients, 7));
    assert_eq!((config.ulysses.head_chunks, config.ulysses.seq_len), (2, Some(64)));
    assert!(config.ulysses.activation_checkpointing && config.optimizer == OptimizerConfig::default());
    // Without a selector that matches, the file is as if the rule did not exist.
    let unchanged = RawConfig::from_json_str(&with_rule(keys), "c.json").unwrap();
    let unchanged = unchanged.resolve(&Overrides::default()).unwrap();
    assert_eq!(
        (sizes(&unchanged), unchanged.seed, unchanged.zero.stage),
        ((2, 2), 1234, ZeroStage::Disabled)
    );
    // A flag has precedence over the rule's keys, as over the file's.
    let settings = Settings { set: vec![Setting::new("seed", 9)], ..Settings::default() };
    let raw = RawConfig::from_json_str_with(&with_rule(keys), "c.json", &settings).unwrap();
    let selector = Some("small".to_owned());
    let config = raw.resolve(&Overrides { mesh_selector: selector, ..Overrides::default() }).unwrap();
    assert_eq!((config.seed, config.ulysses.head_chunks), (9, 2));
}

#[test]
fn errors_in_the_keys_of_a_rule_are_reported_like_those_of_the_file() {
    for (keys, expected) in [
        (r#"{"zero_optimizatoin": {}}"#, "c.json:3:38: unknown key `zero_optimizatoin`, did you mean"),
        (r#"{"seed": -1}"#, "c.json:3:46: `seed`: expected an integer"),
        (
            r#"{"ulysses": {"activation_checkpointing_interval": 2}}"#,
            "`ulysses.activation_checkpointing_interval`",
        ),
    ] {
        let message = message(&with_rule(keys));
        assert!(message.contains(expected), "{message}");
        assert!(message.ends_with("(with the keys of rule 1 of `ulysses.mesh_rules`)"), "{message}");
    }
    for key in
        [r#"{"mesh_param": [1, 4]}"#, r#"{"ulysses": {"mesh": "1x4"}}"#, r#"{"ulysses": {"backend": "mpi"}}"#]
    {
        let message = message(&with_rule(key));
        assert!(message.contains("which a rule cannot override"), "{message}");
    }
    assert!(message(&with_rule("[]")).contains("`ulysses.mesh_rules[1]`: expected an array of a pattern"));
}
