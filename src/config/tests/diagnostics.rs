//! Every class of fault, with its message and place.

use super::*;

#[test]
fn invalid_json_is_located() {
    assert_eq!(
        message("{ \"seed\" 1 }"),
        "c.json:1:10: not valid JSON: Expected colon after the string or word in object property"
    );
    assert_eq!(message("{ \"seed\": NaN }"), "c.json:1:11: not valid JSON: Unexpected word");
    assert_eq!(message("{ \"seed\": 1 "), "c.json:1:1: not valid JSON: Unterminated object");
    assert_eq!(message("{ \"seed\": 01 }"), "c.json:1:12: not valid JSON: Expected comma");
    assert_eq!(message("{} {}"), "c.json:1:4: not valid JSON: Text cannot contain more than one JSON value");
    assert_eq!(message(""), "c.json:1:1: expected a JSON object, found an empty file");
    assert_eq!(message(" [1, 2]"), "c.json:1:2: expected a JSON object, found an array of 2");
}

#[test]
fn comments_and_trailing_commas_are_read_as_deepspeed_reads_them() {
    let text = "# é\n{ // {\n \"seed\": 7, /* \"\n ] */\n \"train_batch_size\": 2, # \"\n \"ulysses\": {\"data\": [\"a//b#\\\"/*,]\",], }, }";
    let config = Config::from_json_str(text, "c.json").unwrap();
    assert_eq!((config.seed, config.ulysses.data), (7, vec!["a//b#\"/*,]".into()]));
    assert!(message("{ // one\n /* two */ \"sed\": 1,}").starts_with("c.json:2:12: unknown key `sed`"));
    for broken in ["{\"seed\": 1,,}", "{,}", "{} /* open"] {
        assert!(message(broken).contains("not valid JSON"), "{broken}");
    }
}

#[test]
fn yaml_is_called_yaml() {
    for text in [
        "compute_environment: LOCAL_MACHINE\nnum_processes: 8\n",
        "---\n- a\n",
        "# of axolotl\nbase_model: x",
    ] {
        assert!(message(text).starts_with("c.json:1:1: not valid JSON: this is YAML"), "{}", message(text));
    }
    let named = RawConfig::from_json_str("- a", "zero3.yml").unwrap_err().to_string();
    assert!(named.contains("this is YAML"), "{named}");
}

#[test]
fn integers_may_have_the_notation_of_floats() {
    let steps = |number: &str| {
        let text = format!("{{\"train_batch_size\": 2.0, \"steps_per_print\": {number}}}");
        Config::from_json_str(&text, "c.json").map(|config| config.steps_per_print)
    };
    for (number, expected) in
        [("1e5", 100_000), ("1E12", 1_000_000_000_000), ("20.0", 20), ("9007199254740992e0", 1 << 53)]
    {
        assert_eq!(steps(number).unwrap(), expected, "{number}");
    }
    for number in ["2.5", "1e-1", "-1e3", "1e16", "1e400"] {
        assert!(steps(number).unwrap_err().to_string().contains("expected an integer"), "{number}");
    }
    assert_eq!(config_with(r#""mesh_param": [1.0, 2e0]"#).mesh.sp_size, 2);
}

#[test]
fn what_rfc_8259_forbids_is_refused_even_where_the_parser_is_lenient() {
    assert!(
        message("{\n \"ulysses\": {\"data\": \"a\u{1}b\"}}")
            .starts_with("c.json:2:23: not valid JSON: control character")
    );
    assert!(message("{\u{a0}\"seed\": 1}").starts_with("c.json:1:2: not valid JSON"));
    assert!(message("\u{feff}{}").starts_with("c.json:1:1: not valid JSON"));
}

#[test]
fn unknown_keys_come_with_the_nearest_known_key() {
    let line = |text: &str| message(text).lines().next().map(str::to_owned).unwrap_or_default();
    let unknown = |text: &str| line(text).split(" (valid here").next().map(str::to_owned).unwrap_or_default();
    assert_eq!(
        unknown("{\n  \"gradient_cliping\": 1.0\n}"),
        "c.json:2:3: unknown key `gradient_cliping`, did you mean `gradient_clipping`?"
    );
    assert_eq!(
        unknown("{\"micro_batch_size\": 1}"),
        "c.json:1:2: unknown key `micro_batch_size`, did you mean `train_micro_batch_size_per_gpu`?"
    );
    assert_eq!(
        unknown("{\"zero_optimization\": {\n\"Stage\": 1}}"),
        "c.json:2:1: unknown key `zero_optimization.Stage`, did you mean `zero_optimization.stage`?"
    );
    assert_eq!(
        unknown("{\"seq_len\": 128}"),
        "c.json:1:2: unknown key `seq_len`, did you mean `ulysses.seq_len`?"
    );
    assert_eq!(
        unknown("{\"optimizer\": {\"type\": \"AdamW\", \"params\": {\"weight_decy\": 1}}}"),
        "c.json:1:44: unknown key `optimizer.params.weight_decy`, did you mean `optimizer.params.weight_decay`?"
    );
    for (name, key) in [
        ("num_train_epochs", "ulysses.epochs"),
        ("max_steps", "ulysses.steps"),
        ("learning_rate", "optimizer.params.lr"),
        ("per_device_train_batch_size", "train_micro_batch_size_per_gpu"),
        ("save_steps", "checkpoint.interval"),
        ("warmup_ratio", "scheduler.params.warmup_num_steps"),
        ("logging_steps", "steps_per_print"),
        ("max_grad_norm", "gradient_clipping"),
    ] {
        let expected = format!("c.json:1:2: unknown key `{name}`, did you mean `{key}`?");
        assert_eq!(unknown(&format!("{{\"{name}\": 1}}")), expected);
    }
    assert!(unknown("{\"ulysses\": {\"max_steps\": 1}}").ends_with("did you mean `ulysses.steps`?"));
    assert_eq!(unknown("{\"steps\": 128}"), "c.json:1:2: unknown key `steps`, did you mean `ulysses.steps`?");
    assert_eq!(
        unknown("{\"ulysses\": {\"seed\": 1}}"),
        "c.json:1:14: unknown key `ulysses.seed`, did you mean `seed`?"
    );
    assert_eq!(unknown("{\"zzz\": 1}"), "c.json:1:2: unknown key `zzz`");
    assert_eq!(
        line("{\"timers\": {\"x\": 0}}"),
        "c.json:1:13: unknown key `timers.x` (valid here: throughput)"
    );
}

#[test]
fn keys_are_valid_only_for_their_type() {
    assert!(
        message("{\"optimizer\": {\"type\": \"Adam\", \"params\": {\"momentum\": 0.9}}}")
            .contains("unknown key `optimizer.params.momentum`")
    );
    assert!(
        message("{\"scheduler\": {\"type\": \"WarmupLR\", \"params\": {\"cycle_min_lr\": 0.9}}}")
            .contains("unknown key `scheduler.params.cycle_min_lr`")
    );
    let sgd = Settings { set: vec![Setting::new("optimizer.type", "SGD")], ..Settings::default() };
    let file = r#"{"train_batch_size": 1, "optimizer": {"type": "AdamW", "params": {"betas": [0.9, 0.95]}}}"#;
    let refused = RawConfig::from_json_str_with(file, "c.json", &sgd).unwrap_err().to_string();
    let expected = "unknown key `optimizer.params.betas`: the type \"SGD\" has no such parameter (valid here: lr, momentum, \
                    nesterov, weight_decay";
    assert!(refused.contains(expected), "{refused}");
}

#[test]
fn duplicate_keys_name_both_places() {
    assert_eq!(
        message("{\n  \"seed\": 1,\n  \"seed\": 1\n}"),
        "c.json:3:3: duplicate key `seed`, first set at line 2, column 3"
    );
}

#[test]
fn wrong_types_and_ranges_say_what_would_be_valid() {
    let cases = [
        (
            r#"{"train_batch_size": 0}"#,
            "c.json:1:22: `train_batch_size`: expected an integer ≥ 1 and < 2^64, found 0",
        ),
        (
            r#"{"train_batch_size": -8}"#,
            "c.json:1:22: `train_batch_size`: expected an integer ≥ 1 and < 2^64, found -8",
        ),
        (
            r#"{"train_batch_size": 4.5}"#,
            "c.json:1:22: `train_batch_size`: expected an integer ≥ 1 and < 2^64, found 4.5",
        ),
        (
            r#"{"train_batch_size": 1e-3}"#,
            "c.json:1:22: `train_batch_size`: expected an integer ≥ 1 and < 2^64, found 1e-3",
        ),
        (
            r#"{"seed": 18446744073709551616}"#,
            "c.json:1:10: `seed`: expected an integer ≥ 0 and < 2^64, found 18446744073709551616",
        ),
        (
            r#"{"train_batch_size": "8"}"#,
            "c.json:1:22: `train_batch_size`: expected an integer ≥ 1 and < 2^64, found the string \"8\"",
        ),
        (
            r#"{"gradient_clipping": 2e400}"#,
            "c.json:1:23: `gradient_clipping`: expected a number ≥ 0 that f32 can represent, found 2e400",
        ),
        (
            r#"{"gradient_clipping": 1e39}"#,
            "c.json:1:23: `gradient_clipping`: expected a number ≥ 0 that f32 can represent, found 1e39",
        ),
        (
            r#"{"gradient_clipping": -0.5}"#,
            "c.json:1:23: `gradient_clipping`: expected a number ≥ 0 that f32 can represent, found -0.5",
        ),
        (
            r#"{"wall_clock_breakdown": "yes"}"#,
            "c.json:1:26: `wall_clock_breakdown`: expected true or false, found the string \"yes\"",
        ),
        (r#"{"optimizer": []}"#, "c.json:1:15: `optimizer`: expected an object, found an array of 0"),
        (r#"{"scheduler": null}"#, "c.json:1:15: `scheduler`: expected an object, found null"),
        (
            r#"{"mesh_param": [2]}"#,
            "c.json:1:16: `mesh_param`: expected an array of two sizes, [dp, sp], found an array of 1",
        ),
        (
            r#"{"mesh_param": [2, 0]}"#,
            "c.json:1:20: `mesh_param[1]`: expected an integer ≥ 1 and < 2^64, found 0",
        ),
        (
            r#"{"zero_optimization": {"stage": 4}}"#,
            "c.json:1:33: `zero_optimization.stage`: expected an integer from 0 to 3, found 4",
        ),
        (
            r#"{"loss_normalization": "mean"}"#,
            "c.json:1:24: `loss_normalization`: expected one of \"global\", \"micro_batch\", found the string \"mean\"",
        ),
        (
            r#"{"ulysses": {"backend": "tcp"}}"#,
            "c.json:1:25: `ulysses.backend`: expected one of \"thread\", \"nccl\", \"mpi\", found the string \"tcp\"",
        ),
        (
            r#"{"ulysses": {"parameter_groups": {"match": "norm"}}}"#,
            "c.json:1:34: `ulysses.parameter_groups`: expected an array of objects, found an object",
        ),
        (
            r#"{"ulysses": {"parameter_groups": [{}]}}"#,
            "c.json:1:35: missing key `ulysses.parameter_groups[0].match`: expected a non-empty string",
        ),
        (
            r#"{"ulysses": {"parameter_groups": [{"match": "a"}, "b"]}}"#,
            "c.json:1:51: `ulysses.parameter_groups[1]`: expected an object, found the string \"b\"",
        ),
        (
            r#"{"ulysses": {"parameter_groups": [{"match": "norm("}]}}"#,
            "c.json:1:45: `ulysses.parameter_groups[0].match`: expected a regular expression (unclosed group), \
             found the string \"norm(\"",
        ),
        (
            r#"{"ulysses": {"model": ""}}"#,
            "c.json:1:23: `ulysses.model`: expected a non-empty string, found the string \"\"",
        ),
        (
            r#"{"ulysses": {"seq_len": true}}"#,
            "c.json:1:25: `ulysses.seq_len`: expected an integer ≥ 1 and < 2^64, found true",
        ),
        (
            r#"{"optimizer": {"type": "nadam", "params": {"any": 1}}}"#,
            "c.json:1:24: `optimizer.type`: \"NAdam\": the optimizers are {types}: use \"AdamW\"",
        ),
        (
            r#"{"optimizer": {"type": "Leon"}}"#,
            "c.json:1:24: `optimizer.type`: expected one of {quoted types}, found the string \"Leon\"",
        ),
        (
            r#"{"optimizer": {"params": {}}}"#,
            "c.json:1:15: missing key `optimizer.type`: expected one of {quoted types}",
        ),
        (
            r#"{"optimizer": {"type": "Adam", "params": {"betas": [0.9, 1.0]}}}"#,
            "c.json:1:58: `optimizer.params.betas[1]`: expected a number ≥ 0 and < 1, found 1.0",
        ),
        (
            r#"{"optimizer": {"type": "SGD", "params": {"nesterov": true}}}"#,
            "c.json:1:54: `optimizer.params.nesterov`: expected false, or a `momentum` above 0, found true",
        ),
        (
            r#"{"scheduler": {"type": "WarmupDecayLR"}}"#,
            "c.json:1:15: missing key `scheduler.params.total_num_steps`: expected an integer ≥ 1 and < 2^64",
        ),
        (
            r#"{"fp16": {"enabled": true}, "bf16": {"enabled": true}}"#,
            "c.json:1:49: `bf16.enabled`: expected false (`fp16.enabled` is true too: enable only one), found true",
        ),
    ];
    let names = OptimizerConfig::names();
    let (last, others) = names.split_last().unwrap();
    let types = format!("{} and {last}", others.join(", "));
    let quoted = format!("\"{}\"", names.join("\", \""));
    for (text, expected) in cases {
        let expected = expected.replace("{types}", &types).replace("{quoted types}", &quoted);
        assert_eq!(message(text), expected, "{text}");
    }
}

#[test]
fn a_zero_eps_is_refused_because_padding_would_become_nan() {
    let text =
        |eps: &str| format!("{{\"optimizer\": {{\"type\": \"Adam\", \"params\": {{\"eps\": {eps}}}}}}}");
    assert!(message(&text("0")).contains("`optimizer.params.eps`"));
    assert!(message(&text("1e-50")).contains("`optimizer.params.eps`"));
}

#[test]
fn all_errors_of_a_file_are_reported_at_once_in_its_order() {
    let text = "{\n  \"train_batch_size\": 0,\n  \"sede\": 1,\n  \"ulysses\": { \"steps\": 1.5 },\n  \
                \"zero_optimization\": { \"stage\": -1 },\n  \"train_batch_size\": 4\n}";
    let error = RawConfig::from_json_str(text, "c.json");
    let Err(ConfigError::File(ConfigFileError::Invalid { diagnostics, omitted: 0, .. })) = error else {
        panic!("{error:?}")
    };
    let places: Vec<_> =
        diagnostics.iter().map(|d| (d.position.line, d.position.column, d.key.as_str())).collect();
    assert_eq!(
        places,
        [
            (2, 23, "train_batch_size"),
            (3, 3, "sede"),
            (4, 25, "ulysses.steps"),
            (5, 35, "zero_optimization.stage"),
            (6, 3, "train_batch_size"),
        ]
    );
}

#[test]
fn columns_count_characters_not_bytes() {
    assert_eq!(
        message("{ \"ulysses\": { \"data\": \"größe\", \"stps\": 1 } }").split(" (").next(),
        Some("c.json:1:33: unknown key `ulysses.stps`, did you mean `ulysses.steps`?")
    );
}

#[test]
fn an_error_is_shown_with_its_line_and_a_mark() {
    assert_eq!(
        full_message("{\n  \"gradient_clipping\": -0.5,\n  \"sed\": 1\n}"),
        "c.json:2:24: `gradient_clipping`: expected a number ≥ 0 that f32 can represent, found -0.5\n\
         \u{20}   2 |   \"gradient_clipping\": -0.5,\n      |                        ^^^^\n\
         c.json:3:3: unknown key `sed`, did you mean `seed`?\n    3 |   \"sed\": 1\n      |   ^^^^^"
    );
    assert_eq!(
        full_message("{ \"seed\" 1 }").lines().skip(1).collect::<Vec<_>>(),
        ["    1 | { \"seed\" 1 }", "      |          ^"]
    );
    assert_eq!(full_message("").lines().skip(1).collect::<Vec<_>>(), ["    1 | ", "      | ^"]);
}

#[test]
fn an_excerpt_of_a_long_line_is_its_part_around_the_error() {
    let text = format!("{{{}\"größe\": [{}1]}}", " ".repeat(500), "1,".repeat(500));
    let message = full_message(&text);
    let [_, line, mark] = message.lines().collect::<Vec<_>>()[..] else { panic!("{message}") };
    assert_eq!((line.chars().count(), mark.chars().count()), (8 + 100, 8 + 60 + 7));
    let marked: String = line.chars().skip(8 + 60).take(7).collect();
    assert_eq!(marked, "\"größe\"");
}

#[test]
fn control_characters_are_not_printed() {
    let message = full_message("{ \"\u{1b}[31mred\": 1,\t\"seed\" }");
    assert!(!message.contains(['\u{1b}', '\t']), "{message:?}");
}

#[test]
fn contradictions_between_keys_are_reported_at_their_position() {
    let cases = [
        (
            r#"{"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}"#,
            "`zero_optimization.stage`: expected 3 (required by `offload_param.device`), found 2",
        ),
        (
            r#"{"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "nvme"}}}"#,
            "`zero_optimization.stage`: expected 1, 2 or 3 (required by `offload_optimizer.device`), found 0",
        ),
        (
            r#"{"zero_optimization": {"offload_param": {"device": "cpu"}}}"#,
            "`zero_optimization.offload_param.device`: expected none, unless `stage` is 3, found the string \"cpu\"",
        ),
        (
            r#"{"bf16": {"enabled": true}, "fp16": {"enabled": true}}"#,
            "`bf16.enabled`: expected false (`fp16.enabled` is true too: enable only one), found true",
        ),
    ];
    for (text, expected) in cases {
        assert!(message(text).contains(expected), "{}", message(text));
    }
    assert_eq!(
        full_message("{\n\"gradient_accumulation_steps\": 2,\n\"train_batch_size\": 3\n}").split_once('\n'),
        Some((
            "c.json:2:32: `train_batch_size` 3 is not a multiple of `gradient_accumulation_steps` 2 × dp 1 = 2: \
             the nearest valid sizes are 2 and 4",
            "    2 | \"gradient_accumulation_steps\": 2,\n      |                                ^"
        ))
    );
}

#[test]
fn an_invalid_stage_is_one_error() {
    let text = r#"{"zero_optimization": {"stage": 4, "offload_optimizer": {"device": "cpu"}}}"#;
    let message = full_message(text);
    assert!(message.contains("`zero_optimization.stage`: expected"), "{message}");
    assert_eq!(message.matches("c.json:").count(), 1, "{message}");
}

#[test]
fn contradicting_settings_of_a_group_are_refused() {
    let of_group = |group: &str, lr: f64| {
        let optimizer = format!(r#"{{"type": "AdamW", "params": {{"lr": {lr}}}}}"#);
        let groups = format!(r#"{{"parameter_groups": [{{"match": "a", {group}}}]}}"#);
        message(&format!(r#"{{"optimizer": {optimizer}, "ulysses": {groups}}}"#))
    };
    for (group, lr, expected) in [
        (r#""lr": 0.1, "lr_scale": 2"#, 1e-3, "[0].lr`: expected either `lr` or `lr_scale`, found 0.1"),
        (
            r#""frozen": true, "lr_scale": 2"#,
            1e-3,
            "[0].lr_scale`: expected no value, because `frozen` is true, found 2",
        ),
        (
            r#""frozen": true, "lr": 2, "weight_decay": 0"#,
            1e-3,
            "[0].weight_decay`: expected no value, because `frozen` is true, found 0",
        ),
        (r#""lr": 0.1"#, 0.0, "[0].lr`: expected an optimizer with `lr` above 0"),
    ] {
        let message = of_group(group, lr);
        assert!(message.contains(&format!("`ulysses.parameter_groups{expected}")), "{message}");
    }
}

#[test]
fn patterns_that_take_too_much_time_or_memory_are_refused() {
    let of_patterns = |patterns: &[&str]| {
        let groups: Vec<_> = patterns.iter().map(|pattern| format!("{{\"match\": \"{pattern}\"}}")).collect();
        message(&format!("{{\"ulysses\": {{\"parameter_groups\": [{}]}}}}", groups.join(", ")))
    };
    let long = of_patterns(&[&"a".repeat(1001)]);
    assert!(long.contains("expected a regular expression of at most 1000 bytes"), "{long}");
    let large = of_patterns(&["(\\\\w{200}){200}"]);
    assert!(large.contains("expected a regular expression (Compiled regex exceeds size limit"), "{large}");
    let many = of_patterns(&["a"; 101]);
    assert!(many.contains("`ulysses.parameter_groups`: expected at most 100 groups"), "{many}");
}

#[test]
fn an_invalid_mesh_rule_is_reported_at_its_position() {
    let text = "{\"train_batch_size\": 1, \"ulysses\": {\"mesh_rules\": [\n  [\"a\"],\n  [\"b(\", \"1x2\"],\n  [\"c\", \"2x\"]\n]}}";
    let message = full_message(text);
    for marked in [
        "c.json:2:3: `ulysses.mesh_rules[0]`: ",
        "c.json:3:4: `ulysses.mesh_rules[1][0]`: expected a regular expression in rule 1 (",
        "    3 |   [\"b(\", \"1x2\"],\n      |    ^^^^",
        "c.json:4:9: `ulysses.mesh_rules[2][1]`: expected a mesh in rule 2 (",
        "    4 |   [\"c\", \"2x\"]\n      |         ^^^^",
    ] {
        assert!(message.contains(marked), "{marked}\n{message}");
    }
}
