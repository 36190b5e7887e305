//! The engine of one stage of a pipeline: the order of its passes, and what only all stages know.

use super::times::StepPhase;
use super::{Engine, EngineError, Loss};
use crate::comm::{CommError, ProcessGroup, ProcessGroupExt, all_gather_object};
use crate::data::MicroBatch;
use crate::pipeline::{Action, Pass};
use candle_core::{DType, Device, Tensor};
use std::collections::HashMap;
use std::sync::Arc;

/// Returns whether an action receives from the stage that the previous one sends to.
fn pairs(action: Action, next: Action) -> bool {
    (action.pass == Pass::Forward) != (next.pass == Pass::Forward)
}

impl Engine {
    /// Runs the micro batches of a step forward and backward: in turn, or in the order of the pipeline's schedule.
    pub(super) fn run_micro_batches(
        &mut self,
        mut next_micro_batch: impl FnMut() -> Result<MicroBatch, EngineError>,
    ) -> Result<(), EngineError> {
        // Known once the first micro batch went backward.
        while self.pipeline.is_none() && self.accumulation.micro_steps < self.micro_steps_per_step() {
            let batch = next_micro_batch()?;
            let loss = self.timed(StepPhase::Forward, |engine| engine.forward(&batch))?;
            self.timed(StepPhase::Backward, |engine| engine.backward(loss))?;
        }
        let Some(pipeline) = &self.pipeline else { return Ok(()) };
        let micro_batches = self.micro_steps_per_step() - self.accumulation.micro_steps;
        if micro_batches == 0 {
            return Ok(());
        }
        let actions = pipeline.actions(micro_batches)?;
        let mut losses: HashMap<usize, Loss> = HashMap::new();
        for (index, &action) in actions.iter().enumerate() {
            self.pair_messages(actions.get(index + 1).is_some_and(|next| pairs(action, *next)));
            match losses.remove(&action.micro_batch) {
                None => {
                    let batch = next_micro_batch()?;
                    let loss = self.timed(StepPhase::Forward, |engine| engine.forward(&batch))?;
                    losses.insert(action.micro_batch, loss);
                }
                Some(loss) => self.timed(StepPhase::Backward, |engine| engine.backward(loss))?,
            }
        }
        Ok(())
    }

    /// The passes of a step of so many micro batches, in order.
    pub(crate) fn passes(&self, micro_batches: usize) -> Result<Vec<Action>, EngineError> {
        let in_turn = |index| [Pass::Forward, Pass::Backward].map(|pass| Action::new(pass, index));
        match &self.pipeline {
            None => Ok((0..micro_batches).flat_map(in_turn).collect()),
            Some(pipeline) => Ok(pipeline.actions(micro_batches)?),
        }
    }

    /// The number in the whole model of the layer `index` of this stage.
    pub(super) fn layer_number(&self, index: usize) -> usize {
        self.pipeline.as_ref().map_or(0, |pipeline| pipeline.layers.start) + index
    }

    fn pair_messages(&mut self, pairs_messages: bool) {
        self.pipeline.iter_mut().for_each(|pipeline| pipeline.pairs_messages = pairs_messages);
    }

    /// Passes the messages of a pass on, unless they run with the first of the next pass.
    pub(super) fn flush_messages(&self) -> Result<(), CommError> {
        let pipeline = self.pipeline.as_ref().filter(|pipeline| !pipeline.pairs_messages);
        pipeline.map_or(Ok(()), |pipeline| pipeline.neighbors.flush())
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
