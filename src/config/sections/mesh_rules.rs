//! `ulysses.mesh_rules`: the mesh and other keys by machine.

use super::mesh_spec;
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
        if let Err(error) = Self::compile(std::slice::from_ref(self)) {
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

    fn compile(rules: &[Self]) -> Result<MeshRules, regex::Error> {
        let patterns: Vec<_> = rules.iter().map(|rule| rule.pattern.as_str()).collect();
        MeshRules::new(&patterns).map_err(|invalid| invalid.error)
    }

    /// Returns the index of the rule that applies.
    pub(crate) fn select(rules: &[Self], selector: &str) -> Option<usize> {
        // Invalid patterns were rejected when the file was read.
        Self::compile(rules).ok()?.select(selector)
    }
}
