//! The forward pass: the counterpart of `engine/forward.rs`, up to the last layer's output.

use super::checkpoints::LayerTape;
use super::dims::Dims;
use super::event::{Event, Moment};
use super::ledger::ElementType;
use super::{Phase, Schedule};
use ulysses_kernels::memory::Category;

impl Schedule {
    /// Tokens, their tables, and the embedding.
    pub(super) fn begin_micro_batch(&mut self) -> Phase {
        self.ledger.push(Event::Begin(Moment::Embedding));
        let Dims { hidden, head_dim, .. } = self.dims;
        let tokens = self.dims.tokens();
        // The batch: ids, labels and positions. The context: positions and the rotary tables.
        let batch = tokens * (size_of::<u32>() + size_of::<i64>() + size_of::<u32>());
        let rope = tokens * head_dim * size_of::<f32>();
        let tables = batch + tokens * size_of::<u32>() + self.dims.geometry_bytes() + rope;
        self.ledger.hold(Category::Other, tables as i64);
        self.tape.table_bytes = tables;
        self.attention.begin_micro_batch();
        self.units.gather(0, &mut self.ledger);
        let next = if self.num_layers == 0 { self.head_unit() } else { 1 };
        self.units.prefetch(next, &mut self.ledger);
        if next == 1 {
            self.units.read_ahead(self.unit_after(0), &mut self.ledger);
        }
        let x = self.layer_pass().take(tokens * hidden);
        self.ledger.touch(2 * tokens * hidden * self.ledger.bytes_of(ElementType::Stored));
        self.units.release(0, &mut self.ledger);
        self.tape.hidden = Some(x);
        Phase::Forward { layer: 0 }
    }

    pub(super) fn forward(&mut self, layer: usize) -> Phase {
        self.ledger.push(Event::Begin(Moment::Forward { layer }));
        self.units.gather(layer + 1, &mut self.ledger);
        self.units.prefetch(self.unit_after(layer), &mut self.ledger);
        if layer + 1 < self.num_layers {
            self.units.read_ahead(self.unit_after(layer + 1), &mut self.ledger);
        }
        let x =
            self.tape.hidden.take().unwrap_or_else(|| unreachable!("the embedding or a layer was before"));
        let (y, left) = if self.is_recomputed(layer) {
            let (y, checkpoint) = self.layer_pass().forward_checkpointed(x);
            (y, self.checkpoint_store.keep(checkpoint, &mut self.ledger))
        } else {
            let (y, saved) = self.layer_pass().forward();
            (y, LayerTape::State(x, saved))
        };
        self.units.release(layer + 1, &mut self.ledger);
        self.tape.hidden = Some(y);
        self.tape.layers.push(left);
        Phase::Forward { layer: layer + 1 }
    }

    /// The unit that the forward pass needs after that of `layer`.
    fn unit_after(&self, layer: usize) -> usize {
        if layer + 1 < self.num_layers { layer + 2 } else { self.head_unit() }
    }

    /// Whether a layer keeps a checkpoint only.
    fn is_recomputed(&self, layer: usize) -> bool {
        self.checkpointing_interval.is_some_and(|interval| layer.is_multiple_of(interval))
    }
}
