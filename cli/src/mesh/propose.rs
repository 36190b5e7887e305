//! `ulysses mesh --propose`.

use super::Drawn;
use crate::arguments::at_least_1;
use crate::config_flags::SetFlags;
use crate::device::DeviceArg;
use crate::placement::likely_device;
use crate::plan::assumed::{AssumedBatch, assumed_config, settings};
use crate::plan::budget::{Available, MemoryFlags, per_rank};
use crate::plan::table::bytes;
use crate::plan::{longest_of_model, model, raw_config};
use crate::{Failure, OrFail, print};
use anyhow::anyhow;
use std::fmt::Write;
use std::path::PathBuf;
use ulysses::config::{Config, Overrides, PartitionAxes};
use ulysses::engine::check_offload_device;
use ulysses::estimate::{Candidate, MemoryBudget, Proposal, Workload};
use ulysses::mesh::{Cluster, DeviceMesh};
use ulysses::monitor::counted;

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
    let device = likely_device(args.device, Some(config.ulysses.backend));
    check_offload_device(&config, device).or_usage()?;
    let (name, model) = model(&config)?;
    let is_of_model = config.ulysses.seq_len.is_none();
    config.ulysses.seq_len = config.ulysses.seq_len.or_else(|| longest_of_model(&name));
    let ProposeArgs { memory_gib, reserve_gib, host_memory_gib, .. } = *args;
    let available = MemoryFlags { memory_gib, reserve_gib, host_memory_gib }.available(device)?;
    let Some(Available { budget, reserve_bytes }) = available else {
        return Err(Failure::Usage(anyhow!("--propose needs --memory-gib")));
    };
    let workload = Workload { config, model, document_len: None, ranks_per_node, device };
    // Rejects an invalid size before planning.
    DeviceMesh::dp_sp(cluster.world_size(), 1).or_usage()?;
    let proposal = workload.propose(cluster, budget).or_usage()?;
    let seq_len = workload.config.require_seq_len().or_usage()?;
    let source = match &args.config {
        Some(path) => path.display().to_string(),
        None => "assumed".to_owned(),
    };
    let length = if is_of_model { " (the model's `max_position_embeddings`)" } else { "" };
    print(format_args!(
        "{name}, sequences of {seq_len} tokens{length}, {} of {}, {}\n\
         {source}: {}; the batch is one micro batch per dp rank\n\n{}\n",
        counted(nodes, "node"),
        counted(ranks_per_node, "rank"),
        per_rank(budget.rank_bytes, reserve_bytes),
        settings(&workload.config, device),
        explain(&proposal, &workload.config, budget)
    ))?;
    if !proposal.chosen.fits() {
        let longest = proposal.chosen.max_seq_len;
        let longest = longest.map_or_else(|| "none".to_owned(), |longest| format!("{longest} tokens"));
        return Err(Failure::Run(anyhow!(
            "no mesh of these ranks fits; longest sequence that fits, on the mesh that needs least memory: {longest}. \
             `ulysses plan` shows the savings of tiles, offload and head chunks; pass them with --config"
        )));
    }
    let config = &proposal.chosen.workload.config;
    let mesh = DeviceMesh::dp_sp(config.mesh.dp_size, config.mesh.sp_size).or_usage()?;
    let mesh = match config.ulysses.ring_size {
        1 => mesh,
        ring_size => mesh.ring(ring_size).or_usage()?,
    };
    Ok(Drawn { mesh, ranks_per_node: Some(ranks_per_node) })
}

fn explain(proposal: &Proposal, configured: &Config, budget: MemoryBudget) -> String {
    let size = |amount: u64| bytes(amount as f64);
    let mut text = String::new();
    for trial in &proposal.tried {
        let config = &trial.workload.config;
        let verdict = if trial.fits() { "fits" } else { "does not fit" };
        let place = match trial.workload.nodes_per_sequence() {
            1 => "within a node".to_owned(),
            nodes => format!("across {nodes} nodes"),
        };
        let host = match (trial.host_bytes_per_node, budget.host_bytes_per_node) {
            (0, _) => String::new(),
            (needed, None) => format!(", {} of host memory per node", size(needed)),
            (needed, Some(limit)) => format!(", {} of {} of host memory per node", size(needed), size(limit)),
        };
        let _ = writeln!(
            text,
            "  {}: ZeRO stage {}, sp groups {place}, peak {} per rank, {} available{host}: {verdict}",
            notation(config),
            config.zero_axes().with_stage(config.zero.stage),
            size(trial.plan.peak_bytes),
            size(budget.rank_bytes)
        );
    }
    let Candidate { workload, plan, .. } = &proposal.chosen;
    let config = &workload.config;
    if !proposal.chosen.fits() {
        return text;
    }
    let sp = config.mesh.sp_size;
    let why_sp = match (sp, workload.nodes_per_sequence()) {
        (1, _) => "a whole sequence fits on one rank, so no exchange is needed".to_owned(),
        (_, 1) => format!(
            "sp {sp} is the smallest size that fits and divides the {} ranks of a node, so exchanges stay within a node",
            workload.ranks_per_node
        ),
        (_, nodes) => {
            format!(
                "a sequence does not fit on one node; sp {sp}, {nodes} whole nodes, is the smallest size that fits"
            )
        }
    };
    let why_ring = match config.ulysses.ring_size {
        1 => String::new(),
        ring_size => format!(
            "; {} ranks divide the heads evenly within a node, and a ring of {ring_size} divides the tokens",
            sp / ring_size
        ),
    };
    // What the config does not say.
    let mut flags = String::new();
    if config.zero.stage != configured.zero.stage {
        let _ = write!(flags, " --zero-stage {}", u8::from(config.zero.stage));
    }
    if config.zero_axes() == PartitionAxes::DpSp
        && configured.ulysses.zero_partition_axes == PartitionAxes::Dp
    {
        flags.push_str(" --zero-partition-axes dp,sp");
    }
    let _ = write!(
        text,
        "\n--mesh {}{flags}: {why_sp}{why_ring}; dp uses the remaining ranks. Sent between nodes: {} per rank and step.\n",
        notation(config),
        size(plan.sent.inter_node_bytes)
    );
    text
}

/// The mesh of a config, as `--mesh` takes it.
fn notation(config: &Config) -> String {
    let (dp, sp) = (config.mesh.dp_size, config.mesh.sp_size);
    match config.ulysses.ring_size {
        1 => format!("{dp}x{sp}"),
        ring_size => format!("dp={dp},ring={ring_size},ulysses={}", sp / ring_size),
    }
}
