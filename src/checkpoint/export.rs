//! Export of a checkpoint's parameters in Hugging Face's layout.

use super::header::Header;
use super::initial_weights::{InitialWeights, rounding};
use super::load::Checkpoint;
use super::state_file::{TensorFileWriter, WrittenFile};
use super::{CheckpointError, Storage};
use crate::model::{HfWeights, OtherTensor};
use crate::zero::{FlatParameter, StateIndex};
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
    /// The directory of a larger model whose language model was trained: its other tensors are copied, and all have its names.
    pub larger_model: Option<&'a HfWeights>,
}

impl ExportOptions<'_> {
    /// One file with elements of this dtype, without a tokenizer.
    pub fn new(dtype: ExportDtype) -> Self {
        Self { dtype, max_file_bytes: u64::MAX, tokenizer: None, initial: None, larger_model: None }
    }
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

const HEAD: &str = "lm_head.weight";
const GENERATION_CONFIG: &str = "generation_config.json";

/// Files to copy with a `tokenizer.json`, if present.
const TOKENIZER_COMPANIONS: [&str; 17] = [
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
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    GENERATION_CONFIG,
];

/// The directory of named chat templates, whose `.jinja` files are copied too.
const CHAT_TEMPLATES: &str = "additional_chat_templates";

/// A tensor of an export.
struct ExportTensor {
    /// Its name in the file.
    name: String,
    content: Content,
    /// Bytes in the export.
    bytes: u64,
}

enum Content {
    /// Index of the unit, and of the parameter within.
    Parameter(usize, usize),
    /// Copied from the larger model.
    Other(OtherTensor),
}

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
    let groups = group_by_size(tensors(checkpoint, options), options.max_file_bytes);
    let mut exported = ExportedModel { files: Vec::new(), bytes: 0, rounded: 0 };
    let mut weight_map = Map::new();
    for (index, group) in groups.iter().enumerate() {
        let name = match groups.len() {
            1 => "model.safetensors".to_owned(),
            all => format!("model-{:05}-of-{all:05}.safetensors", index + 1),
        };
        write_weights(checkpoint, dir.join(&name), group, options, storage, &mut exported)?;
        weight_map.extend(group.iter().map(|tensor| (tensor.name.clone(), json!(name))));
        exported.files.push(PathBuf::from(name));
    }
    if groups.len() > 1 {
        let total: u64 = groups.iter().flatten().map(|tensor| tensor.bytes).sum();
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
    group: &[ExportTensor],
    options: ExportOptions<'_>,
    storage: &dyn Storage,
    exported: &mut ExportedModel,
) -> Result<(), CheckpointError> {
    // transformers requires this metadata.
    let mut header = Header::new([("format", "pt".to_owned())]);
    for ExportTensor { name, content, .. } in group {
        match content {
            Content::Parameter(unit, parameter) => {
                let parameter = &checkpoint.layouts()[*unit].parameters()[*parameter];
                header.push(name, options.dtype.stored(), parameter.shape.clone());
            }
            Content::Other(other) => header.push(name, other.dtype, other.shape.clone()),
        }
    }
    let mut file = TensorFileWriter::create(storage, path, &header)?;
    let mut reader = checkpoint.reader();
    for tensor in group {
        match (&tensor.content, options.larger_model) {
            (Content::Parameter(unit, parameter), _) => {
                let elements = reader.parameter(StateIndex { unit: *unit, kind: 0 }, *parameter)?;
                let parameter = &checkpoint.layouts()[*unit].parameters()[*parameter];
                let is_frozen = checkpoint.layouts()[*unit].is_frozen();
                exported.rounded +=
                    write_parameter(checkpoint, &mut file, parameter, is_frozen, elements, options)?;
            }
            (Content::Other(other), Some(weights)) => weights.copy(other, |bytes| file.write_bytes(bytes))?,
            (Content::Other(_), None) => {}
        }
    }
    let WrittenFile { bytes, .. } = file.finish()?;
    exported.bytes += bytes;
    Ok(())
}

/// Writes a parameter's elements. Returns 1 if they are those that the run rounded, else 0.
fn write_parameter(
    checkpoint: &Checkpoint,
    file: &mut TensorFileWriter,
    parameter: &FlatParameter,
    is_frozen: bool,
    mut elements: Vec<f32>,
    ExportOptions { dtype, initial, .. }: ExportOptions<'_>,
) -> Result<usize, CheckpointError> {
    let mut rounded = 0;
    let rounding = rounding(checkpoint.manifest().progress.precision.as_deref());
    if let Some(rounding) = rounding.filter(|_| is_frozen) {
        match initial.and_then(|initial| initial.unrounded(parameter, &elements, rounding)) {
            Some(unrounded) => elements = unrounded,
            None => rounded = 1,
        }
    }
    if let Some(value) = elements.iter().find(|element| dtype.overflows(**element)) {
        let name = parameter.name.clone();
        return Err(CheckpointError::OutOfRange { name, value: *value, dtype: dtype.hf_name() });
    }
    match dtype {
        ExportDtype::F32 => file.write(&elements, f32::to_le_bytes)?,
        ExportDtype::Bf16 => file.write(&elements, |element| bf16::from_f32(element).to_le_bytes())?,
        ExportDtype::F16 => file.write(&elements, |element| f16::from_f32(element).to_le_bytes())?,
    }
    Ok(rounded)
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

/// The tensors in the order of the files: parameters, then those of a larger model.
fn tensors(
    checkpoint: &Checkpoint,
    ExportOptions { dtype, larger_model, .. }: ExportOptions<'_>,
) -> Vec<ExportTensor> {
    let element_bytes = dtype.stored().bitsize() as u64 / 8;
    let mut tensors = Vec::new();
    for (unit, layout) in checkpoint.layouts().iter().enumerate() {
        for (index, parameter) in layout.parameters().iter().enumerate() {
            let name = larger_model.map_or(&*parameter.name, |weights| weights.stored_name(&parameter.name));
            let (content, bytes) =
                (Content::Parameter(unit, index), parameter.numel() as u64 * element_bytes);
            tensors.push(ExportTensor { name: name.to_owned(), content, bytes });
        }
    }
    // A tied head may be stored, and is the embedding.
    let is_parameter = |name: &str| {
        let all = || checkpoint.layouts().iter().flat_map(|layout| layout.parameters());
        name == HEAD || all().any(|parameter| parameter.name == name)
    };
    let others = larger_model.map(|weights| weights.others(is_parameter)).unwrap_or_default();
    tensors.extend(others.into_iter().map(|other| {
        let bytes = other.shape.iter().product::<usize>() as u64 * other.dtype.bitsize() as u64 / 8;
        ExportTensor { name: other.name.clone(), content: Content::Other(other), bytes }
    }));
    tensors
}

/// Groups tensors into files, in order.
fn group_by_size(tensors: Vec<ExportTensor>, max_bytes: u64) -> Vec<Vec<ExportTensor>> {
    let mut groups: Vec<Vec<ExportTensor>> = vec![Vec::new()];
    let mut group_bytes = 0;
    for tensor in tensors {
        if group_bytes + tensor.bytes > max_bytes && group_bytes > 0 {
            groups.push(Vec::new());
            group_bytes = 0;
        }
        group_bytes += tensor.bytes;
        if let Some(last) = groups.last_mut() {
            last.push(tensor);
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
    // The training sequence length; some programs refuse longer sequences. The number of learned positions (GPT-2) is
    // in the description.
    if !["text_config", "n_positions"].iter().any(|key| config.contains_key(*key)) {
        config.entry("max_position_embeddings").or_insert(json!(manifest.progress.data.seq_len));
    }
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
