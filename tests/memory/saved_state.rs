//! The memory that a forward pass saves for the backward pass.

use super::engine::{config, on_engines};
use ulysses::config::Config;
use ulysses::data::DataError;
use ulysses::memory::live_bytes;

/// The memory that one forward saves: by the loss's report, and by the allocator.
fn kept_by_forward(config: &Config) -> Vec<(usize, i64)> {
    on_engines(config, 288, |engine, batch| {
        engine.train_batch(|| Ok::<_, DataError>(batch.clone()))?;
        engine.workspace().clear();
        let before = live_bytes();
        let loss = engine.forward(batch)?;
        engine.workspace().clear();
        let kept = live_bytes() - before;
        let reported = loss.saved_bytes();
        engine.backward(loss)?;
        Ok((reported, kept))
    })
}

#[test]
fn a_loss_reports_the_bytes_saved_for_the_backward_pass() {
    for (dp, sp) in [(1, 1), (1, 2), (1, 3), (2, 2)] {
        for checkpointing in [false, true] {
            for (reported, kept) in kept_by_forward(&config(dp, sp, 0, checkpointing)) {
                // Not reported: the tokens themselves, their positions and rotary tables.
                let off = (reported as f64 - kept as f64).abs() / kept as f64;
                let label = format!("{dp}x{sp} checkpointing {checkpointing}");
                assert!(off < 0.05, "{label}: {reported} reported, {kept} kept");
            }
        }
    }
}

#[test]
fn activation_checkpointing_saves_only_the_layers_inputs_and_if_asked_the_attention_output() {
    for (dp, sp) in [(1, 1), (1, 2), (2, 2)] {
        let kept = |checkpointing, saves| {
            let mut config = config(dp, sp, 0, checkpointing);
            config.ulysses.save_attention_output = Some(saves);
            kept_by_forward(&config)
        };
        let (all, inputs, outputs) = (kept(false, false), kept(true, false), kept(true, true));
        for (rank, (((_, all), (_, inputs)), (_, outputs))) in
            all.into_iter().zip(inputs).zip(outputs).enumerate()
        {
            // Per token and layer, 128 values against 1290 (both residual inputs, q, k, v, o, gate, up, three
            // scalars and lse); the head's input and the tokens themselves are saved either way.
            assert!(7 * inputs < all, "{dp}x{sp} rank {rank}: {inputs} of {all}");
            // The output is as wide as the input; lse has one number per head.
            let more = (4 * 2 * 288 / sp * (128 + 8) * size_of::<f32>()) as i64;
            let off = (outputs - inputs - more).abs();
            assert!(off < more / 50, "{dp}x{sp} rank {rank}: {outputs} with outputs, {inputs} without");
        }
    }
}
