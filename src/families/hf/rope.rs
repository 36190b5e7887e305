//! The rotary embedding in a Hugging Face `config.json`.
//!
//! transformers 5 writes one object, `rope_parameters`. Earlier versions write `rope_theta` separately, and
//! `rope_scaling` with the scaling. If both exist, `rope_scaling` counts, unless it is empty.

use super::config::{FULL, HfConfig, WINDOWED};
use crate::families::ModelError;
use serde_json::{Map, Value, json};
use ulysses_kernels::rope::{Rope, Scaling, kept_list};

/// Keys of the object for all types of scaling; `finetuned` describes the weights. Sections (`mrope`) rotate alike where a
/// token has one position.
const FIELDS: [&str; 19] = [
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "factor",
    "finetuned",
    "high_freq_factor",
    "long_factor",
    "low_freq_factor",
    "mrope_interleaved",
    "mrope_section",
    "mscale",
    "mscale_all_dim",
    ORIGINAL_LEN,
    "partial_rotary_factor",
    "rope_theta",
    "rope_type",
    "short_factor",
    "truncate",
    "type",
];

const PARAMETERS: &str = "rope_parameters";
const SCALING: &str = "rope_scaling";
const ORIGINAL_LEN: &str = "original_max_position_embeddings";
pub(crate) const QUERY_GROWTH: &str = "llama_4_scaling_beta";

/// The object that describes the scaling, with its key.
struct RopeObject<'a> {
    config: &'a HfConfig<'a>,
    key: &'static str,
    object: &'a Map<String, Value>,
    /// Whether it is that of some layers.
    is_of_layer_type: bool,
}

/// Fields of the rotary embedding. Which of them count depends on the others.
const TOP_LEVEL: [&str; 5] = ["max_position_embeddings", ORIGINAL_LEN, PARAMETERS, SCALING, "rope_theta"];

impl HfConfig<'_> {
    /// The rotary embedding of all layers.
    pub(crate) fn rope(&self) -> Result<Rope, ModelError> {
        self.rope_with_default(10_000.0)
    }

    /// The rotary embedding of all layers, with a family's own base if there is none in the file.
    pub(crate) fn rope_with_default(&self, theta: f64) -> Result<Rope, ModelError> {
        self.accept_rope();
        let theta = || self.number("rope_theta", theta);
        match self.rope_object()? {
            Some(object) => object.read(theta),
            None => Ok(theta()?.into()),
        }
    }

    /// As [`rope_with_default`](Self::rope_with_default), for a family that may rotate a part of each head: by default its
    /// own part, if neither the object nor the top level has `partial_rotary_factor`.
    pub(crate) fn partial_rope(&self, theta: f64, part: f64) -> Result<Rope, ModelError> {
        self.accept_rope();
        let (theta, at_top) =
            (|| self.number("rope_theta", theta), self.number("partial_rotary_factor", part)?);
        match self.rope_object()? {
            Some(object) if object.kind() == Some("proportional") => {
                Err(object.error("this model_type has another rope_type, which rotates a part of each head"))
            }
            Some(object) => {
                let partial_rotary_factor = object.number("partial_rotary_factor")?.unwrap_or(at_top);
                Ok(Rope { partial_rotary_factor, ..object.read_any_part(theta)? })
            }
            None => Ok(Rope { partial_rotary_factor: at_top, ..theta()?.into() }),
        }
    }

    /// The rotary embedding of a family of which queries grow with their position, which its object says
    /// (`llama_4_scaling_beta`); `None` without such an object.
    pub(crate) fn rope_with_query_growth(&self) -> Result<Option<Rope>, ModelError> {
        self.accept_rope();
        let Some(object) = self.rope_object()? else { return Ok(None) };
        let mut others = object.object.clone();
        let growth = object.required(QUERY_GROWTH)?;
        // The model's own length counts, not that in the object.
        ["max_position_embeddings", QUERY_GROWTH].into_iter().for_each(|key| drop(others.remove(key)));
        let rope = RopeObject { object: &others, ..object }.read(|| self.number("rope_theta", 10_000.0))?;
        Ok(Some(Rope { query_growth: growth, ..rope }))
    }

    /// A number of the object that describes the scaling, if it has it.
    pub(crate) fn scaling_number(&self, key: &str) -> Result<Option<f64>, ModelError> {
        self.rope_object()?.map_or(Ok(None), |object| object.number(key))
    }

    /// The object that describes the rotary embedding of all layers, if it is not empty.
    fn rope_object(&self) -> Result<Option<RopeObject<'_>>, ModelError> {
        let is_given = |key: &&'static str| self.get(key).is_some_and(|value| *value != json!({}));
        let Some(key) = [SCALING, PARAMETERS].into_iter().find(is_given) else { return Ok(None) };
        let object = self.get(key).and_then(Value::as_object);
        let object = object.ok_or_else(|| self.error(key, "it must be an object"))?;
        Ok(Some(RopeObject { config: self, key, object, is_of_layer_type: false }))
    }

    /// Accepts the fields of rotary embeddings.
    pub(crate) fn accept_rope(&self) {
        self.accept(&TOP_LEVEL);
    }

    /// The rotary embeddings of the layers without and with a window, of families that have one for each: from
    /// `rope_parameters` by layer type, with `rope_scaling` for the former, or as written before transformers 5. The
    /// second is `None` if the file has none of its own.
    pub(crate) fn rope_of_layer_types(&self, theta: f64) -> Result<(Rope, Option<Rope>), ModelError> {
        self.accept_rope();
        let types = self.get(PARAMETERS).and_then(Value::as_object).filter(|types| !types.is_empty());
        let Some(types) = types else { return Ok((self.rope_with_default(theta)?, None)) };
        let object = |layer_type: &str| types.get(layer_type).and_then(Value::as_object).cloned();
        let (Some(mut full), Some(windowed)) = (object(FULL), object(WINDOWED)) else {
            let expected = format!("it must have an object for {FULL:?} and one for {WINDOWED:?} layers");
            return Err(self.error(PARAMETERS, &expected));
        };
        if let Some(scaling) = self.get(SCALING).and_then(Value::as_object) {
            full.extend(scaling.clone());
        }
        let read = |object: &Map<String, Value>| {
            let rope = RopeObject { config: self, key: PARAMETERS, object, is_of_layer_type: true };
            rope.read(|| Err(rope.error("rope_theta must be given for each layer type")))
        };
        Ok((read(&full)?, Some(read(&windowed)?)))
    }
}

impl RopeObject<'_> {
    /// The rotary embedding of whole heads, with another base than the object's if that has none.
    fn read(&self, theta: impl FnOnce() -> Result<f64, ModelError>) -> Result<Rope, ModelError> {
        let part = self.number("partial_rotary_factor")?;
        if part.is_some_and(|part| part != 1.0) && self.kind() != Some("proportional") {
            return Err(self.error("this model_type rotates whole heads: leave partial_rotary_factor out"));
        }
        self.read_any_part(theta)
    }

    /// As [`read`](Self::read), whichever part of a head rotates.
    fn read_any_part(&self, theta: impl FnOnce() -> Result<f64, ModelError>) -> Result<Rope, ModelError> {
        self.check_fields()?;
        let theta = self.number("rope_theta")?.map_or_else(theta, Ok)?;
        Ok(Rope { scaling: self.scaling()?, ..theta.into() })
    }

    fn check_fields(&self) -> Result<(), ModelError> {
        let is_unknown =
            |(field, value): &(&String, &Value)| !FIELDS.contains(&field.as_str()) && !value.is_null();
        match self.object.iter().find(is_unknown) {
            None => Ok(()),
            Some((layer_type, Value::Object(_))) => {
                let expected =
                    "this model_type has the same rotary embedding in every layer, not one by layer type";
                Err(self.error(&format!("{expected} (`{layer_type}`)")))
            }
            Some((field, _)) => {
                let expected = "is unknown and may change the model: remove it if it has no effect";
                Err(self.error(&format!("its field `{field}` {expected}")))
            }
        }
    }

    fn kind(&self) -> Option<&str> {
        let kind = self.object.get("rope_type").or(self.object.get("type"));
        kind.map_or(Some("default"), Value::as_str)
    }

    fn scaling(&self) -> Result<Scaling, ModelError> {
        match self.kind() {
            Some("default") => Ok(Scaling::None),
            Some("linear") => Ok(Scaling::Linear { factor: self.required("factor")? }),
            Some("proportional") => Ok(Scaling::Proportional {
                part: self.number("partial_rotary_factor")?.unwrap_or(1.0),
                factor: self.number("factor")?.unwrap_or(1.0),
            }),
            Some("dynamic") => {
                Ok(Scaling::Dynamic { factor: self.required("factor")?, original_len: self.max_positions()? })
            }
            Some("llama3") => Ok(Scaling::Llama3 {
                factor: self.required("factor")?,
                low_freq_factor: self.required("low_freq_factor")?,
                high_freq_factor: self.required("high_freq_factor")?,
                original_len: self.original_len()?,
            }),
            Some("yarn") => self.yarn(),
            // Its name in the first versions.
            Some("longrope" | "su") => self.longrope(),
            _ => {
                let known = "\"default\", \"linear\", \"proportional\", \"dynamic\", \"llama3\", \"yarn\" or \"longrope\"";
                Err(self.error(&format!("this version computes a rope_type of {known}")))
            }
        }
    }

    fn yarn(&self) -> Result<Scaling, ModelError> {
        let original_len = self.original_len()?;
        let factor = match self.object.get("factor") {
            Some(Value::Null) => f64::from(self.max_positions()?) / f64::from(original_len),
            _ => self.required("factor")?,
        };
        let or =
            |key, default| Ok::<_, ModelError>(self.number(key)?.filter(|v| *v != 0.0).unwrap_or(default));
        let grown = |mscale: f64| if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 };
        let attention_factor = match self.number("attention_factor")? {
            Some(given) => given,
            None => match (or("mscale", 0.0)?, or("mscale_all_dim", 0.0)?) {
                (mscale, all_dim) if mscale != 0.0 && all_dim != 0.0 => grown(mscale) / grown(all_dim),
                _ => grown(1.0),
            },
        };
        let truncate = match self.object.get("truncate") {
            None => true,
            // In Python, null is false.
            Some(Value::Null) => false,
            Some(value) => value.as_bool().ok_or_else(|| self.error("truncate must be true or false"))?,
        };
        let (beta_fast, beta_slow) = (or("beta_fast", 32.0)?, or("beta_slow", 1.0)?);
        Ok(Scaling::Yarn { factor, beta_fast, beta_slow, truncate, attention_factor, original_len })
    }

    fn longrope(&self) -> Result<Scaling, ModelError> {
        let (short_factor, long_factor) = (self.numbers("short_factor")?, self.numbers("long_factor")?);
        let original_len = self.original_len()?;
        let attention_factor = match (self.number("attention_factor")?, self.number("factor")?) {
            (Some(given), _) => given,
            (None, Some(factor)) => longrope_attention_factor(factor, original_len),
            (None, None) => {
                let factor = f64::from(self.max_positions()?) / f64::from(original_len);
                longrope_attention_factor(factor, original_len)
            }
        };
        Ok(Scaling::LongRope { short_factor, long_factor, attention_factor, original_len })
    }

    /// The length before scaling. transformers 5 takes it from the top level before it looks into the object,
    /// and uses the model's own limit if neither has it.
    fn original_len(&self) -> Result<u32, ModelError> {
        let positive =
            |value: &Value| value.as_u64().and_then(|len| u32::try_from(len).ok()).filter(|len| *len > 0);
        let at_top = self.config.value.get(ORIGINAL_LEN).filter(|_| !self.is_of_layer_type);
        match (at_top, self.object.get(ORIGINAL_LEN)) {
            (Some(at_top), _) => positive(at_top)
                .ok_or_else(|| self.config.error(ORIGINAL_LEN, "it must be a positive integer, or left out")),
            (None, Some(in_object)) => positive(in_object)
                .ok_or_else(|| self.error("original_max_position_embeddings must be a positive integer")),
            (None, None) => self.max_positions(),
        }
    }

    fn max_positions(&self) -> Result<u32, ModelError> {
        let len = self.config.size("max_position_embeddings")?;
        u32::try_from(len).map_err(|_| self.config.error("max_position_embeddings", "it must be below 2^32"))
    }

    fn required(&self, key: &str) -> Result<f64, ModelError> {
        self.number(key)?.ok_or_else(|| self.error(&format!("{key} must be given")))
    }

    fn numbers(&self, key: &str) -> Result<&'static [f64], ModelError> {
        let list = self.object.get(key).and_then(Value::as_array);
        let numbers: Option<Vec<f64>> = list.and_then(|list| list.iter().map(Value::as_f64).collect());
        let numbers = numbers.ok_or_else(|| self.error(&format!("{key} must be a list of numbers")))?;
        Ok(kept_list(&numbers))
    }

    fn number(&self, key: &str) -> Result<Option<f64>, ModelError> {
        match self.object.get(key).filter(|value| !value.is_null()) {
            None => Ok(None),
            Some(value) => match value.as_f64() {
                Some(number) => Ok(Some(number)),
                None => Err(self.error(&format!("{key} must be a number"))),
            },
        }
    }

    fn error(&self, expected: &str) -> ModelError {
        self.config.error(self.key, expected)
    }
}

/// The factor on cosines and sines of a model whose number of positions grew by `factor`.
fn longrope_attention_factor(factor: f64, original_len: u32) -> f64 {
    if factor <= 1.0 { 1.0 } else { (1.0 + factor.ln() / f64::from(original_len).ln()).sqrt() }
}

/// The object in `rope_parameters` for a rotary embedding.
pub(crate) fn rope_to_hf(rope: Rope) -> Value {
    let scaling = scaling_to_hf(rope.scaling).map(|(scaling, _)| scaling);
    let mut object = scaling.unwrap_or_else(|| json!({ "rope_type": "default" }));
    object["rope_theta"] = json!(rope.theta);
    object
}

/// The entries of `config.json` for a scaled rotary embedding: `rope_scaling`, which all versions of
/// transformers read, and the matching `max_position_embeddings`.
pub(crate) fn scaling_to_hf(scaling: Scaling) -> Option<(Value, Option<u64>)> {
    let positions = |len: u32, factor: f64| Some((f64::from(len) * factor).round() as u64);
    match scaling {
        Scaling::None | Scaling::Unrotated { .. } => None,
        Scaling::Linear { factor } => Some((json!({ "rope_type": "linear", "factor": factor }), None)),
        Scaling::Proportional { part, factor } => {
            let value = json!({
                "rope_type": "proportional", "partial_rotary_factor": part, "factor": factor,
            });
            Some((value, None))
        }
        Scaling::Dynamic { factor, original_len } => {
            let value = json!({ "rope_type": "dynamic", "factor": factor });
            Some((value, Some(u64::from(original_len))))
        }
        Scaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_len } => {
            let value = json!({
                "rope_type": "llama3", "factor": factor, "low_freq_factor": low_freq_factor,
                "high_freq_factor": high_freq_factor, "original_max_position_embeddings": original_len,
            });
            Some((value, positions(original_len, factor)))
        }
        Scaling::Yarn { factor, beta_fast, beta_slow, truncate, attention_factor, original_len } => {
            let value = json!({
                "rope_type": "yarn", "factor": factor, "beta_fast": beta_fast, "beta_slow": beta_slow,
                "truncate": truncate, "attention_factor": attention_factor,
                "original_max_position_embeddings": original_len,
            });
            // Older versions derive the factor from the ratio of the two lengths.
            Some((value, positions(original_len, factor)))
        }
        Scaling::LongRope { short_factor, long_factor, attention_factor, original_len } => {
            let mut value = json!({
                "rope_type": "longrope", "short_factor": short_factor, "long_factor": long_factor,
                "original_max_position_embeddings": original_len,
            });
            // Older versions derive the attention's factor from the ratio of the two lengths, and refuse it here.
            let len = f64::from(original_len);
            let positions = len.powf(attention_factor.powi(2)).round();
            if longrope_attention_factor(positions / len, original_len) == attention_factor {
                return Some((value, Some(positions as u64)));
            }
            value["attention_factor"] = json!(attention_factor);
            Some((value, None))
        }
    }
}
