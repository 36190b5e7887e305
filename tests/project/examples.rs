//! Runs the numbered examples as a reader would, and checks their output.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

/// Directory in which cargo puts the examples of this build, once they are built: a test of its own name only does not build them.
static EXAMPLES: LazyLock<PathBuf> = LazyLock::new(|| {
    // TARGET/release/deps/examples-0123
    let test = std::env::current_exe().unwrap();
    let profile = test.ancestors().nth(2).unwrap();
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--quiet", "--examples", "--target-dir"]).arg(profile.parent().unwrap());
    cargo.args((profile.file_name().unwrap() == "release").then_some("--release"));
    // With other features, cargo would build everything again.
    let features = [
        ("mpi", cfg!(feature = "mpi")),
        ("parquet", cfg!(feature = "parquet")),
        ("cuda", cfg!(feature = "cuda")),
        ("nccl", cfg!(feature = "nccl")),
    ];
    for (feature, _) in features.into_iter().filter(|(_, is_on)| *is_on) {
        cargo.args(["--features", feature]);
    }
    assert!(cargo.current_dir(root()).status().unwrap().success(), "the examples build");
    profile.join("examples")
});

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Output of an example, run in a directory where it should leave nothing that it was not asked for.
#[track_caller]
fn output(name: &str, arguments: &[&str]) -> String {
    let place = tempfile::tempdir().unwrap();
    let mut example = Command::new(EXAMPLES.join(name));
    example.args(arguments).current_dir(place.path()).env("CANDLE_NUM_THREADS", "1");
    let outcome = example.output().unwrap();
    let text = String::from_utf8(outcome.stdout).unwrap();
    assert!(outcome.status.success(), "{name}: {text}\n{}", String::from_utf8_lossy(&outcome.stderr));
    assert_eq!(std::fs::read_dir(place.path()).unwrap().count(), 0, "{name} leaves files");
    text
}

#[track_caller]
fn assert_says(text: &str, expected: &[&str]) {
    for expected in expected {
        assert!(text.contains(expected), "no {expected:?} in\n{text}");
    }
}

/// The numbers that follow `label`, up to the line's end, as often as it comes.
fn numbers_after(text: &str, label: &str) -> Vec<Vec<f64>> {
    let rests = text.lines().filter_map(|line| line.split_once(label));
    rests.map(|(_, rest)| rest.split_whitespace().filter_map(|word| word.parse().ok()).collect()).collect()
}

#[test]
fn collectives_move_the_expected_data_and_a_failure_names_its_rank() {
    let text = output("01_collectives", &[]);
    assert_says(
        &text,
        &[
            "all_gather      [0.0, 1.0, 10.0, 11.0, 20.0, 21.0, 30.0, 31.0]",
            "all_reduce      [60.0, 64.0]",
            "reduce_scatter  [80.0, 84.0]",
            "all_to_all      [3.0, 3.0, 3.0, 13.0, 13.0, 13.0, 23.0, 23.0, 23.0, 33.0, 33.0, 33.0]",
            "from the left   [30.0, 31.0]",
            "a failure: rank 2 failed: this rank has run out of disk",
        ],
    );
}

#[test]
fn the_mesh_lists_the_groups_of_every_rank() {
    let text = output("02_mesh", &[]);
    assert_says(
        &text,
        &[
            "its sp peers are [4, 5, 6, 7], its dp peers [2, 6]",
            "dp peers of rank 5 are [1, 3, 5, 7]",
            "the same mesh: true",
            "rank 6: 22  8 28",
            "unknown axis `tp`; the axes of this mesh",
        ],
    );
}

#[test]
fn sharded_attention_equals_that_of_a_single_rank_and_sends_the_bytes_of_the_formula() {
    let text = output("03_ulysses_attention", &[]);
    assert_says(&text, &["49408 bytes sent, 49408 by formula", "43392 bytes sent, 43392 by formula"]);
    for tensor in ["  o  ", "  dq ", "  dk ", "  dv "] {
        let differences = numbers_after(&text, tensor);
        assert!(matches!(differences[..], [ref one] if one[0] < 1e-5), "{tensor}: {text}");
    }
}

#[test]
fn every_zero_stage_computes_the_same_bits_from_fewer_bytes() {
    let text = output("04_zero", &[]);
    assert_says(&text, &["rank 3: weight[9..10] bias[0..1]", "bit-identical: true"]);
    let last = text.lines().find(|line| line.trim_start().starts_with("3 ")).unwrap();
    let numbers: Vec<f64> = last.split_whitespace().map(|word| word.parse().unwrap()).collect();
    assert!(numbers[1] < 1e-2, "the line fits: {text}");
    assert_eq!(numbers[2..], [12.0, 12.0, 24.0]);
}

#[test]
fn a_block_in_candle_ops_learns() {
    let losses = numbers_after(&output("05_own_candle_block", &[]), "loss ");
    assert!(losses.last().unwrap()[0] < 0.7 * losses[0][0], "{losses:?}");
}

#[test]
fn a_fine_tuned_model_starts_from_pretrained_weights_and_is_exported() {
    let losses = numbers_after(&output("06_fine_tune_hugging_face", &[]), "loss ");
    let [fresh, .., tuned, _, best] = losses.iter().map(|line| line[0]).collect::<Vec<_>>()[..] else {
        panic!("six lines: {losses:?}")
    };
    assert!(tuned < 0.7 * fresh && best < 0.5 * tuned, "{losses:?}");
    // The same with a model, a text and a place of one's own, which is a new directory.
    let place = tempfile::tempdir().unwrap();
    let at = |name: &str| place.path().join(name).display().to_string();
    std::fs::write(
        at("text.txt"),
        "a stitch in time saves nine, and a penny saved is a penny earned. ".repeat(50),
    )
    .unwrap();
    let golden = root().join("tests/fixtures/golden/tiny_strong").display().to_string();
    let text = output("06_fine_tune_hugging_face", &[&golden, &at("text.txt"), &at("tuned")]);
    assert_says(&text, &["contains a model that transformers can load"]);
    for file in ["config.json", "model.safetensors"] {
        assert!(Path::new(&at("tuned")).join(file).exists(), "{file}");
    }
}

#[test]
fn packed_documents_have_the_loss_of_documents_alone() {
    let text = output("07_packed_documents", &[]);
    assert_says(
        &text,
        &["one document per sequence: 10 sequences, 62 % padding", "documents start at [0, 40, 63, 64]"],
    );
    assert!(numbers_after(&text, "relative difference ")[0][0] < 1e-6, "{text}");
}

#[test]
fn a_run_resumes_on_every_mesh() {
    let text = output("08_resume_on_another_mesh", &[]);
    let off: Vec<f64> = numbers_after(&text, "off by ").into_iter().map(|numbers| numbers[0]).collect();
    assert_eq!(off.len(), 6, "{text}");
    assert_eq!(off[0], 0.0, "the same mesh, to the bit: {text}");
    assert!(off.iter().all(|off| *off < 1e-5), "{text}");
}

#[test]
fn needles_in_other_shards_are_found_by_attention_over_whole_sequences_only() {
    let place = tempfile::tempdir().unwrap();
    let picture = place.path().join("needle.svg");
    let text = output("09_needle_in_a_haystack", &[picture.to_str().unwrap()]);
    let rows: Vec<[f64; 2]> = text
        .lines()
        .filter(|line| line.contains(" – "))
        .map(|line| {
            line.split(" %").map(|part| part.split_whitespace().last().unwrap().parse().unwrap_or(0.0))
        })
        .map(|mut shares| [shares.next().unwrap(), shares.next().unwrap()])
        .collect();
    assert_eq!(rows.len(), 16, "{text}");
    assert!(rows.iter().all(|[whole, _]| *whole >= 85.0), "{text}");
    // The last three quarters of the distances lie beyond the shard that asks; chance is 12.5 %.
    assert!(rows[5..].iter().all(|[_, shard]| *shard <= 30.0), "{text}");
    let svg = std::fs::read_to_string(picture).unwrap();
    assert!(
        svg.starts_with("<svg") && svg.matches("<polyline").count() == 2 && !svg.contains("NaN"),
        "{svg}"
    );
}

#[test]
fn a_custom_program_trains_evaluates_saves_exports_and_resumes() {
    let place = tempfile::tempdir().unwrap();
    let output = place.path().join("run").display().to_string();
    let text = self::output("10_own_training_program", &[&output]);
    let losses = numbers_after(&text, "  loss ");
    assert!(losses.len() == 4 && losses[3][0] < 0.7 * losses[0][0], "{text}");
    assert_eq!(numbers_after(&text, "held-out loss ").len(), 2, "{text}");
    for file in ["step_00000040/manifest.json", "model/model.safetensors"] {
        assert!(place.path().join("run").join(file).exists(), "{file}");
    }
    assert!(!place.path().join("run/model/config.json").exists(), "the model is not described");
    std::fs::remove_dir_all(place.path().join("run/step_00000040")).unwrap();
    std::fs::remove_dir_all(place.path().join("run/model")).unwrap();
    let resumed = self::output("10_own_training_program", &[&output]);
    assert_eq!(numbers_after(&resumed, "  loss "), losses[2..], "{resumed}");
}

#[test]
fn mesh_recipes_create_one_group_per_list_of_ranks() {
    let text = output("11_mesh_recipes", &[]);
    let by_hand = "  shard      [4, 5, 6, 7]\n  replicate  [1, 5]\n  2 splits";
    assert_says(
        &text,
        &[&format!("HSDP by hand, rank 5:\n{by_hand}"), &format!("HSDP by mesh, rank 5:\n{by_hand}")],
    );
    let slices = "  replicate  [1, 5]\n  shard      [5, 7]\n  tp         [4, 5]\n  data       [1, 3, 5, 7]\n  4 splits";
    let custom = "  my dp      [4, 5]\n  my sp      [1, 3, 5, 7]\n  2 splits";
    assert_says(&text, &[slices, custom]);
}

#[test]
fn three_axes_have_the_losses_of_one_rank() {
    let text = output("14_three_axes", &[]);
    let off: Vec<f64> = numbers_after(&text, "off by ").into_iter().map(|numbers| numbers[0]).collect();
    assert_eq!(off.len(), 5, "{text}");
    assert!(off.iter().all(|off| *off < 1e-5), "{text}");
    assert_says(&text, &["the first rank sent: dp ", "tp "]);
}

#[test]
fn a_model_without_a_vocabulary_trains_over_hsdp() {
    let text = output("12_hsdp_toy", &[]);
    let errors = numbers_after(&text, "mean squared error ");
    assert!(errors.len() == 5 && errors[4][0] < 0.1 * errors[0][0], "{text}");
    // A quarter of 165, with padding.
    assert_says(&text, &["rank 0 holds 42 of 165 elements"]);
}

#[test]
fn sharded_tensors_follow_the_tutorial_of_dtensor() {
    let text = output("13_sharded_tensor", &[]);
    assert_says(
        &text,
        &[
            "   3  3              24             72  [6..7, 0..6]",
            "rows: [2, 6] of [7, 6] on rank 0, [1, 6] on rank 3",
            "columns: [7, 2] on rank 0, [7, 1] on rank 3",
            "replicated: [7, 6] on every rank",
            "x · w: [Shard(0), Partial] without communication; whole: equal",
            "`b.redistribute(&[Shard(0), Partial])?`",
            "loaded [Replicate, Shard(1)]: [7, 3]",
        ],
    );
    let counted = text.lines().find_map(|line| line.strip_prefix("bytes to replicate: ")).unwrap();
    let (planned, sent) = counted.split_once(" planned, ").unwrap();
    assert_eq!(format!("{planned} sent"), sent, "{text}");
}
