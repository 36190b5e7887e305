//! `ulysses.mesh_rules`: the mesh by machine.

use crate::config::define::Setting;
use crate::config::error::ConfigError;
use crate::config::overrides::Overrides;
use crate::config::raw::RawConfig;
use crate::config::reader::Section;
use crate::config::vocabulary::{Key, Value};
use crate::mesh::{Cluster, DeviceMesh, MeshError, MeshRules, Preset, RuleMatch, TrainingShape};
use serde_json::{Value as Json, json};

/// Maximum number of rules; bounds the time that a hostile file can take.
const MAX_RULES: usize = 1000;

/// A rule: a pattern of machines and their mesh.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MeshRule {
    /// A regular expression that must match the whole selector.
    pub pattern: String,
    /// `DPxSP`, `dp=…,sp=…` or a preset's name; `None` ignores the mesh sizes of the file.
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
    /// Reports an invalid pattern or mesh at its position in the file.
    fn check(&self, section: &Section<'_>, name: &str, index: usize) {
        if let Err((_, error)) = Self::compile(std::slice::from_ref(self)) {
            let error = error.to_string();
            let reason = error.lines().last().unwrap_or_default().trim_start_matches("error: ");
            let expected = format!("a regular expression in rule {index} ({reason})");
            section.contradiction_within(name, &[index, 0], &expected);
        }
        // Inferred sizes depend on the number of ranks, which is not known here.
        let anywhere = Cluster { nodes: 1, ranks_per_node: 1 };
        let is_open = |error: &MeshError| {
            matches!(error, MeshError::CannotInfer { .. } | MeshError::WorldSizeMismatch { .. })
        };
        let sizes = self.mesh.as_deref().map(|mesh| sizes_of(mesh, Some(anywhere)));
        if let Some(Err(error)) = sizes.filter(|sizes| !sizes.as_ref().is_err_and(is_open)) {
            section.contradiction_within(name, &[index, 1], &format!("a mesh in rule {index} ({error})"));
        }
    }

    /// Compiles the patterns of the rules.
    pub(crate) fn compile(rules: &[Self]) -> Result<MeshRules, (usize, regex::Error)> {
        let pairs = rules.iter().map(|rule| (rule.pattern.clone(), rule.mesh.clone()));
        MeshRules::new(&pairs.collect::<Vec<_>>())
    }
}

/// The mesh of the rule that applies, which replaces the file's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct AppliedRule {
    /// The sizes; `None` if they follow from the number of ranks.
    pub(crate) shape: Option<TrainingShape>,
    /// The preset that the rule names.
    preset: Option<Preset>,
}

impl RawConfig {
    /// Returns whether the config has `ulysses.mesh_rules`.
    pub fn has_mesh_rules(&self) -> bool {
        !self.config.ulysses.mesh_rules.is_empty()
    }

    /// Returns the rule that applies, if any; a flag that sets the mesh overrides all rules.
    pub(crate) fn applied_rule(&self, overrides: &Overrides) -> Result<Option<AppliedRule>, ConfigError> {
        let selector = overrides.mesh_selector.as_ref().filter(|_| overrides.mesh.is_none());
        let Some(selector) = selector else { return Ok(None) };
        // Invalid patterns were rejected when the file was read.
        let Ok(rules) = MeshRule::compile(&self.config.ulysses.mesh_rules) else { return Ok(None) };
        let cluster = overrides.world_size.map(|ranks| {
            let ranks_per_node = overrides.ranks_per_node.filter(|of_node| ranks.is_multiple_of(*of_node));
            let ranks_per_node = ranks_per_node.unwrap_or(ranks);
            Cluster { nodes: ranks / ranks_per_node.max(1), ranks_per_node }
        });
        match rules.select(selector) {
            RuleMatch::NoMatch => Ok(None),
            RuleMatch::Cleared => Ok(Some(AppliedRule::default())),
            RuleMatch::Mesh(mesh) => match sizes_of(mesh, cluster) {
                Ok(shape) => Ok(Some(AppliedRule { shape: Some(shape), preset: Preset::named(mesh) })),
                Err(source) => Err(ConfigError::MeshRule {
                    file: self.file.clone(),
                    selector: selector.clone(),
                    mesh: mesh.to_owned(),
                    source: Box::new(source),
                }),
            },
        }
    }

    /// Checks that the ZeRO stage is the one that the preset implies.
    pub(crate) fn check_preset(
        &self,
        applied_rule: Option<&AppliedRule>,
        overrides: &Overrides,
    ) -> Result<(), ConfigError> {
        let selector = overrides.mesh_selector.as_deref().unwrap_or_default();
        let (preset, source) =
            match (overrides.preset, applied_rule.and_then(|applied_rule| applied_rule.preset)) {
                (Some(preset), _) => (preset, format!("--mesh {}", preset.name())),
                (None, Some(preset)) => {
                    (preset, format!("the mesh `{}` of `ulysses.mesh_rules` for `{selector}`", preset.name()))
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

    /// Returns a note if there are rules, but none matches this machine.
    pub(crate) fn note_on_rules(
        &self,
        applied_rule: Option<&AppliedRule>,
        overrides: &Overrides,
    ) -> Option<String> {
        let selector = overrides.mesh_selector.as_ref().filter(|_| overrides.mesh.is_none())?;
        (applied_rule.is_none() && self.has_mesh_rules()).then(|| {
            format!("no rule of `ulysses.mesh_rules` matches `{selector}`: the mesh sizes of the file apply")
        })
    }
}

/// Parses the sizes of a mesh, given as text or as a preset's name, for a cluster if it is known.
///
/// # Errors
/// When the text is not a valid mesh, or does not fit the number of ranks.
pub fn sizes_of(text: &str, cluster: Option<Cluster>) -> Result<TrainingShape, MeshError> {
    let mesh = match Preset::parse(text, cluster)? {
        Some((preset, cluster)) => preset.mesh(cluster)?,
        // Without -1, the sizes determine the number of ranks.
        None => match DeviceMesh::parse(text, None) {
            Err(MeshError::InferWithoutWorldSize { .. }) => {
                DeviceMesh::parse(text, cluster.map(Cluster::world_size))?
            }
            parsed => parsed?,
        },
    };
    mesh.training_shape()
}
