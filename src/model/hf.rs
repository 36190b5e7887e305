//! Weights in Hugging Face's layout: `model.safetensors`.

use super::{ModelError, ParameterSpec, WeightSource};
use half::{bf16, f16};
use safetensors::{Dtype, SafeTensors};
use std::ops::Range;
use std::path::{Path, PathBuf};

/// The tensors of a `model.safetensors` file (f32, bf16 or f16, widened to f32).
pub struct HfWeights {
    path: PathBuf,
    tensors: std::collections::HashMap<String, Stored>,
    bytes: Vec<u8>,
}

struct Stored {
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Range<usize>,
}

impl HfWeights {
    /// Opens `DIR/model.safetensors`.
    ///
    /// # Errors
    /// A file that is missing or is not safetensors.
    pub fn open(dir: &Path) -> Result<Self, ModelError> {
        let path = dir.join("model.safetensors");
        let bytes = std::fs::read(&path).map_err(|source| ModelError::Io { path: path.clone(), source })?;
        let format = |error: safetensors::SafeTensorError| ModelError::Format {
            path: path.clone(),
            reason: error.to_string(),
        };
        let start = bytes.as_ptr().addr();
        let parsed = SafeTensors::deserialize(&bytes).map_err(format)?;
        let tensors = parsed
            .iter()
            .map(|(name, view)| {
                let offset = view.data().as_ptr().addr() - start;
                let bytes = offset..offset + view.data().len();
                (name.to_owned(), Stored { dtype: view.dtype(), shape: view.shape().to_vec(), bytes })
            })
            .collect();
        Ok(Self { path, tensors, bytes })
    }

    /// Names of all tensors of the file.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }
}

impl WeightSource for HfWeights {
    fn read(&self, spec: &ParameterSpec, range: Range<usize>, out: &mut [f32]) -> Result<(), ModelError> {
        let Some(stored) = self.tensors.get(&spec.name) else {
            return Err(ModelError::MissingTensor {
                path: self.path.clone(),
                name: spec.name.clone(),
                available: self.tensors.len(),
            });
        };
        if stored.shape != spec.shape {
            return Err(ModelError::TensorShape {
                path: self.path.clone(),
                name: spec.name.clone(),
                expected: spec.shape.clone(),
                got: stored.shape.clone(),
            });
        }
        if range.end > spec.numel() || range.len() != out.len() {
            let (name, elements) = (&spec.name, spec.numel());
            let reason = format!(
                "elements {range:?} of {name}, which has {elements}, do not fill {} asked for",
                out.len()
            );
            return Err(ModelError::Format { path: self.path.clone(), reason });
        }
        let bytes = &self.bytes[stored.bytes.clone()];
        match stored.dtype {
            Dtype::F32 => widen(bytes, range, out, f32::from_le_bytes),
            Dtype::BF16 => widen(bytes, range, out, |b| bf16::from_le_bytes(b).to_f32()),
            Dtype::F16 => widen(bytes, range, out, |b| f16::from_le_bytes(b).to_f32()),
            other => {
                let reason = format!("tensor {} is {other:?}; f32, bf16 and f16 can be loaded", spec.name);
                return Err(ModelError::Format { path: self.path.clone(), reason });
            }
        }
        Ok(())
    }
}

/// Decodes elements `range` of a little-endian array.
fn widen<const N: usize>(
    bytes: &[u8],
    range: Range<usize>,
    out: &mut [f32],
    decode: impl Fn([u8; N]) -> f32,
) {
    let (elements, _) = bytes.as_chunks::<N>();
    for (out, element) in out.iter_mut().zip(&elements[range]) {
        *out = decode(*element);
    }
}
