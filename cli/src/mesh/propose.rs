//! `ulysses mesh --propose`.

use super::Drawn;
use crate::arguments::at_least_1;
use crate::config_flags::SetFlags;
use crate::device::DeviceArg;
use crate::failure::{Failure, OrFail};
use crate::output::print;
use crate::plan::assumed::{AssumedBatch, assumed_config, settings};
use crate::plan::budget::MemoryFlags;
use crate::plan::json::{choice, joined};
use crate::plan::{longest_of_model, model, raw_config};
use crate::template::render;
use anyhow::anyhow;
use serde_json::{Value, json};
use std::path::PathBuf;
use ulysses::config::{MeshShape, Overrides};
use ulysses::engine::check_offload_device;
use ulysses::estimate::{Candidate, Workload};
use ulysses::mesh::{Cluster, DeviceMesh};
use ulysses::trainer::job::likely_device;

#[derive(clap::Args)]
pub(super) struct ProposeArgs {
    /// Propose a mesh for --nodes, --devices-per-node, --model and --memory-gib, with reasons.
    #[arg(long, requires_all = ["nodes", "devices_per_node", "model", "memory_gib"])]
    propose: bool,
    /// Model, as in `ulysses plan`.
    #[arg(long, requires = "propose")]
    model: Option<String>,
    /// Tokens per sequence, over all sp ranks [default: the config's, else the model's `max_position_embeddings`].
    #[arg(long, requires = "propose", value_parser = at_least_1::<usize>)]
    seq_len: Option<usize>,
    /// Memory per rank in GiB.
    #[arg(long, requires = "propose")]
    memory_gib: Option<f64>,
    /// Part of --memory-gib that is not for tensors, as in `ulysses plan` [default: 4 on GPUs, 0 on CPUs].
    #[arg(long, requires = "propose")]
    reserve_gib: Option<f64>,
    /// Available host memory per node in GiB, for what ranks on GPUs offload [default: not limited].
    #[arg(long, requires = "propose")]
    host_memory_gib: Option<f64>,
    /// Config for optimizer, precision, ZeRO stage and activation checkpointing [default: AdamW, bf16, ZeRO stage 3,
    /// activation checkpointing].
    ///
    /// Its mesh and batch sizes are ignored, except for the micro batch size.
    #[arg(long, value_name = "FILE", requires = "propose")]
    config: Option<PathBuf>,
    #[command(flatten)]
    set: SetFlags,
    /// Device of the ranks, as in `ulysses plan`.
    #[arg(long, default_value = "auto", requires = "propose")]
    device: DeviceArg,
}

/// Prints the proposal and returns its mesh.
pub(super) fn run(
    args: &ProposeArgs,
    nodes: Option<usize>,
    devices: Option<usize>,
) -> Result<Drawn, Failure> {
    let (Some(nodes), Some(ranks_per_node)) = (nodes, devices) else {
        return Err(Failure::Usage(anyhow!("--propose needs --nodes and --devices-per-node")));
    };
    let cluster = Cluster { nodes, ranks_per_node };
    let assumed = assumed_config(AssumedBatch::OnePerRank, false);
    let raw = raw_config(args.config.as_deref(), &assumed, &args.set.settings())?;
    let overrides = Overrides { seq_len: args.seq_len, model: args.model.clone(), ..Overrides::default() };
    // The config's mesh does not matter.
    let mut config = raw.without_replicas().resolve(&overrides).or_usage()?;
    let device = likely_device(args.device.kind(), Some(config.ulysses.backend));
    check_offload_device(&config, device).or_usage()?;
    let (name, model) = model(&config)?;
    let is_of_model = config.ulysses.seq_len.is_none();
    config.ulysses.seq_len = config.ulysses.seq_len.or_else(|| longest_of_model(&name));
    let ProposeArgs { memory_gib, reserve_gib, host_memory_gib, .. } = *args;
    let memory = MemoryFlags { memory_gib, reserve_gib, host_memory_gib };
    let Some(available) = memory.available(device)? else {
        return Err(Failure::Usage(anyhow!("--propose needs --memory-gib")));
    };
    let workload = Workload { config, model, document_len: None, ranks_per_node, device };
    // Rejects an invalid size before planning.
    DeviceMesh::dp_sp(cluster.world_size(), 1).or_usage()?;
    let MeshShape { pp, tp, .. } = workload.config.mesh.shape();
    if !cluster.world_size().is_multiple_of(pp) {
        return Err(Failure::Usage(anyhow!(
            "the {} ranks do not divide into {pp} stages (`pipeline_parallel_size`)",
            cluster.world_size()
        )));
    }
    if !ranks_per_node.is_multiple_of(tp) {
        return Err(Failure::Usage(anyhow!(
            "the {ranks_per_node} ranks of a node do not divide into tp groups of {tp} (`tensor_parallel_size`)"
        )));
    }
    let proposal = workload.propose(cluster, available.budget).or_usage()?;
    let seq_len = workload.config.require_seq_len().or_usage()?;
    let data = json!({
        "name": name,
        "seq_len": seq_len,
        "is_length_of_model": is_of_model,
        "nodes": nodes,
        "ranks_per_node": ranks_per_node,
        "available": available.per_rank(),
        "budget": available.budget,
        "config": args.config.as_ref().map(|path| path.display().to_string()),
        "settings": settings(&workload.config, device),
        "zero_stage": workload.config.zero.stage,
        "pp": pp,
        "zero_partition_axes": workload.config.ulysses.zero_partition_axes,
        "micro_batches": proposal.chosen.workload.config.gradient_accumulation_steps,
        "tried": proposal.tried.iter().map(trial).collect::<Vec<_>>(),
        "chosen": trial(&proposal.chosen),
    });
    print(render("propose.txt", data).or_run()?)?;
    if !proposal.chosen.fits() {
        let longest = proposal.chosen.max_seq_len;
        let longest = longest.map_or_else(|| "none".to_owned(), |longest| format!("{longest} tokens"));
        return Err(Failure::Run(anyhow!(
            "no mesh of these ranks fits; longest sequence that fits, on the mesh that needs least memory: {longest}. \
             `ulysses plan` shows the savings of tiles, offload and head chunks; pass them with --config"
        )));
    }
    let config = &proposal.chosen.workload.config;
    let mesh = config.mesh.shape().row_major().or_usage()?;
    let mesh = match config.ulysses.ring_size {
        1 => mesh,
        ring_size => mesh.ring(ring_size).or_usage()?,
    };
    Ok(Drawn { mesh, ranks_per_node: Some(ranks_per_node) })
}

/// Returns what the template shows of a mesh.
fn trial(candidate: &Candidate) -> Value {
    let nodes_per_sequence = candidate.workload.nodes_per_sequence();
    let notation = candidate.workload.config.training_shape().notation();
    let verdict = json!({
        "fits": candidate.fits(), "nodes_per_sequence": nodes_per_sequence, "notation": notation,
    });
    joined([choice(candidate), verdict])
}
