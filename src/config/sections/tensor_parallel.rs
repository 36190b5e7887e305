//! `tensor_parallel`: how the ranks of tp divide weights, by patterns of names.

use super::parameter_groups::NamePattern;
use crate::config_file::define::words::{choice, key, section};
use crate::config_file::define::{FieldValue, Listed, choices, keys};
use crate::config_file::reader::Section;
use crate::config_file::vocabulary::{Array, Value};
use serde_json::Value as Json;

/// Limit on the time and memory that a hostile file can take: specs, and patterns of each.
const MAX_PATTERNS: usize = 100;

const PATTERNS: Array =
    Array { min_len: 1, max_len: MAX_PATTERNS, ..Array::new(&Value::Text, "1 to 100 patterns") };

keys! {
    /// Tensor parallelism (DeepSpeed's AutoTP).
    #[derive(Clone, Debug, Default, PartialEq)]
    pub struct TensorParallelConfig {
        /// Patterns of names, and how the ranks of tp divide their weights.
        pub partition_config: PartitionConfig = section(),
    }
}

keys! {
    /// Patterns of names, and how the ranks of tp divide their weights.
    #[derive(Clone, Debug, Default, PartialEq)]
    pub struct PartitionConfig {
        /// The first spec that matches the name of a weight says how a layer of your own divides it. Layers of a model family divide
        /// themselves: a spec that says otherwise is an error.
        pub layer_specs: Vec<LayerSpec> = section(),
    }
}

keys! {
    /// How the ranks of tp divide the weights that a pattern matches.
    #[derive(Clone, Debug, PartialEq)]
    pub struct LayerSpec {
        /// Regular expressions that match full names of weights from their start on, as Python's `re.match`. Each must match a
        /// weight with two dimensions.
        pub patterns: Vec<NamePattern> = key(Value::Array(PATTERNS)).required(),
        /// "column": each rank has some outputs; "row": some inputs, and outputs are summed; "skip": every rank has the whole weight.
        pub partition_type: PartitionType = choice().text("column"),
    }
}

choices! {
    /// The dimension of a weight that the ranks of tp divide.
    pub enum PartitionType {
        /// Outputs: rows of a weight `[out, in]`.
        #[default]
        Column = "column",
        /// Inputs: its columns.
        Row = "row",
        /// Nothing.
        Skip = "skip",
    }
}

/// An entry of a plan in transformers' words that is not supported.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TpPlanError {
    /// A style that is not supported.
    #[error(
        "the style of {pattern:?} is {style:?}: \"colwise\" and \"rowwise\" are valid; leave out weights that every rank has whole"
    )]
    Style {
        /// The pattern.
        pattern: String,
        /// Its style.
        style: String,
    },
    /// A pattern that cannot be compiled.
    #[error("the pattern {pattern:?}: expected {expected}")]
    Pattern {
        /// The pattern.
        pattern: String,
        /// The expected form.
        expected: String,
    },
}

impl TensorParallelConfig {
    /// Reads a plan in transformers' words, its `tp_plan`: names of modules, with `*` for numbers, and "colwise" or "rowwise".
    ///
    /// ```
    /// use ulysses::config::{LayerSpec, PartitionType, TensorParallelConfig};
    ///
    /// let plan = [("layers.*.mlp.up_proj", "colwise"), ("layers.*.mlp.down_proj", "rowwise")];
    /// let specs = TensorParallelConfig::from_tp_plan(plan)?.partition_config.layer_specs;
    /// let matched = LayerSpec::matching(&specs, "model.layers.11.mlp.down_proj.weight").unwrap();
    /// assert_eq!((matched.index, matched.spec.partition_type), (1, PartitionType::Row));
    /// # Ok::<(), ulysses::config::TpPlanError>(())
    /// ```
    ///
    /// # Errors
    /// Another style, or a pattern that is too long.
    pub fn from_tp_plan<'a>(plan: impl IntoIterator<Item = (&'a str, &'a str)>) -> Result<Self, TpPlanError> {
        let spec = |(pattern, style): (&str, &str)| {
            let pattern_text = || pattern.to_owned();
            let partition_type = match style {
                "colwise" => PartitionType::Column,
                "rowwise" => PartitionType::Row,
                _ => return Err(TpPlanError::Style { pattern: pattern_text(), style: style.to_owned() }),
            };
            let name = regex::escape(pattern).replace(r"\*", r"\d+");
            let of_module = NamePattern::from_start(&format!(r"(.*\.)?{name}(\.weight)?$"));
            let invalid = |expected| TpPlanError::Pattern { pattern: pattern_text(), expected };
            Ok(LayerSpec { patterns: vec![of_module.map_err(invalid)?], partition_type })
        };
        let layer_specs = plan.into_iter().map(spec).collect::<Result<_, _>>()?;
        Ok(Self { partition_config: PartitionConfig { layer_specs } })
    }
}

/// A spec that matches the name of a weight.
#[derive(Clone, Copy, Debug)]
pub struct MatchedSpec<'a> {
    /// The index of the spec.
    pub index: usize,
    /// The pattern of the spec that matches.
    pub pattern: &'a NamePattern,
    /// The spec.
    pub spec: &'a LayerSpec,
}

impl LayerSpec {
    /// Returns the first spec that matches the name of a weight.
    pub fn matching<'a>(specs: &'a [Self], name: &str) -> Option<MatchedSpec<'a>> {
        specs.iter().enumerate().find_map(|(index, spec)| {
            let pattern = spec.patterns.iter().find(|pattern| pattern.matches(name))?;
            Some(MatchedSpec { index, pattern, spec })
        })
    }
}

impl Listed for LayerSpec {
    const MAX_LEN: usize = MAX_PATTERNS;
    const NAME: &'static str = "specs";
}

impl FieldValue for Vec<NamePattern> {
    fn read(section: &Section<'_>, name: &str) -> Self {
        let texts: Vec<String> = section.get(name).unwrap_or_default();
        let compile = |(index, text): (usize, String)| {
            let pattern = NamePattern::from_start(&text);
            pattern.map_err(|expected| section.contradiction_within(name, &[index], &expected)).ok()
        };
        texts.into_iter().take(MAX_PATTERNS).enumerate().filter_map(compile).collect()
    }

    fn written(&self) -> Option<Json> {
        Some(self.iter().map(NamePattern::as_str).collect())
    }
}
