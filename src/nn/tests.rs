//! Layers under autograd, and the context of a micro batch.

use super::*;
use crate::model::{RandomWeights, WeightSource};
use candle_core::{DType, Device, Tensor};
use std::slice::from_ref;
use std::sync::Arc;
use ulysses_kernels::Workspace;
use ulysses_kernels::attention::FlashAttention;

pub(crate) fn context(batch: usize, seq_len: usize) -> LayerContext {
    let position_ids = (0..batch).flat_map(|_| 0..seq_len as u32).collect();
    let cu_seqlens = Arc::new(vec![vec![0, seq_len as u32]; batch]);
    let tokens = TokenLayout::new(from_ref(&(0..seq_len)), position_ids, cu_seqlens).unwrap();
    LayerContext::new(Arc::new(tokens), Arc::new(FlashAttention::default()), Arc::new(Workspace::default()))
}

/// Random values of strength 1, different for every `seed`.
pub(crate) fn random(dims: &[usize], seed: u64) -> Tensor {
    let spec = ParameterSpec::new("x", dims, Init::Normal { std: 1.0 });
    let mut values = vec![0.0; spec.numel()];
    RandomWeights { seed }.read(&spec, 0..spec.numel(), &mut values).unwrap();
    Tensor::from_vec(values, dims, &Device::Cpu).unwrap()
}

#[test]
fn a_block_that_does_not_reach_a_parameter_is_an_error_that_names_it() {
    let spec = |name: &str| ParameterSpec::new(name, [4], Init::Ones);
    let layer = AutogradLayer::new(
        "half",
        vec![spec("used"), spec("unused")],
        |p: &[Tensor], x: &Tensor, _: &BlockContext<'_>| x.broadcast_mul(&p[0]),
    );
    let params = [random(&[4], 0), random(&[4], 1)];
    let grads: Vec<_> = params.iter().map(|p| Some(p.zeros_like().unwrap())).collect();
    let ctx = context(1, 3);
    let (y, saved) = layer.forward(&params, &random(&[1, 3, 4], 2), &ctx).unwrap();
    let error = layer.backward(&params, saved, y, &grads, &ctx).err().unwrap().to_string();
    assert!(error.contains("no gradient reaches unused"), "{error}");
}

#[test]
fn blocks_must_return_the_shape_that_the_layer_promises() {
    let layer =
        AutogradLayer::new("flat", vec![], |_: &[Tensor], x: &Tensor, _: &BlockContext<'_>| x.flatten_all());
    let x = Tensor::zeros((1, 3, 4), DType::F32, &Device::Cpu).unwrap();
    let error = layer.forward(&[], &x, &context(1, 3)).err().unwrap().to_string();
    assert!(error.contains("[1, 3, 4]") && error.contains("[12]"), "{error}");
    let narrow = |_: &[Tensor], x: &Tensor, _: &BlockContext<'_>| x.narrow(2, 0, 2);
    let layer = AutogradLayer::new("narrow", vec![], narrow).with_output_width(2);
    assert_eq!(layer.forward(&[], &x, &context(1, 3)).unwrap().0.dims(), [1, 3, 2]);
    let error = layer.with_output_width(3).forward(&[], &x, &context(1, 3)).err().unwrap().to_string();
    assert!(error.contains("[1, 3, 3]") && error.contains("[1, 3, 2]"), "{error}");
}

/// Nothing is exchanged in these tests.
struct NoExchange;

impl TokenExchange for NoExchange {
    fn all_gather(&self, some: &Tensor, _: usize) -> Result<Tensor, LayerError> {
        Ok(some.clone())
    }

    fn reduce_scatter(&self, partial: &Tensor) -> Result<Tensor, LayerError> {
        Ok(partial.clone())
    }

    fn features_to_tokens(&self, part: &Tensor, _: usize) -> Result<Tensor, LayerError> {
        Ok(part.clone())
    }

    fn all_reduce(&self, _: &Tensor) -> Result<(), LayerError> {
        Ok(())
    }

    fn all_gather_rows(&self, _: &Tensor, _: &[usize], _: &Tensor) -> Result<(), LayerError> {
        Ok(())
    }

    fn reduce_scatter_rows(&self, _: &Tensor, _: &[usize], _: &Tensor) -> Result<(), LayerError> {
        Ok(())
    }
}

#[test]
fn a_token_wise_block_has_the_positions_of_its_tokens_and_no_attention() {
    let documents = Arc::new(vec![vec![0, 6]]);
    let own = TokenLayout::new(from_ref(&(4..6)), vec![4, 5], documents).unwrap();
    let ctx = context(1, 6).with_token_exchange(Arc::new(NoExchange), Arc::new(own));
    let attend = |_: &[Tensor], x: &Tensor, ctx: &BlockContext<'_>| {
        assert_eq!((ctx.seq_len_local(), ctx.position_ids()), (2, &[4, 5][..]));
        let heads = x.unsqueeze(2)?;
        ctx.attention(&heads, &heads, &heads)?.squeeze(2)
    };
    let layer = Box::new(AutogradLayer::new("attends", vec![], attend).token_wise());
    let layer = layer.tensor_parallel(TensorRank { size: 3, rank: 2 }).unwrap();
    let error = layer.forward(&[], &random(&[1, 2, 4], 0), &ctx).err().unwrap().to_string();
    assert!(error.contains("[1, 2, 1, 4]") && error.contains("[1, 6, 1, 4]"), "{error}");
}

#[test]
fn a_branch_without_a_norm_does_not_copy_its_input() {
    let (parameters, ctx) = (ParameterList::new("layer"), context(1, 3));
    let x = random(&[1, 3, 4], 0);
    let pass = parameters.forward(&[], &ctx).unwrap();
    assert_eq!(Branch::residual_by_caller().enter(&x, &x, &pass).unwrap().id(), x.id());
}

#[test]
fn a_token_layout_is_of_its_shard_positions_and_documents_and_of_no_others() {
    let documents = [vec![0, 3, 8], vec![0, 8, 8]];
    let positions = [4, 0, 1, 2, 4, 5, 6, 7];
    let layout =
        TokenLayout::new(from_ref(&(2..6)), positions.to_vec(), Arc::new(documents.to_vec())).unwrap();
    assert!(layout.is_of(from_ref(&(2..6)), &positions, &documents));
    assert!(!layout.is_of(from_ref(&(3..7)), &positions, &documents));
    assert!(!layout.is_of(from_ref(&(2..5)), &positions, &documents));
    assert!(!layout.is_of(from_ref(&(2..6)), &[4, 0, 1, 2, 4, 5, 6, 0], &documents));
    assert!(!layout.is_of(from_ref(&(2..6)), &positions, &[vec![0, 4, 8], vec![0, 8, 8]]));
    assert!(!layout.is_of(from_ref(&(2..6)), &positions, &documents[..1]));
}

#[test]
fn layers_with_the_same_heads_share_the_layout_of_linear_attention() {
    let ctx = context(1, 3);
    let [first, again, other] =
        [&[0, 0][..], &[0, 0], &[0, 1]].map(|v_to_k| ctx.linear_attention_layout(v_to_k));
    assert!(Arc::ptr_eq(first.v_to_k(), again.v_to_k()));
    assert_eq!(**other.v_to_k(), [0, 1]);
}

#[test]
fn positions_are_looked_up_in_each_document_and_those_that_are_not_there_refused() {
    let input = LearnedPositions::new(Embedding::new(3, 2, 1.0), "positions", 4, 1.0);
    let params: Vec<Tensor> =
        input.parameters().iter().zip(0..).map(|(spec, seed)| random(&spec.shape, seed)).collect();
    let forward = |position_ids: [u32; 5], boundaries: &[u32]| {
        let documents = Arc::new(vec![boundaries.to_vec()]);
        let tokens = TokenLayout::new(from_ref(&(0..5)), position_ids.to_vec(), documents).unwrap();
        let (attention, workspace) = (Arc::new(FlashAttention::default()), Arc::new(Workspace::default()));
        let (batch_size, seq_len_local, values) = (1, 5, &Default::default());
        let batch = LocalBatch {
            batch_size,
            seq_len_local,
            input_ids: &[2, 0, 2, 1, 1],
            labels: &[],
            all_input_ids: &[],
            all_labels: &[],
            values,
        };
        let ctx = LayerContext::new(Arc::new(tokens), attention, workspace);
        Ok::<_, LayerError>(input.forward(&params, &batch, &ctx)?.0)
    };
    let rows = |x: &Tensor| x.reshape(((), 2)).unwrap().to_vec2::<f32>().unwrap();
    let (tokens, positions) = (rows(&params[0]), rows(&params[1]));
    let got = rows(&forward([0, 1, 2, 0, 3], &[0, 3, 5]).unwrap());
    for (row, (token, position)) in got.iter().zip([(2, 0), (0, 1), (2, 2), (1, 0), (1, 3)]) {
        let expected = [0, 1].map(|i| tokens[token][i] + positions[position][i]);
        assert_eq!(row[..], expected, "token {token}, position {position}");
    }
    let error = forward([0, 1, 2, 3, 4], &[0, 5]).unwrap_err().to_string();
    assert!(error.contains("5 tokens or more") && error.contains("4 learned positions"), "{error}");
}
