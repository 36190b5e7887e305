//! `--packing`: the documents of the batch, each alone.

use crate::failure::{Failure, OrFail};
use anyhow::anyhow;
use candle_core::Tensor;
use ulysses::config::{Config, LossNormalization};
use ulysses::data::GlobalBatch;

/// Returns the batch with each of its documents in a sequence of its own.
pub(super) fn unpacked(batch: &GlobalBatch, config: &Config) -> Result<GlobalBatch, Failure> {
    if config.loss_normalization == LossNormalization::MicroBatch {
        return Err(Failure::Usage(anyhow!(
            "`--packing` needs `loss_normalization` \"global\": with \"micro_batch\", the mean over each micro batch, the \
             weight of a document depends on the others of its micro batch by definition"
        )));
    }
    batch.unpacked().or_usage()
}

/// Puts the logits of single documents where the documents are in the packed batch.
///
/// # Shapes
/// `logits`: `[documents, longest document, vocab]`; returns `[batch, seq_len, vocab]` of `packed`.
pub(super) fn packed_as(packed: &GlobalBatch, logits: &Tensor) -> anyhow::Result<Tensor> {
    let lengths =
        packed.cu_seqlens().iter().flat_map(|bounds| bounds.windows(2)).map(|pair| pair[1] - pair[0]);
    let document = |(index, length): (usize, u32)| logits.get(index)?.narrow(0, 0, length as usize);
    let documents = lengths.enumerate().map(document).collect::<candle_core::Result<Vec<_>>>()?;
    let shape = (packed.batch_size(), packed.seq_len(), logits.dim(2)?);
    Ok(Tensor::cat(&documents, 0)?.reshape(shape)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    #[test]
    fn logits_of_single_documents_are_put_where_the_documents_are() {
        let positions = vec![0, 1, 2, 0, 0, 1, 0, 1];
        let packed = GlobalBatch::new(2, 4, vec![0; 8], Some(positions), None).unwrap();
        // 10 · document + token, twice for a vocabulary of two.
        let coded: Vec<f32> =
            (0..4).flat_map(|document| (0..3).flat_map(move |at| [(10 * document + at) as f32; 2])).collect();
        let logits = Tensor::from_vec(coded, (4, 3, 2), &Device::Cpu).unwrap();
        let laid_out = packed_as(&packed, &logits).unwrap();
        assert_eq!(laid_out.dims(), [2, 4, 2]);
        let codes: Vec<f32> = laid_out.flatten_all().unwrap().to_vec1().unwrap();
        let expected = [0.0, 1.0, 2.0, 10.0, 20.0, 21.0, 30.0, 31.0].map(|code| [code; 2]);
        assert_eq!(codes, expected.concat());
    }
}
