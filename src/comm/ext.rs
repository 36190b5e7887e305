//! Blocking and typed forms of the [`ProcessGroup`] methods.

use super::arg_check::ArgCheck;
use super::{Call, CommError, Pending, ProcessGroup, ReduceOp, StridedPlan};
use candle_core::Tensor;
use std::sync::Arc;
use ulysses_kernels::tensor::{Element, from_slice, to_vec, zeros};

/// A value that is not the same on all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Disagreement {
    /// Global rank of the first member whose values differ from those of the group's first member.
    pub rank: usize,
    /// Index of its first differing value.
    pub index: usize,
}

/// Blocking forms of the `start_*` methods, each followed by [`Pending::wait`], and
/// collectives on plain values.
///
/// Implemented for every group, including `dyn ProcessGroup`. Errors are those of the
/// `start_*` method and of `wait`.
#[allow(clippy::missing_errors_doc)]
pub trait ProcessGroupExt: ProcessGroup {
    /// See [`start_all_reduce`](ProcessGroup::start_all_reduce).
    fn all_reduce(&self, tensor: &Tensor, op: ReduceOp) -> Result<(), CommError> {
        self.start_all_reduce(tensor, op)?.wait()
    }

    /// See [`start_reduce_scatter`](ProcessGroup::start_reduce_scatter).
    fn reduce_scatter(&self, input: &Tensor, output: &Tensor, op: ReduceOp) -> Result<(), CommError> {
        self.start_reduce_scatter(input, output, op)?.wait()
    }

    /// See [`start_all_gather`](ProcessGroup::start_all_gather).
    fn all_gather(&self, input: &Tensor, output: &Tensor) -> Result<(), CommError> {
        self.start_all_gather(input, output)?.wait()
    }

    /// See [`start_all_to_all`](ProcessGroup::start_all_to_all).
    fn all_to_all(
        &self,
        input: &Tensor,
        output: &Tensor,
        send_counts: &[usize],
        recv_counts: &[usize],
    ) -> Result<(), CommError> {
        self.start_all_to_all(input, output, send_counts, recv_counts)?.wait()
    }

    /// See [`start_all_to_all_strided`](ProcessGroup::start_all_to_all_strided).
    fn all_to_all_strided(
        &self,
        inputs: &[Tensor],
        outputs: &[Tensor],
        plan: &Arc<StridedPlan>,
    ) -> Result<(), CommError> {
        self.start_all_to_all_strided(inputs, outputs, plan)?.wait()
    }

    /// See [`start_broadcast`](ProcessGroup::start_broadcast).
    fn broadcast(&self, tensor: &Tensor, root: usize) -> Result<(), CommError> {
        self.start_broadcast(tensor, root)?.wait()
    }

    /// See [`start_reduce`](ProcessGroup::start_reduce).
    fn reduce(&self, tensor: &Tensor, op: ReduceOp, root: usize) -> Result<(), CommError> {
        self.start_reduce(tensor, op, root)?.wait()
    }

    /// See [`start_gather`](ProcessGroup::start_gather).
    fn gather(&self, input: &Tensor, output: Option<&Tensor>, root: usize) -> Result<(), CommError> {
        self.start_gather(input, output, root)?.wait()
    }

    /// See [`start_scatter`](ProcessGroup::start_scatter).
    fn scatter(&self, input: Option<&Tensor>, output: &Tensor, root: usize) -> Result<(), CommError> {
        self.start_scatter(input, output, root)?.wait()
    }

    /// See [`start_send`](ProcessGroup::start_send). Returns once the receiver has copied
    /// the elements, so two ranks that both send first deadlock.
    fn send(&self, tensor: &Tensor, dst: usize) -> Result<(), CommError> {
        self.start_send(tensor, dst)?.wait()
    }

    /// See [`start_recv`](ProcessGroup::start_recv).
    fn recv(&self, tensor: &Tensor, src: usize) -> Result<(), CommError> {
        self.start_recv(tensor, src)?.wait()
    }

    /// Starts a batch of messages, [`Call::send`] and [`Call::recv`] in any order: torch's `batch_isend_irecv`. They run at
    /// the same time, so ranks that exchange messages with each other, as in a ring, do not wait for each other, and all are
    /// on their way when this returns. None is started if one has invalid arguments.
    ///
    /// With NCCL the first messages between two ranks connect them, for which the hosts of both wait for each other here.
    fn start_messages(&self, messages: &[Call<'_>]) -> Result<Pending, CommError> {
        // A batch of which a part is on its way could not end.
        for message in messages {
            let check = ArgCheck::new(self, message.op());
            if !message.op().is_message() {
                return Err(check.invalid("a batch of messages consists of send and recv".to_owned()));
            }
            message.check(self)?;
            let mut pairs = messages[0].tensors().zip(message.tensors());
            pairs.try_for_each(|(first, tensor)| check.device(first, tensor))?;
        }
        let started =
            messages.iter().map(|message| self.start(message.clone())).collect::<Result<Vec<_>, _>>()?;
        self.flush_messages()?;
        Ok(Pending::all(started))
    }

    /// See [`start_barrier`](ProcessGroup::start_barrier).
    fn barrier(&self) -> Result<(), CommError> {
        self.start_barrier()?.wait()
    }

    /// Reduces values element by element over all ranks; every rank passes the same number.
    fn all_reduce_values<T: Element>(&self, values: &[T], op: ReduceOp) -> Result<Vec<T>, CommError> {
        let tensor = from_slice(values, &self.value_device())?;
        self.all_reduce(&tensor, op)?;
        to_host(self, &tensor)
    }

    /// Concatenates the values of all ranks in rank order; every rank passes the same number.
    fn all_gather_values<T: Element>(&self, values: &[T]) -> Result<Vec<T>, CommError> {
        let device = self.value_device();
        let input = from_slice(values, &device)?;
        let output = zeros(values.len() * self.world_size(), T::DTYPE, &device)?;
        self.all_gather(&input, &output)?;
        to_host(self, &output)
    }

    /// Exchanges values: `values` are `send_counts[0]` for rank 0, then `send_counts[1]` for rank 1, and so on. Returns
    /// `recv_counts[0]` from rank 0, and so on.
    fn all_to_all_values<T: Element>(
        &self,
        values: &[T],
        send_counts: &[usize],
        recv_counts: &[usize],
    ) -> Result<Vec<T>, CommError> {
        let device = self.value_device();
        let input = from_slice(values, &device)?;
        let output = zeros(recv_counts.iter().sum::<usize>(), T::DTYPE, &device)?;
        self.all_to_all(&input, &output, send_counts, recv_counts)?;
        to_host(self, &output)
    }

    /// Compares values that should be equal on all ranks. Returns where they differ first, if they do.
    fn find_disagreement(&self, values: &[u64]) -> Result<Option<Disagreement>, CommError> {
        let own: Vec<i64> = values.iter().map(|value| value.cast_signed()).collect();
        let all = self.all_gather_values(&own)?;
        let differs = (0..all.len()).find(|&at| all[at] != all[at % own.len()]);
        let disagreement =
            |at| Disagreement { rank: self.global_ranks()[at / own.len()], index: at % own.len() };
        Ok(differs.map(disagreement))
    }

    /// Gathers any number of values from every rank, an `all_gather` of unequal lengths: `result[j]` are the values of rank
    /// `j`. Runs two collectives: one for the lengths, one for the values.
    fn all_gather_varied<T: Element>(&self, values: &[T]) -> Result<Vec<Vec<T>>, CommError> {
        let ranks = self.world_size();
        let recv_counts: Vec<usize> = self
            .all_gather_values(&[values.len() as i64])?
            .into_iter()
            .map(|length| length as usize)
            .collect();
        // Every rank sends the same elements to all ranks.
        let gathered =
            self.all_to_all_values(&values.repeat(ranks), &vec![values.len(); ranks], &recv_counts)?;
        let mut rest = gathered.as_slice();
        Ok(recv_counts
            .iter()
            .map(|&count| {
                let (head, tail) = rest.split_at(count);
                rest = tail;
                head.to_vec()
            })
            .collect())
    }
}

impl<G: ProcessGroup + ?Sized> ProcessGroupExt for G {}

/// Copies a tensor's elements to the host.
fn to_host<T: Element, G: ProcessGroup + ?Sized>(group: &G, tensor: &Tensor) -> Result<Vec<T>, CommError> {
    let elements = to_vec(tensor)?;
    group.check()?;
    Ok(elements)
}
