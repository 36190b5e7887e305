//! Partition arithmetic by hand, and live optimizers on several meshes.

use super::update::param_group_ranges::{GroupSettings, ParamGroupRange};
use super::*;
use crate::comm::{CollectiveOp, LaunchOptions, MeshGroups, TrainingGroups, launch};
use crate::config::{
    Adagrad, Adam, CommunicationDtype, GroupRate, Lamb, Lion, OptimizerConfig, Sgd, ZeroStage,
};
use crate::mesh::DeviceMesh;
use candle_core::DType;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use ulysses_kernels::offload::OffloadStore;
use ulysses_kernels::tensor::{TensorOptions, to_vec, with_slice_mut};

/// Two parameters of 6 and 5 elements.
fn layout(num_partitions: usize) -> FlatLayout {
    FlatLayout::new("unit", [("a".into(), vec![2, 3]), ("b".into(), vec![5])], num_partitions)
}

#[test]
fn partitions_are_equal_contiguous_and_cover_the_padded_buffer() {
    let layout = layout(4);
    assert_eq!((layout.numel(), layout.padded_numel(), layout.partition_numel()), (11, 12, 3));
    assert_eq!((0..4).map(|rank| layout.partition(rank)).collect::<Vec<_>>(), [0..3, 3..6, 6..9, 9..12]);
}

#[test]
fn pieces_cut_parameters_at_partition_boundaries() {
    let pieces: Vec<_> = layout(2).pieces(6..12).map(|p| (p.parameter, p.elements, p.target)).collect();
    assert_eq!(pieces, [(1, 0..5, 0..5)]);
    let pieces: Vec<_> = layout(3).pieces(4..8).map(|p| (p.parameter, p.elements, p.target)).collect();
    assert_eq!(pieces, [(0, 4..6, 0..2), (1, 0..2, 2..4)]);
}

#[test]
fn a_unit_smaller_than_the_number_of_ranks_leaves_ranks_with_padding_only() {
    let layout = FlatLayout::new("unit", [("a".into(), vec![2])], 4);
    assert_eq!(layout.padded_numel(), 4);
    assert_eq!(layout.pieces(layout.partition(3)).count(), 0);
}

#[test]
fn expected_bytes_follow_the_table_of_stages() {
    // Adam, Ψ = 100 padded elements, S = 4: 16Ψ; 8Ψ + 8Ψ/S; 4Ψ + 12Ψ/S; 16Ψ/S.
    let totals = |dtype| ZeroStage::ALL.map(|stage| StateBytes::expected(stage, 100, 4, 2, dtype).total());
    assert_eq!(totals(DType::F32), [1600, 1000, 700, 400]);
    // With a master copy: 18Ψ; 6Ψ + 12Ψ/S; 2Ψ + 16Ψ/S; 18Ψ/S.
    assert_eq!(totals(DType::BF16), [1800, 900, 600, 450]);
}

/// Runs `check` on every rank of a (dp, sp) mesh, with a two-unit optimizer whose parameter elements start as
/// their index within the unit.
fn on_mesh(mesh: (usize, usize), stage: ZeroStage, check: impl Fn(&mut ZeroOptimizer, usize, usize) + Sync) {
    on_mesh_with(mesh, stage, (momentum(), TensorOptions::default), check);
}

fn momentum() -> OptimizerConfig {
    OptimizerConfig::Sgd(Sgd { lr: 1.0, momentum: 0.5, nesterov: false, weight_decay: 0.0 })
}

/// The same with another optimizer and other storage.
fn on_mesh_with<S: Into<Storage>>(
    (dp, sp): (usize, usize),
    stage: ZeroStage,
    (config, storage): (OptimizerConfig, impl Fn() -> S + Sync),
    check: impl Fn(&mut ZeroOptimizer, usize, usize) + Sync,
) {
    on_mesh_sending(CommunicationDtype::Fp32, (dp, sp), stage, (config, storage), check);
}

/// The same with gradients that are sent in `gradient_dtype`.
fn on_mesh_sending<S: Into<Storage>>(
    gradient_dtype: CommunicationDtype,
    (dp, sp): (usize, usize),
    stage: ZeroStage,
    (config, storage): (OptimizerConfig, impl Fn() -> S + Sync),
    check: impl Fn(&mut ZeroOptimizer, usize, usize) + Sync,
) {
    let mesh = DeviceMesh::dp_sp(dp, sp).unwrap();
    launch(mesh.world_size(), &LaunchOptions::default(), |rank| {
        let groups = MeshGroups::new(&mesh, rank.group.clone())?;
        let groups = TrainingGroups::new(&groups, None)?;
        let fill = |(_, parameter): (usize, usize), range: std::ops::Range<usize>, out: &mut [f32]| {
            let first = range.start + [0, 6][parameter];
            out.iter_mut().enumerate().for_each(|(i, element)| *element = (first + i) as f32);
            Ok(())
        };
        let units = vec![layout(dp), layout(dp)];
        let (dp_rank, sp_rank) = (groups.dp.rank(), groups.sp.rank());
        let storage = Storage { gradient_dtype, ..storage().into() };
        let mut zero =
            ZeroOptimizer::new::<ZeroError>(units, stage, config.clone(), &[], groups, storage, &fill)?;
        check(&mut zero, dp_rank, sp_rank);
        Ok::<_, ZeroError>(())
    })
    .unwrap();
}

const MESHES: [(usize, usize); 6] = [(1, 1), (1, 3), (2, 1), (2, 2), (3, 2), (4, 1)];

#[test]
fn the_zero_world_is_dp_for_every_sp() {
    for mesh in MESHES {
        for stage in [ZeroStage::OptimizerStates, ZeroStage::Gradients, ZeroStage::Parameters] {
            on_mesh(mesh, stage, |zero, _, _| {
                let dp = mesh.0;
                assert_eq!(zero.world_size(), dp);
                // Two units of 11 elements: the live momentum buffers are 1/dp of them, not 1/(dp·sp).
                assert_eq!(zero.state_numel(), 2 * 11_usize.div_ceil(dp), "{mesh:?} {stage:?}");
            });
        }
        on_mesh(mesh, ZeroStage::Disabled, |zero, _, _| {
            assert_eq!(zero.state_numel(), zero.layouts().map(FlatLayout::padded_numel).sum::<usize>());
        });
    }
}

#[test]
fn gathered_parameters_are_in_place_on_every_rank_and_stage() {
    for (mesh, stage) in MESHES.into_iter().flat_map(|mesh| ZeroStage::ALL.map(|stage| (mesh, stage))) {
        on_mesh(mesh, stage, |zero, _, _| {
            let views = zero.parameters(1).unwrap();
            assert_eq!(to_vec::<f32>(&views[0]).unwrap(), [0., 1., 2., 3., 4., 5.]);
            assert_eq!(to_vec::<f32>(&views[1]).unwrap(), [6., 7., 8., 9., 10.]);
            assert_eq!(views[0].dims(), [2, 3]);
        });
    }
}

/// Adds `dp_rank + 10·sp_rank + element` to every gradient and reduces.
fn one_micro_step(zero: &mut ZeroOptimizer, dp_rank: usize, sp_rank: usize, boundary: bool) {
    for unit in [1, 0] {
        for (view, first) in zero.gradients(unit).unwrap().iter().flatten().zip([0, 6]) {
            with_slice_mut(view, |elements: &mut [f32]| {
                for (i, element) in elements.iter_mut().enumerate() {
                    *element += (dp_rank + 10 * sp_rank + first + i) as f32;
                }
            })
            .unwrap();
        }
        zero.reduce(unit, boundary).unwrap();
    }
    zero.finish_reductions().unwrap();
}

#[test]
fn gradients_are_summed_over_dp_sp_and_micro_steps() {
    for (mesh, stage) in MESHES.into_iter().flat_map(|mesh| ZeroStage::ALL.map(|stage| (mesh, stage))) {
        on_mesh(mesh, stage, |zero, dp_rank, sp_rank| {
            one_micro_step(zero, dp_rank, sp_rank, false);
            one_micro_step(zero, dp_rank, sp_rank, true);
            let (dp, sp) = mesh;
            let ranks: usize = (0..dp).flat_map(|d| (0..sp).map(move |s| d + 10 * s)).sum();
            let expected: Vec<f32> = (0..11).map(|i| (2 * (ranks + dp * sp * i)) as f32).collect();
            let gathered = zero.gather_gradients().unwrap();
            let names: Vec<&str> = gathered.iter().map(|(name, _)| name.as_str()).collect();
            assert_eq!(names, ["a", "b", "a", "b"]);
            let got: Vec<f32> = gathered[2..].iter().flat_map(|(_, t)| to_vec::<f32>(t).unwrap()).collect();
            assert_eq!(got, expected, "{mesh:?} {stage:?}");
            let square: f64 = expected.iter().map(|g| f64::from(*g).powi(2)).sum();
            assert_eq!(zero.gradient_sum_of_squares().unwrap(), 2.0 * square);
        });
    }
}

#[test]
fn a_gradient_that_was_not_reduced_is_not_in_the_next_step() {
    for stage in ZeroStage::ALL {
        on_mesh((2, 1), stage, |zero, _, _| {
            let gradient = zero.gradients(0).unwrap().swap_remove(0).unwrap();
            with_slice_mut(&gradient, |elements: &mut [f32]| elements.fill(1.0)).unwrap();
            zero.zero_gradients().unwrap();
            let gradient = zero.gradients(0).unwrap().swap_remove(0).unwrap();
            assert!(to_vec::<f32>(&gradient).unwrap().iter().all(|element| *element == 0.0), "{stage:?}");
        });
    }
}

#[test]
fn an_update_reaches_the_parameters_of_every_rank() {
    for (mesh, stage) in MESHES.into_iter().flat_map(|mesh| ZeroStage::ALL.map(|stage| (mesh, stage))) {
        on_mesh(mesh, stage, |zero, dp_rank, sp_rank| {
            // Parameters gathered before the update must not be served after it.
            let _stale = zero.parameters(0).unwrap();
            one_micro_step(zero, dp_rank, sp_rank, true);
            let gradients = zero.gather_gradients().unwrap();
            zero.update(1, 0.5, None, 2.0).unwrap();
            for ((_, gradient), (name, parameter)) in gradients.iter().zip(zero.gather_parameters().unwrap())
            {
                let first = if name == "a" { 0.0 } else { 6.0 };
                let gradient = to_vec::<f32>(gradient).unwrap();
                let expected: Vec<f32> =
                    gradient.iter().enumerate().map(|(i, g)| first + i as f32 - 0.5 * 2.0 * g).collect();
                assert_eq!(to_vec::<f32>(&parameter).unwrap(), expected, "{mesh:?} {stage:?} {name}");
            }
        });
    }
}

/// Gradients and norms of three updates, one of them of two micro steps, and parameters and state after them, as one
/// rank sees them.
fn after_three_updates(zero: &mut ZeroOptimizer, dp_rank: usize, sp_rank: usize) -> Vec<Vec<f32>> {
    let mut seen = Vec::new();
    for step in 1..=3 {
        let _gathered = [0, 1].map(|unit| {
            zero.read_ahead(unit).unwrap();
            zero.parameters(unit).unwrap()
        });
        if step == 2 {
            one_micro_step(zero, dp_rank, sp_rank, false);
        }
        one_micro_step(zero, dp_rank, sp_rank, true);
        let gradients = zero.gather_gradients().unwrap();
        seen.extend(gradients.iter().map(|(_, tensor)| to_vec::<f32>(tensor).unwrap()));
        seen.push(vec![zero.gradient_sum_of_squares().unwrap() as f32]);
        assert!(zero.non_finite_gradients().unwrap().is_empty());
        zero.update(step, 0.01, None, 0.5).unwrap();
        zero.zero_gradients().unwrap();
        assert_eq!(zero.gradient_sum_of_squares().unwrap(), 0.0);
    }
    let state = (0..zero.state_kinds().len()).filter_map(|kind| zero.state_partition(1, kind).unwrap());
    let state: Vec<_> = state.map(|part| to_vec::<f32>(&part).unwrap()).collect();
    let parameters = zero.gather_parameters().unwrap();
    seen.extend(state.into_iter().chain(parameters.iter().map(|(_, tensor)| to_vec::<f32>(tensor).unwrap())));
    seen
}

/// Cuts the elements that a rank updates into two parameter groups.
fn cut_into_groups(zero: &mut ZeroOptimizer) {
    for ranges in zero.flats.iter_mut().map(|flat| &mut flat.param_group_ranges) {
        let Some(first) = ranges.first_mut() else { continue };
        let (middle, end) = (first.elements.end / 2, first.elements.end);
        first.elements.end = middle;
        let settings = GroupSettings { rate: GroupRate::Scaled(0.5), weight_decay: Some(0.3) };
        ranges.push(ParamGroupRange { elements: middle..end, settings, tensors: None });
    }
}

/// Host copies that complete as late as a device may, and updates on the host of all optimizers but LAMB.
#[test]
fn offloaded_state_comes_back_bit_for_bit() {
    let lamb = OptimizerConfig::Lamb(Lamb {
        lr: 0.01,
        betas: [0.9, 0.99],
        eps: 1e-8,
        weight_decay: 0.1,
        bias_correction: true,
        min_coeff: 0.01,
        max_coeff: 10.0,
    });
    let (lr, betas, weight_decay) = (0.01, [0.9, 0.99], 0.1);
    let adam = OptimizerConfig::Adam(Adam {
        lr,
        betas,
        eps: 1e-8,
        weight_decay,
        adam_w_mode: true,
        bias_correction: true,
    });
    let lion = OptimizerConfig::Lion(Lion { lr, betas, weight_decay });
    let adagrad = OptimizerConfig::Adagrad(Adagrad {
        lr,
        lr_decay: 0.1,
        eps: 1e-8,
        weight_decay,
        initial_accumulator_value: 0.5,
    });
    let stages = [ZeroStage::OptimizerStates, ZeroStage::Gradients, ZeroStage::Parameters];
    for (mesh, stage) in
        [(1, 1), (2, 2), (3, 1)].into_iter().flat_map(|mesh| stages.map(|stage| (mesh, stage)))
    {
        for (config, dtype) in [
            (momentum(), DType::F32),
            (adam.clone(), DType::F32),
            (adam.clone(), DType::BF16),
            (lion.clone(), DType::BF16),
            (adagrad.clone(), DType::F16),
            (lamb.clone(), DType::BF16),
        ] {
            let on_host = config != lamb;
            let options = || TensorOptions { dtype, ..TensorOptions::default() };
            let store = || Some(Arc::new(OffloadStore::with_late_copies()));
            let away = || Storage {
                parameters: store().filter(|_| stage == ZeroStage::Parameters),
                optimizer: store(),
                ..options().into()
            };
            let seen = Mutex::new(BTreeMap::new());
            on_mesh_with(mesh, stage, (config.clone(), options), |zero, dp_rank, sp_rank| {
                if on_host {
                    cut_into_groups(zero);
                }
                let bits = after_three_updates(zero, dp_rank, sp_rank);
                seen.lock().insert((dp_rank, sp_rank), bits);
            });
            // In one piece, and in pieces that cut the two groups and leave a shorter one.
            for max_piece_elements in [optimizer::MAX_PIECE_ELEMENTS, 4] {
                on_mesh_with(mesh, stage, (config.clone(), away), |zero, dp_rank, sp_rank| {
                    zero.max_piece_elements = max_piece_elements;
                    if on_host {
                        cut_into_groups(zero);
                    }
                    assert_eq!(zero.host_store().is_some(), on_host, "{dtype:?}");
                    let bits = after_three_updates(zero, dp_rank, sp_rank);
                    let expected = seen.lock();
                    let expected = expected.get(&(dp_rank, sp_rank));
                    assert_eq!(Some(&bits), expected, "{mesh:?} {stage:?} {dtype:?} {max_piece_elements}");
                    let bytes = zero.expected_state_bytes();
                    assert_eq!((bytes.optimizer, bytes.parameters == 0), (0, stage == ZeroStage::Parameters));
                    assert_eq!(bytes.gradients == 0, stage.partitions_gradients());
                });
            }
        }
    }
}

#[test]
fn zeroed_gradients_are_zero_again() {
    on_mesh((2, 2), ZeroStage::Gradients, |zero, dp_rank, sp_rank| {
        one_micro_step(zero, dp_rank, sp_rank, true);
        assert!(zero.gradient_sum_of_squares().unwrap() > 0.0);
        zero.zero_gradients().unwrap();
        assert_eq!(zero.gradient_sum_of_squares().unwrap(), 0.0);
    });
}

/// An offloaded gradient is loaded to find it.
#[test]
fn a_non_finite_offloaded_gradient_is_named() {
    let storage = || Storage {
        optimizer: Some(Arc::new(OffloadStore::with_late_copies())),
        ..TensorOptions::default().into()
    };
    for stage in [ZeroStage::Gradients, ZeroStage::Parameters] {
        on_mesh_with((2, 1), stage, (momentum(), storage), |zero, dp_rank, _| {
            let gradients = zero.gradients(1).unwrap();
            // The last element of `b`, in the second partition.
            let write = |b: &mut [f32]| b[4] = f32::INFINITY;
            with_slice_mut(gradients[1].as_ref().unwrap(), write).unwrap();
            drop(gradients);
            zero.gradients(0).unwrap();
            [1, 0].into_iter().for_each(|unit| zero.reduce(unit, true).unwrap());
            zero.finish_reductions().unwrap();
            assert_eq!(zero.non_finite_gradients().unwrap(), [&["b"][..dp_rank]].concat());
            assert!(!zero.gradient_sum_of_squares().unwrap().is_finite());
        });
    }
}

#[test]
fn reducing_before_a_backward_is_an_error_that_names_the_unit() {
    on_mesh((1, 1), ZeroStage::Gradients, |zero, _, _| {
        let error = zero.reduce(0, true).unwrap_err().to_string();
        assert!(error.contains("unit unit"), "{error}");
    });
}

#[test]
fn stage_1_sends_each_gradient_once_and_each_parameter_once() {
    // Per unit of 12 padded elements over 2 ranks: 6 elements out in the reduce-scatter and
    // 6 in the all-gather, of 4 bytes, two units.
    on_mesh((2, 1), ZeroStage::OptimizerStates, |zero, dp_rank, sp_rank| {
        // The group has compared meshes before.
        let sent = |zero: &ZeroOptimizer, op| {
            crate::comm::ProcessGroupExt::barrier(&*zero.groups.dp).unwrap();
            zero.groups.dp.stats().get(op).bytes_sent
        };
        let gathered_before = sent(zero, CollectiveOp::AllGather);
        one_micro_step(zero, dp_rank, sp_rank, true);
        zero.update(1, 0.5, None, 1.0).unwrap();
        assert_eq!(sent(zero, CollectiveOp::ReduceScatter), 2 * 6 * 4);
        assert_eq!(sent(zero, CollectiveOp::AllGather) - gathered_before, 2 * 6 * 4);
    });
}

/// A gradient of one rank; every fourth element is negative, so that sums cancel.
fn irregular(dp_rank: usize, sp_rank: usize, element: usize) -> f32 {
    let value = ((element * 7919 + dp_rank * 104_729 + sp_rank * 1_299_709) % 10_007) as f32 * 1.7e-3;
    if (element + dp_rank).is_multiple_of(4) { -value } else { value }
}

/// Sets every gradient to that of `of_element` and reduces. Returns the reduced gradients of the first unit.
fn reduced(zero: &mut ZeroOptimizer, of_element: impl Fn(usize) -> f32) -> Vec<f32> {
    for unit in [1, 0] {
        for (view, first) in zero.gradients(unit).unwrap().iter().flatten().zip([0, 6]) {
            with_slice_mut(view, |elements: &mut [f32]| {
                let of_view = elements.iter_mut().enumerate();
                of_view.for_each(|(i, element)| *element = of_element(first + i));
            })
            .unwrap();
        }
        zero.reduce(unit, true).unwrap();
    }
    zero.finish_reductions().unwrap();
    zero.gather_gradients().unwrap()[..2].iter().flat_map(|(_, t)| to_vec::<f32>(t).unwrap()).collect()
}

fn on_mesh_in_bf16(
    mesh: (usize, usize),
    stage: ZeroStage,
    check: impl Fn(&mut ZeroOptimizer, usize, usize) + Sync,
) {
    let settings = (momentum(), TensorOptions::default);
    on_mesh_sending(CommunicationDtype::Bf16, mesh, stage, settings, check);
}

#[test]
fn each_contribution_sent_in_bf16_is_rounded_once_and_the_sum_is_not() {
    for (mesh, stage) in MESHES.into_iter().flat_map(|mesh| ZeroStage::ALL.map(|stage| (mesh, stage))) {
        on_mesh_in_bf16(mesh, stage, |zero, dp_rank, sp_rank| {
            let got = reduced(zero, |element| irregular(dp_rank, sp_rank, element));
            let (dp, sp) = mesh;
            // A group of one rank sends nothing.
            let sent = |ranks: usize, x: f32| if ranks > 1 { half::bf16::from_f32(x).to_f32() } else { x };
            for (element, got) in got.into_iter().enumerate() {
                let over_dp =
                    |s: usize| (0..dp).map(move |d| sent(dp, irregular(d, s, element))).sum::<f32>();
                let expected: f32 = (0..sp).map(|s| sent(sp, over_dp(s))).sum();
                assert_eq!(got, expected, "{mesh:?} {stage:?} element {element}");
                // The documented bound, against f64: 2⁻⁸ per reduction that sends.
                let exact =
                    || (0..dp).flat_map(|d| (0..sp).map(move |s| f64::from(irregular(d, s, element))));
                let roundings = u32::from(dp > 1) + u32::from(sp > 1);
                let bound = ((1.0 + 2f64.powi(-8)).powi(roundings as i32) - 1.0 + 1e-6)
                    * exact().map(f64::abs).sum::<f64>();
                let error = (f64::from(got) - exact().sum::<f64>()).abs();
                assert!(error <= bound, "{mesh:?} {stage:?} element {element}: {error:e} > {bound:e}");
            }
        });
    }
}

#[test]
fn gradients_sent_in_bf16_keep_infinities_and_nan() {
    for stage in ZeroStage::ALL {
        on_mesh_in_bf16((2, 2), stage, |zero, dp_rank, sp_rank| {
            // One rank has an infinity and a NaN; the others' largest f32 that bf16 represents stays finite.
            let got = reduced(zero, |element| match (element, (dp_rank, sp_rank)) {
                (2, (1, 0)) => f32::NEG_INFINITY,
                (7, (0, 1)) => f32::NAN,
                (9, (1, 1)) => 3e38,
                _ => 1.0,
            });
            assert_eq!((got[2], got[7].is_nan(), got[8]), (f32::NEG_INFINITY, true, 4.0), "{stage:?}");
            assert!(got[9].is_finite(), "{stage:?} {}", got[9]);
            let squares = zero.gradient_sum_of_squares().unwrap();
            assert!(squares.is_nan(), "{stage:?} {squares}");
        });
    }
}

#[test]
fn bf16_halves_the_bytes_of_a_reduce_scatter() {
    // Per unit of 12 padded elements over 2 ranks: 6 elements of 2 bytes, to sum; at stage 0 as many of 4, to gather.
    for (stage, gathered) in [(ZeroStage::Disabled, 2 * 6 * 4), (ZeroStage::Gradients, 0)] {
        on_mesh_in_bf16((2, 1), stage, |zero, dp_rank, sp_rank| {
            let sent = |zero: &ZeroOptimizer, op| {
                crate::comm::ProcessGroupExt::barrier(&*zero.groups.dp).unwrap();
                zero.groups.dp.stats().get(op).bytes_sent
            };
            let gathered_before = sent(zero, CollectiveOp::AllGather);
            one_micro_step(zero, dp_rank, sp_rank, true);
            assert_eq!(sent(zero, CollectiveOp::ReduceScatter), 2 * 6 * 2);
            assert_eq!(sent(zero, CollectiveOp::AllGather) - gathered_before, gathered, "{stage:?}");
            assert_eq!(sent(zero, CollectiveOp::AllReduce), 0);
        });
    }
}
