//! Stages of a pipeline.

use super::{Case, case, tied, tiny};
use serde_json::{Value, json};
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
pub(super) fn cases() -> Vec<Case> {
    let of = |pp: usize, stage: usize, extra: Value| {
        let mut config = json!({ "zero_optimization": { "stage": stage }, "pipeline_parallel_size": pp });
        config.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        config
    };
    let clipped = json!({ "gradient_clipping": 0.5, "ulysses": { "activation_checkpointing": true } });
    let uneven = json!({ "tensor_parallel_size": 3, "ulysses": { "loss_tile_tokens": 7 } });
    let three = json!({ "gradient_accumulation_steps": 3 });
    let interleaved =
        json!({ "gradient_accumulation_steps": 4, "ulysses": { "pipeline": { "virtual_stages": 2 } } });
    let zero_bubble = |extra: Value| {
        let mut config = json!({ "ulysses": { "pipeline": { "schedule": "zero_bubble" } }, "gradient_accumulation_steps": 3 });
        config.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        config
    };
    let tp = json!({ "tensor_parallel_size": 2 });
    vec![
        case("pp 2, tied, zero bubble", tied(tiny(4, 2)), (2, 1), 24, of(2, 1, zero_bubble(json!({})))),
        case("pp 3, 1 x 2, stage 2, zero bubble", tiny(4, 2), (1, 2), 25, of(3, 2, zero_bubble(json!({})))),
        case("pp 2, 2 x 1, stage 3, tp, zero bubble", tiny(8, 4), (2, 1), 24, of(2, 3, zero_bubble(tp))),
        case("pp 2", tiny(4, 2), (1, 1), 24, of(2, 0, json!({}))),
        case("pp 3, tied, 2 x 1, stage 3", tied(tiny(4, 2)), (2, 1), 24, of(3, 3, clipped)),
        case("pp 2, tied, 1 x 2, stage 1", tied(tiny(8, 4)), (1, 2), 25, of(2, 1, json!({}))),
        case(
            "pp 2, 2 x 2, stage 2, tp",
            tiny(8, 4),
            (1, 2),
            25,
            of(2, 2, json!({ "tensor_parallel_size": 2 })),
        ),
        case(
            "pp 2, tied, 1 x 2, stage 3, tp",
            tied(tiny(8, 4)),
            (1, 2),
            24,
            of(2, 3, json!({ "tensor_parallel_size": 2 })),
        ),
        case("pp 2, 1 x 2, stage 1, tp 3", tiny(6, 3), (1, 2), 25, of(2, 1, uneven.clone())),
        case("pp 2, stage 2, tp 3, OLMo", with_norms_over_heads(tiny(8, 2)), (1, 1), 25, of(2, 2, uneven)),
        case("pp 3, three micro batches", tiny(4, 2).with_num_layers(4), (1, 1), 24, of(3, 1, three)),
        case(
            "pp 2 with 2 stages each, 1 x 2",
            tied(tiny(4, 2).with_num_layers(5)),
            (1, 2),
            24,
            of(2, 2, interleaved),
        ),
    ]
}

/// A stage sends the hidden states of each micro batch to the next one, and their gradient to the previous one: `batch · tokens · hidden`
/// elements, of the tokens that a rank of sp and tp has between layers.
#[test]
fn stages_send_the_bytes_of_the_formula_by_counters_and_by_plan() {
    let model = |layers| tiny(8, 4).with_num_layers(layers);
    let config = |pp: usize, micro_batches: usize, extra: Value| {
        let mut config =
            json!({ "pipeline_parallel_size": pp, "gradient_accumulation_steps": micro_batches });
        config.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        config
    };
    let tp = json!({ "tensor_parallel_size": 2, "bf16": { "enabled": true } });
    let interleaved = json!({ "ulysses": { "pipeline": { "virtual_stages": 2 } } });
    for case in [
        case(
            "pp 3, 2 x 1, stage 2",
            model(3),
            (2, 1),
            24,
            config(3, 2, json!({ "zero_optimization": { "stage": 2 } })),
        ),
        case("pp 2, 1 x 2, tp 2, bf16", model(2), (1, 2), 25, config(2, 3, tp)),
        case("pp 2 with 2 stages each, 1 x 2", model(5), (1, 2), 25, config(2, 4, interleaved)),
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
