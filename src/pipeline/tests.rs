//! Schedules: their order, that they end, their memory and their idle time.

use super::{
    Action, DueMessages, Pass, PassTimes, Schedule, ScheduleError, ScheduleKind, balanced_stages,
    due_messages,
};
use std::collections::HashSet;

const KINDS: [ScheduleKind; 5] = [
    ScheduleKind::GPipe,
    ScheduleKind::OneForwardOneBackward,
    ScheduleKind::Interleaved { num_chunks: 2 },
    ScheduleKind::Interleaved { num_chunks: 3 },
    ScheduleKind::ZeroBubble,
];

/// The schedules of every kind, for 1 to 5 ranks and 1 to 10 micro batches, where there is one.
fn each(mut test: impl FnMut(ScheduleKind, usize, usize, Schedule)) {
    for kind in KINDS {
        for (ranks, micro_batches) in (1..=5).flat_map(|ranks| (1..=10).map(move |number| (ranks, number))) {
            if let Ok(schedule) = kind.schedule(ranks, micro_batches) {
                test(kind, ranks, micro_batches, schedule);
            }
        }
    }
}

#[test]
fn balanced_stages_are_the_best_of_all_divisions() {
    let divisions = |layers: usize, stages: usize| -> Vec<Vec<usize>> {
        // Bits are cuts between layers.
        let cuts = (0_u32..1 << (layers - 1)).filter(|cuts| cuts.count_ones() as usize == stages - 1);
        cuts.map(|cuts| {
            std::iter::once(0)
                .chain((1..layers).filter(|cut| cuts >> (cut - 1) & 1 == 1))
                .chain([layers])
                .collect()
        })
        .collect()
    };
    let costs = [5, 1, 4, 1, 1, 9, 2, 6];
    for (objective, stages) in
        [0, 3, 20].into_iter().flat_map(|objective| (1..=8).map(move |p| (objective, p)))
    {
        let most = |cuts: &[usize]| {
            let cost = |pair: &[usize]| costs[pair[0]..pair[1]].iter().sum::<u64>();
            let of_stages = cuts.windows(2).map(cost);
            of_stages.zip(1..).map(|(cost, stage)| cost + if stage == stages { objective } else { 0 }).max()
        };
        let found = balanced_stages(&costs, objective, stages);
        let cuts: Vec<usize> = std::iter::once(0).chain(found.iter().map(|stage| stage.end)).collect();
        assert!(found.len() == stages && cuts.is_sorted_by(|a, b| a < b) && cuts[stages] == 8, "{found:?}");
        let best = divisions(8, stages).iter().map(|cuts| most(cuts)).min().unwrap();
        assert_eq!(most(&cuts), best, "{objective} {stages}: {found:?}");
    }
}

fn text(actions: &[Action]) -> String {
    actions.iter().map(Action::to_string).collect::<Vec<_>>().join(" ")
}

#[test]
fn the_first_schedules_are_those_of_their_papers() {
    let of = |kind: ScheduleKind| {
        let ranks = kind.schedule(2, 3).unwrap().ranks;
        ranks.iter().map(|actions| text(actions)).collect::<Vec<_>>()
    };
    assert_eq!(of(ScheduleKind::GPipe), ["F0 F1 F2 B0 B1 B2"; 2]);
    assert_eq!(of(ScheduleKind::OneForwardOneBackward), ["F0 F1 B0 F2 B1 B2", "F0 B0 F1 B1 F2 B2"]);
    assert_eq!(of(ScheduleKind::ZeroBubble), ["F0 F1 B0 F2 B1 B2", "F0 I0 F1 I1 W0 F2 I2 W1 W2"]);
    let interleaved = ScheduleKind::Interleaved { num_chunks: 2 }.schedule(2, 2).unwrap();
    assert_eq!(
        text(&interleaved.ranks[1]),
        "F0 F1 F0 of chunk 1 B0 of chunk 1 F1 of chunk 1 B1 of chunk 1 B0 B1"
    );
}

#[test]
fn every_schedule_ends_with_the_idle_time_of_its_formula() {
    let mut number = 0;
    each(|kind, ranks, micro_batches, schedule| {
        let timeline = schedule.check().unwrap();
        // Passes of 1, backward passes of 2: the ranks wait for the first and the last micro batch to pass the others.
        let (p, m) = (ranks as f64, micro_batches as f64);
        let expected = match kind {
            ScheduleKind::Interleaved { num_chunks } => (p - 1.0) / (num_chunks as f64 * m + p - 1.0),
            ScheduleKind::ZeroBubble => {
                let idle = f64::max(p - 1.0, 2.0 * p - 1.0 - m);
                idle / (3.0 * m + idle)
            }
            _ => (p - 1.0) / (m + p - 1.0),
        };
        assert!(
            (timeline.idle - expected).abs() < 1e-9,
            "{kind:?} {ranks} {micro_batches}: {}",
            timeline.idle
        );
        number += 1;
    });
    assert!(number > 130, "{number}");
}

#[test]
fn backward_passes_bound_the_micro_batches_in_memory_but_for_gpipe() {
    each(|kind, ranks, micro_batches, schedule| {
        let most = schedule.check().unwrap().most_in_flight;
        let expected = |rank: usize| match kind {
            ScheduleKind::GPipe => micro_batches,
            ScheduleKind::OneForwardOneBackward => micro_batches.min(ranks - rank),
            ScheduleKind::Interleaved { num_chunks } => {
                (micro_batches * num_chunks).min(2 * (ranks - 1 - rank) + (num_chunks - 1) * ranks + 1)
            }
            ScheduleKind::ZeroBubble => micro_batches.min(ranks),
        };
        let expected: Vec<_> = (0..ranks).map(expected).collect();
        assert!(
            most.iter().zip(&expected).all(|(most, bound)| most <= bound),
            "{kind:?}: {most:?} {expected:?}"
        );
        if kind != ScheduleKind::ZeroBubble {
            assert_eq!(most, expected, "{kind:?} {ranks} {micro_batches}");
        }
    });
}

#[test]
fn schedules_that_cannot_run_are_refused_with_rank_and_pass() {
    let valid = ScheduleKind::OneForwardOneBackward.schedule(2, 2).unwrap();
    let error = |change: &dyn Fn(&mut Schedule)| {
        let mut schedule = valid.clone();
        change(&mut schedule);
        schedule.check().unwrap_err().to_string()
    };
    assert!(error(&|s| s.ranks[1].truncate(3)).contains("B1 of rank 1 is missing"));
    assert!(
        error(&|s| s.ranks[0].push(Action::new(Pass::Forward, 0)))
            .contains("F0 of rank 0 is out of order or there twice")
    );
    assert!(error(&|s| s.ranks[0].swap(0, 2)).contains("B0 of rank 0 is out of order"));
    assert!(error(&|s| s.ranks[0][0].micro_batch = 7).contains("F7 of rank 0 is of a micro batch"));
    // The last stage has its second micro batch first, the first one waits for the gradient of the first.
    let blocked = error(&|s| {
        s.ranks[0] = ["F0", "B0", "F1", "B1"].map(named).to_vec();
        s.ranks[1] = ["F1", "B1", "F0", "B0"].map(named).to_vec();
    });
    assert!(
        blocked.contains("rank 0 waits in B0 for B0 of rank 1, rank 1 waits in F1 for F1 of rank 0"),
        "{blocked}"
    );
    // The second stage sends the gradients in another order than the first one receives them.
    let crossed = error(&|s| {
        s.ranks[0] = ["F0", "F1", "B1", "B0"].map(named).to_vec();
        s.ranks[1] = ["F0", "F1", "B0", "B1"].map(named).to_vec();
    });
    assert!(crossed.contains("B1 of rank 0 is not what is sent to it next"), "{crossed}");
    let interleaved = ScheduleKind::Interleaved { num_chunks: 2 }.schedule(2, 3);
    assert_eq!(interleaved, Err(ScheduleError::Indivisible { ranks: 2, micro_batches: 3 }));
    assert!(ScheduleKind::GPipe.schedule(0, 1).is_err() && ScheduleKind::GPipe.schedule(1, 0).is_err());
}

fn named(name: &str) -> Action {
    let pass = if name.starts_with('F') { Pass::Forward } else { Pass::Backward };
    Action::new(pass, name[1..].parse().unwrap())
}

#[test]
fn a_slow_pass_delays_all_that_wait_for_it() {
    let schedule = ScheduleKind::GPipe.schedule(2, 1).unwrap();
    let times = PassTimes { forward: 3.0, input_backward: 1.0, weight_backward: 4.0 };
    let timeline = schedule.simulate(|_, action| times.seconds(action.pass)).unwrap();
    let spans: Vec<_> = timeline.ranks.iter().flatten().map(|timed| (timed.start, timed.end)).collect();
    assert_eq!(spans, [(0.0, 3.0), (11.0, 16.0), (3.0, 6.0), (6.0, 11.0)]);
    assert_eq!((timeline.seconds, timeline.idle), (16.0, 0.5));
    // A rank that is slower than the others.
    let timeline = schedule.simulate(|rank, _| [1.0, 5.0][rank]).unwrap();
    assert_eq!((timeline.seconds, timeline.idle), (12.0, 0.5));
}

#[test]
fn a_drawing_has_a_line_per_rank_and_a_cell_per_unit_of_time() {
    let draw = |kind: ScheduleKind, micro_batches| kind.schedule(2, micro_batches).unwrap().draw().unwrap();
    let expected = "rank 0   F0 F1 .  .  B0 B0 .  B1 B1\nrank 1   .  F0 B0 B0 F1 B1 B1 .  .\n";
    assert_eq!(draw(ScheduleKind::OneForwardOneBackward, 2).unwrap(), expected);
    let interleaved = draw(ScheduleKind::Interleaved { num_chunks: 2 }, 2).unwrap();
    assert!(interleaved.contains("F0' ") && interleaved.lines().count() == 2, "{interleaved}");
    assert_eq!(draw(ScheduleKind::GPipe, 100), None);
}

/// A message: its sender, its receiver, and the pass that needs it.
type Message = (usize, usize, Action);

/// The messages of a rank in the order in which one stream runs them, in groups.
fn stream(schedule: &Schedule, rank: usize, due: &[DueMessages]) -> Vec<HashSet<Message>> {
    let (mut groups, mut open, mut waiting) = (Vec::new(), HashSet::new(), Vec::new());
    for (action, due) in schedule.ranks[rank].iter().zip(due) {
        if let Some((from, _)) = schedule.sender(rank, *action) {
            open.insert((from, rank, received(*action)));
            groups.push(std::mem::take(&mut open));
        }
        waiting.extend(schedule.receiver(rank, *action).map(|(to, action)| (rank, to, received(action))));
        for receiver in &due.receivers {
            let oldest = waiting.iter().position(|(_, to, _)| to == receiver).unwrap();
            open.insert(waiting.remove(oldest));
        }
        if !(open.is_empty() || due.join_next) {
            groups.push(std::mem::take(&mut open));
        }
    }
    assert!(open.is_empty() && waiting.is_empty(), "rank {rank}: {open:?} {waiting:?}");
    groups
}

/// The pass that names a message: its receiver may split its backward passes or not.
fn received(action: Action) -> Action {
    match action.pass {
        Pass::InputBackward => Action { pass: Pass::Backward, ..action },
        _ => action,
    }
}

/// Returns whether streams end that run one group after another, each message when both ranks have reached it.
fn ends(mut streams: Vec<Vec<HashSet<Message>>>) -> bool {
    streams.iter_mut().for_each(|stream| stream.reverse());
    loop {
        let current: Vec<HashSet<Message>> =
            streams.iter().map(|stream| stream.last().cloned().unwrap_or_default()).collect();
        let is_met =
            |message: &Message| current[message.0].contains(message) && current[message.1].contains(message);
        let met: HashSet<Message> =
            current.iter().flatten().filter(|message| is_met(message)).copied().collect();
        if met.is_empty() {
            return streams.iter().all(Vec::is_empty);
        }
        for stream in &mut streams {
            if let Some(group) = stream.last_mut() {
                group.retain(|message| !met.contains(message));
                if group.is_empty() {
                    stream.pop();
                }
            }
        }
    }
}

#[test]
fn one_stream_of_due_messages_ends_with_every_schedule() {
    let streams = |schedule: &Schedule, due: &dyn Fn(usize) -> Vec<DueMessages>| {
        (0..schedule.ranks.len()).map(|rank| stream(schedule, rank, &due(rank))).collect::<Vec<_>>()
    };
    each(|kind, ranks, micro_batches, schedule| {
        let due = |rank| due_messages(&schedule, rank).unwrap();
        assert!(ends(streams(&schedule, &due)), "{kind:?} {ranks} {micro_batches}");
    });
    // Sent right after its pass, or together with the message that the next pass receives.
    let at_once = |kind: ScheduleKind, joins: bool| {
        let schedule = kind.schedule(2, 4).unwrap();
        let due = |rank: usize| {
            let passes = &schedule.ranks[rank];
            let after = |(index, action): (usize, &Action)| DueMessages {
                receivers: schedule.receiver(rank, *action).map(|(to, _)| to).into_iter().collect(),
                join_next: joins
                    && passes.get(index + 1).is_some_and(|next| schedule.sender(rank, *next).is_some()),
            };
            passes.iter().enumerate().map(after).collect()
        };
        ends(streams(&schedule, &due))
    };
    assert!(!at_once(ScheduleKind::OneForwardOneBackward, false));
    assert!(!at_once(ScheduleKind::Interleaved { num_chunks: 2 }, true));
}

/// A rank waits until no more of its gradients are on their way than there are ranks: [`super::Neighbors`].
#[test]
fn gradients_on_their_way_are_at_most_as_many_as_ranks() {
    each(|kind, ranks, micro_batches, schedule| {
        let timeline = schedule.simulate(|_, _| 1.0).unwrap();
        for rank in 0..ranks {
            let mut received_at = Vec::new();
            for timed in timeline.ranks[rank].iter().filter(|timed| timed.action.pass != Pass::Forward) {
                if let Some((to, action)) = schedule.receiver(rank, timed.action) {
                    let passes = &timeline.ranks[to];
                    received_at.push(
                        passes.iter().find(|timed| received(timed.action) == received(action)).unwrap().start,
                    );
                }
                let on_their_way = received_at.iter().filter(|start| **start >= timed.end).count();
                assert!(
                    on_their_way <= ranks,
                    "{kind:?} {ranks} {micro_batches}: {on_their_way} at {timed:?}"
                );
            }
        }
    });
}
