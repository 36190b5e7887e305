//! The traffic of a rank per layer, forward and backward, when ranks and tokens grow in proportion.
//!
//! DeepSpeed-Ulysses (arXiv 2309.14509, section 3.2) claims that the volume per link stays constant when the
//! sequence length N and the number of ranks P grow in proportion: `4·N·h/P` elements for the forward pass of a layer
//! with hidden size h. [`study`] compares this with the exchange plan, and with two other ways to shard a sequence:
//!
//! - **Ulysses**: the volume of [`ExchangePlan`], including indivisible heads and shared KV heads.
//! - **Megatron** sequence parallelism (arXiv 2205.05198): an all-gather and a reduce-scatter of the activations
//!   around attention and around the MLP, forward and backward: `8·N·h·(P−1)/P`. (It gathers activations
//!   twice more to save memory, which is not counted.)
//! - **Ring** attention (arXiv 2310.01889): K and V circulate forward, and again with their gradients backward:
//!   `6·N·Hkv·D·(P−1)/P`.
//! - **Ulysses × ring**: both, in the groups of `"ring_size": "auto"` on nodes of 8 ranks, by the formulas of
//!   [`ExchangePlan`] and [`RingVolume`]. Only the ring's bytes leave a node.

use crate::engine::EngineError;
use crate::mesh::{SeqSharding, UlyssesLimits};
use crate::model::{ModelConfig, shape};
use crate::nn::AttentionConfig;
use crate::sequence_parallel::{AttentionShape, ExchangePlan, RingVolume};
use serde::Serialize;

/// Numbers of ranks in the study.
pub const RANKS: [usize; 8] = [8, 16, 32, 64, 128, 256, 512, 1024];

/// Ranks of a node.
const RANKS_PER_NODE: usize = 8;

/// Bytes of an element: 16 bits.
const ELEMENT_BYTES: f64 = 2.0;

/// The traffic of one model per layer, by number of ranks.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ModelScaling {
    /// Name of the model.
    pub model: String,
    /// Hidden size.
    pub hidden_size: usize,
    /// Query heads.
    pub num_heads: usize,
    /// KV heads.
    pub num_kv_heads: usize,
    /// One point per number of ranks.
    pub points: Vec<Point>,
}

/// Bytes that the rank with the most traffic sends per layer, forward and backward, for one sequence of `seq_len` tokens.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Point {
    /// Number of ranks P, all on the sp axis.
    pub ranks: usize,
    /// Number of tokens N.
    pub seq_len: usize,
    /// Bytes of the exchange plan; `None` if there are fewer heads than ranks.
    pub ulysses_bytes: Option<f64>,
    /// The part for K, V and their gradients.
    pub ulysses_kv_bytes: Option<f64>,
    /// Twice the paper's `4·N·h/P`, because the backward pass sends as much.
    pub claimed_bytes: f64,
    /// Bytes of all-gather and reduce-scatter (Megatron).
    pub megatron_bytes: f64,
    /// Bytes of K and V in a ring.
    pub ring_bytes: f64,
    /// Ranks of the ring in Ulysses × ring.
    pub combined_ring_size: usize,
    /// Bytes of Ulysses × ring; gradients of K and V travel in f32.
    pub combined_bytes: f64,
}

/// Runs the study for a synthetic model with one head per rank, and for real models.
///
/// # Errors
/// None for the models here.
pub fn study(tokens_per_rank: usize) -> Result<Vec<ModelScaling>, EngineError> {
    // Of Llama 70B's width, with as many heads as the largest number of ranks.
    let synthetic = shape("llama3-70b")?.with_attention(|layer| {
        (layer.num_heads, layer.num_kv_heads, layer.head_dim) = (1024, 1024, 8);
    });
    let real = |name: &str| Ok::<_, EngineError>((name.to_owned(), shape(name)?));
    let models = [
        ("synthetic MHA".to_owned(), synthetic),
        real("llama3-8b")?,
        real("llama3-70b")?,
        real("llama3-405b")?,
    ];
    models.into_iter().map(|(name, model)| of_model(name, &model, tokens_per_rank, &RANKS)).collect()
}

/// Runs the study for the first layer of a model that has attention.
///
/// # Errors
/// When there are fewer tokens than ranks, or the description of the model is not valid.
pub fn of_model(
    name: String,
    model: &ModelConfig,
    tokens_per_rank: usize,
    ranks: &[usize],
) -> Result<ModelScaling, EngineError> {
    model.validate(&name)?;
    let layer = model.attention();
    let point = |&ranks: &usize| point(model.hidden_size, layer, ranks, ranks * tokens_per_rank);
    let points = ranks.iter().map(point);
    Ok(ModelScaling {
        model: name,
        hidden_size: model.hidden_size,
        num_heads: layer.num_heads,
        num_kv_heads: layer.num_kv_heads,
        points: points.collect::<Result<_, EngineError>>()?,
    })
}

fn point(
    hidden_size: usize,
    layer: &AttentionConfig,
    ranks: usize,
    seq_len: usize,
) -> Result<Point, EngineError> {
    let (tokens, hidden) = (seq_len as f64, hidden_size as f64);
    let AttentionConfig { num_heads, num_kv_heads, head_dim, .. } = *layer;
    let kv = (num_kv_heads * (head_dim + layer.value_head_dim())) as f64;
    let to_others = (ranks - 1) as f64 / ranks as f64;
    let limits = UlyssesLimits { num_heads, num_kv_heads, ranks_per_node: RANKS_PER_NODE };
    let sharding = SeqSharding::auto(ranks, limits);
    let exchange = (num_heads >= ranks).then(|| exchanged(layer, ranks, seq_len)).transpose()?;
    Ok(Point {
        ranks,
        seq_len,
        ulysses_bytes: exchange.map(|(all, _)| ELEMENT_BYTES * all),
        ulysses_kv_bytes: exchange.map(|(_, kv)| ELEMENT_BYTES * kv),
        claimed_bytes: ELEMENT_BYTES * 8.0 * tokens * hidden / ranks as f64,
        megatron_bytes: ELEMENT_BYTES * 8.0 * tokens * hidden * to_others,
        ring_bytes: ELEMENT_BYTES * 3.0 * tokens * kv * to_others,
        combined_ring_size: sharding.ring_size,
        combined_bytes: combined_bytes(layer, sharding, seq_len)?,
    })
}

/// Returns the bytes that the rank with the most traffic sends in Ulysses × ring.
fn combined_bytes(
    layer: &AttentionConfig,
    sharding: SeqSharding,
    seq_len: usize,
) -> Result<f64, EngineError> {
    let shared = sharding.ring_tokens(seq_len, 0).len();
    let (exchanged, _) = exchanged(layer, sharding.ulysses_size, shared)?;
    // The Ulysses rank with the most KV heads: at least one, since ranks share one if there are too few.
    let num_kv_heads = layer.num_kv_heads.div_ceil(sharding.ulysses_size);
    let AttentionConfig { num_heads, head_dim, .. } = *layer;
    let value_head_dim = layer.value_head_dim();
    let shape = AttentionShape { batch: 1, seq_len, num_heads, num_kv_heads, head_dim, value_head_dim };
    let RingVolume { block_elems, gradient_elems } = RingVolume::causal(sharding, 0, shape);
    // Forward and backward.
    let blocks = ELEMENT_BYTES * 2.0 * block_elems as f64;
    Ok(ELEMENT_BYTES * exchanged + blocks + size_of::<f32>() as f64 * gradient_elems as f64)
}

/// Returns the elements that the rank with the most traffic exchanges, and those of K, V and their gradients.
fn exchanged(layer: &AttentionConfig, ranks: usize, seq_len: usize) -> Result<(f64, f64), EngineError> {
    let AttentionConfig { num_heads, num_kv_heads, head_dim, .. } = *layer;
    let value_head_dim = layer.value_head_dim();
    let shape = AttentionShape { batch: 1, seq_len, num_heads, num_kv_heads, head_dim, value_head_dim };
    let mut most = (0.0, 0.0);
    for rank in 0..ranks {
        let plan = ExchangePlan::new(shape, &layer.q_to_kv(), ranks, rank)?;
        let all = plan.volume().total_elems() as f64;
        let (seq, kv) = (plan.seq_ranges(), plan.kv_head_ranges());
        let peers = (0..ranks).filter(|peer| *peer != rank);
        // K and V of its tokens for the peers' heads, and gradients of its heads for the peers' tokens.
        let of_peer = |peer: usize| seq[rank].len() * kv[peer].len() + seq[peer].len() * kv[rank].len();
        let kv_elems = (head_dim + value_head_dim) * peers.map(of_peer).sum::<usize>();
        if all > most.0 {
            most = (all, kv_elems as f64);
        }
    }
    Ok(most)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_claim_holds_for_as_many_heads_as_ranks_and_no_other_way_keeps_it() {
        let models = study(1024).unwrap();
        let points = &models[0].points;
        for point in points {
            // The rank's own part does not travel: (P − 1)/P of what is claimed.
            let ratio = point.ulysses_bytes.unwrap() / point.claimed_bytes;
            assert!((ratio - (point.ranks - 1) as f64 / point.ranks as f64).abs() < 1e-9, "{point:?}");
            assert_eq!(point.claimed_bytes, points[0].claimed_bytes);
        }
        let grown = |of: fn(&Point) -> f64| of(&points[7]) / of(&points[0]);
        assert!(grown(|point| point.megatron_bytes) > 128.0 && grown(|point| point.ring_bytes) > 128.0);
    }

    #[test]
    fn kv_bytes_grow_once_there_are_more_ranks_than_kv_heads() {
        let models = study(1024).unwrap();
        let llama = models.iter().find(|model| model.model == "llama3-405b").unwrap();
        let kv = |ranks: usize| {
            let point = llama.points.iter().find(|point| point.ranks == ranks).unwrap();
            point.ulysses_kv_bytes.unwrap()
        };
        // Eight KV heads: with 16 ranks each travels to two, with 128 to sixteen.
        assert!((kv(16) / kv(8) - 2.0 * (15.0 / 16.0) / (7.0 / 8.0)).abs() < 1e-9);
        assert!((kv(128) / kv(8) - 16.0 * (127.0 / 128.0) / (7.0 / 8.0)).abs() < 1e-9);
        assert!(llama.points.iter().all(|point| point.ulysses_bytes.is_some() == (point.ranks <= 128)));
    }

    #[test]
    fn ulysses_and_ring_serve_any_number_of_ranks_and_are_ulysses_within_a_node() {
        for ModelScaling { num_kv_heads, points, model, .. } in study(1024).unwrap() {
            for point in points {
                assert_eq!(point.combined_ring_size, point.ranks / 8, "{model}");
                let within_a_node = points_of(&model)[0].ulysses_bytes.unwrap();
                // Every other ring rank's blocks of two passes, and their gradients in f32, twice as long as an element.
                let head_dim = if num_kv_heads == 1024 { 8 } else { 128 };
                let block = 2 * (8 * 1024) * (num_kv_heads / 8).max(1) * head_dim;
                let ring = ELEMENT_BYTES * (4 * block * (point.combined_ring_size - 1)) as f64;
                assert!((point.combined_bytes - within_a_node - ring).abs() < 1.0, "{model}: {point:?}");
            }
        }
        fn points_of(name: &str) -> Vec<Point> {
            let models = study(1024).unwrap();
            models.into_iter().find(|model| model.model == name).unwrap().points
        }
    }
}
