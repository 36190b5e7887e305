//! Steps reuse what earlier ones allocated. One test, alone in its program: it counts the allocations of all threads.

#![allow(clippy::unwrap_used)]

mod support;

use serde_json::json;
use std::alloc::System;
use std::sync::Arc;
use support::device::test_device;
use support::mesh_run::{global_batch, micro_batches, on_mesh};
use support::reference::Batch;
use ulysses::comm::ProcessGroupExt;
use ulysses::comm::thread::LaunchOptions;
use ulysses::config::Config;
use ulysses::data::DataError;
use ulysses::engine::Engine;
use ulysses::kernels::attention::FlashAttention;
use ulysses::memory::{CountingAllocator, LARGE_BYTES, large_allocations};
use ulysses::model::{Model, RandomWeights, preset};

#[global_allocator]
static ALLOCATOR: CountingAllocator<System> = CountingAllocator(System);

/// So many that a hidden state is large, while what does not grow with the row is not: a layer's gradient, and the
/// panels that the matrix products pack for themselves.
const TOKENS_PER_RANK: usize = 4096;

/// Number of large allocations in the steps after the second, on all ranks together.
fn in_later_steps((dp, sp): (usize, usize), recompute: bool) -> u64 {
    let model = preset("tiny").unwrap();
    assert!(TOKENS_PER_RANK * model.hidden_size * size_of::<f32>() >= LARGE_BYTES);
    let json = json!({
        "train_batch_size": dp,
        "mesh_param": [dp, sp],
        "gradient_clipping": 1.0,
        "ulysses": { "activation_checkpointing": recompute },
    });
    let config = Config::from_json_str(&json.to_string(), "test.json").unwrap();
    let documents = vec![512; TOKENS_PER_RANK * sp / 512];
    let global = global_batch(&Batch::packed(model.vocab_size, &vec![&documents[..]; dp], 3)).unwrap();
    let ranks =
        on_mesh(&config, &LaunchOptions { threads_per_rank: 2, ..LaunchOptions::default() }, |_, groups| {
            let (weights, attention) = (RandomWeights { seed: 1 }, Arc::new(FlashAttention::default()));
            let model = Model::new(&model)?;
            let mut engine =
                Engine::with_attention(model, &weights, &config, groups, attention, &test_device())?;
            let batch = micro_batches(&global, &engine)?.remove(0);
            let mut before = 0;
            for step in 0..4 {
                if step == 2 {
                    engine.dp_group().barrier()?;
                    engine.sp_group().barrier()?;
                    before = large_allocations();
                }
                engine.train_batch(|| Ok::<_, DataError>(batch.clone()))?;
            }
            engine.dp_group().barrier()?;
            engine.sp_group().barrier()?;
            Ok(large_allocations() - before)
        });
    ranks.unwrap().into_iter().max().unwrap()
}

#[test]
fn a_step_after_the_second_allocates_nothing_large() {
    let (before, probe) = (large_allocations(), vec![1_u8; LARGE_BYTES]);
    assert_eq!(large_allocations() - before, 1, "{} bytes count", probe.len());
    for (mesh, recompute) in
        [((1, 1), false), ((1, 1), true), ((1, 2), false), ((1, 2), true), ((2, 1), false)]
    {
        assert_eq!(in_later_steps(mesh, recompute), 0, "{mesh:?}, recomputing: {recompute}");
    }
}
