//! `ulysses.mesh`: a mesh with the order of its ranks.

use crate::config_file::define::FieldValue;
use crate::config_file::reader::Section;
use crate::mesh::{Cluster, MeshError, MeshSpec, Preset, StatedAxis, TrainingShape};
use serde_json::{Map, Value as Json, json};

/// A mesh whose sizes are known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StatedMesh {
    /// The mesh, resolved.
    pub spec: MeshSpec,
    /// Its sizes.
    pub shape: TrainingShape,
    /// The preset that gives it.
    pub preset: Option<Preset>,
}

impl StatedMesh {
    /// Resolves a mesh for a cluster, if it is known.
    ///
    /// # Errors
    /// When the mesh is invalid, or does not fit the cluster.
    pub fn new(spec: &MeshSpec, cluster: Option<Cluster>) -> Result<Self, MeshError> {
        let resolved = spec.resolve(cluster)?;
        let shape = resolved.training_shape()?;
        Ok(Self { spec: resolved, shape, preset: spec.preset() })
    }

    /// Returns the mesh if it gives the ranks an order of its own.
    pub fn layout(&self) -> Option<MeshSpec> {
        Some(self.spec.clone()).filter(|spec| !matches!(spec, MeshSpec::Axes(_)))
    }

    /// Parses and resolves a mesh.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn parse(text: &str, cluster: Option<Cluster>) -> Result<Self, MeshError> {
        Self::new(&MeshSpec::parse(text)?, cluster)
    }
}

/// Returns the error of a mesh that no number of ranks can make valid.
pub(super) fn check(spec: &MeshSpec) -> Result<(), MeshError> {
    // Inferred sizes depend on the number of ranks, which is not known here.
    let anywhere = Cluster { nodes: 1, ranks_per_node: 1 };
    let is_open = |error: &MeshError| match error {
        MeshError::Side { source, .. } => is_size(source),
        error => is_size(error),
    };
    StatedMesh::new(spec, Some(anywhere)).map(|_| ()).or_else(|error| match is_open(&error) {
        true => Ok(()),
        false => Err(error),
    })
}

fn is_size(error: &MeshError) -> bool {
    matches!(error, MeshError::CannotInfer { .. } | MeshError::WorldSizeMismatch { .. })
}

impl FieldValue for MeshSpec {
    fn read(section: &Section<'_>, name: &str) -> Self {
        let text = section.mesh(name, &[]).unwrap_or_default();
        let parsed = Self::parse(&text).and_then(|spec| check(&spec).map(|()| spec));
        parsed.unwrap_or_else(|error| {
            section.contradiction(name, &format!("a mesh ({error})"));
            Self::Axes(Vec::new())
        })
    }

    fn written(&self) -> Option<Json> {
        let side = |axes: &[StatedAxis]| -> Map<String, Json> {
            axes.iter().map(|axis| (axis.name.clone(), Json::from(axis.size))).collect()
        };
        Some(match self {
            Self::Hybrid { intra, inter } => json!({ "intra": side(intra), "inter": side(inter) }),
            spec => Json::from(spec.to_string()),
        })
    }
}
