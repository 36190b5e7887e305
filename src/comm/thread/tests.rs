//! Tests of internals that the conformance suite cannot see: threads, pools, slots.

use super::communicator::Communicator;
use super::group::ThreadGroup;
use super::progress_lane;
use super::rank_state::RankState;
use super::world::ThreadWorld;
use super::{LaunchError, LaunchOptions, launch};
use crate::comm::diagnostics::tests::label;
use crate::comm::{
    Call, CommError, Pending, ProcessGroup, ProcessGroupExt, RecvBlock, ReduceOp, StridedBlock, StridedPlan,
};
use candle_core::{DType, Device, Tensor};
use std::slice::from_ref;
use std::sync::Arc;
use std::time::{Duration, Instant};

#[test]
fn rounds_are_freed_as_they_complete() {
    let world = Arc::new(ThreadWorld::new(3, Duration::from_secs(20)));
    let comm = Arc::new(Communicator::new(label("world", &[0, 1, 2]), world.clone()));
    let rank_main = |rank: usize| {
        let group = ThreadGroup::new(Arc::new(RankState::new(rank, world.clone())), comm.clone(), rank);
        let (small, large) =
            (Tensor::ones(3, DType::F32, &Device::Cpu)?, Tensor::ones(5000, DType::F32, &Device::Cpu)?);
        for _ in 0..1000 {
            group.all_reduce(&small, ReduceOp::Max)?;
            group.all_reduce(&large, ReduceOp::Max)?;
            group.barrier()?;
            // A rank is at most two operations behind a rank that has passed a barrier.
            assert!(comm.open_rounds() <= 5, "{} rounds open", comm.open_rounds());
        }
        Ok::<(), CommError>(())
    };
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..3).map(|rank| scope.spawn(move || rank_main(rank))).collect();
        ranks.into_iter().for_each(|rank| rank.join().unwrap().unwrap());
    });
    assert_eq!(comm.open_rounds(), 0);
}

/// Exchanges of one element per rank, then a ring of messages. No rank waits before all data has moved.
#[test]
fn a_lane_moves_the_data_of_exchanges_while_their_ranks_compute() {
    let world = Arc::new(ThreadWorld::new(2, Duration::from_secs(20)));
    let comm = Arc::new(Communicator::new(label("world", &[0, 1]), world.clone()));
    let rank_main = |rank: usize| {
        let state = Arc::new(RankState::new(rank, world.clone()));
        progress_lane::start(&state)?;
        let group = ThreadGroup::new(state, comm.clone(), rank);
        let block = |offset| StridedBlock::contiguous(0, offset, 1);
        let send = (0..2).map(|peer| vec![block(peer)]).collect();
        let recv = (0..2).map(|peer| vec![RecvBlock { block: block(peer), accumulate: false }]).collect();
        let plan = Arc::new(StridedPlan { send, recv });
        let input = Tensor::full(rank as f32, 2, &Device::Cpu)?;
        let outputs = [0, 1].map(|_| Tensor::ones(2, DType::F32, &Device::Cpu));
        let mut pending = Vec::new();
        for output in outputs.iter().flatten() {
            pending.push(group.start_all_to_all_strided(from_ref(&input), from_ref(output), &plan)?);
        }
        let received = Tensor::zeros(2, DType::F32, &Device::Cpu)?;
        let ring = [Call::send(&input, 1 - rank), Call::recv(&received, 1 - rank)];
        pending.push(group.start_messages(&ring)?);
        let started = Instant::now();
        while group.stats().total().bytes_received < 4 * size_of::<f32>() as u64 {
            assert!(started.elapsed() < Duration::from_secs(20), "no data has moved");
            std::thread::yield_now();
        }
        pending.into_iter().try_for_each(Pending::wait)?;
        let [first, second] = outputs;
        assert_eq!(received.to_vec1::<f32>()?, [1.0 - rank as f32; 2]);
        Ok::<_, CommError>([first?.to_vec1::<f32>()?, second?.to_vec1::<f32>()?])
    };
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..2).map(|rank| scope.spawn(move || rank_main(rank))).collect();
        ranks.into_iter().for_each(|rank| assert_eq!(rank.join().unwrap().unwrap(), [[0.0, 1.0]; 2]));
    });
    assert_eq!(comm.open_rounds(), 0);
}

#[test]
fn each_rank_is_a_named_thread_with_its_own_pool() {
    for threads_per_rank in [1, 3] {
        let options = LaunchOptions { threads_per_rank, ..Default::default() };
        let ranks = launch(2, &options, |context| {
            let name = std::thread::current().name().unwrap_or_default().to_owned();
            context.group.barrier()?;
            let pool: Vec<String> =
                rayon::broadcast(|_| std::thread::current().name().unwrap_or_default().to_owned());
            assert_eq!((context.threads, rayon::current_thread_index()), (threads_per_rank, Some(0)));
            Ok::<_, CommError>((name, pool))
        });
        for (rank, (name, pool)) in ranks.unwrap().into_iter().enumerate() {
            assert_eq!(name, format!("rank-{rank}"));
            let helpers = (1..threads_per_rank).map(|index| format!("rank-{rank}.{index}"));
            assert_eq!(pool, std::iter::once(name).chain(helpers).collect::<Vec<_>>());
        }
    }
}

#[test]
fn results_are_in_rank_order_and_any_error_type_works() {
    let squares =
        launch(4, &LaunchOptions::default(), |context| Ok::<_, String>(context.rank * context.rank));
    assert_eq!(squares.unwrap(), [0, 1, 4, 9]);
    let failed = launch(2, &LaunchOptions::default(), |context| {
        if context.rank == 1 { Err("no data".to_owned()) } else { Ok(()) }
    });
    let error = failed.unwrap_err();
    assert_eq!(error.to_string(), "rank 1 failed: no data");
    assert_eq!(std::error::Error::source(&error).unwrap().to_string(), "no data");
}

#[test]
fn worlds_without_ranks_or_threads_are_refused() {
    let nothing = |_: super::RankContext| Ok::<(), CommError>(());
    let refused = launch(0, &LaunchOptions::default(), nothing).unwrap_err();
    assert!(matches!(refused, LaunchError::InvalidOptions { world_size: 0, .. }), "{refused}");
    let options = LaunchOptions { threads_per_rank: 0, ..Default::default() };
    assert!(matches!(launch(1, &options, nothing).unwrap_err(), LaunchError::InvalidOptions { .. }));
}

#[test]
fn a_rank_that_ignores_a_peers_failure_does_not_hide_it() {
    let launched = launch(2, &LaunchOptions::default(), |context| -> Result<(), CommError> {
        if context.rank == 0 {
            assert!(context.group.barrier().is_err());
            return Ok(());
        }
        panic!("gone")
    });
    assert!(matches!(launched.unwrap_err(), LaunchError::Panicked { rank: 1, .. }));
}

#[test]
fn a_timeout_beyond_the_clock_means_forever() {
    let options = LaunchOptions { timeout: Duration::MAX, ..Default::default() };
    launch(2, &options, |context| context.group.barrier()).unwrap();
}
