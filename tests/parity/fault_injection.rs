//! Injects faults through the library's traits, and checks that the parity suite detects each one.

use crate::support::doubles::{EqualWeights, Fault, FaultyGroup, LossyGroup, WrongAttentionLayout};
use crate::support::mesh_run::{Doubles, Layout, Problem, Rule, layout, matches};
use crate::support::problems::main_problem;
use crate::support::reference::{Batch, IGNORED};
use crate::support::vocab_doubles::{FaultyHeadGroup, HeadFault, with_head_summed_over_tp, with_next_row};
use std::sync::Arc;
use ulysses::comm::{RingGroups, TensorGroups, TrainingGroups};

const TOLERANCE: f64 = 2e-5;

fn problem() -> Problem {
    main_problem(Rule::Sgd { lr: 0.1 }, None)
}

/// The suite's verdict on a run.
#[derive(Debug, PartialEq)]
enum Verdict {
    Accepted,
    /// Loss, norms, gradients or parameters differ from the reference.
    WrongNumbers,
}

fn verdict(layout: Layout, doubles: &Doubles) -> Verdict {
    verdict_on(&problem(), layout, doubles)
}

fn verdict_on(problem: &Problem, layout: Layout, doubles: &Doubles) -> Verdict {
    let expected = problem.reference().unwrap();
    // A test double that caused an error would prove nothing about the comparison.
    let outcome = problem.run_with(layout, doubles).unwrap();
    if matches(&outcome, &expected, TOLERANCE) { Verdict::Accepted } else { Verdict::WrongNumbers }
}

fn with_groups(groups: fn(TrainingGroups) -> TrainingGroups) -> Doubles {
    Doubles { groups, ..Doubles::default() }
}

#[test]
fn correct_parts_are_accepted() {
    for layout in [layout(1, 2, 0), layout(2, 3, 3)] {
        assert_eq!(verdict(layout, &Doubles::default()), Verdict::Accepted, "{layout:?}");
    }
}

#[test]
fn a_group_that_skips_the_sum_over_sp_is_detected() {
    let doubles = with_groups(|groups| TrainingGroups {
        sp: FaultyGroup::wrap(groups.sp, Fault::SkipsTheSum),
        ..groups
    });
    for stage in 0..=3 {
        assert_eq!(verdict(layout(2, 2, stage), &doubles), Verdict::WrongNumbers, "stage {stage}");
    }
}

#[test]
fn a_group_that_skips_the_sum_over_dp_is_detected() {
    let doubles = with_groups(|groups| TrainingGroups {
        dp: FaultyGroup::wrap(groups.dp, Fault::SkipsTheSum),
        ..groups
    });
    for stage in 0..=3 {
        assert_eq!(verdict(layout(2, 2, stage), &doubles), Verdict::WrongNumbers, "stage {stage}");
    }
}

#[test]
fn a_loss_scaled_by_sp_is_detected() {
    let doubles = with_groups(|groups| TrainingGroups {
        sp: FaultyGroup::wrap(groups.sp, Fault::ScalesByWorldSize),
        ..groups
    });
    for stage in 0..=3 {
        assert_eq!(verdict(layout(2, 2, stage), &doubles), Verdict::WrongNumbers, "stage {stage}");
    }
}

/// Faults of tensor parallelism: summands of activations that are not summed or are scaled; replicated gradients (norms,
/// embedding) that are not summed over the ranks with other tokens, are counted once per rank, or are summed over sp alone.
#[test]
fn wrong_sums_of_tensor_parallelism_are_detected() {
    fn change(
        groups: TrainingGroups,
        change: impl Fn(TensorGroups, &TrainingGroups) -> TensorGroups,
    ) -> TrainingGroups {
        let tensor = groups.tensor.clone().map(|tensor| change(tensor, &groups));
        TrainingGroups { tensor, ..groups }
    }
    let on_tp = |dp, sp, stage| Layout { tp: 2, ..layout(dp, sp, stage) };
    let faults: [fn(TrainingGroups) -> TrainingGroups; 5] = [
        |groups| {
            change(groups, |TensorGroups { tp, tokens }, _| TensorGroups {
                tp: FaultyGroup::wrap(tp, Fault::SkipsTheSum),
                tokens,
            })
        },
        |groups| {
            change(groups, |TensorGroups { tp, tokens }, _| TensorGroups {
                tp,
                tokens: FaultyGroup::wrap(tokens, Fault::SkipsTheSum),
            })
        },
        |groups| {
            change(groups, |TensorGroups { tp, tokens }, _| TensorGroups {
                tp,
                tokens: FaultyGroup::wrap(tokens, Fault::ScalesByWorldSize),
            })
        },
        |groups| change(groups, |tensor, groups| TensorGroups { tokens: groups.sp.clone(), ..tensor }),
        |groups| change(groups, |tensor, _| TensorGroups { tokens: tensor.tp.clone(), ..tensor }),
    ];
    for layout in [on_tp(1, 2, 0), on_tp(2, 2, 3)] {
        assert_eq!(verdict(layout, &Doubles::default()), Verdict::Accepted);
        for (number, groups) in faults.into_iter().enumerate() {
            assert_eq!(verdict(layout, &with_groups(groups)), Verdict::WrongNumbers, "{number}, {layout:?}");
        }
    }
}

#[test]
fn wrong_sums_over_slices_of_the_vocabulary_are_detected() {
    fn faulty(groups: TrainingGroups, fault: HeadFault) -> TrainingGroups {
        let wrap =
            |TensorGroups { tp, tokens }| TensorGroups { tp: FaultyHeadGroup::wrap(tp, fault), tokens };
        TrainingGroups { tensor: groups.tensor.map(wrap), ..groups }
    }
    let faults: [fn(TrainingGroups) -> TrainingGroups; 3] = [
        |groups| faulty(groups, HeadFault::DenominatorOfOneSlice),
        |groups| faulty(groups, HeadFault::LabelTwice),
        |groups| faulty(groups, HeadFault::GradientOfOneSlice),
    ];
    let layout = Layout { tp: 2, ..layout(1, 2, 1) };
    for (number, groups) in faults.into_iter().enumerate() {
        assert_eq!(verdict(layout, &with_groups(groups)), Verdict::WrongNumbers, "fault {number}");
    }
    for model in [with_next_row, with_head_summed_over_tp] {
        let faulty = Problem { model, ..problem() };
        assert_eq!(verdict_on(&faulty, layout, &Doubles::default()), Verdict::WrongNumbers);
    }
}

#[test]
fn attention_across_documents_is_detected() {
    let doubles =
        Doubles { attention: Arc::new(WrongAttentionLayout::ignores_cu_seqlens()), ..Doubles::default() };
    for sp in [1, 2] {
        assert_eq!(verdict(layout(1, sp, 0), &doubles), Verdict::WrongNumbers, "sp {sp}");
    }
}

#[test]
fn kv_heads_computed_by_division_are_detected_for_uneven_heads() {
    let doubles =
        Doubles { attention: Arc::new(WrongAttentionLayout::divides_heads_by_group()), ..Doubles::default() };
    // With even heads the division happens to be right, so only sp 3 shows the fault.
    assert_eq!(verdict(layout(1, 2, 0), &doubles), Verdict::Accepted);
    assert_eq!(verdict(layout(1, 3, 0), &doubles), Verdict::WrongNumbers);
}

#[test]
fn labels_shifted_after_sharding_are_detected() {
    // Shifting within a shard leaves its last token without a label.
    let batch = |mut batch: Batch, layout: Layout| {
        let seq_len = batch.labels[0].len();
        for sp_rank in 0..layout.sp {
            let last = ulysses::mesh::shard_range(seq_len, layout.sp, sp_rank).end - 1;
            batch.labels.iter_mut().for_each(|row| row[last] = IGNORED);
        }
        batch
    };
    assert_eq!(verdict(layout(1, 2, 0), &Doubles { batch, ..Doubles::default() }), Verdict::WrongNumbers);
}

/// A ring that loses its transfer number `N`.
fn losing<const N: u64>(groups: TrainingGroups) -> TrainingGroups {
    let lossy = |RingGroups { ring, ulysses }| RingGroups { ring: LossyGroup::wrap(ring, N), ulysses };
    TrainingGroups { ring: groups.ring.map(lossy), ..groups }
}

#[test]
fn every_lost_transfer_of_a_ring_is_detected() {
    // Two layers on a ring of three: four transfers for the logits, which are not compared. Then four of blocks forward;
    // backward per layer two of blocks and two of gradients, of which the last one returns them to their rank.
    let transfers: [fn(TrainingGroups) -> TrainingGroups; 12] = [
        losing::<4>,
        losing::<5>,
        losing::<6>,
        losing::<7>,
        losing::<8>,
        losing::<9>,
        losing::<10>,
        losing::<11>,
        losing::<12>,
        losing::<13>,
        losing::<14>,
        losing::<15>,
    ];
    let ring = Layout { ring: 3, ..layout(1, 3, 0) };
    assert_eq!(verdict(ring, &Doubles::default()), Verdict::Accepted);
    for (number, groups) in transfers.into_iter().enumerate() {
        assert_eq!(verdict(ring, &with_groups(groups)), Verdict::WrongNumbers, "transfer {}", number + 4);
    }
}

#[test]
fn blocks_of_a_ring_merged_with_equal_weights_are_detected() {
    let doubles = Doubles { attention: Arc::new(EqualWeights), ..Doubles::default() };
    let problem = Problem { steps: 1, ..problem() };
    let expected = problem.reference().unwrap().steps[0].loss;
    let is_right = |layout| {
        let loss = problem.run_with(layout, &doubles).unwrap().loss;
        (loss - expected).abs() < TOLERANCE * expected
    };
    let ring = Layout { ring: 2, ..layout(1, 2, 0) };
    // Without a ring nothing is merged, so the first loss is right.
    assert!(is_right(layout(1, 2, 0)) && !is_right(ring));
}
