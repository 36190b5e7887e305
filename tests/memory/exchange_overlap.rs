//! The order in which the exchange of head chunks and their attention run.

use crate::support::device::test_device;
use crate::support::mesh_run::{Problem, layout, micro_batches, on_mesh};
use crate::support::problems::{CONFIG, packed_batch, problem};
use candle_core::Tensor;
use serde_json::json;
use std::sync::{Arc, Mutex};
use ulysses::comm::{
    Call, CollectiveOp, CommError, GroupWrapper, LaunchOptions, Pending, ProcessGroup, TrainingGroups,
};
use ulysses::kernels::Workspace;
use ulysses::kernels::attention::{
    AttentionCompute, AttentionError, AttentionLayout, FlashAttention, QkvGradients, Upstream,
};

/// `s`: an exchange is started; `w`: a rank begins to wait for one; `A`, `B`: attention forward, backward.
type Log = Arc<Mutex<String>>;

/// A group that notes the start and the wait of exchanges.
#[derive(Debug)]
struct Noting {
    inner: Arc<dyn ProcessGroup>,
    log: Log,
}

impl GroupWrapper for Noting {
    fn inner(&self) -> &Arc<dyn ProcessGroup> {
        &self.inner
    }

    fn start(&self, call: Call<'_>) -> Result<Pending, CommError> {
        if call.op() != CollectiveOp::AllToAllStrided {
            return self.inner.start(call);
        }
        self.log.lock().unwrap().push('s');
        let (pending, log) = (self.inner.start(call)?, self.log.clone());
        Ok(pending.around(move |complete| {
            log.lock().unwrap().push('w');
            complete()
        }))
    }
}

/// Local attention that notes when it runs.
struct NotingAttention(Log);

impl AttentionCompute for NotingAttention {
    fn attend(
        &self,
        qkv: [&Tensor; 3],
        layout: &AttentionLayout,
        workspace: &Workspace,
    ) -> Result<(Tensor, Tensor), AttentionError> {
        self.0.lock().unwrap().push('A');
        FlashAttention::default().attend(qkv, layout, workspace)
    }

    fn attend_backward(
        &self,
        qkv: [&Tensor; 3],
        upstream: &Upstream<'_>,
        layout: &AttentionLayout,
        workspace: &Workspace,
    ) -> Result<QkvGradients, AttentionError> {
        self.0.lock().unwrap().push('B');
        FlashAttention::default().attend_backward(qkv, upstream, layout, workspace)
    }
}

/// The events of a forward and a backward pass of one layer on rank 0 of two, in `chunks` head chunks,
/// which overlap or not.
fn events(chunks: usize, overlaps: bool, ulysses: serde_json::Value) -> [String; 2] {
    let mut extra = json!({ "ulysses": ulysses });
    extra["ulysses"]["head_chunks"] = json!(chunks);
    extra["ulysses"]["overlap_exchange"] = json!(overlaps);
    let config = crate::support::reference::ReferenceConfig { num_layers: 1, ..CONFIG };
    let problem = Problem { extra, ..problem(config, packed_batch()) };
    let global = crate::support::mesh_run::global_batch(&problem.batch).unwrap();
    let config = problem.json_config(layout(1, 2, 0), global.batch_size()).unwrap();
    let ranks = on_mesh(&config, &LaunchOptions::default(), |_, groups: TrainingGroups| {
        let log = Log::default();
        let noting = log.clone();
        let groups = groups
            .map(|_, inner| -> Arc<dyn ProcessGroup> { Arc::new(Noting { inner, log: noting.clone() }) });
        let mut engine = problem.engine(&config, groups, Arc::new(NotingAttention(log.clone())))?;
        let batch = micro_batches(&global, &engine)?.remove(0);
        let take = || std::mem::take(&mut *log.lock().unwrap());
        take();
        let loss = engine.forward(&batch)?;
        let forward = take();
        engine.backward(loss)?;
        test_device().synchronize()?;
        Ok([forward, take()])
    });
    ranks.unwrap().swap_remove(0)
}

#[test]
fn the_exchange_of_neighboring_chunks_is_under_way_while_a_chunk_is_attended() {
    // Chunk 1 is sent before the attention of chunk 0; the output of chunk 0 returns during that of chunk 1.
    let forward = "s s wA s s wA s w wA s w w";
    // As many exchanges the other way.
    let saved = forward.replace('A', "B");
    // q, k, v; delta; the gradient of the output; back the three gradients.
    let output = "sss sss wwwB s sss wwwB s w wwwB s w w";
    // q, k, v and the gradient of the output; the output and the gradients.
    let nothing = "ss ss wAs wBs ss wAs wBs ww wAs wBs ww ww";
    for (ulysses, backward) in [
        (json!({}), saved.as_str()),
        (json!({ "activation_checkpointing": true }), output),
        (json!({ "activation_checkpointing": true, "save_attention_output": false }), nothing),
    ] {
        let expected = [forward, backward].map(|events| events.replace(' ', ""));
        assert_eq!(events(3, true, ulysses.clone()), expected, "{ulysses}");
    }
}

#[test]
fn blocks_of_a_ring_and_their_gradients_travel_while_blocks_are_attended() {
    let [forward, backward] = events(1, false, json!({ "ring_size": 2 }));
    // Keys and values leave before this rank's own block is attended. The gradients of the other block return last.
    assert_eq!([forward.as_str(), backward.as_str()], ["sAwA", "sBwBsw"]);
}

#[test]
fn without_overlap_or_with_one_chunk_every_exchange_is_awaited_at_once() {
    assert_eq!(events(2, false, json!({})), ["swAswswAsw", "swBswswBsw"]);
    assert_eq!(events(1, true, json!({})), ["swAsw", "swBsw"]);
}
