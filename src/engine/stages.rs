//! The engine of one rank of a pipeline: the order of its passes, and what only all ranks know.

use super::backward::DeferredChunk;
use super::engine::{INPUT_UNIT, layer_unit};
use super::times::StepPhase;
use super::{Engine, EngineError, Loss};
use crate::comm::{CommError, ProcessGroup, ProcessGroupExt, all_gather_object};
use crate::data::MicroBatch;
use crate::nn::InputLayer;
use crate::objective::Objective;
use crate::pipeline::{Action, Pass};
use candle_core::{DType, Device, Tensor};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

/// The state between the passes of micro batches.
#[derive(Default)]
pub(crate) struct OpenPasses {
    /// Micro batches with chunks that are still to run forward.
    batches: HashMap<usize, MicroBatch>,
    /// By micro batch and chunk.
    losses: HashMap<(usize, usize), Loss>,
    deferred: HashMap<(usize, usize), DeferredChunk>,
}

impl OpenPasses {
    fn run_forward(
        &mut self,
        engine: &mut Engine,
        action: Action,
        next_micro_batch: impl FnOnce() -> Result<MicroBatch, EngineError>,
    ) -> Result<(), EngineError> {
        let Action { micro_batch, chunk, .. } = action;
        let batch = self.batches.remove(&micro_batch).map_or_else(next_micro_batch, Ok)?;
        self.insert(action, engine.forward_chunk(&batch, chunk)?);
        if chunk + 1 < engine.num_chunks() {
            self.batches.insert(micro_batch, batch);
        }
        Ok(())
    }

    /// Keeps the result of a forward pass for the backward pass.
    pub(crate) fn insert(&mut self, Action { micro_batch, chunk, .. }: Action, loss: Loss) {
        self.losses.insert((micro_batch, chunk), loss);
    }

    /// Runs a backward pass, or one of its two parts.
    pub(crate) fn run_backward(
        &mut self,
        engine: &mut Engine,
        Action { pass, micro_batch, chunk }: Action,
    ) -> Result<(), EngineError> {
        let key = (micro_batch, chunk);
        if pass == Pass::WeightBackward {
            let deferred = self.deferred.remove(&key);
            return engine.backward_weights(deferred.unwrap_or_else(|| unreachable!("its pass was before")));
        }
        let loss = self.losses.remove(&key).unwrap_or_else(|| unreachable!("its forward pass was before"));
        if pass == Pass::InputBackward {
            self.deferred.insert(key, engine.backward_input(loss)?);
            return Ok(());
        }
        engine.backward(loss)
    }

    fn owes_gradients(&self) -> bool {
        !self.deferred.is_empty()
    }
}

impl Engine {
    /// Runs the micro batches of a step forward and backward: in turn, or in the order of the pipeline's schedule.
    pub(super) fn run_micro_batches(
        &mut self,
        mut next_micro_batch: impl FnMut() -> Result<MicroBatch, EngineError>,
    ) -> Result<(), EngineError> {
        // Known once the first micro batch went backward.
        while self.pipeline.is_none() && self.accumulation.micro_steps() < self.micro_steps_per_step() {
            let batch = next_micro_batch()?;
            let loss = self.timed(StepPhase::Forward, |engine| engine.forward(&batch))?;
            self.timed(StepPhase::Backward, |engine| engine.backward(loss))?;
        }
        let Some(pipeline) = &self.pipeline else { return Ok(()) };
        let micro_batches = self.micro_steps_per_step() - self.accumulation.micro_steps();
        if micro_batches == 0 {
            return Ok(());
        }
        let actions = pipeline.actions(micro_batches)?;
        let mut due = pipeline.due_messages(micro_batches)?.into_iter();
        let mut open = OpenPasses::default();
        let done = actions.into_iter().try_for_each(|action| {
            self.pipeline.iter_mut().for_each(|pipeline| pipeline.due = due.next());
            match action.pass {
                Pass::Forward => self.timed(StepPhase::Forward, |engine| {
                    open.run_forward(engine, action, &mut next_micro_batch)
                }),
                _ => self.timed(StepPhase::Backward, |engine| open.run_backward(engine, action)),
            }
        });
        // An error may leave products that were never added: the gradients are then incomplete.
        self.is_broken |= open.owes_gradients();
        done
    }

    /// The passes of a step of so many micro batches, in order.
    pub(crate) fn passes(&self, micro_batches: usize) -> Result<Vec<Action>, EngineError> {
        let in_turn = |index| [Pass::Forward, Pass::Backward].map(|pass| Action::new(pass, index));
        match &self.pipeline {
            None => Ok((0..micro_batches).flat_map(in_turn).collect()),
            Some(pipeline) => Ok(pipeline.actions(micro_batches)?),
        }
    }

    /// The number in the whole model of this rank's layer `index`.
    pub(super) fn layer_number(&self, index: usize) -> usize {
        self.pipeline.as_ref().map_or(index, |pipeline| pipeline.layer_number(index))
    }

    /// Number of stages of the pipeline that this rank has.
    pub(super) fn num_chunks(&self) -> usize {
        self.pipeline.as_ref().map_or(1, |pipeline| pipeline.stages.len())
    }

    /// This rank's layers of a chunk: of one of its stages.
    pub(super) fn layers_of(&self, chunk: usize) -> Range<usize> {
        self.pipeline.as_ref().map_or(0..self.model.layers.len(), |pipeline| pipeline.local_layers(chunk))
    }

    /// The input of a chunk, with its unit, if that has parameters of the model.
    pub(super) fn input_of(&self, chunk: usize) -> (&dyn InputLayer, Option<usize>) {
        let later = self.pipeline.as_ref().and_then(|pipeline| pipeline.later_input.as_deref());
        match later.filter(|_| chunk > 0) {
            Some(later) => (later, None),
            None => (&*self.model.input, Some(INPUT_UNIT)),
        }
    }

    /// The objective of a chunk, with its unit, if that has parameters of the model. Units are in forward order: the input is 0,
    /// layer i is i + 1.
    pub(super) fn objective_of(&self, chunk: usize) -> (&dyn Objective, Option<usize>) {
        let earlier = self.pipeline.as_ref().and_then(|pipeline| pipeline.earlier_objective.as_deref());
        match earlier.filter(|_| chunk + 1 < self.num_chunks()) {
            Some(earlier) => (earlier, None),
            None => (&*self.model.objective, Some(self.objective_unit())),
        }
    }

    /// The unit that follows layer `index` of a chunk in the forward pass, if it has one.
    pub(super) fn unit_after(&self, chunk: usize, index: usize) -> Option<usize> {
        if index + 1 < self.layers_of(chunk).end {
            Some(layer_unit(index + 1))
        } else {
            self.objective_of(chunk).1
        }
    }

    /// Starts the messages of a pass: all, or those that are due in a schedule.
    pub(super) fn flush_messages(&mut self) -> Result<(), CommError> {
        let Some(pipeline) = &mut self.pipeline else { return Ok(()) };
        let due = pipeline.due.take();
        pipeline.neighbors.flush(due.as_ref())
    }

    /// Waits for all messages to be received. The other stages must not need another one for that.
    pub(super) fn settle_all_messages(&self) -> Result<(), CommError> {
        self.pipeline.as_ref().map_or(Ok(()), |pipeline| pipeline.neighbors.settle_all())
    }

    /// Ranks of the other stages, and this one's place among them.
    pub(super) fn stages(&self) -> Option<&Arc<dyn ProcessGroup>> {
        self.groups.pipeline.as_ref().map(|groups| &groups.pp)
    }

    /// Collects a value of every stage, first stage first; without a pipeline only `own`. Collective.
    pub(super) fn gather_stages<T>(&self, own: T) -> Result<Vec<T>, EngineError>
    where
        T: serde::Serialize + serde::de::DeserializeOwned,
    {
        match self.stages() {
            None => Ok(vec![own]),
            Some(stages) => all_gather_object(&**stages, &own).map_err(EngineError::Source),
        }
    }

    /// Collects tensors by name from all stages, in f32 and in the order of the model. A tied one comes from the first stage.
    /// Collective.
    pub(super) fn gather_stage_tensors(
        &self,
        own: Vec<(String, Tensor)>,
    ) -> Result<Vec<(String, Tensor)>, EngineError> {
        let (Some(stages), Some(pipeline)) = (self.stages(), &self.pipeline) else { return Ok(own) };
        let names = own.iter().map(|(name, tensor)| (name.clone(), tensor.dims().to_vec()));
        let names: Vec<Vec<(String, Vec<usize>)>> = self.gather_stages(names.collect())?;
        let mut elements = Vec::new();
        for (_, tensor) in &own {
            elements.extend(ulysses_kernels::tensor::to_vec::<f32>(&tensor.to_dtype(DType::F32)?)?);
        }
        let mut all: HashMap<String, Tensor> = HashMap::new();
        for (names, elements) in names.into_iter().zip(stages.all_gather_varied(&elements)?) {
            let mut rest = &elements[..];
            for (name, shape) in names {
                let (of_tensor, others) = rest.split_at(shape.iter().product());
                rest = others;
                let tensor = Tensor::from_slice(of_tensor, shape, &Device::Cpu)?;
                all.entry(name).or_insert(tensor);
            }
        }
        let in_order = pipeline.parameters.iter();
        Ok(in_order.filter_map(|name| all.remove_entry(name)).collect())
    }

    /// Returns a tensor of the last stage on all stages; the others pass anything. Collective.
    pub(super) fn broadcast_last_stage(&self, own: Tensor) -> Result<Tensor, EngineError> {
        let Some(stages) = self.stages() else { return Ok(own) };
        let last = stages.world_size() - 1;
        let dims = self.gather_stages(own.dims().to_vec())?.swap_remove(last);
        let tensor = match stages.rank() == last {
            true => own.contiguous()?,
            false => ulysses_kernels::tensor::empty(dims, own.dtype(), own.device())?,
        };
        stages.broadcast(&tensor, last)?;
        Ok(tensor)
    }
}
