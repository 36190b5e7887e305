//! Records the events of a dry rank.

use super::event::{Axis, Event, Pass, Purpose, Transfer, Work};
use crate::comm::CollectiveOp;
use crate::comm::fake::{FakeCollective, FakeTransfer};
use crate::config::{Config, ZeroStage};
use candle_core::DType;
use std::collections::HashMap;
use ulysses_kernels::device::DeviceKind;
use ulysses_kernels::device::dry::{self, MatmulOp};

/// The phase of a step, which determines the purpose of collectives and the pass of ops.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    Forward,
    Backward,
    Update,
}

/// Records events and offloaded bytes.
#[derive(Debug)]
pub(super) struct Recorder {
    device: DeviceKind,
    stage: ZeroStage,
    /// The axis that counts the traffic between ranks with other tokens: tp, if sp has one rank, since both have one group then.
    tokens_axis: Axis,
    pub(super) phase: Phase,
    events: Vec<Event>,
    /// The purpose of the next exchange.
    direction: Purpose,
    /// The purposes of the exchanges in flight, by axis and number.
    exchanges: HashMap<(Axis, u64), Purpose>,
    offloaded_bytes: i64,
    pub(super) most_offloaded_bytes: i64,
}

impl Recorder {
    pub(super) fn new(device: DeviceKind, config: &Config) -> Self {
        Self {
            device,
            stage: config.zero.stage,
            tokens_axis: if config.mesh.sp_size == 1 { Axis::Tp } else { Axis::Tokens },
            phase: Phase::Forward,
            events: Vec::new(),
            direction: Purpose::ExchangeForward,
            exchanges: HashMap::new(),
            offloaded_bytes: 0,
            most_offloaded_bytes: 0,
        }
    }

    pub(super) fn take(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.events)
    }

    pub(super) fn record(&mut self, event: dry::Event) {
        match event {
            dry::Event::Compute { op, is_backward, flops } => self.compute(op, is_backward, flops),
            dry::Event::Elementwise { bytes } => self.events.push(Event::Elementwise { bytes }),
            dry::Event::Copy { bytes } => self.events.push(match self.device {
                DeviceKind::Cpu => Event::File { bytes },
                DeviceKind::Cuda => Event::HostCopy { bytes },
            }),
            dry::Event::Exchange { is_backward: false } => self.direction = Purpose::ExchangeForward,
            dry::Event::Exchange { is_backward: true } => self.direction = Purpose::ExchangeBackward,
            dry::Event::Offloaded { bytes } => {
                self.offloaded_bytes += bytes;
                self.most_offloaded_bytes = self.most_offloaded_bytes.max(self.offloaded_bytes);
            }
        }
    }

    fn compute(&mut self, op: MatmulOp, is_backward: bool, flops: f64) {
        let pass = match (is_backward, self.phase) {
            (true, _) => Pass::Backward,
            (false, Phase::Backward) => Pass::Recompute,
            (false, _) => Pass::Forward,
        };
        self.events.push(Event::Compute(Work { op, pass, flops }));
    }

    pub(super) fn record_collective(&mut self, collective: FakeCollective<'_>) {
        let FakeCollective { group, op, dtype, sequence, started } = collective;
        let Some(axis) = Axis::with_group(group) else { return };
        let is_exchange = op == CollectiveOp::AllToAllStrided;
        let Some(FakeTransfer { input_elems, traffic }) = started else {
            let exchange = self.exchanges.remove(&(axis, sequence));
            return self.complete(op, axis, exchange.unwrap_or_else(|| self.purpose(op, axis, dtype)));
        };
        let bytes = dtype.size_in_bytes() as u64;
        let purpose = self.purpose(op, axis, dtype);
        if is_exchange {
            self.exchanges.insert((axis, sequence), purpose);
        }
        self.events.push(Event::Collective(Transfer {
            op,
            axis: if axis == Axis::Tokens { self.tokens_axis } else { axis },
            purpose,
            input_bytes: input_elems as u64 * bytes,
            sent_to: traffic.sent.iter().map(|elems| elems * bytes).collect(),
            received_bytes: traffic.stats(dtype).bytes_received,
        }));
    }

    fn complete(&mut self, op: CollectiveOp, axis: Axis, purpose: Purpose) {
        if !purpose.is_awaited_at_once(op, axis) {
            self.events.push(Event::Wait { purpose, axis });
        }
    }

    /// Returns the purpose of a collective. Single values have other dtypes than tensors.
    fn purpose(&self, op: CollectiveOp, axis: Axis, dtype: DType) -> Purpose {
        let is_value = !matches!(dtype, DType::F32 | DType::BF16 | DType::F16);
        let gathers_parameters = self.stage.partitions_optimizer()
            && !matches!(axis, Axis::Sp | Axis::Replicas | Axis::Tokens | Axis::Pp | Axis::Tied);
        match op {
            _ if is_value => Purpose::Agree,
            _ if axis == Axis::Tp => Purpose::ExchangeTokens,
            CollectiveOp::Send | CollectiveOp::Recv if axis == Axis::Pp => Purpose::PassActivations,
            CollectiveOp::AllToAllStrided => self.direction,
            CollectiveOp::AllReduce | CollectiveOp::ReduceScatter => Purpose::ReduceGradients,
            // Of sums, after a reduction in bf16.
            CollectiveOp::AllGather if !gathers_parameters => Purpose::ReduceGradients,
            CollectiveOp::AllGather if self.phase == Phase::Update => Purpose::PublishParameters,
            CollectiveOp::AllGather => Purpose::GatherParameters,
            _ => Purpose::Agree,
        }
    }
}
