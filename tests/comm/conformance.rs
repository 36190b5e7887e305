//! The conformance suite of `ProcessGroup`, run with every backend that this machine supports.

#[cfg(feature = "nccl")]
use crate::support::comm::Nccl;
#[cfg(feature = "cuda")]
use crate::support::comm::OnOneGpu;
use crate::support::comm::cases::every_case;
use crate::support::comm::{Defaults, Threads};

/// One `#[test]` per case, which is a function of `support::comm`.
macro_rules! cases {
    ($backend:expr; $($file:ident: $($case:ident),+ $(,)?;)+) => {
        $($(
            #[test]
            fn $case() {
                crate::support::comm::$file::$case(&$backend);
            }
        )+)+
    };
}

macro_rules! suite {
    ($name:ident, $backend:expr) => {
        mod $name {
            use super::*;

            every_case!(cases! $backend);
        }
    };
}

suite!(threads, Threads { threads_per_rank: 1 });
suite!(threads_with_pools, Threads { threads_per_rank: 2 });
suite!(default_methods, Defaults);

/// Every operation once, in groups of the given sizes.
macro_rules! whole {
    ($name:ident, $backend:expr, $ranks:expr) => {
        mod $name {
            use super::*;

            #[test]
            fn sums_gathers_and_broadcasts() {
                $ranks
                    .into_iter()
                    .for_each(|n| crate::support::comm::whole::sums_gathers_and_broadcasts(&$backend, n));
            }

            #[test]
            fn exchanges_messages_and_sub_groups() {
                $ranks.into_iter().for_each(|n| {
                    crate::support::comm::whole::exchanges_messages_and_sub_groups(&$backend, n)
                });
            }
        }
    };
}

whole!(threads_one_to_four, Threads { threads_per_rank: 1 }, [1, 2, 3, 4]);

// The tests below need GPUs.

#[cfg(feature = "cuda")]
suite!(threads_on_a_gpu, OnOneGpu(Threads { threads_per_rank: 1 }));
#[cfg(feature = "cuda")]
suite!(default_methods_on_a_gpu, OnOneGpu(Defaults));

// Number of ranks: `ULYSSES_TEST_NCCL_RANKS`, default 1; ranks beyond the number of GPUs share them.
#[cfg(feature = "nccl")]
whole!(nccl_on_a_gpu, Nccl, [crate::support::comm::nccl_ranks()]);

/// NCCL, without the cases that it does not support: it has its own order of summation, does not compare calls, and a
/// message may wait on the GPU for its receiver.
#[cfg(feature = "nccl")]
mod on_eight_gpus {
    use super::*;
    use candle_core::{DType, Device, Tensor};
    use std::error::Error;
    use std::sync::Arc;
    use std::time::Duration;
    use ulysses::comm::{CommError, LaunchOptions, ProcessGroup, ProcessGroupExt, ReduceOp, launch, nccl};
    use ulysses::device::open_gpu;

    whole!(all_at_once, Nccl, [8]);
    cases! {
        Nccl;
        reduce:
            all_reduce_sums_every_dtype_at_every_size,
            all_reduce_finds_max_and_min,
            sixteen_bit_elements_are_summed_into_f32_in_rank_order,
            averages_and_products_are_those_of_all_ranks,
            reduce_leaves_the_result_on_the_root_only,
            reduce_scatter_may_write_over_its_own_input;
        gather:
            all_gather_concatenates_in_rank_order,
            all_gather_of_a_part_of_its_own_output_works_in_place,
            broadcast_reaches_all_ranks_from_every_root,
            gather_collects_at_any_root_and_scatter_distributes,
            gather_and_scatter_may_use_a_part_of_the_roots_tensor,
            values_are_reduced_and_gathered,
            varied_lengths_are_gathered_including_none;
        exchange:
            all_to_all_moves_uneven_counts_and_none,
            strided_exchange_turns_sequence_shards_into_head_shards_and_back,
            strided_exchange_accumulates_in_rank_order,
            strided_exchange_may_write_into_the_storage_it_reads,
            plans_that_exceed_their_tensors_are_errors;
        point_to_point:
            a_ring_passes_tensors_on,
            messages_started_together_keep_their_order,
            a_message_goes_out_before_a_later_collective,
            a_batch_of_messages_goes_around_rings_in_both_directions,
            a_batch_with_a_wrong_message_starts_none_and_leaves_the_group_usable;
        groups:
            split_orders_members_by_key_then_rank,
            ranks_without_a_color_join_no_group,
            groups_can_be_split_again_and_work_side_by_side;
        pending:
            operations_can_be_waited_for_in_any_order,
            polls_complete_operations,
            a_dropped_operation_still_completes,
            inputs_may_be_overwritten_once_waited_for;
        failures:
            a_panic_reaches_the_others_at_once,
            an_error_reaches_all_ranks_at_once_and_is_the_error_of_the_launch,
            an_invalid_argument_on_one_rank_reaches_the_others,
            a_failure_in_a_small_group_fails_the_whole_world,
            operations_of_two_groups_end_when_a_rank_fails,
            wrong_arguments_are_typed_errors_and_leave_the_group_usable;
    }

    /// Launches two ranks of the backend `thread`, which create an NCCL group over it on these devices.
    fn over_threads<T: Send>(
        devices: [Device; 2],
        run: impl Fn(Arc<dyn ProcessGroup>) -> Result<T, CommError> + Sync,
    ) -> Result<Vec<T>, String> {
        let options = LaunchOptions { timeout: Duration::from_secs(20), ..LaunchOptions::default() };
        let ranks = launch(2, &options, |context| {
            run(nccl::over(context.group, &devices[context.rank], options.timeout)?)
        });
        ranks.map_err(|error| error.source().map_or(error.to_string(), ToString::to_string))
    }

    #[test]
    fn a_group_over_another_backend_is_for_tensors_on_the_gpu_of_each_rank() {
        let gpus = || [0, 1].map(|ordinal| open_gpu(ordinal).unwrap());
        let sums = over_threads(gpus(), |group| {
            let on_cpu = Tensor::zeros(3, DType::F32, &Device::Cpu).unwrap();
            let refused = group.all_reduce(&on_cpu, ReduceOp::Sum).unwrap_err().to_string();
            assert!(refused.contains("tensors must be on the rank's GPU"), "{refused}");
            let elsewhere = std::thread::scope(|scope| scope.spawn(|| group.barrier()).join().unwrap());
            let refused = elsewhere.unwrap_err().to_string();
            assert!(refused.contains("must be issued by the thread that created the group"), "{refused}");
            group.all_reduce_values(&[1.0 + group.rank() as f64], ReduceOp::Sum)
        });
        assert_eq!(sums, Ok(vec![vec![3.0]; 2]));
        let [first, _] = gpus();
        let refused = |devices| over_threads(devices, |_| Ok(())).unwrap_err();
        let shared = refused([first.clone(), first.clone()]);
        assert!(shared.contains("ranks 0 and 1 are on the same GPU; NCCL 2."), "{shared}");
        let on_cpu = refused([first, Device::Cpu]);
        assert!(on_cpu.contains("a rank needs a CUDA device, got Cpu"), "{on_cpu}");
    }
}

#[test]
fn a_fake_group_refuses_plans_of_another_size_or_out_of_bounds() {
    use candle_core::Tensor;
    use std::sync::Arc;
    use ulysses::comm::fake::FakeGroup;
    use ulysses::comm::{CommError, ProcessGroup, RecvBlock, StridedBlock, StridedPlan};

    let group = FakeGroup::new("fake", vec![0, 1, 2], 1).unwrap();
    let tensor = Tensor::zeros(4, candle_core::DType::F32, &candle_core::Device::Cpu).unwrap();
    let start = |send, recv| {
        let (input, output) = ([tensor.clone()], [tensor.clone()]);
        group.start_all_to_all_strided(&input, &output, &Arc::new(StridedPlan { send, recv })).map(drop)
    };
    let outside =
        StridedBlock { tensor: 0, offset: 3, batch: 1, batch_stride: 0, rows: 1, row_stride: 0, run: 2 };
    let received = RecvBlock { block: outside.clone(), accumulate: false };
    assert_eq!(start(vec![vec![]; 3], vec![vec![]; 3]), Ok(()));
    for refused in [
        start(vec![vec![]; 3], vec![vec![]; 2]),
        start(vec![vec![]; 2], vec![vec![]; 3]),
        start(vec![vec![], vec![], vec![outside]], vec![vec![]; 3]),
        start(vec![vec![]; 3], vec![vec![received], vec![], vec![]]),
    ] {
        assert!(matches!(refused, Err(CommError::InvalidArgument { .. })), "{refused:?}");
    }
}

#[test]
fn a_fake_group_counts_operations_with_a_root_and_messages_as_threads_do() {
    use crate::support::comm::{Backend, Group, tensor, zeros};
    use std::sync::Arc;
    use ulysses::comm::fake::FakeGroup;
    use ulysses::comm::{Call, CommError, GroupStats, ProcessGroupExt, ReduceOp};

    const RANKS: usize = 3;
    fn operations(group: Group) -> Result<GroupStats, CommError> {
        let (rank, root) = (group.rank(), 1);
        group.reduce(&tensor(50, |i| i as f32), ReduceOp::Average, root)?;
        group.reduce(&tensor(20_001, |i| i as f32), ReduceOp::Product, root)?;
        let whole = (rank == root).then(|| zeros::<f32>(21));
        group.gather(&zeros::<f32>(7), whole.as_ref(), root)?;
        group.scatter(whole.as_ref(), &zeros::<f32>(7), root)?;
        let (sent, received) = (zeros::<f64>(9), zeros::<f64>(9));
        let (next, previous) = ((rank + 1) % RANKS, (rank + RANKS - 1) % RANKS);
        let ring = [Call::send(&sent, next), Call::recv(&received, previous)];
        let pending = group.start_messages(&ring)?;
        crate::support::comm::pending::poll_to_the_end(&pending);
        pending.wait()?;
        // A rank's bytes are counted when its peers read them.
        group.barrier()?;
        Ok(GroupStats {
            ops: group
                .stats()
                .ops
                .into_iter()
                .filter(|(_, op)| op.bytes_sent + op.bytes_received > 0)
                .collect(),
        })
    }
    let threads: &dyn Backend = &Threads { threads_per_rank: 1 };
    let of_threads: Vec<String> = threads.run(RANKS, |group| Ok(format!("{:?}", operations(group)?)));
    for (rank, expected) in of_threads.into_iter().enumerate() {
        let group = FakeGroup::new("fake", (0..RANKS).collect(), rank).unwrap();
        assert_eq!(format!("{:?}", operations(Arc::new(group)).unwrap()), expected, "rank {rank}");
    }
}
