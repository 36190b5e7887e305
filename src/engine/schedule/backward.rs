//! The backward pass from the last layer's output on: the counterpart of `engine/backward.rs`.

use super::checkpoints::LayerTape;
use super::event::{Event, Moment};
use super::ledger::ElementType;
use super::{Phase, Schedule};
use ulysses_kernels::memory::Category;

impl Schedule {
    pub(super) fn backward(&mut self, layer: usize) -> Phase {
        self.ledger.push(Event::Begin(Moment::Backward { layer }));
        let unit = layer + 1;
        let left = self.tape.layers.pop();
        self.checkpoint_store.read_ahead(self.tape.layers.last(), &mut self.ledger);
        self.units.gather(unit, &mut self.ledger);
        self.units.gradients(unit, &mut self.ledger);
        if layer > 0 {
            self.units.prefetch(unit - 1, &mut self.ledger);
        }
        if layer > 1 {
            self.units.read_ahead(unit - 2, &mut self.ledger);
        }
        let trained = self.trained[layer];
        match left {
            None => unreachable!("every layer's forward leaves something"),
            Some(LayerTape::State(x, saved)) => {
                self.layer_pass().backward(saved, &trained);
                self.ledger.give(x);
            }
            Some(LayerTape::Checkpoint(checkpoint)) => {
                self.layer_pass().backward_checkpointed(checkpoint, &trained);
            }
            Some(LayerTape::Offloaded(stored)) => {
                let checkpoint = self.checkpoint_store.load(stored, &mut self.ledger);
                self.layer_pass().backward_checkpointed(checkpoint, &trained);
            }
        }
        self.units.release(unit, &mut self.ledger);
        self.units.reduce(unit, self.is_boundary(), &mut self.ledger);
        Phase::Backward { layer }
    }

    pub(super) fn embedding_backward(&mut self) -> Phase {
        self.ledger.push(Event::Begin(Moment::EmbeddingBackward));
        self.units.gradients(0, &mut self.ledger);
        if self.trained_outside.embedding {
            let x = self.dims.tokens() * self.dims.hidden;
            // Read, and added to rows of the f32 gradient.
            self.ledger.touch(x * (self.ledger.bytes_of(ElementType::Stored) + 2 * size_of::<f32>()));
        }
        self.tape.gradient.take().into_iter().for_each(|gradient| self.ledger.give(gradient));
        self.units.reduce(0, self.is_boundary(), &mut self.ledger);
        self.units.finish_reductions(&mut self.ledger);
        let retained = self.attention.retained_bytes(&self.dims);
        let freed = std::mem::take(&mut self.tape.table_bytes) - retained;
        self.ledger.hold(Category::Other, -(freed as i64));
        self.micro_step += 1;
        if self.micro_step < self.accumulation {
            return Phase::Begin;
        }
        self.micro_step = 0;
        Phase::Step
    }
}
