//! Stages of a pipeline.

use super::{case, tied, tiny};
use crate::support::run_case::RunCase;
use ulysses::comm::CollectiveOp;
use ulysses::mesh::shard_range;
use ulysses::model::{ModelConfig, family};
use ulysses::nn::QkNorm;

/// OLMo 2: norms over all heads of queries and keys, which ranks of tp divide.
fn with_norms_over_heads(model: ModelConfig) -> ModelConfig {
    let olmo = ModelConfig { family: family("olmo2").unwrap(), ..model };
    olmo.with_attention(|layer| layer.qk_norm = Some(QkNorm::AllHeads))
}

/// Stages along pp, alone and with the other axes, several micro batches and several stages per rank.
pub(super) fn cases() -> Vec<RunCase> {
    let zero_bubble = |case: RunCase| case.accumulation(3).ulysses("pipeline.schedule", "zero_bubble");
    let olmo = with_norms_over_heads(tiny(8, 2));
    vec![
        zero_bubble(case("pp 2, tied, zero bubble", tied(tiny(4, 2)), 24).pp(2).dp(2).stage(1)),
        zero_bubble(case("pp 3, 1 x 2, stage 2, zero bubble", tiny(4, 2), 25).pp(3).sp(2).stage(2)),
        zero_bubble(case("pp 2, 2 x 1, stage 3, tp, zero bubble", tiny(8, 4), 24).pp(2).dp(2).tp(2).stage(3)),
        case("pp 2", tiny(4, 2), 24).pp(2),
        case("pp 3, tied, 2 x 1, stage 3", tied(tiny(4, 2)), 24)
            .pp(3)
            .dp(2)
            .stage(3)
            .checkpointed()
            .set("gradient_clipping", 0.5),
        case("pp 2, tied, 1 x 2, stage 1", tied(tiny(8, 4)), 25).pp(2).sp(2).stage(1),
        case("pp 2, 1 x 2, stage 2, tp", tiny(8, 4), 25).pp(2).sp(2).tp(2).stage(2),
        case("pp 2, tied, 1 x 2, stage 3, tp", tied(tiny(8, 4)), 24).pp(2).sp(2).tp(2).stage(3),
        case("pp 2, 1 x 2, stage 1, tp 3", tiny(6, 3), 25)
            .pp(2)
            .sp(2)
            .tp(3)
            .stage(1)
            .ulysses("loss_tile_tokens", 7),
        case("pp 2, stage 2, tp 3, OLMo", olmo, 25).pp(2).tp(3).stage(2).ulysses("loss_tile_tokens", 7),
        case("pp 3, three micro batches", tiny(4, 2).with_num_layers(4), 24).pp(3).stage(1).accumulation(3),
        case("pp 2 with 2 stages each, 1 x 2", tied(tiny(4, 2).with_num_layers(5)), 24)
            .pp(2)
            .sp(2)
            .stage(2)
            .accumulation(4)
            .ulysses("pipeline.virtual_stages", 2),
    ]
}

/// A stage sends the hidden states of each micro batch to the next one, and their gradient to the previous one: `batch · tokens · hidden`
/// elements, of the tokens that a rank of sp and tp has between layers.
#[test]
fn stages_send_the_bytes_of_the_formula_by_counters_and_by_plan() {
    let model = |layers| tiny(8, 4).with_num_layers(layers);
    for case in [
        case("pp 3, 2 x 1, stage 2", model(3), 24).pp(3).dp(2).stage(2).accumulation(2),
        case("pp 2, 1 x 2, tp 2, bf16", model(2), 25).pp(2).sp(2).tp(2).bf16().accumulation(3),
        case("pp 2 with 2 stages each, 1 x 2", model(5), 25)
            .pp(2)
            .sp(2)
            .accumulation(4)
            .ulysses("pipeline.virtual_stages", 2),
    ] {
        let config = case.config();
        let [pp, dp, sp, tp] = config.mesh.shape().into_array();
        let stages = pp * config.ulysses.pipeline.virtual_stages;
        for (rank, (_, moved)) in case.run().into_iter().enumerate() {
            let (place, of_sp, of_tp) = (rank / (dp * sp * tp), rank / tp % sp, rank % tp);
            let tokens = shard_range(shard_range(case.seq_len, sp, of_sp).len(), tp, of_tp).len();
            let own = (place..stages).step_by(pp);
            let messages: usize =
                own.map(|stage| usize::from(stage > 0) + usize::from(stage + 1 < stages)).sum();
            let elements = config.micro_batch_size * tokens * case.model.hidden_size;
            let bytes = config.gradient_accumulation_steps
                * messages
                * elements
                * config.precision.dtype().size_in_bytes();
            let sent = moved[&("pp", CollectiveOp::Send)].0;
            assert_eq!(sent, bytes as u64, "{}, rank {rank}", case.label);
            assert_eq!(
                case.planned(rank).1[&("pp", CollectiveOp::Send)].0,
                sent,
                "{}, rank {rank}",
                case.label
            );
        }
    }
}
