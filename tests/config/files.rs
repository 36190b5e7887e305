//! The ready files in `configs/` are valid and are what their README says.

use std::path::{Path, PathBuf};
use ulysses::config::{Backend, Config, MachineProfile, ZeroStage};

fn configs_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("configs")
}

fn config(name: &str) -> Config {
    Config::from_file(configs_dir().join(name)).unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn every_file_is_valid_complete_and_without_notes() {
    let mut num_files = 0;
    for entry in std::fs::read_dir(configs_dir()).unwrap() {
        let path = entry.unwrap().path();
        let is_schema = path.ends_with("ulysses.schema.json");
        if !is_schema && path.extension().is_some_and(|extension| extension == "json") {
            let config = Config::from_file(&path).unwrap_or_else(|error| panic!("{error}"));
            assert!(config.notes.is_empty(), "{}: {:?}", path.display(), config.notes);
            config.require_model().unwrap();
            config.require_data().unwrap();
            config.require_seq_len().unwrap();
            config.require_steps().unwrap();
            num_files += 1;
        }
    }
    assert_eq!(num_files, 7);
}

#[test]
fn every_machine_profile_is_valid_and_says_that_it_is_not_measured() {
    let profiles = std::fs::read_dir(configs_dir().join("machines")).unwrap();
    let profiles: Vec<_> =
        profiles.map(|entry| MachineProfile::from_file(entry.unwrap().path()).unwrap()).collect();
    assert_eq!(profiles.len(), 2);
    for MachineProfile { name, origin, rates, links, .. } in profiles {
        assert!(origin.contains("NOT MEASURED") && origin.contains("assumed"), "{name}: {origin}");
        assert!(rates.bf16.is_some() && links.intra_node.is_some() && links.inter_node.is_some(), "{name}");
    }
}

#[test]
fn the_book_shows_the_config_file_as_it_is() {
    let page = std::fs::read_to_string(configs_dir().join("../docs/config-file.md")).unwrap();
    let file = std::fs::read_to_string(configs_dir().join("long_sequence.json")).unwrap();
    assert!(page.contains(file.trim()), "docs/config-file.md shows another configs/long_sequence.json");
}

#[test]
fn the_small_files_use_one_axis_each_and_the_long_one_both() {
    let zero = config("zero.json");
    assert_eq!((zero.mesh.dp_size, zero.mesh.sp_size, zero.zero.stage), (2, 1, ZeroStage::Parameters));
    assert_eq!(zero.gradient_accumulation_steps, 2);
    let sequence_parallel = config("sequence_parallel.json");
    assert_eq!((sequence_parallel.mesh.dp_size, sequence_parallel.mesh.sp_size), (1, 2));
    let long = config("long_sequence.json");
    assert_eq!((long.mesh.dp_size, long.mesh.sp_size, long.ulysses.seq_len), (2, 2, Some(4096)));
    assert_eq!((long.optimizer.lr(), long.gradient_clipping), (3e-3, 1.0));
    let peak = long.lr_schedule().lr_at(21);
    assert!((2.99e-3..3e-3).contains(&peak), "after the warm-up the rate is near the optimizer's: {peak}");
}

#[test]
fn the_first_run_leaves_its_mesh_open_and_saves() {
    let first = config("first_run.json");
    assert_eq!((first.mesh.dp_size, first.mesh.sp_size, first.zero.stage), (1, 1, ZeroStage::Parameters));
    assert_eq!(first.checkpoint.and_then(|checkpoint| checkpoint.interval), Some(20));
}

#[test]
fn the_max_seq_len_file_enables_every_memory_setting_that_keeps_results() {
    let longest = config("max_seq_len.json");
    assert_eq!((longest.mesh.dp_size, longest.mesh.sp_size, longest.gradient_clipping), (1, 1, 1.0));
    assert!(longest.ulysses.activation_checkpointing && longest.activation_checkpointing.cpu_checkpointing);
    let tiles =
        [longest.ulysses.tile_tokens, longest.ulysses.loss_tile_tokens].map(|tokens| tokens.map(usize::from));
    assert_eq!((tiles, longest.ulysses.head_chunks), ([Some(512), Some(1024)], 2));
}

#[test]
fn the_large_file_is_a_million_tokens_on_32_ranks() {
    let large = config("llama3_8b_1m.json");
    assert_eq!((large.mesh.dp_size, large.mesh.sp_size, large.ulysses.seq_len), (4, 8, Some(1 << 20)));
    assert_eq!(large.ulysses.backend, Backend::Nccl, "planned as GPUs hold it, not as this machine would");
}
