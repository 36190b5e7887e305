//! Training with more sequence-parallel ranks than heads.

use crate::support::cli::Workplace;
use serde_json::json;

#[test]
fn a_ring_trains_and_resumes_on_more_ranks_than_heads() {
    let place = Workplace::new();
    // The preset `nano` has four heads.
    place.write_config("c.json", json!({ "ulysses": { "steps": 4 } }));
    let train = |mesh: &str, output: &str, more: &[&str]| {
        let arguments = ["train", "c.json", "--mesh", mesh, "--output", output];
        place.run(&[&arguments[..], more].concat())
    };
    train("1x2", "flat", &[]).assert_done();
    let ring = train("ring=2,ulysses=3", "ring", &["--steps", "2"]);
    assert!(ring.assert_done().stderr.contains("sp 6 (ring 2 × ulysses 3)"), "{ring:?}");
    train("ring=8,ulysses=1", "ring", &["--resume"]).assert_done();
    let [flat, ring] = ["flat", "ring"].map(|output| place.losses(&format!("{output}/metrics.jsonl")));
    assert_eq!((flat.len(), ring.len()), (4, 4));
    for (flat, ring) in flat.iter().zip(&ring) {
        assert!((flat - ring).abs() < 1e-5 * flat, "{flat} on 1x2, {ring} on rings");
    }
    let error = ["num_heads = 4", "sp 16 in a ring of 2", "`--mesh ring=4,ulysses=4`"];
    train("ring=2,ulysses=8", "wrong", &[]).assert_refused(2, &error);
    train("1x2", "wrong", &["--set", "ulysses.ring_size=3"]).assert_refused(2, &["does not divide sp 2"]);
}
