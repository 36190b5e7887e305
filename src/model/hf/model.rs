//! A model directory in Hugging Face's layout: description, weights, and the files for an export.

use super::HfWeights;
use super::weights::other_weights;
use crate::families::{FAMILIES, HfConfig, ModelError, ModelNames, language_model, read_config};
use crate::model::{Model, ModelConfig};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::HashSet;
use std::path::Path;

/// A model as its `config.json` describes it.
#[derive(Debug, Clone, PartialEq)]
pub struct HfDescription {
    /// The model.
    pub config: ModelConfig,
    /// Notes for the user, one line each.
    pub notes: Vec<String>,
    /// The whole content of the file.
    pub json: Value,
}

/// A model directory.
///
/// # Examples
///
/// ```no_run
/// use std::path::Path;
/// use ulysses::model::{HfModel, Model};
///
/// let HfModel { config, weights, notes, .. } = HfModel::open(Path::new("Llama-3.2-1B"))?;
/// notes.iter().for_each(|note| println!("note: {note}"));
/// let model = Model::new(&config)?; // and `&weights` for `initialize`
/// # let _ = weights;
/// # Ok::<(), ulysses::model::ModelError>(())
/// ```
pub struct HfModel {
    /// The model description. Its head is tied only if the weights agree.
    pub config: ModelConfig,
    /// Its weights, which have every parameter in the right shape.
    pub weights: HfWeights,
    /// Notes for the user, one line each.
    pub notes: Vec<String>,
    /// The other files, for an export.
    pub source: HfSource,
}

/// The files next to the weights from which a run started, for an export.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct HfSource {
    /// `config.json`.
    pub config: Value,
    /// `generation_config.json`; null if it does not exist.
    pub generation_config: Value,
    /// Dtype of the weights in PyTorch's notation; `None` if neither the description nor the weights state
    /// it.
    pub dtype: Option<String>,
}

impl HfDescription {
    /// Returns `max_position_embeddings`, if the file has it.
    pub fn max_position_embeddings(&self) -> Option<usize> {
        let at_top = match &self.json["max_position_embeddings"] {
            Value::Null => &self.json["n_positions"],
            at_top => at_top,
        };
        let within = &self.json["text_config"]["max_position_embeddings"];
        usize::try_from(at_top.as_u64().or(within.as_u64())?).ok()
    }

    /// Reads the `config.json` of a directory.
    ///
    /// # Errors
    /// As [`ModelConfig::from_hf_dir`].
    pub fn from_dir(dir: &Path) -> Result<Self, ModelError> {
        let path = dir.join("config.json");
        if let Some(advice) = other_weights(dir).filter(|_| !path.exists()) {
            return Err(ModelError::NotAModel { dir: dir.to_owned(), advice });
        }
        Self::from_file(&path)
    }

    /// As [`from_dir`](Self::from_dir), for a file of any name.
    ///
    /// # Errors
    /// As [`ModelConfig::from_hf_dir`].
    pub fn from_file(path: &Path) -> Result<Self, ModelError> {
        Self::from_json(read_json(path)?, &path.display().to_string())
    }

    /// As [`from_dir`](Self::from_dir), for JSON that was already read; errors and notes call it `origin`.
    ///
    /// # Errors
    /// As [`ModelConfig::from_hf_dir`], except for reading.
    pub fn from_json(json: Value, origin: &str) -> Result<Self, ModelError> {
        if !json.is_object() {
            return Err(ModelError::Format { path: origin.into(), reason: "expected a JSON object".into() });
        }
        let within = language_model(origin, &json)?;
        let file = HfConfig::new(origin, within.as_ref().map_or(&json, |(text, _)| text));
        let config = read_config(&file)?;
        let mut notes = file.check_fields(config.family.class)?;
        config.validate(origin)?;
        if let Some((_, class)) = within {
            notes.push(format!(
                "{class}: its language model is trained, as {}; an export has the other tensors unchanged",
                config.family.class
            ));
        }
        let notes = notes.into_iter().map(|note| format!("{origin}: {note}")).collect();
        Ok(Self { config, notes, json })
    }

    /// Unties the head if `weights` have a head that differs from the embedding, as transformers 5 does.
    ///
    /// # Errors
    /// Weights that cannot be read.
    pub fn untie_if_weights_differ(&mut self, weights: &HfWeights) -> Result<(), ModelError> {
        let ModelNames { embedding, head, .. } = self.config.family.names;
        let is_stored = |name| weights.shape(name).is_some();
        let are_both_stored = is_stored(embedding) && is_stored(head);
        if self.config.tie_word_embeddings && are_both_stored && !weights.are_equal(embedding, head)? {
            self.config.tie_word_embeddings = false;
            self.notes.push(format!(
                "`tie_word_embeddings` is true, but {head} differs from {embedding} in {}: the two are separate \
                 parameters, as in transformers 5; remove {head} to tie them",
                weights.listing().display()
            ));
        }
        Ok(())
    }
}

impl HfModel {
    /// Opens a model directory.
    ///
    /// # Errors
    /// As [`ModelConfig::from_hf_dir`] and [`HfWeights::open`]; a parameter that is missing or has another shape.
    pub fn open(dir: &Path) -> Result<Self, ModelError> {
        Self::with_weights(HfDescription::from_dir(dir)?, dir)
    }

    /// Opens the weights and the other files of a directory whose description was already read.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn with_weights(mut description: HfDescription, dir: &Path) -> Result<Self, ModelError> {
        let weights = HfWeights::open(dir)?;
        description.untie_if_weights_differ(&weights)?;
        let HfDescription { config, mut notes, json } = description;
        let units = Model::new(&config)?.units();
        let mut used: HashSet<_> =
            units.iter().flat_map(|unit| &unit.parameters).map(|spec| &*spec.name).collect();
        for spec in units.iter().flat_map(|unit| &unit.parameters) {
            weights.check(spec)?;
        }
        if config.tie_word_embeddings {
            used.insert(config.family.names.head);
        }
        if !is_larger_model(&json) {
            notes.extend(unused_tensors(&weights, &used));
        }
        let (source, unread) = HfSource::of(json, dir, Some(&weights));
        notes.extend(unread);
        Ok(Self { config, weights, notes, source })
    }
}

/// Returns whether a `config.json` describes a model of which the language model is one part.
fn is_larger_model(json: &Value) -> bool {
    matches!(language_model("config.json", json), Ok(Some(_)))
}

/// A note with the number of unused tensors.
fn unused_tensors(weights: &HfWeights, used: &HashSet<&str>) -> Option<String> {
    const NAMED: usize = 3;
    let mut unused: Vec<_> = weights.names().filter(|name| !used.contains(name)).collect();
    unused.sort_unstable();
    let (count, more) = (unused.len(), if unused.len() > NAMED { ", …" } else { "" });
    unused.truncate(NAMED);
    let listing = weights.listing().display();
    (count > 0).then(|| {
        format!("{listing}: {count} tensor(s) that the model does not use: {}{more}", unused.join(", "))
    })
}

impl HfSource {
    /// Reads the description in a directory; the weights need not exist.
    ///
    /// # Errors
    /// A `config.json` that is missing or no JSON.
    pub fn read(dir: &Path) -> Result<Self, ModelError> {
        let weights = HfWeights::open(dir).ok();
        Ok(Self::of(read_json(&dir.join("config.json"))?, dir, weights.as_ref()).0)
    }

    /// The second value is a note if the generation config cannot be read.
    fn of(config: Value, dir: &Path, weights: Option<&HfWeights>) -> (Self, Option<String>) {
        let path = dir.join("generation_config.json");
        let (generation_config, unread) = match path.exists().then(|| read_json(&path)) {
            None => (Value::Null, None),
            Some(Ok(read)) => (read, None),
            Some(Err(error)) => (Value::Null, Some(format!("{error}: exports will not have the file"))),
        };
        let is_float = |dtype: &&str| ["float32", "bfloat16", "float16"].contains(dtype);
        let described = ["dtype", "torch_dtype"].into_iter().find_map(|key| config[key].as_str());
        let embeddings = || FAMILIES.iter().map(|family| family.names.embedding);
        let stored = || weights.and_then(|weights| embeddings().find_map(|name| weights.dtype(name)));
        let dtype = described.filter(is_float).or_else(stored).map(str::to_owned);
        (Self { config, generation_config, dtype }, unread)
    }

    /// Adds a token to the `eos_token_id` of `generation_config.json`, if there is one, and of `config.json`: generation stops at any
    /// of them. Returns whether one of the two lacked it.
    pub fn stop_at(&mut self, token: u32) -> bool {
        let files = [&mut self.config, &mut self.generation_config];
        let lacking = files.into_iter().filter_map(Value::as_object_mut).filter_map(|file| {
            let known = match file.get("eos_token_id") {
                Some(Value::Array(ids)) => ids.clone(),
                None | Some(Value::Null) => Vec::new(),
                Some(id) => vec![id.clone()],
            };
            let is_new = !known.contains(&token.into());
            is_new.then(|| {
                let ids: Vec<Value> = known.into_iter().chain([token.into()]).collect();
                let ids = if ids.len() == 1 { token.into() } else { Value::Array(ids) };
                file.insert("eos_token_id".to_owned(), ids);
            })
        });
        lacking.count() > 0
    }

    /// Returns whether the language model is one part of the model, so that an export needs the other tensors.
    pub fn is_larger_model(&self) -> bool {
        is_larger_model(&self.config)
    }

    /// Returns whether its `config.json` describes `model`, apart from whether the head is tied.
    pub fn describes(&self, model: &Value) -> bool {
        let untied = |json: &Value| {
            let config = ModelConfig::from_hf_json(json.clone(), "config.json").ok()?;
            Some(ModelConfig { tie_word_embeddings: false, ..config })
        };
        untied(&self.config).is_some_and(|config| untied(model) == Some(config))
    }
}

fn read_json(path: &Path) -> Result<Value, ModelError> {
    let text = crate::regular_file::read_to_string(path)
        .map_err(|source| ModelError::Io { path: path.to_owned(), source })?;
    let invalid =
        |error| ModelError::Format { path: path.to_owned(), reason: format!("not valid JSON: {error}") };
    match text.contains("Infinity") {
        false => serde_json::from_str(&text).map_err(invalid),
        true => serde_json::from_str(&with_infinity(&text)).map_err(invalid),
    }
}

/// Python writes infinity as a word, which JSON does not have: replaced by the object that transformers 5 writes for it. Other such
/// words stay, and are refused.
fn with_infinity(text: &str) -> String {
    let (mut out, mut rest) = (String::with_capacity(text.len()), text);
    let (mut in_string, mut is_escaped) = (false, false);
    while let Some(next) = rest.chars().next() {
        if !in_string && let Some(after) = rest.strip_prefix("Infinity") {
            out.push_str(r#"{"__float__":"Infinity"}"#);
            rest = after;
            continue;
        }
        in_string ^= next == '"' && !is_escaped;
        is_escaped = next == '\\' && !is_escaped;
        out.push(next);
        rest = &rest[next.len_utf8()..];
    }
    out
}
