//! The fake groups along the axes of a mesh.

use super::{FakeGroup, FakeObserver};
use crate::comm::{AxisGroups, CommError, ProcessGroup};
use crate::mesh::{DeviceMesh, MeshError, ShardShape};
use std::sync::Arc;

/// The name of the group of the first and the last rank along an axis.
pub const ENDS: &str = "ends";

/// One real rank's groups along the axes of a mesh whose other ranks are simulated. Every group is named by its axis; groups that axes
/// would share are several.
#[derive(Clone)]
pub struct FakeMeshGroups {
    mesh: DeviceMesh,
    rank: usize,
    observer: Option<Arc<FakeObserver>>,
}

impl FakeMeshGroups {
    /// The groups of a rank of `mesh`. Every collective of a group with several ranks calls `observer`.
    pub fn new(mesh: DeviceMesh, rank: usize, observer: Option<Arc<FakeObserver>>) -> Self {
        Self { mesh, rank, observer }
    }

    fn group(&self, name: &str, ranks: Vec<usize>) -> Result<Arc<dyn ProcessGroup>, CommError> {
        let own = ranks.iter().position(|rank| *rank == self.rank).unwrap_or(ranks.len());
        let group = FakeGroup::new(name, ranks, own)?;
        Ok(Arc::new(match &self.observer {
            Some(observer) => group.observed(observer.clone()),
            None => group,
        }))
    }

    fn derived(&self, mesh: Result<DeviceMesh, MeshError>) -> Result<Self, CommError> {
        Ok(Self { mesh: mesh?, ..self.clone() })
    }
}

impl AxisGroups for FakeMeshGroups {
    fn mesh(&self) -> &DeviceMesh {
        &self.mesh
    }

    fn get_group(&self, axis: &str) -> Result<Arc<dyn ProcessGroup>, CommError> {
        self.group(axis, self.mesh.group_of(axis, self.rank)?)
    }

    fn ends(&self, axis: &str) -> Result<Option<Arc<dyn ProcessGroup>>, CommError> {
        let ranks = self.mesh.group_of(axis, self.rank)?;
        let ends = [ranks[0], ranks[ranks.len() - 1]];
        match ranks.len() {
            1 | 2 => self.get_group(axis).map(Some),
            _ => ends.contains(&self.rank).then(|| self.group(ENDS, ends.to_vec())).transpose(),
        }
    }

    fn flatten(&self, axes: &[&str], new_name: &str) -> Result<Self, CommError> {
        self.derived(self.mesh.flatten(axes, new_name))
    }

    fn sharded(&self, shape: ShardShape) -> Result<Self, CommError> {
        self.derived(self.mesh.sharded(shape))
    }

    fn ring(&self, ring_size: usize) -> Result<Self, CommError> {
        self.derived(self.mesh.ring(ring_size))
    }
}
