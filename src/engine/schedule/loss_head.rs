//! The head with the loss: the counterpart of [`LossHead`](crate::model::LossHead), forward and backward.

use super::dims::Dims;
use super::event::{Axis, Event, Moment, Pass, Piece, Purpose};
use super::layer::LayerPass;
use super::{Phase, Schedule};
use crate::comm::CollectiveOp;
use ulysses_kernels::device::DeviceKind;
use ulysses_kernels::memory::Category;

impl Schedule {
    /// The head's forward, the loss, and the head's backward.
    pub(super) fn head(&mut self) -> Phase {
        self.ledger.push(Event::Begin(Moment::Head));
        if self.checkpoint_store.is_used() {
            self.ledger.trim();
        }
        let Dims { hidden, vocab, .. } = self.dims;
        let (unit, tokens) = (self.head_unit(), self.dims.tokens());
        let x = tokens * hidden;
        self.units.gather(unit, &mut self.ledger);
        let mut pass = self.layer_pass();
        let (normed, rstd) = (pass.normalise(pass.dims.all()), pass.take_f32(tokens));
        let lse = pass.take_f32(tokens);
        pass.loss_tiles(false, false);
        pass.count(pass.dims.all(), hidden, vocab);
        pass.compute(Piece::Head, Pass::Forward);
        pass.ledger.give(normed);

        let ids_and_labels = tokens * (size_of::<u32>() + size_of::<i64>());
        self.tape.table_bytes += ids_and_labels;
        self.ledger.hold(Category::Other, ids_and_labels as i64);
        if self.normalises_micro_batches {
            let agree = (CollectiveOp::AllReduce, Axis::Sp, Purpose::Agree);
            self.units.transfer(&mut self.ledger, agree, (1, size_of::<f64>()));
        }
        self.checkpoint_store.read_ahead(self.tape.layers.last(), &mut self.ledger);
        self.units.gradients(unit, &mut self.ledger);
        if self.num_layers > 0 {
            self.units.prefetch(self.num_layers, &mut self.ledger);
        }
        if self.num_layers > 1 {
            self.units.read_ahead(self.num_layers - 1, &mut self.ledger);
        }
        let is_trained = self.trained_outside.projection;
        let mut pass = self.layer_pass();
        let (gradient, rstd_again) = (pass.normalise(pass.dims.all()), pass.take_f32(tokens));
        let dnormed = pass.take(x);
        pass.loss_tiles(true, is_trained);
        pass.backward_norm(pass.dims.all());
        (0..1 + usize::from(is_trained)).for_each(|_| pass.count(pass.dims.all(), hidden, vocab));
        pass.compute(Piece::Head, Pass::Backward);
        [rstd, rstd_again, lse, dnormed].into_iter().for_each(|buffer| pass.ledger.give(buffer));
        self.units.release(unit, &mut self.ledger);
        if !self.is_tied {
            self.units.reduce(unit, self.is_boundary(), &mut self.ledger);
        }
        self.tape.hidden.take().into_iter().for_each(|hidden| self.ledger.give(hidden));
        self.tape.gradient = Some(gradient);
        Phase::Backward { layer: self.num_layers }
    }
}

impl LayerPass<'_> {
    /// The loss, or its gradient, a tile of tokens at a time; and the weight's gradient, if it has one.
    fn loss_tiles(&mut self, backward: bool, is_trained: bool) {
        let kernels = self.attention.kernels;
        let Dims { vocab, loss_tile, .. } = *self.dims;
        match kernels.device {
            DeviceKind::Cpu => {
                let logits = self.take_f32(loss_tile * vocab);
                let [of_logits, of_tokens, of_weight] = kernels.loss_products(self.dims);
                self.ledger.keep(of_logits);
                if backward {
                    self.ledger.keep(of_tokens);
                }
                if is_trained {
                    self.sum_over_tokens(of_weight, loss_tile, vocab);
                }
                self.ledger.give(logits);
            }
            DeviceKind::Cuda => self.ledger.scratch(kernels.device_loss_bytes(self.dims, backward)),
        }
        // Softmax and its gradient read and write the logits.
        self.ledger.touch(2 * self.dims.tokens() * vocab * size_of::<f32>());
    }
}
