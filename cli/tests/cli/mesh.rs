//! `ulysses mesh` and `--help`.

use crate::support::cli::Workplace;
use std::process::Stdio;

/// Returns the drawing of `mesh`.
fn drawing(arguments: &[&str]) -> String {
    let outcome = Workplace::new().run(&[&["mesh"], arguments].concat());
    outcome.assert_done();
    assert_eq!(outcome.stderr, "");
    outcome.stdout
}

/// Columns of a row in the table of groups.
fn groups_of(drawing: &str, axis: &str) -> String {
    let row = drawing.lines().find(|line| line.starts_with(&format!("{axis} ")));
    let words: Vec<&str> =
        row.unwrap_or_else(|| panic!("no {axis} in {drawing}")).split_whitespace().collect();
    words.join(" ")
}

#[test]
fn a_drawing_shows_ranks_groups_and_their_purpose() {
    let drawing = drawing(&["2x4"]);
    assert!(drawing.starts_with("mesh dp=2,sp=4: 8 ranks\n"), "{drawing}");
    for row in ["0 │ 0 1 2 3", "1 │ 4 5 6 7"] {
        assert!(drawing.contains(row), "{drawing}");
    }
    assert_eq!(groups_of(&drawing, "dp"), "dp 4 2 [0 4] [1 5] [2 6] [3 7]");
    assert_eq!(groups_of(&drawing, "sp"), "sp 2 4 [0 1 2 3] [4 5 6 7]");
    assert!(
        drawing.contains("each sequence is sharded over 4 ranks")
            && drawing.contains("ZeRO partitions: 2 over dp (the default), 8 over dp × sp.")
    );
}

#[test]
fn a_tensor_is_drawn_with_the_slices_and_bytes_of_every_rank() {
    let text = drawing(&["2x2", "--tensor", "7,3:Shard(0),Replicate"]);
    let rows = "rank  dp,sp       bytes  sends for all  slices\n   \
                0  0,0            48             48  [0..4, 0..3]\n   \
                1  0,1            48             48  [0..4, 0..3]\n   \
                2  1,0            36             36  [4..7, 0..3]\n";
    assert!(text.contains(rows), "{text}");
    let sum = drawing(&["2x2", "--tensor", "8:S(0),P:bf16"]);
    assert!(sum.contains("bf16, 16 bytes") && sum.contains("[4..8], a partial sum\n"), "{sum}");
    let refused = |tensor: &str, expected: &[&str]| {
        Workplace::new().run(&["mesh", "2x2", "--tensor", tensor]).assert_refused(2, expected);
    };
    refused("7,3", &["--tensor 7,3", "no `:`", "7,3:Shard(0),Replicate"]);
    refused("7,3:Shard(0)", &["&[Shard(0)]", "one per axis"]);
    refused("7,3:Shard(0),Shard(2)", &["axis `sp` shards dimension 2"]);
    refused("7,3:Row,Replicate", &["`Row`", "Shard(DIM), Replicate or Partial"]);
    refused("7,3:R,R:f31", &["no dtype `f31`"]);
}

#[test]
fn all_axes_of_training_are_drawn() {
    let text = drawing(&["pp=2,dp=2,sp=2,tp=2"]);
    assert!(text.contains("mesh pp=2,dp=2,sp=2,tp=2: 16 ranks\n"), "{text}");
    assert!(text.contains("pp=1, dp=0\n  sp\\tp │  0  1\n"), "{text}");
    assert!(groups_of(&text, "pp").starts_with("pp 8 2 [0 8] [1 9] "), "{text}");
    assert!(groups_of(&text, "tp").starts_with("tp 8 2 [0 1] [2 3] "), "{text}");
    assert!(
        text.contains("2 stages divide the layers.\n") && text.ends_with("ZeRO partitions: 2 over dp.\n"),
        "{text}"
    );
}

#[test]
fn nodes_are_drawn_with_groups_across_nodes() {
    let text = drawing(&["2x4", "--nodes", "2"]);
    assert!(text.contains("   0  [0 1 2 3]\n   1  [4 5 6 7]\n"), "{text}");
    assert!(
        text.contains("dp: 4 groups of 2, each across up to 2 nodes\nsp: 2 groups of 4, within a node\n"),
        "{text}"
    );
    let hybrid = drawing(&["intra:dp=2,sp=4/inter:sp=2"]);
    for row in ["0 │  0  1  2  3  8  9 10 11", "1 │  4  5  6  7 12 13 14 15"] {
        assert!(hybrid.contains(row), "{hybrid}");
    }
    let refused = |arguments: &[&str], expected: &[&str]| {
        Workplace::new().run(&[&["mesh"], arguments].concat()).assert_refused(2, expected);
    };
    // As in training, ranks are row-major across nodes.
    let across = drawing(&["2x4", "--nodes", "4"]);
    assert!(across.contains("sp         2     4  [0 1 2 3] [4 5 6 7]\n"), "{across}");
    assert!(across.contains("sp: 2 groups of 4, each across up to 2 nodes\n"), "{across}");
    refused(&["2x2", "--nodes", "3"], &["4 ranks cannot be divided into 3 nodes"]);
    refused(&["2x2", "--nodes", "3", "--devices-per-node", "2"], &["needs 4 ranks, but the world size is 6"]);
    refused(&["split:1x8", "--nodes", "2"], &["no `split:`", "`intra:…/inter:…`"]);
    refused(&["fsdp"], &["`fsdp=NODESxRANKS`"]);
}

#[test]
fn presets_draw_their_mesh() {
    let text = drawing(&["ulysses_hsdp", "--nodes", "2", "--devices-per-node", "8"]);
    assert!(text.starts_with("mesh dp_replicate=2,dp_shard=2,sp=4: 16 ranks\n"), "{text}");
    assert!(text.contains("dp_replicate: 8 groups of 2, each across up to 2 nodes"), "{text}");
    assert!(drawing(&["hsdp=2x4"]).starts_with("mesh dp_replicate=2,dp_shard=4: 8 ranks\n"));
    assert!(drawing(&["fsdp", "--world-size", "6"]).starts_with("mesh dp=6,sp=1: 6 ranks\n"));
}

#[test]
fn a_preset_with_sizes_uses_the_nodes_of_the_flags() {
    let text = drawing(&["hsdp=8", "--nodes", "2"]);
    assert!(text.starts_with("mesh dp_replicate=1,dp_shard=8: 8 ranks\n"), "the mesh of training: {text}");
    assert!(text.contains("   0  [0 1 2 3]\n   1  [4 5 6 7]\n"), "{text}");
    assert!(text.contains("dp_shard: 1 group of 8, across 2 nodes\n"), "{text}");
    let text = drawing(&["ulysses=2x4", "--devices-per-node", "2"]);
    assert!(text.contains("sp: 2 groups of 4, each across up to 2 nodes\n"), "{text}");
    assert!(drawing(&["ulysses=2x4"]).contains("sp: 2 groups of 4, within a node\n"));
    assert!(drawing(&["2x4", "--devices-per-node", "4"]).contains("sp: 2 groups of 4, within a node\n"));
    let two_of_4 = drawing(&["hsdp", "--devices-per-node", "4", "--world-size", "8"]);
    assert!(two_of_4.starts_with("mesh dp_replicate=2,dp_shard=4: 8 ranks\n"), "{two_of_4}");
    let refused = |arguments: &[&str], expected: &[&str]| {
        Workplace::new().run(&[&["mesh"], arguments].concat()).assert_refused(2, expected);
    };
    refused(&["fsdp=2x4", "--nodes", "3"], &["--mesh fsdp=2x4: 8 ranks cannot be divided into 3 nodes"]);
    refused(&["fsdp", "--nodes", "3", "--world-size", "8"], &["--world-size 8", "--nodes 3"]);
    refused(&["fsdp", "--devices-per-node", "3", "--world-size", "8"], &["--devices-per-node 3"]);
    let contradictory = ["fsdp", "--nodes", "2", "--devices-per-node", "4", "--world-size", "6"];
    refused(&contradictory, &["--world-size 6", "which give 8 ranks"]);
}

#[test]
fn a_mesh_is_written_as_svg() {
    let place = Workplace::new();
    let outcome = place.run(&["mesh", "2x4", "--nodes", "2", "--svg", "mesh.svg"]);
    assert!(outcome.assert_done().stderr.contains("written to mesh.svg"), "{outcome:?}");
    let svg = place.read("mesh.svg");
    assert!(svg.starts_with("<svg ") && svg.matches("<title>rank ").count() == 16, "{svg}");
    assert!(
        svg.contains(">Mesh dp=2,sp=4: 8 ranks, 4 per node</text>") && svg.contains(">node</text>"),
        "{svg}"
    );
    place
        .run(&["mesh", "2x4", "--svg", "no/such/dir.svg"])
        .assert_refused(1, &["--svg: cannot write no/such/dir.svg"]);
}

#[test]
fn both_notations_draw_the_same() {
    assert_eq!(drawing(&["dp=2,sp=4"]), drawing(&["2x4"]));
    assert_eq!(drawing(&["2x4", "--names", "dp,sp"]), drawing(&["2x4"]));
    assert_eq!(drawing(&["data_parallel=2,sequence_parallel=4"]), drawing(&["2x4"]));
}

#[test]
fn other_axes_have_other_groups() {
    let drawing = drawing(&["2x2x2", "--names", "pp,dp,sp"]);
    assert_eq!(groups_of(&drawing, "pp"), "pp 4 2 [0 4] [1 5] [2 6] [3 7]");
    assert_eq!(groups_of(&drawing, "dp"), "dp 4 2 [0 2] [1 3] [4 6] [5 7]");
    assert_eq!(groups_of(&drawing, "sp"), "sp 4 2 [0 1] [2 3] [4 5] [6 7]");
}

#[test]
fn one_size_is_inferred_from_the_world_size() {
    for shape in ["-1x4", "2x-1", "dp=-1,sp=4"] {
        assert_eq!(drawing(&[shape, "--world-size", "8"]), drawing(&["2x4"]), "{shape}");
    }
}

#[test]
fn a_drawing_of_a_million_ranks_is_shortened() {
    let drawing = drawing(&["1000x1000"]);
    assert!(drawing.contains("1000000 ranks") && drawing.contains('…'), "{drawing}");
    assert!(drawing.lines().count() < 60, "{drawing}");
}

#[test]
fn a_pipe_closed_early_is_no_failure() {
    let place = Workplace::new();
    let mut child =
        place.command(&["mesh", "1000x1000"]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    let outcome = child.wait_with_output().unwrap();
    assert_eq!((outcome.status.code(), outcome.stderr.len()), (Some(0), 0), "{outcome:?}");
}

#[test]
fn help_documents_every_flag_of_every_subcommand() {
    let flags: [(&str, &[&str]); 3] = [
        (
            "train",
            &[
                "[CONFIG]",
                "--model",
                "--data",
                "--tokenizer",
                "--mesh",
                "--seq-len",
                "--steps",
                "--threads-per-rank",
                "--backend",
                "--output",
                "--seed",
            ],
        ),
        (
            "verify",
            &[
                "--model",
                "--batch",
                "--mesh",
                "--zero-stage",
                "--steps",
                "--config",
                "--output",
                "--tolerance",
                "--json",
            ],
        ),
        ("mesh", &["<SHAPE>", "--names", "--world-size", "--tensor"]),
    ];
    let place = Workplace::new();
    for (subcommand, flags) in flags {
        let help = place.run(&[subcommand, "--help"]);
        help.assert_done();
        let lines = help.stdout.lines().map(str::trim).filter(|line| !line.starts_with("Usage:"));
        let lines: Vec<&str> = lines.collect();
        for flag in flags.iter().chain(&["--help"]) {
            let at = lines.iter().position(|line| line.split([' ', ',']).any(|word| word == *flag));
            let at = at.unwrap_or_else(|| panic!("{subcommand} {flag}: {}", help.stdout));
            let described =
                lines[at].contains("  ") || lines.get(at + 1).is_some_and(|line| !line.is_empty());
            assert!(described, "{subcommand} {flag} has no description: {}", help.stdout);
        }
        assert!(place.run(&["--help"]).assert_done().stdout.contains(subcommand));
    }
}

#[test]
fn hybrid_meshes_and_rank_maps_are_drawn_as_training_uses_them() {
    let text = drawing(&["intra:sp=2/inter:dp=2,sp=2"]);
    assert!(text.starts_with("mesh dp=2,sp=4: 8 ranks\n"), "{text}");
    assert!(
        text.contains("sp: 2 groups of 4, each across up to 2 nodes\n")
            && text.contains("dp: 4 groups of 2, each across up to 2 nodes\n"),
        "{text}"
    );
    let inferred = drawing(&["ici:sp=-1/dcn:dp=-1", "--nodes", "2", "--devices-per-node", "4"]);
    assert!(inferred.contains("sp: 2 groups of 4, within a node\n"), "{inferred}");
    let map = drawing(&["dp=2,sp=2@0,2,1,3", "--devices-per-node", "2"]);
    assert!(map.contains("sp: 2 groups of 2, each across up to 2 nodes\n"), "{map}");
}
