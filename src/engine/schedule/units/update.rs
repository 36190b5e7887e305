//! The end of a step: the norm, the update of what this rank owns, and the parameters of the others.

use super::{Flat, State, Units};
use crate::comm::CollectiveOp;
use crate::engine::schedule::event::{Axis, Event, Purpose};
use crate::engine::schedule::ledger::{Away, Buffer, ElementType, Ledger};
use ulysses_kernels::memory::Category;

impl Units {
    /// What `step` does: rows, losses, norm, update, and the parameters of the others.
    pub(in crate::engine::schedule) fn step(&mut self, ledger: &mut Ledger) {
        let f64 = size_of::<f64>();
        self.transfer(ledger, (CollectiveOp::AllGather, Axis::Sp, Purpose::Agree), (1, size_of::<u64>()));
        for axis in [Axis::Dp, Axis::Sp] {
            self.transfer(ledger, (CollectiveOp::AllReduce, axis, Purpose::Agree), (2, f64));
        }
        if self.stage.partitions_optimizer() {
            let gather = (CollectiveOp::AllGather, self.places.shard_axis(), Purpose::Agree);
            self.transfer(ledger, gather, (1, f64));
            if self.is_lamb {
                let norms = 2 * self.trained_flats().map(|flat| flat.num_parameters).sum::<usize>();
                self.transfer(ledger, gather, (norms, f64));
            }
        }
        (0..self.units.len()).for_each(|unit| self.release(unit, ledger));
        self.sweep_update(ledger);
        self.update(ledger);
        self.publish(ledger);
    }

    /// What the norm, the update and the zeroed gradients of the next step read and write.
    fn sweep_update(&self, ledger: &mut Ledger) {
        let State { has_master, tensors, .. } = self.state;
        let f32 = size_of::<f32>();
        for Flat { partition_numel, padded_numel, .. } in self.trained_flats() {
            let updated = if self.stage.partitions_optimizer() { *partition_numel } else { *padded_numel };
            let kept = if self.stage.partitions_gradients() { *partition_numel } else { *padded_numel };
            // Gradients are read; parameters and state are read and written.
            let update = f32 * (1 + 2 * (1 + tensors));
            // LAMB reads parameters and its step once more, for their norms.
            let norms = if self.is_lamb { 2 * f32 } else { 0 };
            let rounding = if has_master { f32 + self.stored_bytes } else { 0 };
            ledger.touch(updated * (f32 + update + norms + rounding) + kept * f32);
        }
    }

    fn update(&self, ledger: &mut Ledger) {
        let mut in_flight = self.update_each(ledger);
        if self.is_lamb {
            in_flight = self.apply_directions(in_flight, ledger);
        }
        in_flight.into_iter().for_each(|written| ledger.free(written));
    }

    /// What is offloaded comes back, one unit while the one before is written and, from the host's memory, the one
    /// after arrives. What is left is being written.
    fn update_each(&self, ledger: &mut Ledger) -> Vec<Buffer> {
        let exact_is_away = self.state.exact().0.is_some();
        let fetches_ahead = [self.state.exact().0, self.state.optimizer_away].contains(&Some(Away::Host));
        let mut in_flight: Vec<Buffer> = Vec::new();
        let mut flats = self.trained_flats().peekable();
        let mut arriving = flats.peek().map(|first| self.fetch(first, ledger));
        while let Some(flat) = flats.next() {
            let mut fetched = arriving.take().unwrap_or_default();
            if fetches_ahead {
                arriving = flats.peek().map(|next| self.fetch(next, ledger));
            }
            in_flight.drain(..).for_each(|written| ledger.free(written));
            if self.is_lamb {
                // The parameters stay as they are until all norms are known.
                let unchanged = exact_is_away.then(|| fetched.remove(0));
                unchanged.into_iter().for_each(|unchanged| ledger.free(unchanged));
            } else {
                fetched.extend(self.round_to_store(flat, ledger));
            }
            in_flight = fetched;
            if !fetches_ahead {
                arriving = flats.peek().map(|next| self.fetch(next, ledger));
            }
        }
        in_flight
    }

    /// LAMB's second pass, over the parameters alone.
    fn apply_directions(&self, mut in_flight: Vec<Buffer>, ledger: &mut Ledger) -> Vec<Buffer> {
        for flat in self.trained_flats() {
            let mut changed: Vec<Buffer> = self.fetch_exact(flat, ledger).into_iter().collect();
            in_flight.drain(..).for_each(|written| ledger.free(written));
            changed.extend(self.round_to_store(flat, ledger));
            in_flight = changed;
        }
        in_flight
    }

    /// Everything of a unit that an update changes and that is offloaded, the parameters first.
    fn fetch(&self, flat: &Flat, ledger: &mut Ledger) -> Vec<Buffer> {
        self.fetch_exact(flat, ledger).into_iter().chain(self.fetch_state(flat, ledger)).collect()
    }

    /// The rounded parameters of a master copy, on their way to their store.
    fn round_to_store(&self, flat: &Flat, ledger: &mut Ledger) -> Option<Buffer> {
        let place = self.state.parameters_away.filter(|_| self.state.has_master)?;
        ledger.move_to_or_from(place, flat.partition_numel * self.stored_bytes);
        Some(ledger.allocate(Category::Parameters, ElementType::Stored, flat.partition_numel))
    }

    /// The parameters that are updated, where they are offloaded.
    fn fetch_exact(&self, flat: &Flat, ledger: &mut Ledger) -> Option<Buffer> {
        let (place, category) = self.state.exact();
        place.map(|place| Self::fetch_f32((flat, place), category, ledger))
    }

    fn fetch_state(&self, flat: &Flat, ledger: &mut Ledger) -> Vec<Buffer> {
        let Some(place) = self.state.optimizer_away else { return Vec::new() };
        (0..self.state.tensors).map(|_| Self::fetch_f32((flat, place), Category::Optimizer, ledger)).collect()
    }

    /// A tensor out of its store, which goes back there when it is updated.
    fn fetch_f32((flat, place): (&Flat, Away), category: Category, ledger: &mut Ledger) -> Buffer {
        ledger.move_to_or_from(place, 2 * flat.partition_numel * size_of::<f32>());
        ledger.allocate(category, ElementType::F32, flat.partition_numel)
    }

    fn trained_flats(&self) -> impl Iterator<Item = &Flat> {
        self.flats.iter().filter(|flat| !flat.is_frozen)
    }

    /// Two gathers at a time, each with a copy of the own partition.
    fn publish(&self, ledger: &mut Ledger) {
        let is_whole = !self.stage.partitions_parameters() && self.stage.partitions_optimizer();
        if !is_whole || self.places.shard().ranks == 1 {
            return;
        }
        let published = |own: Buffer, ledger: &mut Ledger| {
            ledger.push(Event::Wait(Purpose::PublishParameters));
            ledger.free(own);
        };
        let mut in_flight = None;
        for flat in self.trained_flats() {
            let own = ledger.allocate(Category::Parameters, ElementType::Stored, flat.partition_numel);
            ledger.touch(2 * flat.partition_numel * self.stored_bytes);
            let gather = (CollectiveOp::AllGather, self.places.shard_axis(), Purpose::PublishParameters);
            self.transfer(ledger, gather, (flat.partition_numel, self.stored_bytes));
            in_flight.replace(own).into_iter().for_each(|before| published(before, ledger));
        }
        in_flight.into_iter().for_each(|last| published(last, ledger));
    }
}
