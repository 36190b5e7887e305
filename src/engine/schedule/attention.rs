//! Attention over a sharded sequence: the counterpart of
//! [`UlyssesAttention`](crate::sequence_parallel::UlyssesAttention) around
//! [`FlashAttention`](ulysses_kernels::attention::FlashAttention).

use super::dims::{Dims, Heads};
use super::event::{Axis, Event, Pass, Piece, Purpose, Transfer, Work};
use super::kernels::{AttentionMemory, Kernels};
use super::ledger::{Buffer, ElementType, Ledger};
use super::units::transfer_of;
use crate::comm::{CollectiveOp, RecvBlock, StridedBlock, StridedPlan, Traffic};
use crate::sequence_parallel::ExchangePlan;
use ulysses_kernels::memory::Category;

/// Attention of one rank, with what it keeps between calls.
#[derive(Debug)]
pub(super) struct SequenceParallel {
    /// One for each chunk of heads; none on an sp axis of one rank.
    exchanges: Vec<Exchange>,
    pub(super) kernels: Kernels,
    /// Bytes of working memory that the rank's threads keep.
    scratch_bytes: usize,
    /// Bytes of the geometry and plans of the last micro batch.
    geometry_bytes: usize,
    /// The chunks that have a geometry and plans in this one, but for those like an earlier chunk.
    known: Vec<Heads>,
}

/// The four transfers of a layer.
#[derive(Debug)]
struct Exchange {
    qkv_to_heads: Way,
    out_to_tokens: Way,
    out_to_heads: Way,
    qkv_to_tokens: Way,
    plan_bytes: usize,
}

#[derive(Debug)]
struct Way {
    transfer: Transfer,
    /// Bytes of the copies that are sent and received instead of the tensors.
    packed_bytes: usize,
}

impl Way {
    fn go(&self, ledger: &mut Ledger) {
        ledger.scratch_for(Category::Exchange, self.packed_bytes);
        ledger.push(Event::Collective(self.transfer.clone()));
    }
}

/// What attention keeps from forward to backward; without sequence parallelism `out` is the layer's
/// output as well.
#[derive(Debug)]
pub(super) struct Saved {
    qkv: [Buffer; 3],
    out: Buffer,
    lse: Buffer,
}

impl Saved {
    /// Gives all of it back, when the layer is to be recomputed.
    pub(super) fn recycle(self, ledger: &mut Ledger) {
        let Self { qkv, out, lse } = self;
        qkv.into_iter().chain([out, lse]).for_each(|buffer| ledger.give(buffer));
    }
}

impl Exchange {
    fn new(plan: &ExchangePlan, kernels: Kernels) -> Self {
        let strided =
            [plan.qkv_seq_to_head(), plan.out_head_to_seq(), plan.out_seq_to_head(), plan.qkv_head_to_seq()];
        let way = |plan_of: &StridedPlan, purpose| {
            let traffic = Traffic::strided(plan.rank(), plan_of);
            let (sent, received) = plan_of.counts();
            let [sent, received] = [sent, received].map(|counts| counts.into_iter().sum());
            let what = (CollectiveOp::AllToAllStrided, Axis::Sp, purpose);
            let transfer = transfer_of(what, sent, kernels.dtype.size_in_bytes(), &traffic);
            Way { transfer, packed_bytes: kernels.exchange_bytes(sent, received) }
        };
        Self {
            qkv_to_heads: way(&strided[0], Purpose::ExchangeForward),
            out_to_tokens: way(&strided[1], Purpose::ExchangeForward),
            out_to_heads: way(&strided[2], Purpose::ExchangeBackward),
            qkv_to_tokens: way(&strided[3], Purpose::ExchangeBackward),
            plan_bytes: strided.iter().map(plan_bytes).sum(),
        }
    }
}

/// Bytes of the blocks of a plan.
fn plan_bytes(plan: &StridedPlan) -> usize {
    let lists = size_of::<Vec<StridedBlock>>() * (plan.send.len() + plan.recv.len());
    let sends: usize = plan.send.iter().map(Vec::len).sum();
    let recvs: usize = plan.recv.iter().map(Vec::len).sum();
    lists + sends * size_of::<StridedBlock>() + recvs * size_of::<RecvBlock>()
}

impl SequenceParallel {
    /// Of chunks with these plans.
    pub(super) fn new(plans: &[ExchangePlan], kernels: Kernels) -> Self {
        let sharded = plans.iter().filter(|plan| plan.seq_ranges().len() > 1);
        let exchanges = sharded.map(|plan| Exchange::new(plan, kernels)).collect();
        Self { exchanges, kernels, scratch_bytes: 0, geometry_bytes: 0, known: Vec::new() }
    }

    /// What the layers of a micro batch share is made anew for the next one.
    pub(super) fn begin_micro_batch(&mut self) {
        self.known.clear();
    }

    /// Bytes that it keeps from one micro batch to the next.
    pub(super) fn kept(&self) -> [usize; 2] {
        [self.scratch_bytes, self.geometry_bytes]
    }

    /// Attention's forward of a chunk. `q`, `k` and `v` are used up. The result is none where it is what is saved.
    pub(super) fn forward(
        &mut self,
        chunk: usize,
        qkv: [Buffer; 3],
        dims: &Dims,
        pass: Pass,
        ledger: &mut Ledger,
    ) -> (Option<Buffer>, Saved) {
        let heads = dims.chunks[chunk];
        if self.exchanges.is_empty() {
            return (None, self.forward_locally(heads, qkv, dims, pass, ledger));
        }
        self.plan(chunk, dims, ledger);
        let whole = head_sharded(heads, dims)
            .map(|elems| ledger.take(Category::Exchange, ElementType::Stored, elems));
        self.exchanges[chunk].qkv_to_heads.go(ledger);
        qkv.into_iter().for_each(|buffer| ledger.give(buffer));
        let saved = self.forward_locally(heads, whole, dims, pass, ledger);
        let elems = dims.tokens() * heads.num_heads * dims.head_dim;
        let out = ledger.take(Category::Activations, ElementType::Stored, elems);
        self.exchanges[chunk].out_to_tokens.go(ledger);
        (Some(out), saved)
    }

    /// Attention's backward of a chunk, from the output's gradient, which stays the caller's: gradients of q, k
    /// and v.
    pub(super) fn backward(
        &mut self,
        chunk: usize,
        saved: Saved,
        dims: &Dims,
        ledger: &mut Ledger,
    ) -> [Buffer; 3] {
        let heads = dims.chunks[chunk];
        if self.exchanges.is_empty() {
            return self.backward_locally(heads, saved, dims, ledger);
        }
        let [q_elems, ..] = head_sharded(heads, dims);
        let dout = ledger.take(Category::Exchange, ElementType::Stored, q_elems);
        self.exchanges[chunk].out_to_heads.go(ledger);
        let whole = self.backward_locally(heads, saved, dims, ledger);
        ledger.give(dout);
        let gradients = seq_sharded(heads, dims)
            .map(|elems| ledger.take(Category::Activations, ElementType::Stored, elems));
        self.exchanges[chunk].qkv_to_tokens.go(ledger);
        whole.into_iter().for_each(|buffer| ledger.give(buffer));
        gradients
    }

    fn forward_locally(
        &mut self,
        heads: Heads,
        qkv: [Buffer; 3],
        dims: &Dims,
        pass: Pass,
        ledger: &mut Ledger,
    ) -> Saved {
        let [q, _, _] = head_sharded(heads, dims);
        let category = self.category();
        let out = ledger.take(category, ElementType::Stored, q);
        let lse = ledger.take(category, ElementType::F32, dims.all_tokens() * heads.num_heads_local);
        self.work(self.kernels.attention(heads, dims, false), ledger);
        let flops = 4.0 * dims.visible_pairs() * (heads.num_heads_local * dims.head_dim) as f64;
        ledger.push(Event::Compute(Work { piece: Piece::Attention, pass, flops }));
        Saved { qkv, out, lse }
    }

    fn backward_locally(
        &mut self,
        heads: Heads,
        saved: Saved,
        dims: &Dims,
        ledger: &mut Ledger,
    ) -> [Buffer; 3] {
        let Saved { qkv, out, lse } = saved;
        let [q, k, v] = head_sharded(heads, dims);
        let category = self.category();
        let delta = ledger.take(category, ElementType::F32, dims.all_tokens() * heads.num_heads_local);
        ledger.sweep(&[q, q], 0, 1);
        ledger.give(out);
        let gradients = [q, k, v].map(|elems| ledger.take(category, ElementType::Stored, elems));
        self.work(self.kernels.attention(heads, dims, true), ledger);
        // Twice the forward's; that the scores are computed once more is the kernel's affair.
        let flops = 8.0 * dims.visible_pairs() * (heads.num_heads_local * dims.head_dim) as f64;
        ledger.push(Event::Compute(Work { piece: Piece::Attention, pass: Pass::Backward, flops }));
        qkv.into_iter().chain([lse, delta]).for_each(|buffer| ledger.give(buffer));
        gradients
    }

    fn category(&self) -> Category {
        if self.exchanges.is_empty() { Category::Activations } else { Category::Exchange }
    }

    /// A chunk's plans, unless those of an equal one serve, and positions and visible ranges of whole rows, which
    /// all chunks share. Those of the micro batch before end here.
    fn plan(&mut self, chunk: usize, dims: &Dims, ledger: &mut Ledger) {
        let heads = dims.chunks[chunk];
        if self.known.contains(&heads) {
            return;
        }
        if self.known.is_empty() {
            let before = std::mem::replace(&mut self.geometry_bytes, dims.geometry_bytes());
            ledger.hold(Category::Other, -(before as i64));
            self.hold_geometry(size_of::<u32>() * (dims.seq_len + 2 * dims.all_tokens()), ledger);
        }
        self.known.push(heads);
        self.hold_geometry(self.exchanges[chunk].plan_bytes, ledger);
    }

    fn hold_geometry(&mut self, bytes: usize, ledger: &mut Ledger) {
        self.geometry_bytes += bytes;
        ledger.hold(Category::Other, bytes as i64);
    }

    /// Bytes of a micro batch's tables that outlive it: by its geometry the layers of the next one are told
    /// from its own.
    pub(super) fn retained_bytes(&self, dims: &Dims) -> usize {
        if self.exchanges.is_empty() { 0 } else { dims.geometry_bytes() }
    }

    /// What the kernels take. Threads keep their working memory, and make it anew where it is too small.
    fn work(&mut self, AttentionMemory { kept, taken }: AttentionMemory, ledger: &mut Ledger) {
        let more = kept.saturating_sub(self.scratch_bytes);
        self.scratch_bytes += more;
        ledger.hold(Category::Other, more as i64);
        ledger.scratch(taken);
    }
}

/// Elements of q, k and v with all tokens of this rank's heads.
fn head_sharded(heads: Heads, dims: &Dims) -> [usize; 3] {
    let unit = dims.all_tokens() * dims.head_dim;
    [heads.num_heads_local, heads.num_kv_heads_local, heads.num_kv_heads_local].map(|heads| unit * heads)
}

/// Elements of q, k and v with all heads of this rank's tokens.
fn seq_sharded(heads: Heads, dims: &Dims) -> [usize; 3] {
    let unit = dims.tokens() * dims.head_dim;
    [heads.num_heads, heads.num_kv_heads, heads.num_kv_heads].map(|heads| unit * heads)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::engine::schedule::Schedule;
    use crate::mesh::DeviceMesh;
    use crate::model::preset;
    use serde_json::json;
    use std::collections::BTreeSet;
    use ulysses_kernels::device::DeviceKind;

    /// Bytes that exist during an exchange only.
    fn packed_bytes(device: DeviceKind) -> BTreeSet<i64> {
        let config = json!({
            "train_batch_size": 1, "mesh_param": [1, 2], "bf16": { "enabled": true }, "ulysses": { "seq_len": 4096 },
        });
        let config = Config::from_json_str(&config.to_string(), "c.json").unwrap();
        let mesh = DeviceMesh::dp_sp(1, 2).unwrap();
        let events = Schedule::on(device, &config, &preset("small").unwrap(), &mesh, 0, None).unwrap();
        let events: Vec<Event> = events.collect();
        let packed = |events: &[Event]| match events {
            [
                Event::Memory { category: Category::Exchange, bytes },
                Event::Memory { category: Category::Exchange, bytes: freed },
                Event::Collective(_),
            ] if *freed == -bytes => Some(*bytes),
            _ => None,
        };
        events.windows(3).filter_map(packed).collect()
    }

    #[test]
    fn a_gpu_sends_one_copy_and_receives_into_another() {
        // Of 2048 tokens, 8 heads of 32, two bytes each: the output, or queries, keys and values.
        let of_output = 2048 * 8 * 32 * 2;
        assert_eq!(packed_bytes(DeviceKind::Cuda), BTreeSet::from([2 * of_output, 2 * 3 * of_output]));
        assert_eq!(packed_bytes(DeviceKind::Cpu), BTreeSet::new());
    }
}
