//! `ulysses mesh`.

use super::arguments::at_least_1;
use super::plan::write_file;
use crate::failure::{Failure, OrFail};
use crate::output::print;
use anyhow::{Context, anyhow};
use std::path::{Path, PathBuf};
use ulysses::candle::DType;
use ulysses::mesh::{
    Cluster, DeviceMesh, MeshSpec, Preset, PresetOnCluster, SpecMesh, draw, draw_nodes, svg,
};
use ulysses::placement::{self, Layout};

/// Default ranks per node of a drawing.
const DEFAULT_RANKS_PER_NODE: usize = 8;

#[derive(clap::Args)]
pub(super) struct MeshArgs {
    /// Mesh shape: `2x4` (dp × sp), `2x2x4` (dp × sp × tp), named axes `pp=2,dp=2,sp=2`, or a preset (ddp, fsdp, hsdp, ulysses, ulysses_hsdp).
    ///
    /// As in training, `intra:sp=8/inter:dp=2` gives sizes within a node and between nodes, `dp=2,sp=2@0,2,1,3` the rank at each
    /// coordinate.
    #[arg(allow_hyphen_values = true)]
    shape: String,
    /// Axis names for a shape without names, such as `dp,sp`.
    #[arg(long, value_delimiter = ',')]
    names: Option<Vec<String>>,
    /// Number of ranks, from which one size of -1 is inferred.
    #[arg(long)]
    world_size: Option<usize>,
    /// Number of nodes; each has the same number of consecutive ranks.
    #[arg(long, value_parser = at_least_1::<usize>)]
    nodes: Option<usize>,
    /// Ranks per node.
    #[arg(long, value_parser = at_least_1::<usize>)]
    devices_per_node: Option<usize>,
    /// Also draw which part of a tensor each rank has: `7,3:Shard(0),Replicate` is a shape with one placement per axis.
    ///
    /// Placements are `Shard(DIM)`, `Replicate` and `Partial`. A dtype for the bytes may follow: `7,3:Shard(0),Replicate:bf16`.
    #[arg(long, value_name = "SHAPE:PLACEMENTS")]
    tensor: Option<String>,
    /// Write a drawing of nodes and groups as SVG.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

/// A mesh, and its ranks per node, if known.
struct Drawn {
    mesh: DeviceMesh,
    ranks_per_node: Option<usize>,
}

pub(super) fn run(args: &MeshArgs) -> Result<(), Failure> {
    let drawn = drawn(args)?;
    let nodes = drawn.ranks_per_node.map(|ranks| draw_nodes(&drawn.mesh, ranks)).transpose().or_usage()?;
    let tensor = args.tensor.as_deref().map(|text| draw_tensor(text, &drawn.mesh)).transpose()?;
    print(format_args!("{}{}{}", draw(&drawn.mesh), nodes.unwrap_or_default(), tensor.unwrap_or_default()))?;
    args.svg.as_deref().map_or(Ok(()), |path| write_svg(&drawn, path))
}

fn draw_tensor(text: &str, mesh: &DeviceMesh) -> Result<String, Failure> {
    let colon = text.match_indices(':').nth(1).map_or(text.len(), |(at, _)| at);
    let (layout, dtype) = text.split_at(colon);
    let dtype = dtype.strip_prefix(':').unwrap_or("f32");
    let Ok(dtype) = dtype.trim().parse::<DType>() else {
        let message = format!("--tensor {text}: no dtype `{dtype}`; expected one such as f32 or bf16");
        return Err(Failure::Usage(anyhow!(message)));
    };
    let flag = || format!("--tensor {text}");
    let layout = Layout::parse(layout, mesh).with_context(flag).or_usage()?;
    Ok(format!("\n{}", placement::draw(&layout, mesh.ranks(), dtype).with_context(flag).or_usage()?))
}

fn write_svg(drawn: &Drawn, path: &Path) -> Result<(), Failure> {
    let drawing = svg(&drawn.mesh, drawn.ranks_per_node.unwrap_or(DEFAULT_RANKS_PER_NODE)).or_usage()?;
    write_file(path, "--svg", drawing)
}

fn drawn(args: &MeshArgs) -> Result<Drawn, Failure> {
    let (shape, cluster) = (&*args.shape, cluster(args)?);
    if args.names.is_none()
        && let Some(PresetOnCluster { preset, cluster: own }) = Preset::parse(shape, cluster).or_usage()?
    {
        let mesh = preset.mesh(own).or_usage()?;
        // As in training, sizes of the preset make its mesh; the flags only place the ranks on nodes.
        let ranks_per_node = ranks_per_node(&mesh, args)?.unwrap_or(own.ranks_per_node);
        return Ok(Drawn { mesh, ranks_per_node: Some(ranks_per_node) });
    }
    if args.names.is_none() && shape.contains([':', '@']) {
        let spec = MeshSpec::parse(shape).and_then(|spec| spec.resolve(cluster)).or_usage()?;
        let SpecMesh { mesh, ranks_per_node: own } = spec.mesh().or_usage()?;
        let ranks_per_node = ranks_per_node(&mesh, args)?.or(own);
        return Ok(Drawn { mesh, ranks_per_node });
    }
    let world_size = args.world_size.or(cluster.map(Cluster::world_size));
    let mesh = parse(args, world_size)?;
    // As in training, ranks are row-major whatever their nodes.
    let ranks_per_node = ranks_per_node(&mesh, args)?;
    Ok(Drawn { mesh, ranks_per_node })
}

/// Returns the ranks per node that the flags give, if any.
fn ranks_per_node(mesh: &DeviceMesh, args: &MeshArgs) -> Result<Option<usize>, Failure> {
    let ranks = mesh.world_size();
    match (args.nodes, args.devices_per_node) {
        (Some(nodes), None) if !ranks.is_multiple_of(nodes) => Err(Failure::Usage(anyhow!(
            "--mesh {}: {ranks} ranks cannot be divided into {nodes} nodes",
            args.shape
        ))),
        (Some(nodes), None) => Ok(Some(ranks / nodes)),
        (_, devices) => Ok(devices),
    }
}

/// Returns the cluster that the flags describe. --world-size alone is one node, and so is --devices-per-node alone for a
/// shape that leaves the number of ranks open.
fn cluster(args: &MeshArgs) -> Result<Option<Cluster>, Failure> {
    let (nodes, ranks_per_node) = match (args.nodes, args.devices_per_node, args.world_size) {
        (Some(nodes), None, Some(ranks)) => (nodes, ranks / nodes),
        (None, Some(ranks_per_node), Some(ranks)) => (ranks / ranks_per_node, ranks_per_node),
        (Some(nodes), Some(ranks_per_node), _) => (nodes, ranks_per_node),
        (None, Some(ranks_per_node), None) if is_open(&args.shape) => (1, ranks_per_node),
        (None, None, Some(ranks)) => (1, ranks),
        (_, _, None) => return Ok(None),
    };
    let cluster = Cluster { nodes, ranks_per_node };
    let Some(ranks) = args.world_size.filter(|ranks| *ranks != cluster.world_size()) else {
        return Ok(Some(cluster));
    };
    Err(Failure::Usage(match (args.nodes, args.devices_per_node) {
        (Some(nodes), Some(devices)) => anyhow!(
            "--world-size {ranks} contradicts --nodes {nodes} and --devices-per-node {devices}, which give {} ranks",
            cluster.world_size()
        ),
        (Some(nodes), None) => anyhow!("--world-size {ranks} is not a multiple of --nodes {nodes}"),
        _ => {
            anyhow!("--world-size {ranks} is not a multiple of --devices-per-node {ranks_per_node}")
        }
    }))
}

/// Returns whether a shape leaves the number of ranks open.
fn is_open(shape: &str) -> bool {
    if Preset::named(shape).is_some() { !shape.contains('=') } else { shape.contains("-1") }
}

fn parse(args: &MeshArgs, world_size: Option<usize>) -> Result<DeviceMesh, Failure> {
    let shape = &*args.shape;
    let mesh = match &args.names {
        None => DeviceMesh::parse(shape, world_size),
        Some(_) if shape.contains('=') => {
            let error = anyhow!("--names applies to shapes such as 2x4, but {shape} already has names");
            return Err(Failure::Usage(error));
        }
        Some(names) => {
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            DeviceMesh::parse_with_names(shape, &names, world_size)
        }
    };
    mesh.or_usage()
}
