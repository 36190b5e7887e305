//! Weights in Hugging Face's layout: `model.safetensors`, or shards and their index.

use super::tensor_file::TensorFile;
use crate::families::language_model_name;
use crate::model::{ModelError, WeightSource};
use crate::nn::ParameterSpec;
use safetensors::Dtype;
use safetensors::tensor::TensorInfo;
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;
use std::ops::Range;
use std::path::{Component, Path, PathBuf};

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// The tensors of a model directory (f32, bf16 or f16, converted to f32). Only the headers are in memory;
/// tensor data is read on demand.
pub struct HfWeights {
    /// The file that lists the tensors.
    listing: PathBuf,
    files: Vec<TensorFile>,
    /// The place of each tensor, by its name in a language model alone.
    file_of: HashMap<String, Place>,
}

/// Where a tensor is stored.
#[derive(Clone)]
struct Place {
    /// Index of the file.
    file: usize,
    /// Its name there.
    name: String,
}

impl Place {
    fn new(file: usize, name: &str) -> (String, Self) {
        (language_model_name(name), Self { file, name: name.to_owned() })
    }
}

/// A tensor that is not a parameter of the language model.
pub struct OtherTensor {
    /// Its name in the file.
    pub name: String,
    /// Its dtype.
    pub dtype: Dtype,
    /// Its shape.
    pub shape: Vec<usize>,
}

impl HfWeights {
    /// Opens `DIR/model.safetensors` or, if it does not exist, the shards that
    /// `DIR/model.safetensors.index.json` lists.
    ///
    /// # Errors
    /// A file that is missing or is not safetensors; an index that does not match its shards, with a tensor
    /// that is missing, listed twice, or in two shards.
    pub fn open(dir: &Path) -> Result<Self, ModelError> {
        let (single, index) = (dir.join(SINGLE), dir.join(INDEX));
        if !single.exists() && !index.exists() {
            let advice = other_weights(dir).map_or_else(String::new, |advice| format!("; {advice}"));
            return Err(ModelError::NoWeights { advice, dir: dir.to_owned(), single: SINGLE, index: INDEX });
        }
        if single.exists() { Self::open_file(&single) } else { Self::open_shards(dir, index) }
    }

    /// Opens one safetensors file.
    ///
    /// # Errors
    /// A file that is missing or is not safetensors.
    pub fn open_file(path: &Path) -> Result<Self, ModelError> {
        let file = TensorFile::open(path.to_owned())?;
        let places: Vec<_> = file.names().map(|name| Place::new(0, name)).collect();
        let (listing, file_of) = (path.to_owned(), places.iter().cloned().collect());
        let weights = Self { listing, files: vec![file], file_of };
        match weights.file_of.len() == places.len() {
            true => Ok(weights),
            false => Err(weights.files[0].format("it holds tensors of a language model twice".to_owned())),
        }
    }

    /// The files, and the name of every tensor with the index of its file.
    pub(crate) fn into_files(self) -> (Vec<TensorFile>, impl Iterator<Item = (String, usize)>) {
        (self.files, self.file_of.into_values().map(|place| (place.name, place.file)))
    }

    fn open_shards(dir: &Path, index: PathBuf) -> Result<Self, ModelError> {
        let WeightMap(places) = read_index(&index)?;
        let format = |reason: String| ModelError::Format { path: index.clone(), reason };
        let (mut files, mut file_by_name, mut file_of) = (Vec::new(), HashMap::new(), HashMap::new());
        for (tensor, shard) in &places {
            let file = match file_by_name.entry(shard.as_str()) {
                Entry::Occupied(known) => *known.get(),
                Entry::Vacant(new) => {
                    files.push(open_shard(dir, &index, shard)?);
                    *new.insert(files.len() - 1)
                }
            };
            if files[file].info(tensor).is_none() {
                return Err(format(format!("it lists {tensor} in {shard}, which has no such tensor")));
            }
            let (name, place) = Place::new(file, tensor);
            if file_of.insert(name, place).is_some() {
                return Err(format(format!("it lists {tensor} twice")));
            }
        }
        let weights = Self { listing: index, files, file_of };
        weights.refuse_second_copies()?;
        Ok(weights)
    }

    /// Refuses tensors that are in two files, since it is unclear which copy counts.
    fn refuse_second_copies(&self) -> Result<(), ModelError> {
        for (held_by, file) in self.files.iter().enumerate() {
            let listed = |name: &str| Some(self.file_of.get(&language_model_name(name))?.file);
            if let Some(name) = file.names().find(|name| listed(name).is_some_and(|listed| listed != held_by))
            {
                let listed = self.files[listed(name).unwrap_or_default()].path().display();
                return Err(file.format(format!("it holds {name}, which the index lists in {listed}")));
            }
        }
        Ok(())
    }

    /// The file that lists the tensors.
    pub(super) fn listing(&self) -> &Path {
        &self.listing
    }

    fn find(&self, name: &str) -> Option<(&TensorFile, &TensorInfo)> {
        let place = self.file_of.get(name)?;
        let file = &self.files[place.file];
        Some((file, file.info(&place.name)?))
    }

    /// The name under which a parameter is stored.
    pub fn stored_name<'a>(&'a self, parameter: &'a str) -> &'a str {
        self.file_of.get(parameter).map_or(parameter, |place| &place.name)
    }

    /// The tensors that are no parameters, in order of their names.
    pub fn others(&self, is_parameter: impl Fn(&str) -> bool) -> Vec<OtherTensor> {
        let mut names: Vec<_> = self.names().filter(|name| !is_parameter(name)).collect();
        names.sort_unstable();
        let other = |name| {
            let (_, TensorInfo { dtype, shape, .. }) = self.find(name)?;
            Some(OtherTensor { name: self.stored_name(name).to_owned(), dtype: *dtype, shape: shape.clone() })
        };
        names.into_iter().filter_map(other).collect()
    }

    /// Passes the bytes of a tensor to `write`, part by part.
    ///
    /// # Errors
    /// A failed read, or an error of `write`.
    pub fn copy<E: From<ModelError>>(
        &self,
        tensor: &OtherTensor,
        write: impl FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let name = language_model_name(&tensor.name);
        match self.find(&name) {
            Some((file, info)) => file.copy(info, write),
            None => Err(ModelError::MissingTensor {
                path: self.listing.clone(),
                name: tensor.name.clone(),
                available: self.file_of.len(),
            }
            .into()),
        }
    }

    /// The shape of a tensor, if it exists.
    pub(super) fn shape(&self, name: &str) -> Option<&[usize]> {
        self.find(name).map(|(_, info)| &*info.shape)
    }

    /// The dtype of a tensor in PyTorch's notation, if it exists and can be loaded.
    pub(super) fn dtype(&self, name: &str) -> Option<&'static str> {
        match self.find(name)?.1.dtype {
            Dtype::F32 => Some("float32"),
            Dtype::BF16 => Some("bfloat16"),
            Dtype::F16 => Some("float16"),
            _ => None,
        }
    }

    /// Checks that a parameter exists with its shape and a supported dtype.
    pub(super) fn check(&self, spec: &ParameterSpec) -> Result<(), ModelError> {
        self.read(spec, 0..0, &mut [])
    }

    /// Returns whether two tensors have the same shape and elements. Reads both up to the first difference.
    pub(super) fn are_equal(&self, first: &str, second: &str) -> Result<bool, ModelError> {
        const CHUNK: usize = 1 << 18;
        let (Some((first_file, first_info)), Some((second_file, second_info))) =
            (self.find(first), self.find(second))
        else {
            return Ok(false);
        };
        if first_info.shape != second_info.shape {
            return Ok(false);
        }
        let numel = first_info.shape.iter().product();
        let mut chunks = [vec![0.0; CHUNK.min(numel)], vec![0.0; CHUNK.min(numel)]];
        for start in (0..numel).step_by(CHUNK) {
            let range = start..numel.min(start + CHUNK);
            let [ours, theirs] = chunks.each_mut().map(|chunk| &mut chunk[..range.len()]);
            first_file.read(first, first_info, range.clone(), ours)?;
            second_file.read(second, second_info, range, theirs)?;
            if ours != theirs {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The names of all listed tensors.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.file_of.keys().map(String::as_str)
    }
}

impl WeightSource for HfWeights {
    fn read(&self, spec: &ParameterSpec, range: Range<usize>, out: &mut [f32]) -> Result<(), ModelError> {
        let Some((file, info)) = self.find(&spec.name) else {
            return Err(ModelError::MissingTensor {
                path: self.listing.clone(),
                name: spec.name.clone(),
                available: self.file_of.len(),
            });
        };
        if info.shape != spec.shape {
            return Err(ModelError::TensorShape {
                path: file.path().to_owned(),
                name: spec.name.clone(),
                expected: spec.shape.clone(),
                got: info.shape.clone(),
            });
        }
        file.read(&spec.name, info, range, out)
    }
}

/// Says what to do with weights in another form.
pub(super) fn other_weights(dir: &Path) -> Option<String> {
    const WITH_TRANSFORMERS: &str = "write it with Python's transformers, `AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR)`";
    let kinds: [(&[&str], &str); 4] = [
        (
            &["adapter_config.json"],
            "it is an adapter (LoRA), not a model; merge it with Python's peft, \
             `AutoPeftModelForCausalLM.from_pretrained(DIR).merge_and_unload().save_pretrained(NEW_DIR)`",
        ),
        (&["pytorch_model.bin", "pytorch_model.bin.index.json"], WITH_TRANSFORMERS),
        (
            &["consolidated.safetensors", "consolidated.00.pth", "params.json"],
            "it is in the layout of its publisher, not in Hugging Face's",
        ),
        (&["model_index.json"], "it is a pipeline of diffusers, not a language model"),
    ];
    let known = kinds.into_iter().find_map(|(files, advice)| {
        let file = files.iter().find(|file| dir.join(file).exists())?;
        Some(format!("{file} is there: {advice}"))
    });
    known.or_else(|| {
        let files =
            dir.read_dir().ok()?.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
        let file = files.filter(|file| file.ends_with(".gguf") || file.ends_with(".bin")).min()?;
        Some(format!("{file} is there: only safetensors are read"))
    })
}

fn open_shard(dir: &Path, index: &Path, shard: &str) -> Result<TensorFile, ModelError> {
    // The index is untrusted: it may name only files in its own directory.
    let mut components = Path::new(shard).components();
    if !matches!((components.next(), components.next()), (Some(Component::Normal(_)), None)) {
        let reason = format!("it names the shard {shard:?}, which is not a plain file name");
        return Err(ModelError::Format { path: index.to_owned(), reason });
    }
    TensorFile::open(dir.join(shard)).map_err(|error| match error {
        ModelError::Io { path, source } if source.kind() == std::io::ErrorKind::NotFound => {
            ModelError::MissingShard { index: index.to_owned(), shard: path }
        }
        other => other,
    })
}

/// (tensor, file name of its shard), as listed.
struct WeightMap(Vec<(String, String)>);

fn read_index(path: &Path) -> Result<WeightMap, ModelError> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: WeightMap,
    }
    let io = |source| ModelError::Io { path: path.to_owned(), source };
    let text = crate::regular_file::read_to_string(path).map_err(io)?;
    let format =
        |error| ModelError::Format { path: path.to_owned(), reason: format!("not an index: {error}") };
    serde_json::from_str(&text).map(|Index { weight_map }| weight_map).map_err(format)
}

/// Reads entry by entry: a JSON object read as a map would hide a repeated key.
impl<'de> Deserialize<'de> for WeightMap {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = WeightMap;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("an object from tensor names to file names")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<WeightMap, A::Error> {
                let mut places = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    places.push(entry);
                }
                Ok(WeightMap(places))
            }
        }
        deserializer.deserialize_map(Entries)
    }
}
