//! The parity suite notices what it is there to notice: wrong parts put in at the library's
//! trait seams each make it fail.

#![allow(clippy::unwrap_used)]

mod support;

use std::sync::Arc;
use support::doubles::{Fault, FaultyGroup, WrongGeometry};
use support::mesh_run::{Doubles, Layout, Problem, Rule, layout, matches};
use support::problems::main_problem;
use support::reference::{Batch, IGNORED};
use ulysses::zero::ZeroGroups;

const TOLERANCE: f64 = 2e-5;

fn problem() -> Problem {
    main_problem(Rule::Sgd { lr: 0.1 }, None)
}

/// Whether the suite accepts a run with `doubles`. A run that ends in an error is noticed too.
fn is_accepted(layout: Layout, doubles: &Doubles) -> bool {
    let problem = problem();
    let expected = problem.reference().unwrap();
    problem.run_with(layout, doubles).is_ok_and(|outcome| matches(&outcome, &expected, TOLERANCE))
}

#[test]
fn the_right_parts_are_accepted() {
    for layout in [layout(1, 2, 0), layout(2, 3, 3)] {
        assert!(is_accepted(layout, &Doubles::default()), "{layout:?}");
    }
}

#[test]
fn a_group_that_skips_the_sum_over_sp_is_noticed() {
    let groups =
        |groups: ZeroGroups| ZeroGroups { sp: FaultyGroup::wrap(groups.sp, Fault::SkipsTheSum), ..groups };
    for stage in 0..=3 {
        assert!(
            !is_accepted(layout(2, 2, stage), &Doubles { groups, ..Doubles::default() }),
            "stage {stage}"
        );
    }
}

#[test]
fn a_loss_scaled_by_sp_is_noticed() {
    let groups = |groups: ZeroGroups| ZeroGroups {
        sp: FaultyGroup::wrap(groups.sp, Fault::ScalesByWorldSize),
        ..groups
    };
    for stage in 0..=3 {
        assert!(
            !is_accepted(layout(2, 2, stage), &Doubles { groups, ..Doubles::default() }),
            "stage {stage}"
        );
    }
}

#[test]
fn attention_across_documents_is_noticed() {
    let attention = Arc::new(WrongGeometry::ignores_cu_seqlens());
    assert!(!is_accepted(layout(1, 1, 0), &Doubles { attention: attention.clone(), ..Doubles::default() }));
    assert!(!is_accepted(layout(1, 2, 0), &Doubles { attention, ..Doubles::default() }));
}

#[test]
fn kv_heads_found_by_division_are_noticed_where_heads_are_uneven() {
    // Even heads: division happens to be right, so sp 3 is the case that tells.
    let doubles =
        || Doubles { attention: Arc::new(WrongGeometry::divides_heads_by_group()), ..Doubles::default() };
    assert!(is_accepted(layout(1, 2, 0), &doubles()));
    assert!(!is_accepted(layout(1, 3, 0), &doubles()));
}

#[test]
fn labels_shifted_after_the_cut_are_noticed() {
    // Shifting within a shard leaves its last token without a label.
    let batch = |mut batch: Batch, layout: Layout| {
        let seq_len = batch.labels[0].len();
        for sp_rank in 0..layout.sp {
            let last = ulysses::mesh::shard_range(seq_len, layout.sp, sp_rank).end - 1;
            batch.labels.iter_mut().for_each(|row| row[last] = IGNORED);
        }
        batch
    };
    assert!(!is_accepted(layout(1, 2, 0), &Doubles { batch, ..Doubles::default() }));
}
