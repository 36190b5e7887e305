//! Export of a checkpoint's parameters in Hugging Face's layout.

use super::header::Header;
use super::initial_weights::{InitialWeights, rounding};
use super::load::Checkpoint;
use super::state_file::{TensorFileWriter, WrittenFile};
use super::{CheckpointError, Storage};
use half::{bf16, f16};
use safetensors::Dtype;
use serde_json::{Map, Value, json};
use std::io::Write;
use std::path::{Path, PathBuf};

/// The dtype of an export.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExportDtype {
    /// The f32 master parameters, unchanged.
    F32,
    /// bfloat16, rounded to nearest, ties to even.
    Bf16,
    /// float16, rounded to nearest, ties to even.
    F16,
}

/// Options of [`export`].
#[derive(Clone, Copy)]
pub struct ExportOptions<'a> {
    /// Dtype of the weights.
    pub dtype: ExportDtype,
    /// Maximum tensor bytes per file. A larger tensor gets its own file.
    pub max_file_bytes: u64,
    /// A `tokenizer.json` to copy, with the related files of its directory.
    pub tokenizer: Option<&'a Path>,
    /// The weights that the run started from. Without them, frozen parameters of a run in 16 bits are exported rounded.
    pub initial: Option<&'a InitialWeights<'a>>,
}

/// A written export.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExportedModel {
    /// Weight files.
    pub files: Vec<PathBuf>,
    /// Total bytes of the weight files.
    pub bytes: u64,
    /// Number of frozen parameters that are exported as the run rounded them to 16 bits.
    pub rounded: usize,
}

const GENERATION_CONFIG: &str = "generation_config.json";

/// Files to copy with a `tokenizer.json`, if present.
const TOKENIZER_COMPANIONS: [&str; 14] = [
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "tokenizer.model.v3",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "chat_template.jinja",
    "chat_template.json",
    GENERATION_CONFIG,
];

/// The directory of named chat templates, whose `.jinja` files are copied too.
const CHAT_TEMPLATES: &str = "additional_chat_templates";

/// A parameter as (unit, index in the unit, bytes in the export).
type ParameterSize = (usize, usize, u64);

/// Exports the parameters to the new directory `output`.
///
/// It writes `config.json`, `model.safetensors` (or numbered files and their index) and the tokenizer. If the run
/// started from a model directory, `config.json` has all its fields except the dtype, and
/// `generation_config.json` is copied. A model without a description has no `config.json`. The directory appears
/// atomically. Only one parameter is in memory at once.
///
/// # Errors
/// Fails if `output` exists, the model description is not a JSON object, a file cannot be read or written, or a
/// parameter is out of range for the dtype.
pub fn export(
    checkpoint: &Checkpoint,
    output: &Path,
    options: ExportOptions<'_>,
    storage: &dyn Storage,
) -> Result<ExportedModel, CheckpointError> {
    if output.symlink_metadata().is_ok() {
        let exists = std::io::Error::from(std::io::ErrorKind::AlreadyExists);
        return Err(CheckpointError::io("create", output)(exists));
    }
    let config = config_json(checkpoint, options.dtype)?;
    let name = output.file_name().unwrap_or_default().to_string_lossy();
    let unfinished = output.with_file_name(format!(".{name}.saving"));
    // A leftover of a killed export.
    let _ = storage.remove_dir_all(&unfinished);
    storage.create_dir(&unfinished).map_err(CheckpointError::io("create", &unfinished))?;
    let written =
        write_all(checkpoint, &unfinished, options, config.as_ref(), storage).and_then(|exported| {
            storage.sync_dir(&unfinished).map_err(CheckpointError::io("fsync", &unfinished))?;
            storage.rename(&unfinished, output).map_err(CheckpointError::io("rename", &unfinished))?;
            Ok(exported)
        });
    match written {
        Ok(exported) => {
            let files = exported.files.iter().map(|file| output.join(file)).collect();
            Ok(ExportedModel { files, ..exported })
        }
        Err(error) => {
            let _ = storage.remove_dir_all(&unfinished);
            Err(error)
        }
    }
}

/// Writes all files to `dir`. The returned file names are relative to it.
fn write_all(
    checkpoint: &Checkpoint,
    dir: &Path,
    options: ExportOptions<'_>,
    config: Option<&Value>,
    storage: &dyn Storage,
) -> Result<ExportedModel, CheckpointError> {
    let groups = group_by_size(parameter_sizes(checkpoint, options.dtype), options.max_file_bytes);
    let mut exported = ExportedModel { files: Vec::new(), bytes: 0, rounded: 0 };
    let mut weight_map = Map::new();
    for (index, group) in groups.iter().enumerate() {
        let name = match groups.len() {
            1 => "model.safetensors".to_owned(),
            all => format!("model-{:05}-of-{all:05}.safetensors", index + 1),
        };
        write_weights(checkpoint, dir.join(&name), group, options, storage, &mut exported)?;
        for &(unit, parameter, _) in group {
            let parameter = checkpoint.layouts()[unit].parameters()[parameter].name.clone();
            weight_map.insert(parameter, json!(name));
        }
        exported.files.push(PathBuf::from(name));
    }
    if groups.len() > 1 {
        let total: u64 = groups.iter().flatten().map(|(.., bytes)| bytes).sum();
        let index = json!({ "metadata": { "total_size": total }, "weight_map": weight_map });
        write_text(storage, &dir.join("model.safetensors.index.json"), &index)?;
    }
    if let Some(config) = config {
        write_text(storage, &dir.join("config.json"), config)?;
    }
    if let Some(tokenizer) = options.tokenizer {
        copy(tokenizer, &dir.join("tokenizer.json"))?;
        for companion in TOKENIZER_COMPANIONS {
            let source = tokenizer.with_file_name(companion);
            if source.is_file() {
                copy(&source, &dir.join(companion))?;
            }
        }
        copy_templates(&tokenizer.with_file_name(CHAT_TEMPLATES), &dir.join(CHAT_TEMPLATES), storage)?;
    }
    let source = checkpoint.manifest().source.as_ref();
    if let Some(generation) = source.map(|source| &source.generation_config).filter(|json| !json.is_null()) {
        write_text(storage, &dir.join(GENERATION_CONFIG), generation)?;
    }
    Ok(exported)
}

/// Writes a file, and counts its bytes and rounded parameters in `exported`.
fn write_weights(
    checkpoint: &Checkpoint,
    path: PathBuf,
    group: &[ParameterSize],
    ExportOptions { dtype, initial, .. }: ExportOptions<'_>,
    storage: &dyn Storage,
    exported: &mut ExportedModel,
) -> Result<(), CheckpointError> {
    // transformers requires this metadata.
    let mut header = Header::new([("format", "pt".to_owned())]);
    for &(unit, parameter, _) in group {
        let parameter = &checkpoint.layouts()[unit].parameters()[parameter];
        header.push(&parameter.name, dtype.stored(), parameter.shape.clone());
    }
    let mut file = TensorFileWriter::create(storage, path, &header)?;
    let mut reader = checkpoint.reader();
    let rounding = rounding(checkpoint.manifest().progress.precision.as_deref());
    for &(unit, parameter, _) in group {
        let mut elements = reader.parameter((unit, 0), parameter)?;
        let layout = &checkpoint.layouts()[unit];
        if let Some(rounding) = rounding.filter(|_| layout.is_frozen()) {
            let parameter = &layout.parameters()[parameter];
            match initial.and_then(|initial| initial.unrounded(parameter, &elements, rounding)) {
                Some(unrounded) => elements = unrounded,
                None => exported.rounded += 1,
            }
        }
        if let Some(value) = elements.iter().find(|element| dtype.overflows(**element)) {
            let name = layout.parameters()[parameter].name.clone();
            return Err(CheckpointError::OutOfRange { name, value: *value, dtype: dtype.hf_name() });
        }
        match dtype {
            ExportDtype::F32 => file.write(&elements, f32::to_le_bytes)?,
            ExportDtype::Bf16 => file.write(&elements, |element| bf16::from_f32(element).to_le_bytes())?,
            ExportDtype::F16 => file.write(&elements, |element| f16::from_f32(element).to_le_bytes())?,
        }
    }
    let WrittenFile { bytes, .. } = file.finish()?;
    exported.bytes += bytes;
    Ok(())
}

impl ExportDtype {
    /// Returns the dtype with the given PyTorch name.
    pub fn from_hf_name(name: &str) -> Option<Self> {
        [Self::F32, Self::Bf16, Self::F16].into_iter().find(|dtype| dtype.hf_name() == name)
    }

    fn hf_name(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::Bf16 => "bfloat16",
            Self::F16 => "float16",
        }
    }

    fn stored(self) -> Dtype {
        match self {
            Self::F32 => Dtype::F32,
            Self::Bf16 => Dtype::BF16,
            Self::F16 => Dtype::F16,
        }
    }

    /// Returns whether a finite element rounds to infinity.
    fn overflows(self, element: f32) -> bool {
        element.is_finite()
            && match self {
                Self::F32 => false,
                Self::Bf16 => bf16::from_f32(element).is_infinite(),
                Self::F16 => f16::from_f32(element).is_infinite(),
            }
    }
}

fn parameter_sizes(checkpoint: &Checkpoint, dtype: ExportDtype) -> Vec<ParameterSize> {
    let element_bytes = dtype.stored().bitsize() as u64 / 8;
    let of_unit = |(unit, layout): (usize, &crate::zero::FlatLayout)| {
        let bytes = |p: &crate::zero::FlatParameter| p.numel() as u64 * element_bytes;
        let sizes: Vec<u64> = layout.parameters().iter().map(bytes).collect();
        sizes.into_iter().enumerate().map(move |(parameter, bytes)| (unit, parameter, bytes))
    };
    checkpoint.layouts().iter().enumerate().flat_map(of_unit).collect()
}

/// Groups parameters into files, in order.
fn group_by_size(parameters: Vec<ParameterSize>, max_bytes: u64) -> Vec<Vec<ParameterSize>> {
    let mut groups: Vec<Vec<ParameterSize>> = vec![Vec::new()];
    let mut group_bytes = 0;
    for parameter in parameters {
        if group_bytes + parameter.2 > max_bytes && group_bytes > 0 {
            groups.push(Vec::new());
            group_bytes = 0;
        }
        group_bytes += parameter.2;
        if let Some(last) = groups.last_mut() {
            last.push(parameter);
        }
    }
    groups
}

/// Returns the `config.json`, or `None` if the model has no description.
fn config_json(checkpoint: &Checkpoint, dtype: ExportDtype) -> Result<Option<Value>, CheckpointError> {
    const TIED: &str = "tie_word_embeddings";
    let manifest = checkpoint.manifest();
    if manifest.model.is_null() {
        return Ok(None);
    }
    let Value::Object(mut config) = manifest.model.clone() else {
        let reason = "the model description is not a JSON object".to_owned();
        return Err(CheckpointError::Manifest { path: checkpoint.dir().join(super::MANIFEST), reason });
    };
    if let Some(Value::Object(of_source)) = manifest.source.as_ref().map(|source| &source.config) {
        let is_tied = config.remove(TIED).unwrap_or(Value::Bool(false));
        config.clone_from(of_source);
        // The source may declare a tied head although it has separate weights for it.
        config.insert(TIED.into(), is_tied);
    }
    // transformers 5 writes `dtype`, which takes precedence.
    let keys =
        ["dtype", "torch_dtype"].into_iter().filter(|key| config.contains_key(*key)).collect::<Vec<_>>();
    for key in if keys.is_empty() { vec!["torch_dtype"] } else { keys } {
        config.insert(key.into(), json!(dtype.hf_name()));
    }
    // The training sequence length; some programs refuse longer sequences.
    config.entry("max_position_embeddings").or_insert(json!(manifest.progress.data.seq_len));
    Ok(Some(Value::Object(config)))
}

fn write_text(storage: &dyn Storage, path: &Path, value: &Value) -> Result<(), CheckpointError> {
    let mut file = storage.create(path).map_err(CheckpointError::io("create", path))?;
    file.write_all(format!("{value:#}\n").as_bytes()).map_err(CheckpointError::io("write", path))?;
    file.sync().map_err(CheckpointError::io("fsync", path))
}

/// Copies the `.jinja` files of a directory, if it exists.
fn copy_templates(from: &Path, to: &Path, storage: &dyn Storage) -> Result<(), CheckpointError> {
    let Ok(entries) = std::fs::read_dir(from) else { return Ok(()) };
    storage.create_dir(to).map_err(CheckpointError::io("create", to))?;
    for entry in entries {
        let path = entry.map_err(CheckpointError::io("read", from))?.path();
        if path.is_file() && path.extension().is_some_and(|extension| extension == "jinja") {
            copy(&path, &to.join(path.file_name().unwrap_or_default()))?;
        }
    }
    Ok(())
}

fn copy(from: &Path, to: &Path) -> Result<(), CheckpointError> {
    std::fs::copy(from, to).map_err(CheckpointError::io("copy", from))?;
    Ok(())
}
