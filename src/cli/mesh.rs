//! `ulysses mesh`.

use super::{Failure, OrFail};
use ulysses::mesh::{DeviceMesh, draw};

#[derive(clap::Args)]
pub(super) struct MeshArgs {
    /// Shape: `2x4` (dp × sp), or with names `dp=2,pp=2,sp=2`.
    shape: String,
    /// Axis names for a shape without names, for example `dp,sp`.
    #[arg(long, value_delimiter = ',')]
    names: Option<Vec<String>>,
    /// Number of ranks, to infer one size given as -1.
    #[arg(long)]
    world_size: Option<usize>,
}

pub(super) fn run(args: &MeshArgs) -> Result<(), Failure> {
    let notation = match &args.names {
        None => args.shape.clone(),
        Some(names) => named(&args.shape, names).or_usage()?,
    };
    let mesh = DeviceMesh::parse(&notation, args.world_size).or_usage()?;
    print!("{}", draw(&mesh));
    Ok(())
}

/// `2x4` with names `dp,sp` is `dp=2,sp=4`.
fn named(shape: &str, names: &[String]) -> anyhow::Result<String> {
    let sizes: Vec<&str> = shape.split('x').collect();
    anyhow::ensure!(
        sizes.len() == names.len(),
        "{shape} has {} axes, --names gives {}",
        sizes.len(),
        names.len()
    );
    let axes: Vec<String> = names.iter().zip(sizes).map(|(name, size)| format!("{name}={size}")).collect();
    Ok(axes.join(","))
}
