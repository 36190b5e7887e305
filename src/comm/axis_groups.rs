//! The groups along the axes of a mesh, of a real rank or of a simulated one.

use super::{CommError, ProcessGroup};
use crate::mesh::{DeviceMesh, ShardShape};
use std::sync::Arc;

/// One rank's groups along the axes of a mesh. The other groups of training, [`TrainingGroups`](super::TrainingGroups), are made of them.
pub trait AxisGroups: Sized {
    /// The mesh.
    fn mesh(&self) -> &DeviceMesh;

    /// This rank's group along an axis.
    ///
    /// # Errors
    /// A mesh without this axis or this rank.
    fn get_group(&self, axis: &str) -> Result<Arc<dyn ProcessGroup>, CommError>;

    /// The group of the first and the last rank along an axis; `None` on the others. Collective over the mesh's world.
    ///
    /// # Errors
    /// As [`get_group`](Self::get_group), and failed communication.
    fn ends(&self, axis: &str) -> Result<Option<Arc<dyn ProcessGroup>>, CommError>;

    /// The groups of the same ranks along the axes of [`DeviceMesh::flatten`]. Collective over the mesh's world.
    ///
    /// # Errors
    /// A mesh that cannot be divided so, and failed communication.
    fn flatten(&self, axes: &[&str], new_name: &str) -> Result<Self, CommError>;

    /// The groups of the same ranks along the axes of [`DeviceMesh::sharded`]. Collective over the mesh's world.
    ///
    /// # Errors
    /// As [`flatten`](Self::flatten).
    fn sharded(&self, shape: ShardShape) -> Result<Self, CommError>;

    /// The groups of the same ranks along the axes of [`DeviceMesh::ring`]. Collective over the mesh's world.
    ///
    /// # Errors
    /// As [`flatten`](Self::flatten).
    fn ring(&self, ring_size: usize) -> Result<Self, CommError>;
}
