//! `ulysses mesh`.

use super::{Failure, OrFail, print};
use ulysses::mesh::{DeviceMesh, draw};

#[derive(clap::Args)]
pub(super) struct MeshArgs {
    /// Shape: `2x4` (dp × sp), or with names `dp=2,pp=2,sp=2`.
    #[arg(allow_hyphen_values = true)]
    shape: String,
    /// Axis names for a shape without names, for example `dp,sp`.
    #[arg(long, value_delimiter = ',')]
    names: Option<Vec<String>>,
    /// Number of ranks, to infer one size given as -1.
    #[arg(long, allow_negative_numbers = true)]
    world_size: Option<usize>,
}

pub(super) fn run(args: &MeshArgs) -> Result<(), Failure> {
    let mesh = match &args.names {
        None => DeviceMesh::parse(&args.shape, args.world_size),
        Some(_) if args.shape.contains('=') => {
            let error = anyhow::anyhow!("--names is for shapes such as 2x4; {} has names", args.shape);
            return Err(Failure::Usage(error));
        }
        Some(names) => {
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            DeviceMesh::parse_with_names(&args.shape, &names, args.world_size)
        }
    };
    print(draw(&mesh.or_usage()?))
}
