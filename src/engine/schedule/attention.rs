//! Attention over a sharded sequence: the counterpart of
//! [`UlyssesAttention`](crate::ulysses::UlyssesAttention) around
//! [`FlashAttention`](crate::ops::attention::FlashAttention).

use super::dims::Dims;
use super::event::{Axis, Category, Event, Pass, Piece, Purpose, Transfer, Work};
use super::ledger::{Buffer, Element, Ledger};
use super::units::transfer_of;
use crate::comm::{CollectiveOp, RecvBlock, StridedBlock, StridedPlan, Traffic};
use crate::ops::attention;
use crate::ulysses::ExchangePlan;

/// Attention of one rank, with what it keeps between calls.
#[derive(Debug)]
pub(super) struct SequenceParallel {
    /// None on an sp axis of one rank.
    exchange: Option<Exchange>,
    /// Bytes of working memory of every thread of the rank.
    scratch_bytes: usize,
    threads: usize,
    /// Bytes of the geometry and plans of the last micro batch, and whether they are this one's.
    geometry_bytes: usize,
    has_geometry: bool,
}

/// The four transfers of a layer.
#[derive(Debug)]
struct Exchange {
    qkv_to_heads: Transfer,
    out_to_tokens: Transfer,
    out_to_heads: Transfer,
    qkv_to_tokens: Transfer,
    plan_bytes: usize,
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
    /// All of it, when the layer is to be recomputed.
    pub(super) fn drop_state(self, ledger: &mut Ledger) {
        let Self { qkv, out, lse } = self;
        qkv.into_iter().chain([out, lse]).for_each(|buffer| ledger.free(buffer));
    }
}

impl Exchange {
    fn new(plan: &ExchangePlan, element_bytes: usize) -> Self {
        let strided =
            [plan.qkv_seq_to_head(), plan.out_head_to_seq(), plan.out_seq_to_head(), plan.qkv_head_to_seq()];
        let transfer = |plan_of: &StridedPlan, purpose| {
            let traffic = Traffic::strided(plan.rank(), plan_of);
            let input_elems = plan_of.counts().0.into_iter().sum();
            let what = (CollectiveOp::AllToAllStrided, Axis::Sp, purpose);
            transfer_of(what, input_elems, element_bytes, &traffic)
        };
        Self {
            qkv_to_heads: transfer(&strided[0], Purpose::ExchangeForward),
            out_to_tokens: transfer(&strided[1], Purpose::ExchangeForward),
            out_to_heads: transfer(&strided[2], Purpose::ExchangeBackward),
            qkv_to_tokens: transfer(&strided[3], Purpose::ExchangeBackward),
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
    pub(super) fn new(plan: &ExchangePlan, element_bytes: usize, threads: usize) -> Self {
        let exchange = (plan.seq_ranges().len() > 1).then(|| Exchange::new(plan, element_bytes));
        Self { exchange, scratch_bytes: 0, threads, geometry_bytes: 0, has_geometry: false }
    }

    /// What the layers of a micro batch share is made anew for the next one.
    pub(super) fn begin_micro_batch(&mut self) {
        self.has_geometry = false;
    }

    /// Attention's forward. `q`, `k` and `v` are used up. The result is none where it is what is saved.
    pub(super) fn forward(
        &mut self,
        qkv: [Buffer; 3],
        dims: &Dims,
        pass: Pass,
        ledger: &mut Ledger,
    ) -> (Option<Buffer>, Saved) {
        if self.exchange.is_none() {
            return (None, self.forward_locally(qkv, dims, pass, ledger));
        }
        self.plan(dims, ledger);
        let whole = head_sharded(dims).map(|elems| ledger.take(Category::Exchange, Element::Stored, elems));
        self.transfer(|exchange| &exchange.qkv_to_heads, ledger);
        qkv.into_iter().for_each(|buffer| ledger.give(buffer));
        let saved = self.forward_locally(whole, dims, pass, ledger);
        let elems = dims.tokens() * dims.num_heads * dims.head_dim;
        let out = ledger.take(Category::Activations, Element::Stored, elems);
        self.transfer(|exchange| &exchange.out_to_tokens, ledger);
        (Some(out), saved)
    }

    /// Attention's backward, from the output's gradient, which stays the caller's: gradients of q, k and v.
    /// The output is returned where it was saved here and the caller has it as well.
    pub(super) fn backward(
        &mut self,
        saved: Saved,
        dims: &Dims,
        ledger: &mut Ledger,
    ) -> ([Buffer; 3], Option<Buffer>) {
        if self.exchange.is_none() {
            let (gradients, out) = self.backward_locally(saved, dims, ledger);
            return (gradients, Some(out));
        }
        let [q_elems, ..] = head_sharded(dims);
        let dout = ledger.take(Category::Exchange, Element::Stored, q_elems);
        self.transfer(|exchange| &exchange.out_to_heads, ledger);
        let (whole, out) = self.backward_locally(saved, dims, ledger);
        ledger.give(dout);
        ledger.give(out);
        let gradients =
            seq_sharded(dims).map(|elems| ledger.take(Category::Activations, Element::Stored, elems));
        self.transfer(|exchange| &exchange.qkv_to_tokens, ledger);
        whole.into_iter().for_each(|buffer| ledger.give(buffer));
        (gradients, None)
    }

    fn forward_locally(&mut self, qkv: [Buffer; 3], dims: &Dims, pass: Pass, ledger: &mut Ledger) -> Saved {
        let [q, k, v] = head_sharded(dims);
        let category = self.category();
        let out = ledger.allocate(category, Element::Stored, q);
        let lse = ledger.allocate(category, Element::F32, dims.all_tokens() * dims.num_heads_local);
        self.keep_scratch(attention::scratch_bytes(dims.seq_len, dims.head_dim, false), ledger);
        ledger.operate(&[q, k, v, q], 0);
        let flops = 4.0 * dims.visible_pairs() * (dims.num_heads_local * dims.head_dim) as f64;
        ledger.push(Event::Compute(Work { piece: Piece::Attention, pass, flops }));
        Saved { qkv, out, lse }
    }

    fn backward_locally(&mut self, saved: Saved, dims: &Dims, ledger: &mut Ledger) -> ([Buffer; 3], Buffer) {
        let Saved { qkv, out, lse } = saved;
        let [q, k, v] = head_sharded(dims);
        let category = self.category();
        let delta = ledger.allocate(category, Element::F32, dims.all_tokens() * dims.num_heads_local);
        ledger.operate(&[q, q], 0);
        let gradients = [q, k, v].map(|elems| ledger.allocate(category, Element::Stored, elems));
        self.keep_scratch(attention::scratch_bytes(dims.seq_len, dims.head_dim, true), ledger);
        ledger.operate(&[q, k, v, q, q, k, v], 0);
        // Twice the forward's; that the scores are computed once more is the kernel's affair.
        let flops = 8.0 * dims.visible_pairs() * (dims.num_heads_local * dims.head_dim) as f64;
        ledger.push(Event::Compute(Work { piece: Piece::Attention, pass: Pass::Backward, flops }));
        // Not given back: the gradients take their places in the workspace.
        qkv.into_iter().for_each(|buffer| ledger.free(buffer));
        ledger.free(lse);
        ledger.free(delta);
        (gradients, out)
    }

    fn category(&self) -> Category {
        if self.exchange.is_some() { Category::Exchange } else { Category::Activations }
    }

    fn transfer(&self, which: impl Fn(&Exchange) -> &Transfer, ledger: &mut Ledger) {
        if let Some(exchange) = &self.exchange {
            ledger.push(Event::Collective(which(exchange).clone()));
        }
    }

    /// Positions and visible ranges of whole rows, and the plans; those of the micro batch before end here.
    fn plan(&mut self, dims: &Dims, ledger: &mut Ledger) {
        if std::mem::replace(&mut self.has_geometry, true) {
            return;
        }
        let whole = size_of::<u32>() * (dims.seq_len + 2 * dims.all_tokens());
        let plans = self.exchange.as_ref().map_or(0, |exchange| exchange.plan_bytes);
        let now = whole + plans;
        let before = std::mem::replace(&mut self.geometry_bytes, now + dims.geometry_bytes());
        ledger.hold(Category::Other, now as i64);
        ledger.hold(Category::Other, -(before as i64));
    }

    /// Bytes of a micro batch's tables that outlive it: by its geometry the layers of the next one are told
    /// from its own.
    pub(super) fn retained_bytes(&self, dims: &Dims) -> usize {
        if self.exchange.is_some() { dims.geometry_bytes() } else { 0 }
    }

    /// Threads keep their working memory, and make it anew where it is too small.
    fn keep_scratch(&mut self, bytes: usize, ledger: &mut Ledger) {
        if self.scratch_bytes < bytes {
            let before = std::mem::replace(&mut self.scratch_bytes, bytes);
            ledger.hold(Category::Other, (self.threads * bytes) as i64);
            ledger.hold(Category::Other, -((self.threads * before) as i64));
        }
    }
}

/// Elements of q, k and v with all tokens of this rank's heads.
fn head_sharded(dims: &Dims) -> [usize; 3] {
    let unit = dims.all_tokens() * dims.head_dim;
    [dims.num_heads_local, dims.num_kv_heads_local, dims.num_kv_heads_local].map(|heads| unit * heads)
}

/// Elements of q, k and v with all heads of this rank's tokens.
fn seq_sharded(dims: &Dims) -> [usize; 3] {
    let unit = dims.tokens() * dims.head_dim;
    [dims.num_heads, dims.num_kv_heads, dims.num_kv_heads].map(|heads| unit * heads)
}
