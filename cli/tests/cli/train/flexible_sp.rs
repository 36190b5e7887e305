//! `ulysses.flexible_sp`: documents of a step on as many sp ranks as they need.

use crate::support::cli::Workplace;
use serde_json::json;

#[test]
fn a_flexible_run_resumes_on_another_mesh_and_has_the_losses_of_the_fixed_layout() {
    let place = Workplace::new();
    // Documents of 8 to 120 tokens in sequences of 128.
    let documents: Vec<String> =
        (0..60).map(|index| json!({ "text": "abcdefgh".repeat(1 + (index * 7) % 15) }).to_string()).collect();
    place.write("documents.jsonl", documents.join("\n"));
    place.write_config(
        "c.json",
        json!({ "checkpoint": { "interval": 2 }, "ulysses": { "data": "documents.jsonl", "seq_len": 128 } }),
    );
    let train = |mesh: &str, output: &str, more: &[&str]| {
        let arguments = ["train", "c.json", "--mesh", mesh, "--output", output];
        place.run(&[&arguments[..], more].concat())
    };
    train("1x4", "fixed", &[]).assert_done();
    let flexible = ["--set", "ulysses.flexible_sp=true"];
    let first = train("1x4", "flexible", &[&flexible[..], &["--steps", "2"]].concat());
    assert!(
        first.assert_done().stderr.contains("flexible sp: planned imbalance of the next step: "),
        "{first:?}"
    );
    let resumed = train("2x2", "flexible", &[&flexible[..], &["--resume"]].concat());
    assert!(resumed.assert_done().stderr.contains("step 2"), "{resumed:?}");
    let [fixed, flexible] =
        ["fixed", "flexible"].map(|output| place.losses(&format!("{output}/metrics.jsonl")));
    assert_eq!((fixed.len(), flexible.len()), (4, 4));
    for (fixed, flexible) in fixed.iter().zip(&flexible) {
        assert!((fixed - flexible).abs() < 1e-5 * fixed, "{fixed} fixed, {flexible} flexible");
    }
    train("ring=2,ulysses=1", "wrong", &["--set", "ulysses.flexible_sp=true"])
        .assert_refused(2, &["flexible_sp", "ring"]);
}
