//! `ulysses.mesh_rules`: the mesh and other keys by machine.

use super::mesh_spec::{self, StatedMesh};
use crate::config::error::ConfigError;
use crate::config::overrides::Overrides;
use crate::config::raw::RawConfig;
use crate::config_file::define::FieldValue;
use crate::config_file::reader::Section;
use crate::config_file::vocabulary::{Array, Key, Value};
use crate::mesh::{MeshError, MeshRules, MeshSpec};
use serde_json::{Value as Json, json};

/// Maximum number of rules; bounds the time that a hostile file can take.
const MAX_RULES: usize = 1000;

/// Maximum number of rules with keys, for each of which the file is checked once.
const MAX_RULES_WITH_KEYS: usize = 50;

/// Keys that a rule cannot override: they select the rule, or are its mesh.
const NOT_IN_RULES: [&str; 10] = [
    "mesh_param",
    "data_parallel_size",
    "sequence_parallel_size",
    "pipeline_parallel_size",
    "pipeline.stages",
    "tensor_parallel_size",
    "tensor_parallel.autotp_size",
    "ulysses.mesh",
    "ulysses.mesh_rules",
    "ulysses.backend",
];

/// A rule: a pattern of machines, their mesh and other keys.
#[derive(Clone, Debug, PartialEq)]
pub struct MeshRule {
    /// A regular expression that must match the whole selector.
    pub pattern: String,
    /// The mesh; `None` ignores the mesh of the file.
    pub mesh: Option<MeshSpec>,
    /// Keys that override those of the file, as a JSON object; null without any.
    pub keys: Json,
}

impl FieldValue for Vec<MeshRule> {
    fn complete(key: Key, _path: &str) -> Key {
        let rules = Array::new(&Value::Rule, "rules [pattern, mesh] or [pattern, mesh, keys]");
        Key { value: Value::Array(rules), ..key }
    }

    fn read(section: &Section<'_>, name: &str) -> Self {
        let rules: Vec<Json> = section.elements(name);
        let with_keys = rules.iter().filter(|rule| rule.get(2).is_some()).count();
        if rules.len() > MAX_RULES || with_keys > MAX_RULES_WITH_KEYS {
            let limit = match rules.len() > MAX_RULES {
                true => format!("at most {MAX_RULES} rules"),
                false => format!("at most {MAX_RULES_WITH_KEYS} rules with keys"),
            };
            section.contradiction(name, &limit);
            return Self::new();
        }
        let read = |(index, rule): (usize, &Json)| {
            let (pattern, _mesh) = (rule.get(0)?.as_str()?.to_owned(), rule.get(1)?);
            let mesh = section.mesh(name, &[index, 1]).and_then(|mesh| {
                let invalid = |error| MeshRule::refuse_mesh(section, name, index, &error);
                MeshSpec::parse(&mesh).map_err(invalid).ok()
            });
            let rule = MeshRule { pattern, mesh, keys: rule.get(2).cloned().unwrap_or_default() };
            rule.check(section, name, index);
            Some(rule)
        };
        rules.iter().enumerate().filter_map(read).collect()
    }

    fn written(&self) -> Option<Json> {
        let rule = |rule: &MeshRule| {
            let mesh = rule.mesh.as_ref().and_then(FieldValue::written).unwrap_or_default();
            let keys = Some(rule.keys.clone()).filter(|keys| !keys.is_null());
            [json!(rule.pattern), mesh].into_iter().chain(keys).collect::<Vec<_>>()
        };
        (!self.is_empty()).then(|| self.iter().map(rule).collect())
    }
}

impl MeshRule {
    /// Reports an invalid pattern, mesh or set of keys at its position in the file.
    fn check(&self, section: &Section<'_>, name: &str, index: usize) {
        if let Err((_, error)) = Self::compile(std::slice::from_ref(self)) {
            let error = error.to_string();
            let reason = error.lines().last().unwrap_or_default().trim_start_matches("error: ");
            let expected = format!("a regular expression in rule {index} ({reason})");
            section.contradiction_within(name, &[index, 0], &expected);
        }
        if let Some(Err(error)) = self.mesh.as_ref().map(mesh_spec::check) {
            Self::refuse_mesh(section, name, index, &error);
        }
        let is_set = |path: &&&str| self.keys.pointer(&format!("/{}", path.replace('.', "/"))).is_some();
        if let Some(key) = NOT_IN_RULES.iter().find(is_set) {
            let expected = format!("keys of rule {index} without `{key}`, which a rule cannot override");
            section.contradiction_within(name, &[index, 2], &expected);
        }
    }

    fn refuse_mesh(section: &Section<'_>, name: &str, index: usize, error: &MeshError) {
        section.contradiction_within(name, &[index, 1], &format!("a mesh in rule {index} ({error})"));
    }

    /// Compiles the patterns of the rules.
    pub(crate) fn compile(rules: &[Self]) -> Result<MeshRules, (usize, regex::Error)> {
        MeshRules::new(&rules.iter().map(|rule| rule.pattern.as_str()).collect::<Vec<_>>())
    }
}

/// The rule that applies. Its mesh replaces the file's.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct AppliedRule {
    /// The index of the rule.
    pub(crate) index: usize,
    /// The mesh; `None` if it follows from the number of ranks.
    pub(crate) mesh: Option<StatedMesh>,
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
        let rules = &self.config.ulysses.mesh_rules;
        // Invalid patterns were rejected when the file was read.
        let Ok(patterns) = MeshRule::compile(rules) else { return Ok(None) };
        let Some(index) = patterns.select(selector) else { return Ok(None) };
        let stated = |mesh: &MeshSpec| {
            StatedMesh::new(mesh, overrides.cluster()).map_err(|source| ConfigError::MeshRule {
                file: self.file.clone(),
                selector: selector.clone(),
                mesh: mesh.to_string(),
                source: Box::new(source),
            })
        };
        let mesh = rules[index].mesh.as_ref().map(stated).transpose()?;
        Ok(Some(AppliedRule { index, mesh }))
    }

    /// Checks that the ZeRO stage is the one that the preset implies.
    pub(crate) fn check_preset(
        &self,
        stated: Option<&StatedMesh>,
        is_of_rule: bool,
        overrides: &Overrides,
    ) -> Result<(), ConfigError> {
        let selector = overrides.mesh_selector.as_deref().unwrap_or_default();
        let (preset, source) = match (overrides.preset, stated.and_then(|stated| stated.preset)) {
            (Some(preset), _) => (preset, format!("--mesh {}", preset.name())),
            (None, Some(preset)) if is_of_rule => {
                (preset, format!("the mesh `{}` of `ulysses.mesh_rules` for `{selector}`", preset.name()))
            }
            (None, Some(preset)) => (preset, format!("`ulysses.mesh` \"{}\"", preset.name())),
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
