//! Invalid arguments.

use crate::golden;
use crate::support::cli::Workplace;
use serde_json::json;

/// Runs `train` with flags on a valid config.
fn train(flags: &[&str]) -> crate::support::cli::Outcome {
    let place = Workplace::new();
    place.write_config("c.json", json!({}));
    let outcome = place.run(&[&["train", "c.json"], flags].concat());
    assert!(!place.path("out").exists(), "nothing is written: {outcome:?}");
    outcome
}

fn verify(flags: &[&str]) -> crate::support::cli::Outcome {
    let (model, batch) = (golden("tiny_strong", ""), golden("tiny_strong", "inputs.safetensors"));
    Workplace::new().run(&[&["verify", "--model", &model, "--batch", &batch], flags].concat())
}

#[test]
fn invalid_meshes_are_refused() {
    // The tests of `src/mesh` have every notation.
    for (mesh, expected) in [
        ("0x2", "size 0; valid sizes are 1 or more"),
        ("dp=2,ep=2", "unknown axis `ep`: the axes are, first, pp, dp (or "),
        ("100000x100000", "more than 1048576 ranks"),
    ] {
        train(&["--mesh", mesh]).assert_refused(2, &[expected, &format!("--mesh {mesh}")]);
    }
    for (mesh, expected) in
        [("-1x2", "the size of dp cannot be inferred from -1"), ("two", "write DPxSP such as `2x4`")]
    {
        let named = format!("--mesh {mesh}");
        train(&["--mesh", mesh]).assert_refused(2, &[expected, &named]);
        verify(&["--mesh", mesh]).assert_refused(2, &[expected, &named]);
        for command in [&["plan", "--model", "nano"][..], &["eval", "nano", "--data", "text.txt"]] {
            let run = Workplace::new().run(&[command, &["--mesh", mesh]].concat());
            run.assert_refused(2, &[expected, &named]);
        }
    }
    for (mesh, expected) in [("2x2x2x2", "4 sizes"), ("0x2", "axis `dp` has size 0"), ("-1x2", "world size")]
    {
        Workplace::new().run(&["mesh", mesh]).assert_refused(2, &[expected]);
    }
    let names = Workplace::new().run(&["mesh", "2x4", "--names", "a"]);
    names.assert_refused(2, &["2 sizes for the axes a;"]);
    Workplace::new().run(&["mesh", "dp=2", "--names", "a"]).assert_refused(2, &["--names", "dp=2"]);
    let world = Workplace::new().run(&["mesh", "2x4", "--world-size", "7"]);
    world.assert_refused(2, &["needs 8 ranks, but the world size is 7"]);
}

#[test]
fn more_sequence_ranks_than_heads_or_tokens_are_refused() {
    let heads = ["num_heads = 4", "sp = 5", "largest valid sp is 4"];
    train(&["--mesh", "1x5"]).assert_refused(2, &heads);
    let tokens = ["seq_len = 3", "sp = 4", "largest valid sp is 3"];
    train(&["--mesh", "1x4", "--seq-len", "3"]).assert_refused(2, &tokens);
    let ring = "`ulysses.ring_size` 2, or `--mesh dp=1,ring=2,ulysses=8`";
    verify(&["--mesh", "1x16"])
        .assert_refused(2, &["num_heads = 8", "sp = 16", "largest valid sp is 8", ring]);
}

#[test]
fn invalid_numbers_are_refused_with_the_expected_kind() {
    for (flag, value) in [("--steps", "many"), ("--steps", "-1"), ("--seed", "1.5")] {
        let expected = format!("invalid value '{value}' for '{flag} ");
        let outcome = train(&[flag, value]);
        outcome.assert_refused(2, &[&expected, "expected a whole number of at least 0"]);
        assert!(outcome.stderr.ends_with("at least 0\n"), "{outcome:?}");
    }
    train(&["--seq-len", "4k"]).assert_refused(2, &["'4k' for '--seq-len ", "a whole number of at least 1"]);
    train(&["--steps", "99999999999999999999"]).assert_refused(2, &["'--steps ", "a smaller number"]);
    let plan = |gib: &str| Workplace::new().run(&["plan", "c.json", "--memory-gib", gib]);
    plan("80GB").assert_refused(2, &["'80GB' for '--memory-gib ", "a number, such as 80 or 0.5"]);
    // The flag's own message is kept.
    train(&["--packing", "tight"]).assert_refused(2, &["expected greedy, cut or concat"]);
}

#[test]
fn counts_of_zero_and_below_are_refused() {
    for flag in ["--steps", "--threads-per-rank"] {
        train(&[flag, "0"]).assert_refused(2, &[flag, "at least 1", "found 0"]);
    }
    train(&["--seq-len", "0"]).assert_refused(2, &["'0' for '--seq-len ", "at least 1"]);
    for flag in ["--steps", "--threads-per-rank", "--seq-len", "--seed"] {
        train(&[flag, "-1"]).assert_refused(2, &[flag, "invalid value '-1'"]);
        train(&[flag, "many"]).assert_refused(2, &[flag, "invalid value 'many'"]);
    }
}

#[test]
fn a_negative_number_is_a_flag_value_in_every_command() {
    let run = |arguments: &[&str]| Workplace::new().run(arguments);
    for arguments in [
        &["plan", "c.json", "--ranks-per-node", "-1"][..],
        &["mesh", "2x2", "--nodes", "-1"],
        &["bench", "attention", "--seq-len", "-1"],
        &["bench", "max-seq-len", "c.json", "--resolution", "-1"],
        &["train", "c.json", "--trace", "t.json", "--trace-steps", "-1"],
        #[cfg(unix)]
        &["launch", "--nproc", "-1"],
        // Arguments after `--` are parsed before anything starts.
        #[cfg(unix)]
        &["launch", "--nproc", "2", "--", "train", "c.json", "--steps", "-1"],
    ] {
        let flag = arguments[arguments.len() - 2];
        run(arguments).assert_refused(2, &[&format!("invalid value '-1' for '{flag} ")]);
    }
    // A flag stays a flag.
    run(&["mesh", "2x2", "-x"]).assert_refused(2, &["unexpected argument '-x'"]);
    train(&["--trace", "t.json", "--trace-steps", "0"])
        .assert_refused(2, &["expected a whole number of at least 1"]);
}

#[test]
fn runs_beyond_the_limits_of_this_machine_are_refused() {
    train(&["--threads-per-rank", "100000"]).assert_refused(2, &["100000 thread(s)", "the limit of 4096"]);
    train(&["--seq-len", "4000000000"]).assert_refused(2, &["GiB", "4000000000 tokens", "seq_len"]);
    verify(&["--mesh", "100000x1"]).assert_refused(2, &["100000 rank(s)", "the limit of 4096"]);
    let place = Workplace::new();
    let per_rank = json!({ "train_batch_size": null, "train_micro_batch_size_per_gpu": 1 });
    place.write_config("c.json", per_rank);
    let outcome = place.run(&["train", "c.json", "--mesh", "100000x1"]);
    outcome.assert_refused(2, &["100000 rank(s)", "the limit of 4096", "mesh"]);
}

#[test]
fn verify_refuses_invalid_tolerances_stages_and_outputs() {
    for tolerance in ["-1", "nan", "inf", "small"] {
        let refused = verify(&["--mesh", "1x1", "--tolerance", tolerance]);
        refused.assert_refused(2, &["--tolerance", tolerance, "a number of at least 0"]);
    }
    verify(&["--mesh", "1x1", "--zero-stage", "4"]).assert_refused(2, &["--zero-stage", "4", "0..=3"]);
    let no_directory = verify(&["--mesh", "1x1", "--output", "no/such/o.safetensors"]);
    no_directory.assert_refused(2, &["--output", "no/such/o.safetensors", "does not exist"]);
    verify(&["--mesh", "1x1", "--output", "."]).assert_refused(2, &["--output", "expected a file"]);
    let config = verify(&["--mesh", "1x1", "--config", "nothing.json"]);
    config.assert_refused(2, &["nothing.json", "No such file"]);
}

#[test]
fn missing_files_and_features_are_refused() {
    train(&["--resume=nowhere"]).assert_refused(
        2,
        &["--resume nowhere: expected a checkpoint, or an output directory with checkpoints, found nothing"],
    );
    for (backend, is_built) in [("nccl", cfg!(feature = "nccl")), ("mpi", cfg!(feature = "mpi"))] {
        if is_built {
            continue;
        }
        let (stated, lacks) = (format!("--backend {backend}"), format!("lacks the feature `{backend}`"));
        train(&["--backend", backend]).assert_refused(2, &[&stated, &lacks, "thread"]);
        let place = Workplace::new();
        place.write_config("c.json", json!({ "ulysses": { "backend": backend } }));
        let in_file = [format!("`ulysses.backend` is \"{backend}\""), lacks];
        let outcome = place.run(&["train", "c.json"]);
        outcome.assert_refused(2, &in_file.each_ref().map(String::as_str));
        assert!(!outcome.stderr.contains("--backend"), "no flag was given: {outcome:?}");
    }
    for (name, variables, is_built) in [
        ("Open MPI", [("OMPI_COMM_WORLD_RANK", "0"), ("OMPI_COMM_WORLD_SIZE", "2")], cfg!(feature = "mpi")),
        ("torchrun", [("RANK", "0"), ("WORLD_SIZE", "2")], cfg!(feature = "nccl")),
    ] {
        if is_built {
            continue;
        }
        let place = Workplace::new();
        place.write_config("c.json", json!({}));
        let outcome = place.command(&["train", "c.json"]).envs(variables).output().unwrap();
        let message = String::from_utf8(outcome.stderr).unwrap();
        assert_eq!(outcome.status.code(), Some(2), "{message}");
        let refused = format!("{name} started 2 processes, but this build lacks the feature");
        assert!(message.contains(&refused), "{message}");
        for threads in [
            &["train", "c.json", "--backend", "thread"][..],
            &["bench", "collectives", "--backend", "thread"],
        ] {
            let outcome = place.command(threads).envs(variables).output().unwrap();
            let message = String::from_utf8(outcome.stderr).unwrap();
            assert_eq!(outcome.status.code(), Some(2), "{message}");
            let refused =
                format!("--backend thread: {name} started 2 processes, and each would run all ranks");
            assert!(message.contains(&refused), "{message}");
        }
        assert!(!place.path("runs").exists() && !place.path("out").exists(), "nothing was written");
    }
    train(&["--speed", "11"]).assert_refused(2, &["--speed"]);
    Workplace::new().run(&["fly"]).assert_refused(2, &["fly", "subcommand"]);
    Workplace::new().run(&["train"]).assert_refused(2, &["<CONFIG>"]);
    Workplace::new().run(&["verify"]).assert_refused(2, &["--model", "--batch", "--mesh"]);
}

#[cfg(not(feature = "cuda"))]
#[test]
fn a_gpu_is_refused_by_a_build_without_cuda_which_says_that_it_runs_on_the_cpu() {
    let feature = ["--device cuda: this build lacks the feature `cuda`"];
    train(&["--device", "cuda"]).assert_refused(2, &feature);
    verify(&["--mesh", "1x2", "--device", "cuda"]).assert_refused(2, &feature);
    let place = Workplace::new();
    place.write_config("c.json", json!({ "ulysses": { "steps": 1 } }));
    let line = "device: cpu (this build lacks the feature `cuda`)";
    for (device, lines) in [(&[][..], 1), (&["--device", "auto"], 1), (&["--device", "cpu"], 0)] {
        let outcome =
            place.run(&[&["train", "c.json", "--output", &format!("out-{device:?}")], device].concat());
        let found = outcome.assert_done().stderr.lines().filter(|found| *found == line).count();
        assert_eq!(found, lines, "{device:?}: {outcome:?}");
    }
}
