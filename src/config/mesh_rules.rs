//! `ulysses.mesh_rules`: meshes by the machine that a run finds itself on.

use super::reader::Section;
use crate::mesh::{Cluster, DeviceMesh, MeshError, MeshRules, Preset, TrainingShape};
use serde::{Serialize, Serializer};

/// More is no list that somebody has written.
const MAX_RULES: usize = 1000;

/// A pattern of machines and their mesh.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MeshRule {
    /// A regular expression that the whole selector must match.
    pub pattern: String,
    /// `DPxSP`, `dp=…,sp=…` or a preset's name; `None` sets aside what the file says of the mesh.
    pub mesh: Option<String>,
}

impl Serialize for MeshRule {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        (&self.pattern, &self.mesh).serialize(serializer)
    }
}

impl MeshRule {
    pub(super) fn read_all(section: &Section<'_>) -> Vec<Self> {
        let pairs = section.rules("mesh_rules");
        if pairs.len() > MAX_RULES {
            section.contradiction("mesh_rules", &format!("at most {MAX_RULES} rules"));
            return Vec::new();
        }
        let rules: Vec<Self> = pairs.into_iter().map(|(pattern, mesh)| Self { pattern, mesh }).collect();
        if let Err((index, error)) = Self::compile(&rules) {
            let error = error.to_string();
            let reason = error.lines().last().unwrap_or_default().trim_start_matches("error: ");
            section.contradiction("mesh_rules", &format!("a regular expression in rule {index} ({reason})"));
        }
        // The sizes that a machine's ranks would give an axis are not known here.
        let anywhere = Cluster { nodes: 1, ranks_per_node: 1 };
        let is_open = |error: &MeshError| {
            matches!(error, MeshError::CannotInfer { .. } | MeshError::WorldSizeMismatch { .. })
        };
        for (index, mesh) in
            rules.iter().enumerate().filter_map(|(index, rule)| Some((index, rule.mesh.as_ref()?)))
        {
            if let Some(error) = sizes_of(mesh, Some(anywhere)).err().filter(|error| !is_open(error)) {
                section.contradiction("mesh_rules", &format!("a mesh in rule {index} ({error})"));
            }
        }
        rules
    }

    /// The rules with their patterns compiled.
    pub(super) fn compile(rules: &[Self]) -> Result<MeshRules, (usize, regex::Error)> {
        let pairs = rules.iter().map(|rule| (rule.pattern.clone(), rule.mesh.clone()));
        MeshRules::new(&pairs.collect::<Vec<_>>())
    }
}

/// The sizes of a mesh given as text, or by a preset's name, on the ranks that there are, where that is known.
///
/// # Errors
/// When it is no mesh of these axes, or none for as many ranks.
pub fn sizes_of(text: &str, cluster: Option<Cluster>) -> Result<TrainingShape, MeshError> {
    let mesh = match Preset::parse(text, cluster)? {
        Some((preset, cluster)) => preset.mesh(cluster)?,
        // The sizes of a mesh that has them all say how many ranks there are.
        None => match DeviceMesh::parse(text, None) {
            Err(MeshError::InferWithoutWorldSize { .. }) => {
                DeviceMesh::parse(text, cluster.map(Cluster::world_size))?
            }
            parsed => parsed?,
        },
    };
    mesh.training_shape()
}
