//! The batch file: safetensors with `input_ids`, `position_ids` and `shift_labels`.

use anyhow::{Context, bail, ensure};
use safetensors::{Dtype, SafeTensors};
use std::path::Path;
use ulysses::data::GlobalBatch;
use ulysses::regular_file;

/// Sixty million tokens with positions and labels.
const MAX_BYTES: u64 = 4 << 30;

/// Reads a batch. Errors name the file.
pub(super) fn read(path: &Path, vocab_size: usize) -> anyhow::Result<GlobalBatch> {
    read_tensors(path, vocab_size).with_context(|| path.display().to_string())
}

fn read_tensors(path: &Path, vocab_size: usize) -> anyhow::Result<GlobalBatch> {
    let bytes = regular_file::read_at_most(path, MAX_BYTES)?;
    let file = SafeTensors::deserialize(&bytes).context("not a safetensors file")?;
    let Ok(ids) = file.tensor("input_ids") else {
        bail!("missing tensor input_ids; the file contains {}", listed(file.names()))
    };
    let [batch_size, seq_len] = *ids.shape() else {
        bail!("input_ids has shape {:?}, expected [batch, seq_len]", ids.shape())
    };
    if file.tensor("labels").is_ok() && file.tensor("shift_labels").is_err() {
        tracing::warn!("{}: `labels` is ignored; shifted labels are named `shift_labels`", path.display());
    }
    let shape = [batch_size, seq_len];
    let ids = optional(&file, "input_ids", shape, |value| u32::try_from(value).ok())?.unwrap_or_default();
    let positions = optional(&file, "position_ids", shape, |value| u32::try_from(value).ok())?;
    let labels = optional(&file, "shift_labels", shape, Some)?;
    let batch = GlobalBatch::new(batch_size, seq_len, ids, positions, labels)?;
    batch.check_vocab(vocab_size)?;
    Ok(batch)
}

/// Lists the first names in alphabetical order.
fn listed(mut names: Vec<&str>) -> String {
    const MAX_LISTED: usize = 8;
    names.sort_unstable();
    let rest = names.len().saturating_sub(MAX_LISTED);
    let text = names.iter().take(MAX_LISTED).copied().collect::<Vec<_>>().join(", ");
    match (names.len(), rest) {
        (0, _) => "no tensors".to_owned(),
        (_, 0) => text,
        _ => format!("{text} and {rest} others"),
    }
}

/// Reads an integer tensor of the given shape, if present.
fn optional<T>(
    file: &SafeTensors<'_>,
    name: &str,
    shape: [usize; 2],
    convert: impl Fn(i64) -> Option<T>,
) -> anyhow::Result<Option<Vec<T>>> {
    let Ok(tensor) = file.tensor(name) else { return Ok(None) };
    ensure!(
        tensor.shape() == shape,
        "{name} has shape {:?}, expected {shape:?} as input_ids",
        tensor.shape()
    );
    let values: Vec<i64> = match tensor.dtype() {
        Dtype::I64 => decode(tensor.data(), i64::from_le_bytes),
        Dtype::I32 => decode(tensor.data(), |bytes| i32::from_le_bytes(bytes).into()),
        Dtype::U32 => decode(tensor.data(), |bytes| u32::from_le_bytes(bytes).into()),
        other => bail!("{name} has dtype {other:?}, expected I64, I32 or U32"),
    };
    let converted = values.into_iter().enumerate().map(|(index, value)| {
        let (sequence, position) = (index / shape[1], index % shape[1]);
        convert(value).with_context(|| {
            format!(
                "{name} is {value} in sequence {sequence}, position {position}; expected 0 to {}",
                u32::MAX
            )
        })
    });
    converted.collect::<anyhow::Result<_>>().map(Some)
}

fn decode<const N: usize>(bytes: &[u8], decode: impl Fn([u8; N]) -> i64) -> Vec<i64> {
    let (elements, _) = bytes.as_chunks::<N>();
    elements.iter().map(|element| decode(*element)).collect()
}
