//! What is remembered, told and compared.

use super::*;

fn label(name: &str, members: &[usize]) -> Arc<Label> {
    Arc::new(Label { name: name.into(), members: members.to_vec() })
}

type Call<'a> = (&'a Arc<Label>, u64, &'static str);

fn issued(calls: &[Call]) -> History<&'static str> {
    let mut history = History::default();
    for (id, (group, sequence, call)) in (0..).zip(calls) {
        let (group, sequence, call) = ((*group).clone(), *sequence, *call);
        history.add(Record { id, group, sequence, is_collective: true, call });
    }
    history
}

/// All but the last are complete.
fn history(calls: &[Call]) -> Vec<Told> {
    let mut history = issued(calls);
    (0..calls.len() as u64 - 1).for_each(|id| history.complete(id));
    history.tell()
}

#[test]
fn the_last_64_are_told_in_order_with_what_is_under_way() {
    let group = label("sp", &[0, 1]);
    let calls: Vec<_> = (0..100).map(|id| (&group, id, "barrier")).collect();
    let text = lines(&history(&calls));
    let lines: Vec<&str> = text.trim_start_matches('\n').lines().collect();
    assert_eq!(lines.len(), 64);
    assert_eq!(lines[0], "  #36 of \"sp\": barrier, complete");
    assert_eq!(lines[63], "  #99 of \"sp\": barrier, under way");
}

#[test]
fn the_rank_that_took_another_path_is_told_with_its_last_call() {
    let (world, sp) = (label("world", &[0, 1, 2]), label("sp", &[1, 2]));
    let ranks = [
        (0, history(&[(&world, 4, "barrier"), (&world, 5, "all_reduce")])),
        (1, history(&[(&world, 4, "barrier"), (&world, 5, "all_reduce")])),
        (2, history(&[(&world, 4, "barrier"), (&sp, 0, "broadcast")])),
    ];
    let expected = "
  #0 of \"sp\" (ranks [1, 2]):
    rank(s) [2] called broadcast
    rank 1 has not come to it; its last call is #5 of \"world\": all_reduce, under way
  #5 of \"world\" (ranks [0, 1, 2]):
    rank(s) [0, 1] called all_reduce
    rank 2 has not come to it; its last call is #0 of \"sp\": broadcast, under way";
    assert_eq!(divergence(&ranks), expected);
}

#[test]
fn different_calls_at_one_place_are_told_and_later_ones_are_not() {
    let world = label("world", &[0, 1]);
    let ranks = [
        (0, history(&[(&world, 0, "barrier"), (&world, 1, "all_gather"), (&world, 2, "barrier")])),
        (1, history(&[(&world, 0, "barrier"), (&world, 1, "all_reduce")])),
    ];
    let text = divergence(&ranks);
    assert!(text.starts_with("\n  #1 of \"world\""), "{text}");
    assert!(text.contains("[0] called all_gather") && text.contains("[1] called all_reduce"), "{text}");
    assert!(!text.contains("#2"), "{text}");
}

#[test]
fn absent_ranks_and_other_operations_are_told_from_different_arguments() {
    let (world, sp) = (label("world", &[0, 1, 2, 3]), label("sp", &[2, 3]));
    let ranks = [
        (0, history(&[(&world, 4, "barrier"), (&world, 5, "all_to_all(1)")])),
        (1, history(&[(&world, 4, "barrier"), (&world, 5, "barrier")])),
        (2, history(&[(&world, 4, "barrier"), (&world, 5, "all_to_all(2)"), (&sp, 5, "barrier")])),
    ];
    assert_eq!(absent(&ranks, &world, 5), [3], "which has told nothing");
    assert_eq!(absent(&ranks, &world, 6), [0, 1, 2, 3], "another group's number does not count");
    assert_eq!(absent(&ranks, &sp, 3), [3], "what is forgotten was issued");
    let (rank, called, others, others_called) = another_operation(&ranks, &world, 5).unwrap();
    assert_eq!((rank, called.as_str(), others_called.as_str()), (1, "barrier", "all_to_all(1)"));
    assert_eq!(others, [0, 2]);
    assert_eq!(another_operation(&ranks, &world, 4), None);
    assert_eq!((first_to_tell(&[]), first_to_tell(&[0, 1, 3])), (0, 2));
    let text = where_they_part(ranks.to_vec(), &[3]);
    assert!(text.contains("rank 3 has not come to it; nothing is known of it"), "{text}");
}

#[test]
fn a_rank_that_an_older_operation_keeps_has_not_come_to_the_next_one() {
    let (world, sp) = (label("world", &[0, 1, 2, 3]), label("sp", &[2, 3]));
    let calls = [(&world, 4, "barrier"), (&sp, 5, "barrier")];
    let ranks = [(2, history(&calls)), (3, issued(&calls).tell())];
    assert_eq!(absent(&ranks, &sp, 5), [3]);
    assert_eq!(absent(&ranks, &sp, 4), [] as [usize; 0], "it has left that behind");
}

#[test]
fn all_but_the_newest_can_be_completed_at_once() {
    let group = label("sp", &[0, 1]);
    let mut history = issued(&[(&group, 0, "barrier"), (&group, 1, "barrier"), (&group, 2, "barrier")]);
    history.complete_before_newest();
    let text = lines(&history.tell());
    assert_eq!(text.matches("complete").count(), 2, "{text}");
    assert!(text.ends_with("#2 of \"sp\": barrier, under way"), "{text}");
}

#[test]
fn groups_of_one_name_are_told_apart_and_forgotten_calls_count_as_made() {
    let [first, second] = [label("sp", &[0, 1]), label("sp", &[2, 3])];
    // Another pair may be further; and rank 1 remembers more of its own.
    let ranks = [
        (0, history(&[(&first, 8, "barrier"), (&first, 9, "barrier")])),
        (1, history(&[(&first, 7, "barrier"), (&first, 8, "barrier"), (&first, 9, "barrier")])),
        (2, history(&[(&second, 3, "barrier")])),
        (3, history(&[(&second, 3, "barrier")])),
    ];
    assert_eq!(divergence(&ranks), "\n  no group has one among the calls that are known");
}
