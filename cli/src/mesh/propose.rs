//! `ulysses mesh --propose`.

use super::Drawn;
use crate::config_flags::SetFlags;
use crate::device::DeviceArg;
use crate::plan::table::bytes;
use crate::plan::{budget_bytes, model};
use crate::{Failure, OrFail, print};
use anyhow::anyhow;
use std::fmt::Write;
use std::path::PathBuf;
use ulysses::config::{Overrides, RawConfig};
use ulysses::device::DeviceKind;
use ulysses::engine::check_offload_device;
use ulysses::estimate::{Proposal, Trial, Workload};
use ulysses::mesh::{Cluster, DeviceMesh};

/// Without a config: what long sequences on many ranks are usually trained with.
const USUAL: &str = r#"{
  "train_micro_batch_size_per_gpu": 1,
  "bf16": { "enabled": true },
  "zero_optimization": { "stage": 3 },
  "ulysses": { "activation_checkpointing": true }
}"#;

#[derive(clap::Args)]
pub(super) struct ProposeArgs {
    /// Propose the mesh for --nodes, --devices-per-node, --model, --seq-len and --memory-gib, and say why.
    #[arg(long, requires_all = ["nodes", "devices_per_node", "model", "seq_len", "memory_gib"])]
    propose: bool,
    /// Model to propose for, as in `ulysses plan`.
    #[arg(long, requires = "propose")]
    model: Option<String>,
    /// Tokens in a row, over all sp ranks.
    #[arg(long, requires = "propose")]
    seq_len: Option<usize>,
    /// Memory of a rank in GiB.
    #[arg(long, requires = "propose")]
    memory_gib: Option<f64>,
    /// Config with optimizer, precision, ZeRO stage and recomputation; without it AdamW, bf16, stage 3 and all
    /// layers recomputed. Its mesh and its batch sizes do not count, but for the micro batch.
    #[arg(long, value_name = "FILE", requires = "propose")]
    config: Option<PathBuf>,
    #[command(flatten)]
    set: SetFlags,
    /// What ranks compute on, as in `ulysses plan`.
    #[arg(long, requires = "propose")]
    device: Option<DeviceArg>,
}

/// Prints the proposal and gives its mesh.
pub(super) fn run(
    args: &ProposeArgs,
    nodes: Option<usize>,
    devices: Option<usize>,
) -> Result<Drawn, Failure> {
    let (Some(nodes), Some(ranks_per_node)) = (nodes, devices) else {
        return Err(Failure::Usage(anyhow!("--propose needs --nodes and --devices-per-node")));
    };
    let cluster = Cluster { nodes, ranks_per_node };
    let raw = match &args.config {
        Some(path) => RawConfig::from_file_with(path, &args.set.settings()),
        None => RawConfig::from_json_str_with(USUAL, "the usual config", &args.set.settings()),
    };
    let overrides = Overrides { seq_len: args.seq_len, model: args.model.clone(), ..Overrides::default() };
    // The mesh is what is asked for.
    let config = raw.or_usage()?.without_replicas().resolve(&overrides).or_usage()?;
    let device = args.device.map_or_else(|| config.ulysses.backend.device(), DeviceKind::from);
    check_offload_device(&config, device).or_usage()?;
    let (name, model) = model(&config)?;
    let budget = budget_bytes(args.memory_gib)?.unwrap_or(u64::MAX);
    let workload = Workload { config, model, document_len: None, ranks_per_node, device };
    // Sizes that make no mesh are refused before anything is planned.
    DeviceMesh::dp_sp(cluster.world_size(), 1).or_usage()?;
    let proposal = workload.propose(cluster, budget).or_usage()?;
    let seq_len = workload.config.require_seq_len().or_usage()?;
    print(format_args!(
        "{name}, rows of {seq_len} tokens, {nodes} node(s) of {ranks_per_node} ranks with {} each\n\n{}\n",
        bytes(budget as f64),
        explain(&proposal, cluster, budget)
    ))?;
    if !proposal.chosen.fits {
        let longest = proposal.max_seq_len.map_or_else(
            || "no sequence fits".to_owned(),
            |longest| format!("the longest sequence that fits is {longest}"),
        );
        return Err(Failure::Run(anyhow!(
            "no mesh of these ranks fits; with the one that needs least, {longest}. `ulysses plan` tells what tiles, \
             offload and chunks of heads would save, and --config brings them here"
        )));
    }
    let mesh = DeviceMesh::dp_sp(proposal.chosen.dp, proposal.chosen.sp).or_usage()?;
    Ok(Drawn { mesh, ranks_per_node: Some(ranks_per_node) })
}

fn explain(proposal: &Proposal, cluster: Cluster, budget: u64) -> String {
    let mut text = String::new();
    for Trial { dp, sp, zero_stage, peak_bytes, fits, nodes_per_sequence, .. } in &proposal.tried {
        let verdict = if *fits { "fits" } else { "too much" };
        let place = match nodes_per_sequence {
            1 => "within a node".to_owned(),
            nodes => format!("across {nodes} nodes"),
        };
        let _ = writeln!(
            text,
            "  {dp}x{sp}: ZeRO stage {zero_stage}, sequences {place}, {} of {} per rank: {verdict}",
            bytes(*peak_bytes as f64),
            bytes(budget as f64)
        );
    }
    let Trial { dp, sp, nodes_per_sequence, inter_node_bytes, fits, .. } = proposal.chosen;
    if !fits {
        return text;
    }
    let why_sp = match (sp, nodes_per_sequence) {
        (1, _) => "whole sequences fit, so no heads are exchanged".to_owned(),
        (_, 1) => format!(
            "sp {sp} is the smallest that fits, and divides the {} ranks of a node, so no exchange leaves it",
            cluster.ranks_per_node
        ),
        (_, nodes) => {
            format!("no node alone can hold a sequence: sp {sp} is the fewest whole nodes that can, {nodes}")
        }
    };
    let _ = write!(
        text,
        "\n--mesh {dp}x{sp}: {why_sp}; dp takes the other ranks. A rank sends {} to other nodes in a step.\n",
        bytes(inter_node_bytes as f64)
    );
    text
}
