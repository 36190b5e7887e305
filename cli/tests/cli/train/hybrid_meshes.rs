//! Training on hybrid meshes: `ulysses.mesh`, `--mesh`, and ranks on stated hosts.

use crate::support::cli::Workplace;
use serde_json::{Value, json};

const HOSTS: &str = "ULYSSES_HOSTS";

fn workplace(changes: Value) -> Workplace {
    let place = Workplace::new();
    place.write_config("c.json", changes);
    place
}

#[test]
fn a_hybrid_mesh_trains_as_the_flat_one_does() {
    let place = workplace(json!({ "ulysses": { "steps": 2 } }));
    let train = |mesh: &str, hosts: &str, output: &str| {
        let arguments = ["train", "c.json", "--mesh", mesh, "--output", output];
        place.run_with(&arguments, &[(HOSTS, hosts)])
    };
    train("2x2", "a,a,b,b", "flat").assert_done();
    for (mesh, hosts, output) in [
        ("intra:dp=2/inter:sp=2", "a,a,b,b", "across"),
        ("intra:sp=-1/inter:dp=-1", "a,b,a,b", "within"),
        ("ulysses", "a,b,b,a", "preset"),
        ("dp=2,sp=2@3,1,0,2", "a,a,b,b", "map"),
    ] {
        let outcome = train(mesh, hosts, output);
        assert!(outcome.assert_done().stderr.contains("mesh dp 2 × sp 2"), "{outcome:?}");
        assert_eq!(
            place.losses("flat/metrics.jsonl"),
            place.losses(&format!("{output}/metrics.jsonl")),
            "{mesh}"
        );
    }
    let written = place.read_json("across/config.json");
    let expected = json!({ "intra": { "dp": 2, "sp": 1 }, "inter": { "dp": 1, "sp": 2 } });
    assert_eq!(written["ulysses"]["mesh"], expected);
    // The resolved config trains on the same mesh.
    place
        .run_with(&["train", "across/config.json", "--output", "again"], &[(HOSTS, "a,a,b,b")])
        .assert_done();
    assert_eq!(place.losses("flat/metrics.jsonl"), place.losses("again/metrics.jsonl"));
}

#[test]
fn the_order_of_the_ranks_follows_their_hosts_and_avoidable_traffic_is_reported() {
    let place = workplace(json!({ "ulysses": { "steps": 1 } }));
    let train =
        |mesh: &str, hosts: &str| place.run_with(&["train", "c.json", "--mesh", mesh], &[(HOSTS, hosts)]);
    let repaired = train("2x2", "a,b,a,b");
    let line = "placement: ranks are ordered by node, so that an sp group spans 1 node instead of 2";
    assert!(repaired.assert_done().stderr.contains(line), "{repaired:?}");
    assert!(!train("2x2", "a,a,b,b").assert_done().stderr.contains("placement"));
    let scattered = train("intra:dp=2/inter:sp=2", "a,a,b,b");
    let expected = "an sp group spans 2 nodes; 1 would be enough";
    assert!(scattered.assert_done().stderr.contains(expected), "{scattered:?}");
    assert!(scattered.stderr.contains("rank 0 sends") && scattered.stderr.contains("between nodes per step"));
}

#[test]
fn bytes_between_nodes_are_recorded_next_to_the_plans() {
    let place = workplace(json!({ "ulysses": { "steps": 2 } }));
    let volumes = |mesh: &str, output: &str| -> Vec<(String, u64, u64)> {
        let arguments = ["train", "c.json", "--mesh", mesh, "--output", output];
        place.run_with(&arguments, &[(HOSTS, "a,a,b,b")]).assert_done();
        let record = place.read_json(&format!("{output}/run.json"));
        let part = record["parts"].as_array().map_or(&record, |parts| parts.last().unwrap());
        let volumes = part["communication"]["volumes"].as_array().unwrap();
        let volume = |volume: &Value| {
            let bytes = |key: &str| volume[key].as_u64().unwrap();
            (volume["what"].as_str().unwrap().to_owned(), bytes("planned_bytes"), bytes("sent_bytes"))
        };
        volumes.iter().map(volume).collect()
    };
    let within = volumes("intra:sp=2/inter:dp=2", "within");
    let across = volumes("intra:dp=2/inter:sp=2", "across");
    for volumes in [&within, &across] {
        let (kinds, nodes) = volumes.split_at(volumes.len() - 2);
        assert_eq!([nodes[0].0.as_str(), nodes[1].0.as_str()], ["within nodes", "between nodes"]);
        // Every byte is on one side.
        let sums = |volumes: &[(String, u64, u64)]| {
            volumes.iter().fold((0, 0), |sum, (_, planned, sent)| (sum.0 + planned, sum.1 + sent))
        };
        assert_eq!(sums(nodes), sums(kinds));
        // Measured bytes include the few that ranks exchange before the first step.
        assert!(
            nodes.iter().all(|(_, planned, sent)| (*planned..planned + 1024).contains(sent)),
            "{nodes:?}"
        );
    }
    let planned = |volumes: &[(String, u64, u64)]| [2, 1].map(|last| volumes[volumes.len() - last].1);
    let ([near, far], [near_across, far_across]) = (planned(&within), planned(&across));
    assert_eq!((near, far), (far_across, near_across), "the same bytes, on the other side");
    assert_ne!(near, far);
}

#[test]
fn hosts_that_do_not_fit_the_mesh_are_named() {
    let place = workplace(json!({ "ulysses": { "steps": 1 } }));
    let refuse = |mesh: &str, hosts: &str, expected: &[&str]| {
        place.run_with(&["train", "c.json", "--mesh", mesh], &[(HOSTS, hosts)]).assert_refused(2, expected);
    };
    refuse("intra:sp=2/inter:dp=2", "a,a,a,b", &["different numbers of ranks (a: 3 ranks, b: 1 rank)"]);
    refuse("intra:sp=4/inter:dp=1", "a,a,b,b", &["--mesh", "within a node", "needs 4 ranks"]);
    refuse("2x2", "a,b", &["ULYSSES_HOSTS has 2 host(s) for 4 rank(s)"]);
    // Without stated hosts, a size that only a job determines is an error.
    place
        .run(&["train", "c.json", "--mesh", "intra:sp=-1/inter:dp=2"])
        .assert_refused(2, &["the size of sp cannot be inferred from -1"]);
}

#[test]
fn a_rule_sets_the_mesh_and_other_keys() {
    let keys =
        json!({ "zero_optimization": { "stage": 2 }, "ulysses": { "activation_checkpointing": true } });
    let rules = json!([["small", { "intra": { "sp": 2 }, "inter": { "dp": 2 } }, keys]]);
    let place = workplace(json!({ "ulysses": { "steps": 1, "mesh_rules": rules } }));
    let outcome = place.run(&["train", "c.json", "--mesh-selector", "small", "--output", "out"]);
    assert!(outcome.assert_done().stderr.contains("mesh dp 2 × sp 2, ZeRO stage 2"), "{outcome:?}");
    let written = place.read_json("out/config.json");
    assert_eq!(written["ulysses"]["activation_checkpointing"], true);
    assert_eq!(written["zero_optimization"]["stage"], 2);
    let alone = place.run(&["train", "c.json", "--mesh-selector", "other"]);
    assert!(alone.assert_done().stderr.contains("mesh dp 1 × sp 1, ZeRO stage 0"), "{alone:?}");
}
