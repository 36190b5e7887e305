//! The stages of a pipeline: where their number and their layers come from, and what is refused.

use super::*;

/// Resolves a file of these keys and a batch size.
fn resolve(keys: &str, overrides: &Overrides) -> Result<Config, ConfigError> {
    let text = format!(r#"{{"train_batch_size": 8, {keys}}}"#);
    RawConfig::from_json_str(&text, "c.json")?.resolve(overrides)
}

fn by_flag(mesh: &str) -> Overrides {
    Overrides::default().with_mesh(&StatedMesh::parse(mesh, None).unwrap())
}

fn refusal(keys: &str) -> String {
    resolve(keys, &Overrides::default()).unwrap_err().to_string()
}

#[test]
fn the_number_of_stages_comes_from_our_key_from_deepspeeds_or_from_the_mesh() {
    let none = Overrides::default();
    for (keys, overrides, sizes) in [
        (r#""pipeline_parallel_size": 2"#, &none, [2, 1, 1, 1]),
        (r#""pipeline": {"stages": 4}, "mesh_param": [2, 2]"#, &none, [4, 2, 2, 1]),
        (r#""pipeline": {"stages": "auto"}, "pipeline_parallel_size": 2"#, &none, [2, 1, 1, 1]),
        (r#""pipeline": {"stages": 2}, "pipeline_parallel_size": 2"#, &none, [2, 1, 1, 1]),
        (r#""ulysses": {"mesh": "pp=2,dp=2,sp=2,tp=2"}"#, &none, [2, 2, 2, 2]),
        (
            r#""ulysses": {"mesh": {"intra": {"tp": 2, "sp": 2}, "inter": {"dp": 2, "pp": 3}}}"#,
            &none,
            [3, 2, 2, 2],
        ),
        (r#""seed": 1"#, &by_flag("pp=2,dp=2,ring=2,ulysses=1"), [2, 2, 2, 1]),
    ] {
        let config = resolve(keys, overrides).unwrap();
        assert_eq!(config.mesh.shape().into_array(), sizes, "{keys}");
        // The batch does not count stages.
        assert_eq!((config.train_batch_size, config.micro_batch_size), (8, 8 / sizes[1]), "{keys}");
        assert_eq!(config.world_size(), sizes.iter().product::<usize>());
        let mesh = config.placed_mesh(None).unwrap().mesh;
        assert_eq!(mesh.axis_names()[..2], ["pp", "dp"], "{keys}");
        let written = serde_json::to_string(&config).unwrap();
        assert_eq!(Config::from_json_str(&written, "c.json").unwrap().mesh, config.mesh, "{written}");
    }
    let refused = refusal(r#""pipeline": {"stages": 4}, "pipeline_parallel_size": 2"#);
    assert!(refused.contains("pp is 4 by `pipeline.stages`") && refused.contains("but 2 by"), "{refused}");
    let world = Overrides { world_size: Some(8), ..none };
    assert_eq!(resolve(r#""pipeline_parallel_size": 2"#, &world).unwrap().mesh.dp_size, 4);
}

#[test]
fn layers_are_divided_as_stated_or_left_open() {
    let stages = |keys: &str, num_layers| {
        let config = resolve(keys, &Overrides::default()).unwrap();
        let layers = config.ulysses.pipeline.stated_layers(config.mesh.pp_size, num_layers);
        layers.map_err(|error| error.to_string())
    };
    let pp = r#""pipeline_parallel_size": 3"#;
    assert_eq!(stages(pp, 8), Ok(None));
    assert_eq!(
        stages(pp, 2).unwrap_err(),
        "pp is 3 (`pipeline_parallel_size`), but the model has 2 layers: expected at most 2 stages"
    );
    let stated = format!(r#"{pp}, "ulysses": {{"pipeline": {{"layers_per_stage": [1, 4, 3]}}}}"#);
    assert_eq!(stages(&stated, 8), Ok(Some(vec![0..1, 1..5, 5..8])));
    assert!(stages(&stated, 9).unwrap_err().contains("has 8 layers in all, but the model has 9"));
    assert!(
        refusal(&stated.replace("[1, 4, 3]", "[4, 4]")).contains("pp is 3, but `ulysses.pipeline.layers_p")
    );
    for invalid in ["[1, 0, 3]", "[]", "3"] {
        assert!(
            refusal(&stated.replace("[1, 4, 3]", invalid)).contains("`ulysses.pipeline.layers_per_stage")
        );
    }
    // A run on one rank, to compare with, has all layers.
    let alone = resolve(&stated, &by_flag("1x1")).unwrap();
    assert_eq!(alone.ulysses.pipeline.stated_layers(1, 9), Ok(None));
    assert!(alone.notes.iter().any(|note| note.contains("has no effect: pp is 1")), "{:?}", alone.notes);
}

#[test]
fn virtual_stages_need_groups_of_micro_batches_and_a_schedule_that_has_them() {
    let keys = |accumulation: usize, pipeline: &str| {
        format!(
            r#""pipeline_parallel_size": 2, "gradient_accumulation_steps": {accumulation}, "ulysses": {{"pipeline": {{{pipeline}}}}}"#
        )
    };
    let layers = |pipeline: &str, num_layers| {
        let config = resolve(&keys(4, pipeline), &Overrides::default()).unwrap();
        config.ulysses.pipeline.stated_layers(2, num_layers).map_err(|error| error.to_string())
    };
    let two = r#""virtual_stages": 2"#;
    let stated = format!(r#"{two}, "layers_per_stage": [1, 2, 1, 1]"#);
    assert_eq!((layers(two, 5), layers(&stated, 5)), (Ok(None), Ok(Some(vec![0..1, 1..3, 3..4, 4..5]))));
    assert_eq!(
        layers(two, 3).unwrap_err(),
        "pp is 2 (`pipeline_parallel_size`) with 2 stages each (`ulysses.pipeline.virtual_stages`), but the model has 3 layers: \
         expected at most 3 stages"
    );
    for (accumulation, pipeline, expected) in [
        (
            1,
            two.to_owned(),
            "needs micro batches in groups of pp 2, but there are 1 (`gradient_accumulation_steps`)",
        ),
        (4, format!(r#"{two}, "schedule": "gpipe""#), "the schedule \"gpipe\" has one stage per rank"),
        (4, format!(r#"{two}, "schedule": "zero_bubble""#), "\"zero_bubble\" has one stage per rank"),
        (
            4,
            format!(r#"{two}, "layers_per_stage": [3, 2]"#),
            "with 2 stages each (`ulysses.pipeline.virtual_stages`), but `ulysses",
        ),
    ] {
        let refused = refusal(&keys(accumulation, &pipeline));
        assert!(refused.contains(expected), "{refused}");
    }
    let alone = resolve(&keys(4, two), &by_flag("1x1")).unwrap();
    assert!(alone.notes.iter().any(|note| note.contains("`ulysses.pipeline.virtual_stages` has no effect")));
}

#[test]
fn schedules_are_named_and_others_refused() {
    let schedule = |name: &str| {
        let keys = format!(r#""ulysses": {{"pipeline": {{"schedule": "{name}"}}}}"#);
        resolve(&keys, &Overrides::default()).map(|config| config.ulysses.pipeline.schedule)
    };
    assert_eq!(
        resolve(r#""seed": 1"#, &Overrides::default()).unwrap().ulysses.pipeline.schedule,
        PipelineSchedule::OneForwardOneBackward
    );
    assert_eq!(schedule("gpipe").unwrap(), PipelineSchedule::Gpipe);
    assert_eq!(schedule("zero_bubble").unwrap(), PipelineSchedule::ZeroBubble);
    let refused = schedule("zbv").unwrap_err().to_string();
    assert!(refused.contains("one of \"gpipe\", \"1f1b\", \"zero_bubble\""), "{refused}");
}

#[test]
fn features_without_pipeline_parallelism_are_refused_by_name() {
    for (keys, feature) in [
        (r#""ulysses": {"flexible_sp": true}"#, "`ulysses.flexible_sp`"),
        (r#""checkpoint": {"memory_interval": 2}"#, "`checkpoint.memory_interval`"),
        (
            r#""mesh_param": [2, 2], "zero_optimization": {"stage": 3}, "ulysses": {"zero_partition_axes": ["dp", "sp"]}"#,
            "`ulysses.zero_partition_axes`",
        ),
    ] {
        resolve(keys, &Overrides::default()).unwrap();
        let refused = refusal(&format!(r#"{keys}, "pipeline_parallel_size": 2"#));
        let expected = format!("c.json: pp is 2, but {feature} does not support pipeline parallelism: ");
        assert!(refused.starts_with(&expected) && refused.ends_with("or use pp 1"), "{refused}");
    }
}
