//! The flag `--mesh`.

use ulysses::config::{MeshShape, Overrides};
use ulysses::mesh::TrainingShape;
use ulysses::trainer::JobError;
use ulysses::trainer::job::stated_mesh;

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
    match stated_mesh(notation, None)?.shape {
        shape @ TrainingShape { shard_size: None, .. } => Ok(shape),
        shape => Err(JobError::usage(format!(
            "--mesh {notation}: this command does not support hybrid sharding (`dp_replicate`); use {}",
            shape.sizes.notation()
        ))),
    }
}

/// Returns the overrides of a `--mesh` flag, if given.
pub(crate) fn mesh_overrides(notation: Option<&str>) -> Result<Overrides, JobError> {
    let Some(notation) = notation else { return Ok(Overrides::default()) };
    Ok(Overrides::default().with_mesh(&stated_mesh(notation, None)?))
}
