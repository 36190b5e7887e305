//! Mistakes in the use of collectives, each with what the ledger says.

use super::*;
use crate::comm::fake::FakeGroup;
use crate::comm::{ProcessGroupExt, ReduceOp};
use candle_core::{DType, Device};
use std::sync::Arc;
use ulysses_kernels::device::DeviceKind;
use ulysses_kernels::device::dry::DryDevice;
use ulysses_kernels::tensor::zeros;

/// The groups of rank 0 by the axes of a mesh.
struct Groups {
    mesh: DeviceMesh,
}

impl Groups {
    fn along(&self, axis: &str) -> LedgerGroup {
        Self::over(&self.mesh, axis)
    }

    /// A group of a derived mesh, over several axes.
    fn over(mesh: &DeviceMesh, axis: &str) -> LedgerGroup {
        let group = FakeGroup::new(axis, mesh.group_of(axis, 0).unwrap(), 0).unwrap();
        let group = group.observed(Arc::new(|_| {}));
        LedgerGroup::new(Arc::new(group))
    }
}

fn with_ledger(mesh: &str, work: impl FnOnce(&Groups)) {
    on_rank(0, mesh, work);
}

fn on_rank(rank: usize, mesh: &str, work: impl FnOnce(&Groups)) {
    let groups = Groups { mesh: DeviceMesh::parse(mesh, None).unwrap() };
    let device = DryDevice { kind: DeviceKind::Cpu, threads: 1 };
    dry::run(device, |_| {}, || run(groups.mesh.clone(), rank, || work(&groups))).unwrap().unwrap();
}

fn tensor() -> Tensor {
    zeros(8, DType::F32, &Device::Cpu).unwrap()
}

/// A gradient that a backward pass has added to.
fn gradient() -> Tensor {
    gradient_of("model.layers.3", &[])
}

/// The gradient of a parameter that the ranks along some axes divide.
fn gradient_of(parameter: &str, divided_over: &[&'static str]) -> Tensor {
    let gradient = tensor();
    let of_parameter = || GradientOf { parameter, is_frozen: false, divided_over: divided_over.to_vec() };
    add_tokens(&gradient, || vec![of_parameter()], || format!("the gradient of `{parameter}`")).unwrap();
    gradient
}

/// Sums a gradient over every axis, and returns its placements.
fn sum(groups: &Groups, gradient: &Tensor, axes: &[&str]) -> Placed {
    for axis in axes {
        groups.along(axis).all_reduce(gradient, ReduceOp::Sum).unwrap();
    }
    placed(gradient).unwrap()
}

fn check_summed(gradient: &Tensor) -> Result<(), LedgerError> {
    placed(gradient).unwrap().check_summed()
}

#[track_caller]
fn assert_fault<E: ToString>(outcome: Result<(), E>, expected: &str) {
    let error = outcome.map_err(|error| error.to_string()).unwrap_err();
    assert!(error.ends_with(expected), "{error}");
}

#[test]
fn a_sum_that_is_missing_or_done_twice_is_named_with_unit_and_axis() {
    with_ledger("2x2", |groups| {
        let gradient = gradient();
        assert_fault(
            check_summed(&gradient),
            "the gradient of `model.layers.3` is used without its sum over `dp`",
        );
        groups.along("dp").all_reduce(&gradient, ReduceOp::Sum).unwrap();
        assert_fault(check_summed(&gradient), "is used without its sum over `sp`");
        groups.along("sp").all_reduce(&gradient, ReduceOp::Sum).unwrap();
        check_summed(&gradient).unwrap();
        let twice = groups.along("sp").all_reduce(&gradient, ReduceOp::Sum);
        assert_fault(twice, "the gradient of `model.layers.3` is summed over `sp` twice");
    });
}

#[test]
fn only_a_sum_is_the_sum() {
    with_ledger("2x2", |groups| {
        for op in [ReduceOp::Average, ReduceOp::Max, ReduceOp::Min, ReduceOp::Product] {
            let reduced = groups.along("dp").all_reduce(&gradient(), op);
            assert_fault(
                reduced,
                "the gradient of `model.layers.3` is reduced over `dp`, but not to the sum",
            );
            let partition = zeros(4, DType::F32, &Device::Cpu).unwrap();
            let reduced = groups.along("sp").reduce_scatter(&gradient(), &partition, op);
            assert_fault(
                reduced,
                "the gradient of `model.layers.3` is reduced over `sp`, but not to the sum",
            );
        }
        let (gradient, partition) = (gradient(), zeros(4, DType::F32, &Device::Cpu).unwrap());
        groups.along("dp").reduce_scatter(&gradient, &partition, ReduceOp::Sum).unwrap();
        groups.along("sp").all_reduce(&partition, ReduceOp::Sum).unwrap();
        sums::begin_squares(placed(&partition)).unwrap();
        let norm = groups.along("dp").all_reduce_values(&[1.0], ReduceOp::Max).map(drop);
        assert_fault(norm, "the norm of the gradients is reduced over `dp`, but not to the sum");
    });
}

#[test]
fn a_sum_over_a_part_of_sp_leaves_the_other_part() {
    with_ledger("ring=2,ulysses=2", |groups| {
        for (part, rest) in [("ring", "ulysses"), ("ulysses", "ring")] {
            let gradient = gradient();
            groups.along(part).all_reduce(&gradient, ReduceOp::Sum).unwrap();
            assert_fault(check_summed(&gradient), &format!("without its sum over `{rest}`"));
        }
        let whole = groups.mesh.flatten(&["ring", "ulysses"], "sp").unwrap();
        let gradient = gradient();
        Groups::over(&whole, "sp").all_reduce(&gradient, ReduceOp::Sum).unwrap();
        check_summed(&gradient).unwrap();
    });
}

#[test]
fn partitions_over_dp_and_sp_are_not_summed_over_sp_again() {
    with_ledger("2x2", |groups| {
        let whole = groups.mesh.flatten(&["dp", "sp"], "shard").unwrap();
        let (gradient, partition) = (gradient(), zeros(2, DType::F32, &Device::Cpu).unwrap());
        Groups::over(&whole, "shard").reduce_scatter(&gradient, &partition, ReduceOp::Sum).unwrap();
        check_summed(&partition).unwrap();
        assert_fault(groups.along("sp").all_reduce(&partition, ReduceOp::Sum), "summed over `sp` twice");
    });
}

#[test]
fn a_copy_in_bf16_is_still_a_partial_sum_of_the_replicas() {
    with_ledger("2x2", |groups| {
        let (gradient, rounded) = (gradient(), zeros(8, DType::BF16, &Device::Cpu).unwrap());
        copy(&gradient, &rounded).unwrap();
        let partition = zeros(4, DType::F32, &Device::Cpu).unwrap();
        groups.along("dp").reduce_scatter(&rounded, &partition, ReduceOp::Sum).unwrap();
        assert_fault(check_summed(&partition), "without its sum over `sp`");
    });
}

#[test]
fn a_backward_pass_must_not_add_to_a_sum() {
    with_ledger("2x1", |groups| {
        let gradient = gradient();
        groups.along("dp").all_reduce(&gradient, ReduceOp::Sum).unwrap();
        let tied = add_tokens(&gradient, Vec::new, || unreachable!("it has a name"));
        assert_fault(tied, "is added to by a backward pass after its sum over `dp`");
    });
}

#[test]
fn a_reduction_in_flight_is_not_used() {
    with_ledger("2x1", |groups| {
        let gradient = gradient();
        let pending = groups.along("dp").start_all_reduce(&gradient, ReduceOp::Sum).unwrap();
        assert_fault(check_summed(&gradient), "is used before the collective over `dp` is complete");
        assert_fault(copy(&gradient, &tensor()), "is used before the collective over `dp` is complete");
        pending.wait().unwrap();
        check_summed(&gradient).unwrap();
    });
}

#[test]
fn micro_steps_are_added_up_before_or_after_their_sum_but_not_mixed() {
    with_ledger("1x2", |groups| {
        let (first, second) = (gradient(), gradient());
        add(&second, &first).unwrap();
        groups.along("sp").all_reduce(&first, ReduceOp::Sum).unwrap();
        assert_fault(add(&second, &first), "is combined with a tensor that is placed differently over `sp`");
    });
}

#[test]
fn a_gradient_without_a_backward_pass_is_neither_summed_nor_used() {
    with_ledger("2x1", |groups| {
        let frozen = tensor();
        place(&frozen, Placed::unwritten(|| "the gradient of `model.embed_tokens (frozen)`".to_owned()));
        let reduced = groups.along("dp").all_reduce(&frozen, ReduceOp::Sum);
        assert_fault(reduced, "(frozen)` is summed over `dp`, but no backward pass has added to it");
        assert_fault(check_summed(&frozen), "(frozen)` is used without its sum over `dp`");
    });
}

#[test]
fn a_norm_is_summed_over_shards_and_not_over_replicas() {
    with_ledger("2x2", |groups| {
        let (gradient, partition) = (gradient(), zeros(4, DType::F32, &Device::Cpu).unwrap());
        let begin = || sums::begin_squares(placed(&partition));
        groups.along("dp").reduce_scatter(&gradient, &partition, ReduceOp::Sum).unwrap();
        assert_fault(begin(), "the gradient of `model.layers.3` is used without its sum over `sp`");
        groups.along("sp").all_reduce(&partition, ReduceOp::Sum).unwrap();
        begin().unwrap();
        assert_fault(sums::end(), "the norm of the gradients is used without its sum over `dp`");
        begin().unwrap();
        groups.along("dp").all_gather_values(&[1.0]).unwrap();
        sums::end().unwrap();
        // Not of a norm.
        groups.along("dp").all_reduce_values(&[1.0], ReduceOp::Sum).unwrap();
        for axis in ["sp", "dp"] {
            begin().unwrap();
            groups.along("dp").all_gather_values(&[1.0]).unwrap();
            let twice = groups.along(axis).all_reduce_values(&[1.0], ReduceOp::Sum).map(drop);
            assert_fault(twice, &format!("the norm of the gradients is summed over `{axis}` twice"));
        }
    });
}

#[test]
fn every_gradient_counts_once_in_the_norm() {
    with_ledger("2x1", |groups| {
        let [first, second] = ["a", "b"].map(|name| sum(groups, &gradient_of(name, &[]), &["dp"]));
        let norm_of = |gradients: &[&Placed]| {
            sums::begin_norm();
            sums::begin_squares(gradients.iter().copied().cloned())?;
            sums::end()?;
            sums::end_norm()
        };
        norm_of(&[&first, &second]).unwrap();
        assert_fault(norm_of(&[&first]), "the gradient of `b` is not counted in the norm");
        assert_fault(
            norm_of(&[&second, &first, &second]),
            "the gradient of `b` is counted twice in the norm",
        );
        clear_gradients();
        norm_of(&[]).unwrap();
    });
}

#[test]
fn a_gradient_of_two_stages_counts_on_the_first_and_the_norm_is_summed_over_stages() {
    for stage in [0, 1] {
        on_rank(stage, "pp=2,dp=1,sp=1", |groups| {
            let pp = groups.along("pp");
            let tied = sum(groups, &gradient_of("tied", &[]), &["pp"]);
            let own = sum(groups, &gradient_of("own", &["pp"]), &[]);
            let norm_of = |gradients: &[&Placed], is_summed: bool| {
                sums::begin_norm();
                sums::begin_squares(gradients.iter().copied().cloned())?;
                if is_summed {
                    pp.all_gather_values(&[1.0]).unwrap();
                }
                sums::end()?;
                sums::end_norm()
            };
            let (both, one) = (norm_of(&[&own, &tied], true), norm_of(&[&own], true));
            if stage == 0 {
                both.unwrap();
                assert_fault(one, "the gradient of `tied` is not counted in the norm");
            } else {
                assert_fault(
                    both,
                    "the gradient of `tied` is counted in the norm by several ranks along `pp`, which all have it",
                );
                one.unwrap();
            }
            assert_fault(
                norm_of(&[&own], false),
                "the norm of the gradients is used without its sum over `pp`",
            );
            assert_fault(norm_of(&[], false), "the norm of the gradients is used without its sum over `pp`");
        });
    }
}

#[test]
fn the_losses_are_summed_over_every_axis() {
    with_ledger("2x2", |groups| {
        sums::begin_tokens("the sum of the losses");
        groups.along("sp").all_reduce_values(&[1.0], ReduceOp::Sum).unwrap();
        assert_fault(sums::end(), "the sum of the losses is used without its sum over `dp`");
    });
}

#[test]
fn parameters_in_a_buffer_are_trained_and_divided_alike() {
    with_ledger("2x2", |_| {
        let of = |parameter, is_frozen, divided_over: &[_]| GradientOf {
            parameter,
            is_frozen,
            divided_over: divided_over.to_vec(),
        };
        let add = |parameters| add_tokens(&tensor(), || parameters, || "the gradient of a buffer".to_owned());
        add(vec![of("a", false, &["dp"]), of("b", false, &["dp"])]).unwrap();
        assert_fault(
            add(vec![of("a", false, &["dp"]), of("b", false, &[])]),
            "the gradient of `b` is combined with a tensor that is placed differently over `dp`",
        );
        assert_fault(
            add(vec![of("a", false, &[]), of("b", true, &[])]),
            "the gradient of `b` is computed, but the parameter is frozen",
        );
    });
}

#[test]
fn parameters_are_gathered_before_their_use() {
    with_ledger("2x2", |groups| {
        let dp = groups.along("dp");
        let name = || "the parameter buffer of `lm_head`".to_owned();
        let (own, whole) = (tensor(), zeros(16, DType::F32, &Device::Cpu).unwrap());
        place(&own, Placed::along(name, [PlacedAlong { group: &dp, placement: Shard(0) }]));
        let used = placed(&own).unwrap().check_gathered();
        assert_fault(used, "the parameter buffer of `lm_head` is used without its gather over `dp`");
        assert_fault(
            groups.along("sp").all_gather(&own, &whole),
            "is gathered over `sp`, but not sharded over it",
        );
        dp.all_gather(&own, &whole).unwrap();
        placed(&whole).unwrap().check_gathered().unwrap();
    });
}

#[test]
fn replicas_are_compared_along_exactly_the_axes_that_replicate() {
    with_ledger("2x2", |groups| {
        let (dp, sp) = (groups.along("dp"), groups.along("sp"));
        let [dp, sp] = [&dp, &sp].map(|group| group as &dyn ProcessGroup);
        let state = Placed::along(
            || "the optimizer state of `lm_head`".to_owned(),
            [PlacedAlong { group: dp, placement: Shard(0) }],
        )
        .unwrap();
        state.check_compared(&[sp]).unwrap();
        let of_shards = state.check_compared(&[sp, dp]);
        assert_fault(
            of_shards,
            "the optimizer state of `lm_head` is compared over `dp`, but sharded over it",
        );
        assert_fault(state.check_compared(&[]), "is not compared over `sp`, but replicated over it");
    });
}

#[test]
fn outside_of_a_dry_run_nothing_is_recorded() {
    let gradient = tensor();
    add_tokens(&gradient, || unreachable!("no parameters"), || unreachable!("no name")).unwrap();
    assert_eq!(placed(&gradient), None);
    sums::begin_norm();
    sums::begin_squares(None).unwrap();
    sums::end().unwrap();
    sums::end_norm().unwrap();
}
