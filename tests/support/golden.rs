//! Fixtures computed by PyTorch and Hugging Face transformers: `tests/fixtures/golden/`.

use super::reference::{AdamWConfig, Batch, ReferenceConfig, Tensors, Weights, load_tensors, load_weights};
use anyhow::{Context, Result};
use candle_core::Tensor;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// One model on one batch.
pub struct Fixture {
    /// The folder of its files.
    pub dir: PathBuf,
    pub config: ReferenceConfig,
    pub weights: Weights,
    pub batch: Batch,
    /// f32: `logits` `[rows, seq_len, vocab_size]`, `loss` `[1]` and more, see the manifest.
    pub outputs: Tensors,
    /// f32 weights, by parameter name.
    pub grads: Tensors,
    /// The same model evaluated by PyTorch in f64: `loss`, `logits`, `grad.<name>`; empty if there is none.
    pub f64_outputs: Tensors,
    /// The optimizer of all trajectories.
    pub adamw: AdamWConfig,
    /// Error of PyTorch's f32 results against its f64 results, by quantity; see the manifest.
    pub f32_errors: BTreeMap<String, f64>,
    /// By name, such as `adamw` and `adamw_clip0.5`.
    pub trajectories: BTreeMap<String, Trajectory>,
}

/// A few optimizer steps on the fixture's batch.
pub struct Trajectory {
    /// Maximum gradient norm.
    pub clip: Option<f64>,
    pub steps: Vec<TrajectoryStep>,
}

pub struct TrajectoryStep {
    /// Before the update.
    pub loss: f64,
    /// Before the update and before clipping.
    pub grad_norm: f64,
    /// f32, after the update.
    pub params: Tensors,
}

#[derive(Deserialize)]
struct Manifest {
    adamw: AdamWConfig,
    fixtures: BTreeMap<String, ManifestEntry>,
}

#[derive(Deserialize)]
struct ManifestEntry {
    #[serde(default)]
    errors: BTreeMap<String, f64>,
    #[serde(default)]
    trace: BTreeMap<String, Vec<TraceStep>>,
}

#[derive(Deserialize)]
struct TraceStep {
    step: usize,
    loss_before_step: f64,
    grad_norm_before_clip: f64,
}

/// Returns the folder of `tests/fixtures`, from `CARGO_MANIFEST_DIR`.
///
/// Set this variable to run a test binary without cargo.
pub fn repository() -> PathBuf {
    std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into()).into()
}

impl Fixture {
    /// Loads a fixture by folder name.
    pub fn load(name: &str) -> Result<Self> {
        let root = repository().join("tests/fixtures/golden");
        let dir = root.join(name);
        let manifest: Manifest = serde_json::from_str(&std::fs::read_to_string(root.join("manifest.json"))?)?;
        let entry = manifest.fixtures.get(name);
        let entry = entry.with_context(|| format!("no fixture {name} in the manifest"))?;
        let config = ReferenceConfig::from_hugging_face(&dir.join("config.json"))?;
        let f64_file = dir.join("ref_f64.safetensors");
        Ok(Self {
            weights: load_weights(&config, &dir.join("model.safetensors"))?,
            config,
            batch: load_batch(&dir.join("inputs.safetensors"))?,
            outputs: load_tensors(&dir.join("outputs.safetensors"))?,
            grads: load_tensors(&dir.join("grads.safetensors"))?,
            f64_outputs: if f64_file.exists() { load_tensors(&f64_file)? } else { Tensors::new() },
            adamw: manifest.adamw,
            f32_errors: entry.errors.clone(),
            trajectories: load_trajectories(&dir, &entry.trace)?,
            dir,
        })
    }

    pub fn trajectory(&self, name: &str) -> Result<&Trajectory> {
        self.trajectories.get(name).with_context(|| format!("no trajectory {name} in {}", self.dir.display()))
    }

    /// PyTorch's gradients in f64, by parameter name.
    pub fn f64_grads(&self) -> Tensors {
        let grad = |(name, tensor): (&String, &Tensor)| {
            name.strip_prefix("grad.").map(|name| (name.to_owned(), tensor.clone()))
        };
        self.f64_outputs.iter().filter_map(grad).collect()
    }
}

fn load_batch(path: &Path) -> Result<Batch> {
    let tensors = load_tensors(path)?;
    let rows = |name: &str| -> Result<Vec<Vec<i64>>> {
        Ok(tensors.get(name).with_context(|| format!("no {name} in {}", path.display()))?.to_vec2()?)
    };
    let unsigned = |name: &str| -> Result<Vec<Vec<u32>>> {
        let row = |row: Vec<i64>| row.into_iter().map(u32::try_from).collect::<Result<Vec<_>, _>>();
        Ok(rows(name)?.into_iter().map(row).collect::<Result<_, _>>()?)
    };
    Ok(Batch {
        input_ids: unsigned("input_ids")?,
        position_ids: unsigned("position_ids")?,
        labels: rows("shift_labels")?,
    })
}

fn load_trajectories(
    dir: &Path,
    traces: &BTreeMap<String, Vec<TraceStep>>,
) -> Result<BTreeMap<String, Trajectory>> {
    let mut trajectories = BTreeMap::new();
    for (name, trace) in traces {
        let clip = match name.split_once("_clip") {
            Some((_, clip)) => Some(clip.parse().with_context(|| format!("clipping norm of {name}"))?),
            None => None,
        };
        let mut steps = Vec::with_capacity(trace.len());
        for TraceStep { step, loss_before_step, grad_norm_before_clip } in trace {
            let params = load_tensors(&dir.join(format!("{name}_step{step}.safetensors")))?;
            steps.push(TrajectoryStep { loss: *loss_before_step, grad_norm: *grad_norm_before_clip, params });
        }
        trajectories.insert(name.clone(), Trajectory { clip, steps });
    }
    Ok(trajectories)
}
