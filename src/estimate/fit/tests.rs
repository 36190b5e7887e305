use super::*;
use crate::config::{Config, PartitionAxes};
use crate::model::{preset, shape};
use serde_json::json;
use ulysses_kernels::device::DeviceKind;

/// Eight sequences of 512 tokens on `ranks` ranks.
fn workload(ranks: usize, device: DeviceKind) -> Workload {
    let config = json!({
        "train_batch_size": 8, "mesh_param": [ranks, 1], "bf16": { "enabled": true },
        "ulysses": { "seq_len": 512 },
    });
    let config = Config::from_json_str(&config.to_string(), "c.json").unwrap();
    let model = preset("tiny").unwrap().with_num_layers(4);
    Workload { config, model, document_len: None, ranks_per_node: ranks, device }
}

fn fit(workload: &Workload, rank_bytes: u64) -> Fit {
    workload.fit(rank_bytes.into(), None).unwrap()
}

/// Whether a config has none of the settings that save memory.
fn is_plain(config: &Config) -> bool {
    let ulysses = &config.ulysses;
    u8::from(config.zero.stage) == 0
        && !ulysses.activation_checkpointing
        && (ulysses.tile_tokens, ulysses.head_chunks) == (None, 1)
        && ulysses.zero_partition_axes == PartitionAxes::Dp
}

#[test]
fn with_enough_memory_nothing_is_saved_and_the_batch_stays() {
    let found = fit(&workload(4, DeviceKind::Cpu), 1 << 40);
    assert!(found.nearest.is_none() && found.tried < found.combinations / 4, "{}", found.tried);
    let meshes: Vec<_> = found.choices.iter().map(|choice| choice.workload.config.mesh.sp_size).collect();
    assert_eq!(meshes.len(), 3, "{meshes:?}");
    for choice in &found.choices {
        let config = &choice.workload.config;
        assert!(is_plain(config), "{config:?}");
        assert_eq!((config.gradient_accumulation_steps, config.train_batch_size), (1, 8));
        assert_eq!(config.micro_batch_size * config.mesh.dp_size, 8);
    }
    // Without sp nothing is exchanged.
    assert_eq!(meshes[0], 1, "{meshes:?}");
}

#[test]
fn every_choice_fits_and_no_cheaper_value_of_a_setting_does() {
    let workload = workload(4, DeviceKind::Cuda);
    let plain = fit(&workload, 1 << 40).choices[0].plan.peak_bytes;
    for budget in [plain * 3 / 4, plain / 2, plain / 4] {
        let found = fit(&workload, budget);
        assert!(!found.choices.is_empty(), "{budget} of {plain}");
        for choice in &found.choices {
            let config = &choice.workload.config;
            let peak = |workload: &Workload| workload.plan().unwrap().peak_bytes;
            assert_eq!(peak(&choice.workload), choice.plan.peak_bytes);
            assert!(choice.plan.peak_bytes <= budget);
            let sizes = config.micro_batch_size * config.gradient_accumulation_steps * config.mesh.dp_size;
            assert_eq!(sizes, 8);
            if let Some(larger) =
                choice.workload.micro_batches().iter().rev().find(|size| **size > config.micro_batch_size)
            {
                assert!(peak(&choice.workload.with_micro_batch(*larger)) > budget, "{config:?}");
            }
        }
        let order = |pair: &[Candidate]| compare(&pair[0], &pair[1]) != Ordering::Greater;
        assert!(found.choices.windows(2).all(order));
    }
}

#[test]
fn host_memory_limits_what_is_offloaded() {
    let workload = workload(4, DeviceKind::Cuda);
    let least = fit(&workload, 1).nearest.unwrap();
    let rank_bytes = least.plan.peak_bytes;
    let offloading = fit(&workload, rank_bytes * 11 / 10);
    assert!(offloading.choices.iter().any(|choice| choice.plan.offloaded_bytes > 0), "{offloading:?}");
    let budget = MemoryBudget { rank_bytes: rank_bytes * 11 / 10, host_bytes_per_node: Some(0) };
    let limited = workload.fit(budget, None).unwrap();
    assert!(limited.choices.iter().all(|choice| choice.plan.offloaded_bytes == 0));
}

#[test]
fn fewer_head_chunks_are_tried_where_host_memory_lacks() {
    let config = json!({
        "train_batch_size": 1, "mesh_param": [1, 8], "bf16": { "enabled": true },
        "ulysses": { "seq_len": 1 << 20 },
    });
    let config = Config::from_json_str(&config.to_string(), "c.json").unwrap();
    let model = shape("llama3-8b").unwrap();
    let workload =
        Workload { config, model, document_len: None, ranks_per_node: 8, device: DeviceKind::Cuda };
    // Two head chunks, which save GPU memory, offload two checkpoints per layer in place of one: 635 GiB in place of 379.
    let budget = MemoryBudget { rank_bytes: 26 << 30, host_bytes_per_node: Some(500 << 30) };
    let found = workload.fit(budget, None).unwrap();
    assert!(!found.choices.is_empty(), "{:?}", found.nearest);
    let host = |choice: &Candidate| choice.plan.offloaded_bytes * 8;
    assert!(found.choices.iter().all(|choice| choice.plan.peak_bytes <= 26 << 30));
    assert!(found.choices.iter().all(|choice| choice.fits() && host(choice) <= 500 << 30));
}

#[test]
fn where_nothing_fits_the_nearest_is_the_one_that_exceeds_least() {
    let found = fit(&workload(2, DeviceKind::Cpu), 1000);
    let nearest = found.nearest.unwrap();
    assert!(found.choices.is_empty() && nearest.plan.peak_bytes > 1000);
    assert_eq!(nearest.workload.config.micro_batch_size, 1);
}

/// `size · size` of the largest has more than 64 bits.
#[test]
fn micro_batches_of_the_largest_batch_divide_it_in_descending_order() {
    let mut workload = workload(1, DeviceKind::Cpu);
    workload.config.train_batch_size = usize::MAX;
    let sizes = workload.micro_batches();
    assert_eq!((sizes[0], sizes.last()), (usize::MAX, Some(&1)));
    assert!(sizes.is_sorted_by(|a, b| a > b) && sizes.iter().all(|size| usize::MAX.is_multiple_of(*size)));
    workload.config.train_batch_size = 36;
    assert_eq!(workload.micro_batches(), [36, 18, 12, 9, 6, 4, 3, 2, 1]);
}
