//! `ulysses.mesh_rules`: meshes by the machine that a run finds itself on.

use crate::config::define::Setting;
use crate::config::error::ConfigError;
use crate::config::overrides::Overrides;
use crate::config::raw::RawConfig;
use crate::config::reader::Section;
use crate::config::vocabulary::{Key, Value};
use crate::mesh::{Cluster, DeviceMesh, MeshError, MeshRules, Preset, RuleMatch, TrainingShape};
use serde_json::{Value as Json, json};

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

impl Setting for Vec<MeshRule> {
    fn complete(key: Key, _path: &str) -> Key {
        Key { value: Value::Rules, ..key }
    }

    fn find(section: &Section<'_>, name: &'static str) -> Option<Self> {
        let pairs = section.rules(name);
        if pairs.len() > MAX_RULES {
            section.contradiction(name, &format!("at most {MAX_RULES} rules"));
            return None;
        }
        let read = |(index, pattern, mesh)| {
            let rule = MeshRule { pattern, mesh };
            rule.check(section, name, index);
            rule
        };
        Some(pairs.into_iter().map(read).collect())
    }

    fn read(section: &Section<'_>, name: &'static str) -> Self {
        Self::find(section, name).unwrap_or_default()
    }

    fn written(&self) -> Option<Json> {
        let pair = |rule: &MeshRule| json!([rule.pattern, rule.mesh]);
        (!self.is_empty()).then(|| self.iter().map(pair).collect())
    }
}

impl MeshRule {
    /// Reports a pattern or a mesh that is none, where it stands.
    fn check(&self, section: &Section<'_>, name: &str, index: usize) {
        if let Err((_, error)) = Self::compile(std::slice::from_ref(self)) {
            let error = error.to_string();
            let reason = error.lines().last().unwrap_or_default().trim_start_matches("error: ");
            let expected = format!("a regular expression in rule {index} ({reason})");
            section.contradiction_within(name, &[index, 0], &expected);
        }
        // The sizes that a machine's ranks would give an axis are not known here.
        let anywhere = Cluster { nodes: 1, ranks_per_node: 1 };
        let is_open = |error: &MeshError| {
            matches!(error, MeshError::CannotInfer { .. } | MeshError::WorldSizeMismatch { .. })
        };
        let sizes = self.mesh.as_deref().map(|mesh| sizes_of(mesh, Some(anywhere)));
        if let Some(Err(error)) = sizes.filter(|sizes| !sizes.as_ref().is_err_and(is_open)) {
            section.contradiction_within(name, &[index, 1], &format!("a mesh in rule {index} ({error})"));
        }
    }

    /// The rules with their patterns compiled.
    pub(crate) fn compile(rules: &[Self]) -> Result<MeshRules, (usize, regex::Error)> {
        let pairs = rules.iter().map(|rule| (rule.pattern.clone(), rule.mesh.clone()));
        MeshRules::new(&pairs.collect::<Vec<_>>())
    }
}

/// What a rule that applies puts in the place of the file's mesh.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Ruled {
    /// Its sizes; none where it leaves them to the number of ranks.
    pub(crate) shape: Option<TrainingShape>,
    /// What it names them by.
    preset: Option<Preset>,
}

impl RawConfig {
    /// Whether [`Overrides::mesh_selector`] has something to choose among.
    pub fn has_mesh_rules(&self) -> bool {
        !self.config.ulysses.mesh_rules.is_empty()
    }

    /// The rule that applies, if one does: none where a flag gives the mesh.
    pub(crate) fn ruled(&self, overrides: &Overrides) -> Result<Option<Ruled>, ConfigError> {
        let selector = overrides.mesh_selector.as_ref().filter(|_| overrides.mesh.is_none());
        let Some(selector) = selector else { return Ok(None) };
        // Patterns that are none were refused when the file was read.
        let Ok(rules) = MeshRule::compile(&self.config.ulysses.mesh_rules) else { return Ok(None) };
        let cluster = overrides.world_size.map(|ranks| {
            let ranks_per_node = overrides.ranks_per_node.filter(|of_node| ranks.is_multiple_of(*of_node));
            let ranks_per_node = ranks_per_node.unwrap_or(ranks);
            Cluster { nodes: ranks / ranks_per_node.max(1), ranks_per_node }
        });
        match rules.select(selector) {
            RuleMatch::NoMatch => Ok(None),
            RuleMatch::Cleared => Ok(Some(Ruled::default())),
            RuleMatch::Mesh(mesh) => match sizes_of(mesh, cluster) {
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
    pub(crate) fn check_preset(
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
        match (preset.zero_stage(), u8::from(self.config.zero.stage)) {
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
    pub(crate) fn note_on_rules(&self, ruled: Option<&Ruled>, overrides: &Overrides) -> Option<String> {
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
