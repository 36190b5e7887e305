//! Stages of a pipeline.

use super::{Case, case, tied, tiny};
use serde_json::{Value, json};

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
    vec![
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
        case("pp 2, 1 x 2, stage 1, tp 3", tiny(6, 3), (1, 2), 25, of(2, 1, uneven)),
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
