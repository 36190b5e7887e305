//! `ulysses.mesh_rules`: meshes by the machine that a run finds itself on.

use super::error::ConfigError;
use super::raw::RawConfig;
use super::reader::Section;
use super::resolved::Overrides;
use crate::mesh::{Cluster, DeviceMesh, MeshError, MeshRules, Preset, RuledMesh, TrainingShape};
use serde::{Serialize, Serializer};

/// The key within `ulysses`.
const KEY: &str = "mesh_rules";

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
        let pairs = section.rules(KEY);
        if pairs.len() > MAX_RULES {
            section.contradiction(KEY, &format!("at most {MAX_RULES} rules"));
            return Vec::new();
        }
        let read = |(index, pattern, mesh)| {
            let rule = Self { pattern, mesh };
            rule.check(section, index);
            rule
        };
        pairs.into_iter().map(read).collect()
    }

    /// Reports a pattern or a mesh that is none, where it stands.
    fn check(&self, section: &Section<'_>, index: usize) {
        if let Err((_, error)) = Self::compile(std::slice::from_ref(self)) {
            let error = error.to_string();
            let reason = error.lines().last().unwrap_or_default().trim_start_matches("error: ");
            let expected = format!("a regular expression in rule {index} ({reason})");
            section.contradiction_within(KEY, &[index, 0], &expected);
        }
        // The sizes that a machine's ranks would give an axis are not known here.
        let anywhere = Cluster { nodes: 1, ranks_per_node: 1 };
        let is_open = |error: &MeshError| {
            matches!(error, MeshError::CannotInfer { .. } | MeshError::WorldSizeMismatch { .. })
        };
        let sizes = self.mesh.as_deref().map(|mesh| sizes_of(mesh, Some(anywhere)));
        if let Some(Err(error)) = sizes.filter(|sizes| !sizes.as_ref().is_err_and(is_open)) {
            section.contradiction_within(KEY, &[index, 1], &format!("a mesh in rule {index} ({error})"));
        }
    }

    /// The rules with their patterns compiled.
    pub(super) fn compile(rules: &[Self]) -> Result<MeshRules, (usize, regex::Error)> {
        let pairs = rules.iter().map(|rule| (rule.pattern.clone(), rule.mesh.clone()));
        MeshRules::new(&pairs.collect::<Vec<_>>())
    }
}

/// What a rule that applies puts in the place of the file's mesh.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Ruled {
    /// Its sizes; none where it leaves them to the number of ranks.
    pub(super) shape: Option<TrainingShape>,
    /// What it names them by.
    preset: Option<Preset>,
}

impl RawConfig {
    /// Whether [`Overrides::mesh_selector`] has something to choose among.
    pub fn has_mesh_rules(&self) -> bool {
        !self.ulysses.mesh_rules.is_empty()
    }

    /// The rule that applies, if one does: none where a flag gives the mesh.
    pub(super) fn ruled(&self, overrides: &Overrides) -> Result<Option<Ruled>, ConfigError> {
        let selector = overrides.mesh_selector.as_ref().filter(|_| overrides.mesh.is_none());
        let Some(selector) = selector else { return Ok(None) };
        // Patterns that are none were refused when the file was read.
        let Ok(rules) = MeshRule::compile(&self.ulysses.mesh_rules) else { return Ok(None) };
        let cluster = overrides.world_size.map(|ranks| {
            let ranks_per_node = overrides.ranks_per_node.filter(|of_node| ranks.is_multiple_of(*of_node));
            let ranks_per_node = ranks_per_node.unwrap_or(ranks);
            Cluster { nodes: ranks / ranks_per_node.max(1), ranks_per_node }
        });
        match rules.select(selector) {
            RuledMesh::Unruled => Ok(None),
            RuledMesh::Cleared => Ok(Some(Ruled::default())),
            RuledMesh::Mesh(mesh) => match sizes_of(mesh, cluster) {
                Ok(shape) => Ok(Some(Ruled { shape: Some(shape), preset: Preset::named(mesh) })),
                Err(source) => Err(ConfigError::MeshRule {
                    file: self.file.clone(),
                    selector: selector.clone(),
                    mesh: mesh.to_owned(),
                    source: Box::new(source),
                }),
            },
        }
    }

    /// A preset that stands for a ZeRO stage is another mesh at any other, whoever names it.
    pub(super) fn check_preset(
        &self,
        ruled: Option<&Ruled>,
        overrides: &Overrides,
    ) -> Result<(), ConfigError> {
        let selector = overrides.mesh_selector.as_deref().unwrap_or_default();
        let (preset, source) = match (overrides.preset, ruled.and_then(|ruled| ruled.preset)) {
            (Some(preset), _) => (preset, format!("--mesh {}", preset.name())),
            (None, Some(preset)) => {
                (preset, format!("`{}`, which `ulysses.mesh_rules` gives `{selector}`,", preset.name()))
            }
            (None, None) => return Ok(()),
        };
        match (preset.zero_stage(), u8::from(self.zero_stage)) {
            (Some(wanted), stage) if wanted != stage => Err(ConfigError::PresetStage {
                file: self.file.clone(),
                source_of_mesh: source,
                wanted,
                stage,
            }),
            _ => Ok(()),
        }
    }

    /// What the user should know of rules that none of is for this machine.
    pub(super) fn note_on_rules(&self, ruled: Option<&Ruled>, overrides: &Overrides) -> Option<String> {
        let selector = overrides.mesh_selector.as_ref().filter(|_| overrides.mesh.is_none())?;
        (ruled.is_none() && self.has_mesh_rules())
            .then(|| format!("no rule of `ulysses.mesh_rules` matches `{selector}`: the mesh is the file's"))
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
