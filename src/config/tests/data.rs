//! `ulysses.data` and what belongs to it.

use super::*;

fn ulysses(members: &str) -> Config {
    config_with(&format!("\"ulysses\": {{{members}}}"))
}

/// The error of a file whose `ulysses` section has the given members, without place and file.
fn error_of(members: &str) -> String {
    let message = message(&format!("{{\"train_batch_size\": 1, \"ulysses\": {{{members}}}}}"));
    message.split_once(": ").unwrap().1.to_owned()
}

#[test]
fn data_is_a_path_or_paths_or_paths_with_weights() {
    assert_eq!(ulysses(r#""data": "a""#).ulysses.data, ["a".into()]);
    assert_eq!(ulysses(r#""data": ["a", "b"]"#).ulysses.data, ["a".into(), "b".into()]);
    assert_eq!(ulysses(r#""data": ["a", {"path": "b"}]"#).ulysses.data, ["a".into(), "b".into()]);
    let weighted = |path: &str, weight| DataSource { path: path.into(), weight: Some(weight) };
    let sources = r#""data": [{"path": "a", "weight": 0.5}, {"path": "b", "weight": 2}]"#;
    assert_eq!(ulysses(sources).ulysses.data, [weighted("a", 0.5), weighted("b", 2.0)]);
    assert_eq!(ulysses("").ulysses.data, []);
}

#[test]
fn sources_that_make_no_mixture_are_refused() {
    let expected = "`ulysses.data`: expected a weight for every source, or for none, found an array";
    assert!(error_of(r#""data": ["a", {"path": "b", "weight": 1}]"#).starts_with(expected));
    for (members, expected) in [
        (r#""data": [{"weight": 1}]"#, "`ulysses.data[0].path`"),
        (r#""data": [{"path": "a", "weight": 0}]"#, "`ulysses.data[0].weight`: expected a number ≥ 1e-30"),
        (r#""data": ["a", 7]"#, "`ulysses.data[1]`: expected a non-empty string"),
        (r#""data": ["a", ""]"#, "`ulysses.data[1]`: expected a non-empty string"),
        (r#""data": []"#, "`ulysses.data`: expected a non-empty string, or an array of such strings"),
        (r#""data": [{"file": "a"}]"#, "`ulysses.data[0].file`"),
        (r#""packing": "tight""#, "expected one of \"greedy\", \"cut\", \"concat\""),
    ] {
        let error = error_of(members);
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn steps_and_epochs_exclude_each_other_and_flags_decide() {
    assert_eq!(
        error_of(r#""steps": 5, "epochs": 2"#),
        "`ulysses.epochs`: expected either `steps` or `epochs`, not both, found 2"
    );
    let text = r#"{"train_batch_size": 1, "ulysses": {"steps": 5}}"#;
    let raw = RawConfig::from_json_str(text, "c.json").unwrap();
    let by_flag = raw.resolve(&Overrides { epochs: Some(3), ..Overrides::default() }).unwrap();
    assert_eq!((by_flag.ulysses.steps, by_flag.ulysses.epochs), (None, Some(3)));
    let both = Overrides { epochs: Some(3), steps: Some(1), ..Overrides::default() };
    assert_eq!(
        raw.resolve(&both).unwrap_err().to_string(),
        "--epochs: expected either --steps or --epochs, found both"
    );
}

#[test]
fn a_schedule_of_lengths_ascends() {
    let change = |step, seq_len| SeqLenChange { step, seq_len };
    let config = ulysses(r#""seq_len": 64, "seq_len_schedule": [[10, 128], [20, 32]]"#);
    assert_eq!(config.ulysses.seq_len_schedule, [change(10, 128), change(20, 32)]);
    for (schedule, expected) in [
        ("[[20, 128], [10, 256]]", "expected steps in ascending order"),
        ("[[10, 128], [10, 256]]", "expected steps in ascending order"),
        ("[[10, 5000000000]]", "expected lengths up to 4294967295"),
        ("[[0, 128]]", "`ulysses.seq_len_schedule[0][0]`: expected an integer ≥ 1"),
        ("[[10]]", "`ulysses.seq_len_schedule[0]`: expected an array of two"),
        (
            "[10, 128]",
            "`ulysses.seq_len_schedule[0]`: expected an array of two integers ≥ 1, [step, seq_len], found 10",
        ),
        ("5", "`ulysses.seq_len_schedule`: expected an array of pairs of integers"),
    ] {
        let error = error_of(&format!("\"seq_len_schedule\": {schedule}"));
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn validation_has_its_own_data_or_a_fraction() {
    let validation =
        |members: &str| ulysses(&format!("\"validation\": {{{members}}}")).ulysses.validation.unwrap();
    let plain = ValidationConfig {
        data: HeldOut::Fraction(0.25),
        interval: None,
        batches: None,
        eval_on_start: false,
        early_stopping_patience: None,
        early_stopping_threshold: 0.0,
    };
    let data = HeldOut::Path("v".into());
    let expected = ValidationConfig { data, interval: Some(4), batches: Some(2), ..plain.clone() };
    assert_eq!(validation(r#""data": "v", "eval_interval": 4, "eval_batches": 2"#), expected);
    let stopping = r#""fraction": 0.25, "eval_on_start": true, "early_stopping_patience": 3, "early_stopping_threshold": 0.5"#;
    let expected = ValidationConfig {
        eval_on_start: true,
        early_stopping_patience: Some(3),
        early_stopping_threshold: 0.5,
        ..plain.clone()
    };
    assert_eq!(validation(stopping), expected);
    let expected = plain;
    assert_eq!(validation(r#""fraction": 0.25"#), expected);
    for members in ["", r#""data": "v", "fraction": 0.1"#] {
        let error = error_of(&format!("\"validation\": {{{members}}}"));
        assert!(
            error.starts_with("`ulysses.validation`: expected either `data` or `fraction` in it"),
            "{error}"
        );
    }
    assert_eq!(
        error_of(r#""validation": {"data": ["v"]}"#),
        "`ulysses.validation.data`: expected a non-empty string, found an array of 1"
    );
    for fraction in ["0", "1", "-0.5"] {
        let error = error_of(&format!("\"validation\": {{\"fraction\": {fraction}}}"));
        assert!(error.contains("`ulysses.validation.fraction`: expected a number"), "{error}");
    }
}
