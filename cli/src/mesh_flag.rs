//! The flag `--mesh`.

use anyhow::Context;
use ulysses::config::{MeshShape, Overrides, StatedMesh};
use ulysses::mesh::{Cluster, MeshError, TrainingShape};
use ulysses::trainer::JobError;

/// Parses the sizes of a command that takes neither hybrid sharding nor a ring.
pub(crate) fn without_ring(notation: &str) -> Result<MeshShape, JobError> {
    match unreplicated(notation)? {
        shape @ TrainingShape { ring_size: None, .. } => Ok(shape.sizes),
        shape => Err(JobError::usage(format!(
            "--mesh {notation}: this command does not support a ring (`ring`); use {}",
            shape.sizes.notation()
        ))),
    }
}

/// Parses the sizes of a command that takes no hybrid sharding.
pub(crate) fn unreplicated(notation: &str) -> Result<TrainingShape, JobError> {
    match training_shape(notation)? {
        shape @ TrainingShape { shard_size: None, .. } => Ok(shape),
        shape => Err(JobError::usage(format!(
            "--mesh {notation}: this command does not support hybrid sharding (`dp_replicate`); use {}",
            shape.sizes.notation()
        ))),
    }
}

/// Parses the sizes of a `--mesh` flag.
pub(crate) fn training_shape(notation: &str) -> Result<TrainingShape, JobError> {
    Ok(stated_mesh(notation, None)?.shape)
}

/// Returns the overrides of a `--mesh` flag, if given.
pub(crate) fn mesh_overrides(mesh: Option<&StatedMesh>) -> Overrides {
    mesh.map_or_else(Overrides::default, |mesh| Overrides::default().with_mesh(mesh))
}

/// Parses a `--mesh` flag, for a job on `cluster`, if any.
pub(crate) fn stated_mesh(notation: &str, cluster: Option<Cluster>) -> Result<StatedMesh, JobError> {
    let flag = || format!("--mesh {notation}");
    match StatedMesh::parse(notation, cluster) {
        Err(MeshError::InferWithoutWorldSize { axis }) => {
            let message = format!(
                "{}: the size of {axis} cannot be inferred from -1, because the mesh determines the number of ranks; \
                 give a size, 1 for an unused axis",
                flag()
            );
            Err(JobError::usage(message))
        }
        parsed => parsed.with_context(flag).map_err(JobError::usage),
    }
}
