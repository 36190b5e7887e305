//! The conformance suite of `ProcessGroup`, run with MPI.

use crate::job::Job;
use crate::large;
use crate::sharded;
use crate::support::comm::cases::every_case;
use crate::support::comm::mpi::Mpi;
use crate::support::comm::{
    counters, exchange, failures, gather, groups, pending, point_to_point, reduce, whole,
};
use crate::trial;
use libtest_mimic::Trial;

type Case = (&'static str, &'static str, fn(&Mpi));

/// All cases, each with its file.
macro_rules! table {
    (; $($file:ident: $($case:ident),+ $(,)?;)+) => {
        [$($((stringify!($file), stringify!($case), (|mpi| $file::$case(mpi)) as fn(&Mpi))),+),+]
    };
}

fn cases() -> Vec<Case> {
    let mut cases: Vec<Case> = every_case!(table!).into();
    cases.push(("whole", "sums_gathers_and_broadcasts", |mpi| {
        whole::sums_gathers_and_broadcasts(mpi, mpi.processes());
    }));
    cases.push(("whole", "exchanges_messages_and_sub_groups", |mpi| {
        whole::exchanges_messages_and_sub_groups(mpi, mpi.processes());
    }));
    cases.push(("large", "a_tensor_with_more_elements_than_an_int_arrives_complete", |mpi| {
        large::a_tensor_with_more_elements_than_an_int_arrives_complete(mpi);
    }));
    cases.push(("sharded", "sharded_tensors_move_at_the_same_time_and_are_saved_and_loaded", |mpi| {
        sharded::sharded_tensors_move_at_the_same_time_and_are_saved_and_loaded(mpi);
    }));
    cases
}

/// Files whose cases also run with eight ranks; the others use at most four.
const WITH_EIGHT_RANKS: [&str; 3] = ["reduce", "gather", "groups"];

/// One job per file, with as many processes as its cases need, plus every operation once with two,
/// three and four.
pub(crate) fn trials() -> Vec<Trial> {
    let mut files: Vec<&str> = cases().iter().map(|(file, ..)| *file).collect();
    files.dedup();
    let job = |file: &'static str, processes: usize| {
        trial(format!("{file}_among_{processes}_processes"), move || {
            Job::of_this_binary(processes, &["--ranks", file]).run().assert_done();
        })
    };
    let sizes = |file: &str| match file {
        "whole" => vec![2, 3, 4],
        "large" => vec![2],
        _ if WITH_EIGHT_RANKS.contains(&file) => vec![8],
        _ => vec![4],
    };
    files.into_iter().flat_map(|file| sizes(file).into_iter().map(move |size| job(file, size))).collect()
}

/// Runs the cases of a file as one process of a job.
pub(crate) fn run_as_rank(file: &str) {
    let mpi = Mpi::start();
    for (_, name, case) in cases().into_iter().filter(|(of, ..)| *of == file) {
        eprintln!("{name}");
        case(&mpi);
    }
}
