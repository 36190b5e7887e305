//! Step times on idealized machines.

mod choices;
mod counted;

use super::*;
use crate::config::{Config, Links, RatesByFormat};
use crate::model::{preset, shape};
use serde_json::{Value, json};
use ulysses_kernels::device::DeviceKind;

const INFINITE: Rates = Rates {
    peak_flops_per_second: 1e12,
    product_flops_per_second: f64::INFINITY,
    attention_forward_flops_per_second: f64::INFINITY,
    attention_backward_flops_per_second: f64::INFINITY,
    elementwise_bytes_per_second: f64::INFINITY,
};

const INSTANT: LinkRates = LinkRates {
    latency_seconds: 0.0,
    all_to_all_bytes_per_second: f64::INFINITY,
    all_reduce_bytes_per_second: f64::INFINITY,
    reduce_scatter_bytes_per_second: f64::INFINITY,
    all_gather_bytes_per_second: f64::INFINITY,
};

/// A machine that does everything at once.
fn machine() -> MachineProfile {
    MachineProfile {
        name: "paper".to_owned(),
        origin: "a test".to_owned(),
        ranks_per_node: 8,
        rates: RatesByFormat { f32: Some(INFINITE), bf16: None, fp16: None },
        update_bytes_per_second: f64::INFINITY,
        file_bytes_per_second: Some(f64::INFINITY),
        host_bytes_per_second: Some(f64::INFINITY),
        overlaps_communication: false,
        links: Links { intra_node: Some(INSTANT), inter_node: Some(INSTANT) },
    }
}

fn with_rates(change: impl FnOnce(&mut Rates)) -> MachineProfile {
    let mut rates = INFINITE;
    change(&mut rates);
    MachineProfile { rates: RatesByFormat { f32: Some(rates), ..RatesByFormat::default() }, ..machine() }
}

fn with_link(change: impl FnOnce(&mut LinkRates)) -> MachineProfile {
    let mut link = INSTANT;
    change(&mut link);
    MachineProfile { links: Links { intra_node: Some(link), inter_node: None }, ..machine() }
}

/// The preset `nano` on sequences of 64 tokens, one for each dp rank.
fn nano(dp: usize, sp: usize, changes: Value) -> Workload {
    let mut json = json!({
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "mesh_param": [dp, sp],
        "ulysses": { "seq_len": 64 },
    });
    for (key, value) in changes.as_object().unwrap() {
        match (json.get_mut(key).and_then(Value::as_object_mut), value.as_object()) {
            (Some(section), Some(changes)) => section.extend(changes.clone()),
            _ => json[key] = value.clone(),
        }
    }
    let config = Config::from_json_str(&json.to_string(), "c.json").unwrap();
    Workload {
        config,
        model: preset("nano").unwrap(),
        document_len: None,
        ranks_per_node: 8,
        device: DeviceKind::Cpu,
    }
}

#[track_caller]
fn assert_close(found: f64, expected: f64) {
    assert!((found - expected).abs() <= 1e-12 * expected.abs(), "{found} is not {expected}");
}

#[track_caller]
fn seconds(workload: &Workload, machine: &MachineProfile) -> f64 {
    let time = workload.step_time(machine).unwrap();
    assert_close(time.parts.named().iter().map(|(_, seconds)| seconds).sum(), time.total_seconds);
    time.total_seconds
}

/// Weights of the matmuls: q, k, v, o: 64·(64 + 32 + 32 + 64); gate, up, down: 3·64·172; two layers; head: 64·256.
const HEAD: f64 = 64.0 * 256.0;
const WEIGHTS: f64 = 2.0 * (64.0 * 192.0 + 3.0 * 64.0 * 172.0) + HEAD;

#[test]
fn a_pipeline_takes_all_micro_batches_of_its_slowest_stage_and_one_of_the_others() {
    let machine = with_rates(|rates| rates.product_flops_per_second = 1e9);
    let stages = json!({ "gradient_accumulation_steps": 4, "pipeline_parallel_size": 2 });
    let layer = 64.0 * 6.0 * (WEIGHTS - HEAD) / 2.0 / 1e9;
    let with_head = layer + 64.0 * 8.0 * HEAD / 1e9;
    let workload = nano(1, 1, stages);
    assert_close(seconds(&workload, &machine), 4.0 * with_head + layer);
    let time = workload.step_time(&machine).unwrap();
    assert_eq!(time.rank, 1);
    assert_close(time.parts.pipeline_seconds, layer);
}

#[test]
fn matmuls_take_six_flops_a_weight_and_token_and_the_logits_once_more() {
    let machine = with_rates(|rates| rates.product_flops_per_second = 1e9);
    assert_close(seconds(&nano(1, 1, json!({})), &machine), 64.0 * (6.0 * WEIGHTS + 2.0 * HEAD) / 1e9);
    let time = nano(1, 1, json!({})).step_time(&machine).unwrap();
    assert_close(time.recompute_seconds, 64.0 * 2.0 * HEAD / 1e9);
    assert_close(time.tokens_per_second, 64.0 / time.total_seconds);
    // The recomputed logits do not count as model FLOPs, attention does.
    let attention = 2.0 * 12.0 * 2080.0 * 64.0;
    assert_close(time.mfu, (64.0 * 6.0 * WEIGHTS + attention) / time.total_seconds / 1e12);
}

#[test]
fn attention_takes_twelve_flops_a_visible_pair_and_head_element() {
    // 64·65/2 pairs, 4 heads of 16, two layers.
    let forward = with_rates(|rates| rates.attention_forward_flops_per_second = 1e6);
    assert_close(seconds(&nano(1, 1, json!({})), &forward), 2.0 * 4.0 * 2080.0 * 64.0 / 1e6);
    let backward = with_rates(|rates| rates.attention_backward_flops_per_second = 1e6);
    assert_close(seconds(&nano(1, 1, json!({})), &backward), 2.0 * 8.0 * 2080.0 * 64.0 / 1e6);
    // Two ranks have half of the heads each.
    assert_close(seconds(&nano(1, 2, json!({})), &forward), 4.0 * 2080.0 * 64.0 / 1e6);
}

#[test]
fn the_exchange_takes_its_bytes_by_the_bandwidth_of_an_all_to_all() {
    let machine = with_link(|link| link.all_to_all_bytes_per_second = 1e6);
    // 32 tokens a rank; 2 query heads and a KV head of 16 for the peer: 32·(2 + 2·1) + 32·2 heads forward, as many
    // backward, in each of two layers, 4 bytes an element.
    let bytes = 2.0 * 2.0 * (32.0 * 4.0 + 32.0 * 2.0) * 16.0 * 4.0;
    let time = nano(1, 2, json!({})).step_time(&machine).unwrap();
    assert_close(time.parts.exchange_seconds, bytes / 1e6);
    assert_close(time.total_seconds, bytes / 1e6);
    assert_eq!(seconds(&nano(1, 1, json!({})), &machine), 0.0, "a single rank exchanges nothing");
}

#[test]
fn every_collective_takes_its_latency() {
    let machine = with_link(|link| link.latency_seconds = 1.0);
    // Four exchanges in each of two layers, the sum of four units over sp, the batch hashes and the loss.
    assert_close(seconds(&nano(1, 2, json!({})), &machine), 8.0 + 4.0 + 2.0);
    // Four reductions over dp, and the loss.
    assert_close(seconds(&nano(2, 1, json!({})), &machine), 4.0 + 1.0);
}

#[test]
fn gradients_are_reduced_at_the_bandwidth_of_their_operation() {
    let parameters = preset("nano").unwrap().num_parameters() as f64;
    // Of two ranks each sends half of its sums and half of its results; the loss are 16 bytes of few elements.
    let all_reduce = with_link(|link| link.all_reduce_bytes_per_second = 1e6);
    let sent = 4.0 * parameters;
    assert_close(seconds(&nano(2, 1, json!({})), &all_reduce), (sent + 16.0) / 1e6);
    let stage = |stage: u8| nano(2, 1, json!({ "zero_optimization": { "stage": stage } }));
    let scatter = with_link(|link| link.reduce_scatter_bytes_per_second = 1e6);
    let gather = with_link(|link| link.all_gather_bytes_per_second = 1e6);
    for (number, gathers) in [(1, 1.0), (2, 1.0), (3, 2.0)] {
        assert_close(seconds(&stage(number), &scatter), 2.0 * parameters / 1e6);
        // Stage 3 gathers a layer twice, embedding and head once; all gather a number for the norm.
        let outside = if number == 3 { 2.0 * HEAD + 64.0 } else { 0.0 };
        let expected = 2.0 * (gathers * parameters - outside) + 8.0;
        assert_close(seconds(&stage(number), &gather), expected / 1e6);
    }
}

#[test]
fn the_update_reads_gradients_twice_and_reads_and_writes_parameters_and_state() {
    let parameters = preset("nano").unwrap().num_parameters() as f64;
    let machine = MachineProfile { update_bytes_per_second: 1e6, ..machine() };
    // Norm, gradient, three tensors both ways: 4 bytes each.
    assert_close(seconds(&nano(1, 1, json!({})), &machine), 4.0 * (1.0 + 1.0 + 6.0) * parameters / 1e6);
}

#[test]
fn offloaded_tensors_go_to_their_file_and_back() {
    let parameters = preset("nano").unwrap().num_parameters() as f64;
    let machine = MachineProfile { file_bytes_per_second: Some(1e6), ..machine() };
    let offload = json!({ "zero_optimization": { "stage": 1, "offload_optimizer": { "device": "nvme" } } });
    // Both moments, both ways, 4 bytes each.
    assert_close(seconds(&nano(1, 1, offload), &machine), 2.0 * 2.0 * 4.0 * parameters / 1e6);
    let checkpoints = json!({
        "activation_checkpointing": { "cpu_checkpointing": true }, "ulysses": { "activation_checkpointing": true },
    });
    // The input of each of two layers, both ways.
    assert_close(seconds(&nano(1, 1, checkpoints), &machine), 2.0 * 2.0 * 64.0 * 64.0 * 4.0 / 1e6);
}

#[test]
fn what_a_gpu_offloads_goes_to_the_host_and_back_and_nothing_to_files() {
    let parameters = preset("nano").unwrap().num_parameters() as f64;
    let machine =
        MachineProfile { host_bytes_per_second: Some(1e6), file_bytes_per_second: None, ..machine() };
    let on_gpu = |changes| Workload { device: DeviceKind::Cuda, ..nano(1, 1, changes) };
    let offload = json!({ "zero_optimization": { "stage": 1, "offload_optimizer": { "device": "cpu" } } });
    // Gradients and parameters go to the host and parameters back; the host updates parameters, which are f32, from
    // gradients and two moments.
    assert_close(seconds(&on_gpu(offload.clone()), &machine), (3.0 + 4.0) * 4.0 * parameters / 1e6);
    assert_close(seconds(&nano(1, 1, offload), &machine), 0.0);
    let checkpoints = json!({
        "activation_checkpointing": { "cpu_checkpointing": true }, "ulysses": { "activation_checkpointing": true },
    });
    assert_close(seconds(&on_gpu(checkpoints), &machine), 2.0 * 2.0 * 64.0 * 64.0 * 4.0 / 1e6);
}

#[test]
fn a_slower_machine_is_never_faster() {
    type Change = fn(&mut MachineProfile);
    let usual = MachineProfile {
        rates: RatesByFormat {
            f32: Some(Rates {
                peak_flops_per_second: 1e11,
                product_flops_per_second: 5e10,
                attention_forward_flops_per_second: 2e10,
                attention_backward_flops_per_second: 1e10,
                elementwise_bytes_per_second: 1e9,
            }),
            ..RatesByFormat::default()
        },
        update_bytes_per_second: 1e9,
        file_bytes_per_second: Some(1e8),
        host_bytes_per_second: Some(1e9),
        overlaps_communication: true,
        links: Links {
            intra_node: Some(LinkRates {
                latency_seconds: 1e-6,
                all_to_all_bytes_per_second: 1e9,
                all_reduce_bytes_per_second: 1e9,
                reduce_scatter_bytes_per_second: 1e9,
                all_gather_bytes_per_second: 1e9,
            }),
            inter_node: None,
        },
        ..machine()
    };
    let link: [Change; 5] = [
        |slow| slow.links.intra_node.as_mut().unwrap().latency_seconds *= 2.0,
        |slow| slow.links.intra_node.as_mut().unwrap().all_to_all_bytes_per_second /= 2.0,
        |slow| slow.links.intra_node.as_mut().unwrap().all_reduce_bytes_per_second /= 2.0,
        |slow| slow.links.intra_node.as_mut().unwrap().reduce_scatter_bytes_per_second /= 2.0,
        |slow| slow.links.intra_node.as_mut().unwrap().all_gather_bytes_per_second /= 2.0,
    ];
    let rates: [Change; 7] = [
        |slow| slow.rates.f32.as_mut().unwrap().product_flops_per_second /= 2.0,
        |slow| slow.rates.f32.as_mut().unwrap().attention_forward_flops_per_second /= 2.0,
        |slow| slow.rates.f32.as_mut().unwrap().attention_backward_flops_per_second /= 2.0,
        |slow| slow.rates.f32.as_mut().unwrap().elementwise_bytes_per_second /= 2.0,
        |slow| slow.update_bytes_per_second /= 2.0,
        |slow| *slow.file_bytes_per_second.as_mut().unwrap() /= 2.0,
        |slow| slow.overlaps_communication = false,
    ];
    let workload = nano(
        2,
        2,
        json!({
            "zero_optimization": { "stage": 3, "offload_optimizer": { "device": "nvme" } },
            "ulysses": { "activation_checkpointing": true, "seq_len": 96 },
        }),
    );
    let before = seconds(&workload, &usual);
    for (index, change) in link.into_iter().chain(rates).enumerate() {
        let mut slow = usual.clone();
        change(&mut slow);
        assert!(seconds(&workload, &slow) > before, "change {index} makes no difference");
    }
    assert!(seconds(&workload.with_seq_len(128), &usual) > before);
}

#[test]
fn what_overlaps_costs_as_much_as_the_longer_of_the_two_and_nothing_is_lost() {
    let workload = nano(2, 1, json!({ "zero_optimization": { "stage": 3 } }));
    let mut apart = with_link(|link| link.all_gather_bytes_per_second = 1e9);
    apart.rates.f32.as_mut().unwrap().product_flops_per_second = 1e11;
    let together = MachineProfile { overlaps_communication: true, ..apart.clone() };
    let [apart, together] = [apart, together].map(|machine| workload.step_time(&machine).unwrap());
    assert_eq!(apart.parts.matmul_seconds, together.parts.matmul_seconds);
    assert_eq!(apart.hidden_seconds, 0.0);
    // All of the communication is either waited for or hidden.
    let all = apart.parts.zero_seconds;
    assert!(together.hidden_seconds > 0.2 * all, "{together:?}");
    assert!((together.parts.zero_seconds + together.hidden_seconds - all).abs() < 1e-12);
    assert!(together.total_seconds < apart.total_seconds);
    assert!(together.total_seconds >= together.parts.matmul_seconds.max(all));
}

/// Two head chunks of one layer: 8 exchanges of a second each, and 4 seconds of attention per chunk forward, 8 backward.
#[test]
fn the_exchange_of_a_chunk_hides_behind_the_attention_of_its_neighbor() {
    let mut machine = MachineProfile { overlaps_communication: true, ..machine() };
    machine.links.intra_node =
        Some(LinkRates { latency_seconds: 1.0, all_to_all_bytes_per_second: f64::INFINITY, ..INSTANT });
    let rates = machine.rates.f32.as_mut().unwrap();
    // 4 and 8 FLOPs per pair and head element; 2080 pairs, a head of 16 per chunk and rank.
    rates.attention_forward_flops_per_second = 2080.0 * 16.0;
    rates.attention_backward_flops_per_second = 2080.0 * 16.0;
    let of = |ulysses: Value| {
        let mut workload = nano(1, 2, json!({ "ulysses": ulysses }));
        workload.model = workload.model.with_num_layers(1);
        workload.step_time(&machine).unwrap()
    };
    let apart = of(json!({ "head_chunks": 2 }));
    assert_close(apart.parts.exchange_seconds, 8.0);
    assert_eq!(apart.hidden_seconds, 0.0);
    let chunks = json!({ "head_chunks": 2, "overlap_exchange": true });
    // The first chunk's operands and the last one's results have nothing to hide behind, in either direction.
    let overlapped = of(chunks.clone());
    assert_close(overlapped.parts.exchange_seconds, 4.0);
    assert_close(overlapped.hidden_seconds, 4.0);
    assert_close(overlapped.total_seconds, apart.total_seconds - 4.0);
    // A machine whose ranks move data themselves hides nothing.
    machine.overlaps_communication = false;
    let time = nano(1, 2, json!({ "ulysses": chunks })).step_time(&machine).unwrap();
    assert_close(time.parts.exchange_seconds, 2.0 * 8.0);
}

#[test]
fn recomputation_takes_time_and_is_not_model_flops() {
    let machine = with_rates(|rates| rates.product_flops_per_second = 1e9);
    let of = |checkpointing: bool| {
        let workload = nano(1, 1, json!({ "ulysses": { "activation_checkpointing": checkpointing } }));
        workload.step_time(&machine).unwrap()
    };
    let (kept, again) = (of(false), of(true));
    assert_close(again.recompute_seconds - kept.recompute_seconds, again.total_seconds - kept.total_seconds);
    assert!(again.total_seconds > 1.2 * kept.total_seconds);
    assert_close(kept.mfu * kept.total_seconds, again.mfu * again.total_seconds);
}

#[test]
fn what_leaves_the_node_goes_by_the_other_link_and_the_slower_one_counts() {
    let slow = |rate: f64| Some(LinkRates { all_to_all_bytes_per_second: rate, ..INSTANT });
    let machine = |within: f64, between: f64| MachineProfile {
        links: Links { intra_node: slow(within), inter_node: slow(between) },
        ..machine()
    };
    // Four sp ranks, two on each node: a third of what a rank sends stays.
    let workload = |ranks_per_node: usize| Workload { ranks_per_node, ..nano(1, 4, json!({})) };
    let all = seconds(&workload(4), &machine(1e6, 1.0));
    assert_close(seconds(&workload(2), &machine(1e6, f64::INFINITY)), all / 3.0);
    assert_close(seconds(&workload(2), &machine(f64::INFINITY, 1e6)), all * 2.0 / 3.0);
    assert_close(seconds(&workload(2), &machine(1e6, 1e6)), all * 2.0 / 3.0);
    // Groups of two on nodes of three: the second group is split.
    let split = Workload { ranks_per_node: 3, ..nano(2, 2, json!({})) };
    let time = split.step_time(&machine(f64::INFINITY, 1e6)).unwrap();
    assert!(time.rank >= 2 && time.parts.exchange_seconds > 0.0, "{time:?}");
}

#[test]
fn a_required_rate_that_is_missing_is_named() {
    let message =
        |workload: Workload, machine: &MachineProfile| workload.step_time(machine).unwrap_err().to_string();
    let bf16 = nano(1, 1, json!({ "bf16": { "enabled": true } }));
    assert!(message(bf16, &machine()).contains("`rates.bf16`"));
    let alone = MachineProfile { links: Links::default(), file_bytes_per_second: None, ..machine() };
    assert!(message(nano(1, 2, json!({})), &alone).contains("`links.intra_node`"));
    let spread = Workload { ranks_per_node: 1, ..nano(2, 1, json!({})) };
    let text = message(spread, &alone);
    assert!(text.contains("`links.inter_node`, but the mesh communicates along dp"), "{text}");
    let offload = json!({ "zero_optimization": { "stage": 1, "offload_optimizer": { "device": "nvme" } } });
    assert!(message(nano(1, 1, offload), &alone).contains("`file_bytes_per_second`"));
    assert_eq!(seconds(&nano(1, 1, json!({})), &alone), 0.0);
}

#[test]
fn thousands_of_ranks_cost_a_loop() {
    let config = json!({
        "train_micro_batch_size_per_gpu": 1, "mesh_param": [32, 128],
        "zero_optimization": { "stage": 3 }, "ulysses": { "seq_len": 1 << 20, "activation_checkpointing": true },
    });
    let config = Config::from_json_str(&config.to_string(), "c.json").unwrap();
    let model = shape("llama3-405b").unwrap();
    let workload = Workload { config, model, document_len: None, ranks_per_node: 8, device: DeviceKind::Cpu };
    let machine = with_rates(|rates| rates.product_flops_per_second = 1e15);
    let time = workload.step_time(&machine).unwrap();
    // Of a layer all is multiplied again but what gives its output; of the head the logits.
    let (hidden, inner, kv, layers) = (16_384.0, 53_248.0, 8.0 * 128.0, 126.0);
    let layer = 2.0 * hidden * hidden + 2.0 * hidden * kv + 3.0 * hidden * inner;
    let again = layer - hidden * inner;
    let flops = layers * (6.0 * layer + 2.0 * again) + 8.0 * hidden * 128_256.0;
    let tokens_per_rank = 32.0 * f64::from(1 << 20) / 4096.0;
    assert!((time.total_seconds / (tokens_per_rank * flops / 1e15) - 1.0).abs() < 1e-9, "{time:?}");
}
