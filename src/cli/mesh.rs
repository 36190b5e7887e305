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
    let mesh = match &args.names {
        None => DeviceMesh::parse(&args.shape, args.world_size),
        Some(names) => {
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            DeviceMesh::parse_with_names(&args.shape, &names, args.world_size)
        }
    };
    let mesh = mesh.or_usage()?;
    print!("{}", draw(&mesh));
    Ok(())
}
