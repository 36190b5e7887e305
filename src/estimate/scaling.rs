//! How much a rank sends in a layer, forward and backward, when ranks and tokens grow together.
//!
//! DeepSpeed-Ulysses (arXiv 2309.14509, section 3.2) claims that the volume per link stays constant when the
//! sequence length N and the number of ranks P grow in proportion: `4·N·h/P` elements for a layer's forward of
//! hidden size h. [`study`] lays the exchange plan's own count beside it, and beside two other ways to
//! shard a sequence:
//!
//! - **Ulysses**: what [`ExchangePlan`] sends, heads that do not divide and shared KV heads included.
//! - **Megatron** sequence parallelism (arXiv 2205.05198): an all-gather and a reduce-scatter of the activations
//!   around attention and around the MLP, forward and backward: `8·N·h·(P−1)/P`. (It gathers activations
//!   twice more to save memory, which is not counted.)
//! - **Ring** attention (arXiv 2310.01889): K and V go around forward, and again with their gradients backward:
//!   `6·N·Hkv·D·(P−1)/P`.

use crate::engine::EngineError;
use crate::model::{Architecture, LlamaConfig, shape};
use crate::sequence_parallel::{AttentionShape, ExchangePlan};
use serde::Serialize;
use ulysses_kernels::rope::Scaling;

/// Ranks of the study.
pub const RANKS: [usize; 8] = [8, 16, 32, 64, 128, 256, 512, 1024];

/// Bytes of an element: 16 bits.
const ELEMENT_BYTES: f64 = 2.0;

/// What one model's ranks send in a layer, for each number of ranks.
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
    /// One for each number of ranks.
    pub points: Vec<Point>,
}

/// Bytes that a rank sends in a layer, forward and backward, one row of `seq_len` tokens; of ranks that differ,
/// the one that sends most.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Point {
    /// Ranks P, all of them on the sp axis.
    pub ranks: usize,
    /// Tokens N.
    pub seq_len: usize,
    /// By the exchange plan; none when there are fewer heads than ranks.
    pub ulysses_bytes: Option<f64>,
    /// The part of it that is K, V and their gradients.
    pub ulysses_kv_bytes: Option<f64>,
    /// Twice the paper's `4·N·h/P`, for the backward pass sends as much.
    pub claimed_bytes: f64,
    /// By all-gather and reduce-scatter.
    pub megatron_bytes: f64,
    /// By K and V in a ring.
    pub ring_bytes: f64,
}

/// The study of a synthetic model with a head for every rank, and of real ones.
///
/// # Errors
/// None that the models here could give.
pub fn study(tokens_per_rank: usize) -> Result<Vec<ModelScaling>, EngineError> {
    let real = |name: &str| Ok::<_, EngineError>((name.to_owned(), shape(name)?));
    let models = [
        ("synthetic MHA".to_owned(), synthetic()),
        real("llama3-8b")?,
        real("llama3-70b")?,
        real("llama3-405b")?,
    ];
    models.into_iter().map(|(name, model)| of_model(name, &model, tokens_per_rank, &RANKS)).collect()
}

/// As wide as Llama 70B, with as many heads as the largest world has ranks.
fn synthetic() -> LlamaConfig {
    LlamaConfig {
        architecture: Architecture::Llama,
        vocab_size: 128_256,
        hidden_size: 8192,
        intermediate_size: 28_672,
        num_layers: 80,
        num_heads: 1024,
        num_kv_heads: 1024,
        head_dim: 8,
        rope_theta: 500_000.0,
        rope_scaling: Scaling::None,
        rms_norm_eps: 1e-5,
        initializer_range: 0.02,
        tie_word_embeddings: false,
    }
}

/// The study of one model on each of these numbers of ranks.
///
/// # Errors
/// Fewer tokens than ranks.
pub fn of_model(
    name: String,
    model: &LlamaConfig,
    tokens_per_rank: usize,
    ranks: &[usize],
) -> Result<ModelScaling, EngineError> {
    let points = ranks.iter().map(|&ranks| point(model, ranks, ranks * tokens_per_rank));
    Ok(ModelScaling {
        model: name,
        hidden_size: model.hidden_size,
        num_heads: model.num_heads,
        num_kv_heads: model.num_kv_heads,
        points: points.collect::<Result<_, EngineError>>()?,
    })
}

fn point(model: &LlamaConfig, ranks: usize, seq_len: usize) -> Result<Point, EngineError> {
    let (tokens, hidden) = (seq_len as f64, model.hidden_size as f64);
    let kv = (model.num_kv_heads * model.head_dim) as f64;
    let to_others = (ranks - 1) as f64 / ranks as f64;
    let exchange = (model.num_heads >= ranks).then(|| exchanged(model, ranks, seq_len)).transpose()?;
    Ok(Point {
        ranks,
        seq_len,
        ulysses_bytes: exchange.map(|(all, _)| ELEMENT_BYTES * all),
        ulysses_kv_bytes: exchange.map(|(_, kv)| ELEMENT_BYTES * kv),
        claimed_bytes: ELEMENT_BYTES * 8.0 * tokens * hidden / ranks as f64,
        megatron_bytes: ELEMENT_BYTES * 8.0 * tokens * hidden * to_others,
        ring_bytes: ELEMENT_BYTES * 6.0 * tokens * kv * to_others,
    })
}

/// Elements that the busiest rank exchanges, and how many of them are K, V and their gradients.
fn exchanged(model: &LlamaConfig, ranks: usize, seq_len: usize) -> Result<(f64, f64), EngineError> {
    let LlamaConfig { num_heads, num_kv_heads, head_dim, .. } = *model;
    let shape = AttentionShape { batch: 1, seq_len, num_heads, num_kv_heads, head_dim };
    let mut most = (0.0, 0.0);
    for rank in 0..ranks {
        let plan = ExchangePlan::new(shape, &model.q_to_kv(), ranks, rank)?;
        let all = plan.volume().total_elems(false) as f64;
        let (seq, kv) = (plan.seq_ranges(), plan.kv_head_ranges());
        let peers = (0..ranks).filter(|peer| *peer != rank);
        // K and V to the peers' heads, and their gradients of its own heads to the peers' tokens.
        let of_peer = |peer: usize| seq[rank].len() * kv[peer].len() + seq[peer].len() * kv[rank].len();
        let kv_elems = 2 * head_dim * peers.map(of_peer).sum::<usize>();
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
}
