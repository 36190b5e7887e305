//! The config of a job: its file, with the changes of its options and what follows from where it runs.

use super::devices::likely_device;
use super::options::{JobError, JobOptions, OrJobError};
use crate::comm::{host_name, with_causes};
use crate::config::{Backend, Config, Overrides, RawConfig, StatedMesh};
use crate::kernels::device::DeviceKind;
use crate::mesh::{Cluster, MeshError};
use std::path::Path;

/// Parses a `--mesh` flag, for a job on `cluster`, if any.
///
/// # Errors
/// [`JobError::Usage`], which names the flag.
pub fn stated_mesh(notation: &str, cluster: Option<Cluster>) -> Result<StatedMesh, JobError> {
    StatedMesh::parse(notation, cluster).map_err(|error| {
        JobError::usage(match error {
            MeshError::InferWithoutWorldSize { axis } => format!(
                "--mesh {notation}: the size of {axis} cannot be inferred from -1, because the mesh determines the number of \
                 ranks; give a size, 1 for an unused axis"
            ),
            error => format!("--mesh {notation}: {}", with_causes(&error)),
        })
    })
}

impl JobOptions {
    /// Resolves the config of `file` for a job on `cluster`, if a launcher has started processes, whose backend is that of
    /// the options, the file or the launcher. An unspecified mesh size fills the job; a mesh that does not fill it gets a
    /// better error later.
    ///
    /// # Errors
    /// A config that cannot be resolved.
    pub fn resolve(
        &self,
        file: &Path,
        raw: &RawConfig,
        cluster: Option<Cluster>,
        backend: Option<Backend>,
    ) -> Result<Config, JobError> {
        let mut overrides = self.overrides.clone();
        if let Some(notation) = &self.mesh {
            overrides = overrides.with_mesh(&stated_mesh(notation, cluster)?);
        }
        if let Some(selector) = overrides.mesh_selector.as_ref().filter(|_| !raw.has_mesh_rules()) {
            return Err(JobError::usage(format!(
                "--mesh-selector {selector}: {} has no `ulysses.mesh_rules` to select from; add some, or remove the flag",
                file.display()
            )));
        }
        let overrides = with_location(overrides, raw, cluster, likely_device(self.device, backend));
        let unfilled = || Overrides { world_size: None, ..overrides.clone() };
        raw.resolve(&overrides).or_else(|error| raw.resolve(&unfilled()).map_err(|_| error)).or_usage()
    }
}

/// Adds what follows from where a job runs: its size, and the text that the config's mesh rules are matched with.
fn with_location(
    overrides: Overrides,
    raw: &RawConfig,
    cluster: Option<Cluster>,
    device: DeviceKind,
) -> Overrides {
    // A GPU that does not report its name fails later, when it is opened.
    let machine = || {
        let device = device.describe().unwrap_or_else(|_| "cuda".to_owned());
        format!("{}/{device}", host_name().unwrap_or_default())
    };
    Overrides {
        mesh_selector: overrides.mesh_selector.clone().or_else(|| raw.has_mesh_rules().then(machine)),
        world_size: overrides.world_size.or(cluster.map(Cluster::world_size)),
        ranks_per_node: overrides.ranks_per_node.or(cluster.map(|cluster| cluster.ranks_per_node)),
        ..overrides
    }
}
