//! Plans, simulated on integers and executed on threads.

use super::*;
use crate::comm::traffic::DIRECT_REDUCE_MAX_ELEMS;
use crate::comm::{LaunchOptions, MeshGroups, launch};
use crate::mesh::{DeviceMesh, shard_range};
use Placement::{Partial, Replicate, Shard};
use candle_core::{DType, Device};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::{Config as Settings, TestRunner};
use std::collections::BTreeMap;
use std::ops::Range;
use ulysses_kernels::tensor::to_vec;

/// The tensors of all ranks, by coordinate.
type Locals = BTreeMap<Vec<usize>, Array>;

#[derive(Debug, Clone, PartialEq)]
struct Array {
    shape: Vec<usize>,
    elements: Vec<i64>,
}

impl Array {
    /// Itself, or zeros.
    fn kept_if(&self, is_kept: bool) -> Self {
        let elements = self.elements.iter().map(|x| x * i64::from(is_kept)).collect();
        Self { elements, ..self.clone() }
    }

    fn slice(&self, dim: usize, range: Range<usize>) -> Self {
        let row: usize = self.shape[dim + 1..].iter().product();
        let blocks = self.elements.chunks(row.max(1) * self.shape[dim].max(1));
        let of_block = |block: &[i64]| block[range.start * row..range.end * row].to_vec();
        let elements = if self.elements.is_empty() { vec![] } else { blocks.flat_map(of_block).collect() };
        let mut shape = self.shape.clone();
        shape[dim] = range.len();
        Self { shape, elements }
    }

    fn concat(parts: &[Self], dim: usize) -> Self {
        let mut shape = parts[0].shape.clone();
        shape[dim] = parts.iter().map(|part| part.shape[dim]).sum();
        let outer: usize = shape[..dim].iter().product();
        let row = |part: &Self, index: usize| {
            let row = part.elements.len() / outer.max(1);
            part.elements[index * row..(index + 1) * row].to_vec()
        };
        let elements = (0..outer).flat_map(|index| parts.iter().flat_map(move |part| row(part, index)));
        Self { shape, elements: elements.collect() }
    }

    fn sum<'a>(mut arrays: impl Iterator<Item = &'a Self>) -> Self {
        let mut sum = arrays.next().unwrap().clone();
        arrays.for_each(|array| sum.elements.iter_mut().zip(&array.elements).for_each(|(sum, x)| *sum += x));
        sum
    }
}

fn coordinates(sizes: &[usize]) -> Vec<Vec<usize>> {
    sizes.iter().fold(vec![vec![]], |all, &size| {
        all.iter().flat_map(|outer| (0..size).map(|index| [&outer[..], &[index]].concat())).collect()
    })
}

fn sizes(layout: &Layout) -> Vec<usize> {
    layout.axes().iter().map(|axis| axis.size).collect()
}

/// The elements of a box: each is its position in the logical tensor, from 1.
fn values(layout: &Layout, coordinate: &[usize]) -> Array {
    let slices = layout.local_slices(coordinate).unwrap();
    let shape: Vec<usize> = slices.iter().map(ExactSizeIterator::len).collect();
    let value = |index: Vec<usize>| {
        let position = index.iter().zip(&slices).zip(layout.shape());
        position.fold(0, |sum, ((index, slice), len)| sum * len + slice.start + index) as i64 + 1
    };
    Array { elements: coordinates(&shape).into_iter().map(value).collect(), shape }
}

/// A coordinate without the axes of pending sums.
fn without_partial(layout: &Layout, coordinate: &[usize]) -> Vec<usize> {
    let axes = coordinate.iter().zip(layout.axes());
    axes.map(|(index, axis)| if axis.placement == Partial { 0 } else { *index }).collect()
}

/// Tensors of a layout. The summands of an element differ, and have its value as their sum.
fn locals(layout: &Layout) -> Locals {
    let all = coordinates(&sizes(layout));
    let mut locals: Locals = all.iter().map(|at| (at.clone(), values(layout, at))).collect();
    for (number, at) in all.iter().enumerate() {
        let first = without_partial(layout, at);
        if *at != first {
            let summand = |value: &i64| (value + 3 * number as i64) % 7 - 3;
            let summands: Vec<i64> = locals[at].elements.iter().map(summand).collect();
            let rest = locals.get_mut(&first).unwrap();
            rest.elements.iter_mut().zip(&summands).for_each(|(rest, summand)| *rest -= summand);
            locals.get_mut(at).unwrap().elements = summands;
        }
    }
    locals
}

/// Checks that these tensors are those of a layout.
fn check(layout: &Layout, locals: &Locals) -> Result<(), TestCaseError> {
    for at in locals.keys() {
        let group =
            locals.iter().filter(|(other, _)| without_partial(layout, other) == without_partial(layout, at));
        let sum = Array::sum(group.map(|(_, local)| local));
        prop_assert_eq!(sum, values(layout, at), "{} at {:?}", layout, at);
    }
    Ok(())
}

/// Runs a step on all ranks as its kind is defined, and returns the elements that each rank sends.
fn simulate(step: &Step, locals: &mut Locals) -> BTreeMap<Vec<usize>, u64> {
    let before = locals.clone();
    let mut sent = BTreeMap::new();
    for (at, local) in locals.iter_mut() {
        let ranks = step.before.axes()[step.axis].size;
        let rank = at[step.axis];
        let of_rank = |rank: usize| {
            let mut at = at.clone();
            at[step.axis] = rank;
            &before[&at]
        };
        let group: Vec<&Array> = (0..ranks).map(of_rank).collect();
        let part =
            |array: &Array, dim: usize, rank| array.slice(dim, shard_range(array.shape[dim], ranks, rank));
        let (result, elems) = match step.kind {
            StepKind::Slice { dim } => (part(group[rank], dim, rank), vec![0; ranks]),
            StepKind::ReduceScatter { dim } => {
                let largest = part(group[rank], dim, 0).elements.len();
                (part(&Array::sum(group.iter().copied()), dim, rank), vec![largest; ranks])
            }
            StepKind::AllToAll { from, to } => {
                let parts: Vec<Array> = group.iter().map(|array| part(array, to, rank)).collect();
                let elems = (0..ranks).map(|peer| part(group[rank], to, peer).elements.len()).collect();
                (Array::concat(&parts, from), elems)
            }
            StepKind::AllReduce => {
                assert!(group[rank].elements.len() <= DIRECT_REDUCE_MAX_ELEMS);
                (Array::sum(group.iter().copied()), vec![group[rank].elements.len(); ranks])
            }
            StepKind::AllGather { dim } => {
                let parts: Vec<Array> = group.iter().map(|array| (*array).clone()).collect();
                (Array::concat(&parts, dim), vec![group[rank].elements.len(); ranks])
            }
            StepKind::Pad { dim } => {
                let padded = |(peer, array): (usize, &&Array)| array.kept_if(peer == rank);
                let parts: Vec<Array> = group.iter().enumerate().map(padded).collect();
                (Array::concat(&parts, dim), vec![0; ranks])
            }
            StepKind::ZeroOthers => (group[rank].kept_if(rank == 0), vec![0; ranks]),
        };
        let to_peers = elems.iter().enumerate().filter(|(peer, _)| *peer != rank);
        sent.insert(at.clone(), to_peers.map(|(_, elems)| *elems as u64).sum());
        *local = result;
    }
    sent
}

fn layout(shape: &[usize], axes: &[(usize, Placement)]) -> Layout {
    let axes = axes.iter().zip(["a", "b", "c"]);
    let axes = axes.map(|(&(size, placement), name)| LayoutAxis::new(name, size, placement));
    Layout::new(shape, axes).unwrap()
}

/// Two layouts of one tensor.
fn pairs(max_size: usize) -> impl Strategy<Value = (Layout, Layout)> {
    (vec(0..6_usize, 1..=3), vec((1..=max_size, 0..5_usize, 0..5_usize), 1..=3)).prop_map(|(shape, axes)| {
        let placement = |index: usize| match index % (shape.len() + 2) {
            0 => Replicate,
            1 => Partial,
            dim => Shard(dim - 2),
        };
        let of = |pick: fn(&(usize, usize, usize)) -> usize| -> Vec<_> {
            axes.iter().map(|axis| (axis.0, placement(pick(axis)))).collect()
        };
        (layout(&shape, &of(|axis| axis.1)), layout(&shape, &of(|axis| axis.2)))
    })
}

fn settings() -> Settings {
    Settings { failure_persistence: None, ..Settings::default() }
}

/// `from` with the placements of `to` along axes of one rank, where all placements are the same.
fn relabeled(from: &Layout, to: &Layout) -> Layout {
    let axes = from.axes().iter().zip(to.axes());
    let axes = axes.map(|(from, to)| if from.size == 1 { to.clone() } else { from.clone() });
    Layout::new(from.shape(), axes).unwrap()
}

/// A layout without the axes of one rank.
fn without_single_ranks(layout: &Layout) -> Layout {
    let axes = layout.axes().iter().filter(|axis| axis.size > 1).cloned();
    Layout::new(layout.shape(), axes).unwrap()
}

/// Elements sent by a plan that gathers and sums everything first.
fn naive_elems(from: &Layout, to: &Layout, at: &[usize]) -> u64 {
    let whole = from.axes().iter().map(|axis| LayoutAxis { placement: Replicate, ..axis.clone() });
    let whole = Layout::new(from.shape(), whole).unwrap();
    let plans = [redistribute(from, &whole).unwrap(), redistribute(&whole, to).unwrap()];
    plans.iter().map(|plan| plan.sent_elems(at).unwrap()).sum()
}

proptest! {
    #![proptest_config(settings())]

    #[test]
    fn the_steps_of_a_plan_lead_from_one_layout_to_the_other((from, to) in pairs(4)) {
        let plan = redistribute(&from, &to).unwrap();
        let mut now = locals(&from);
        check(&from, &now)?;
        let start = relabeled(&from, &to);
        let mut layout = &start;
        for step in plan.steps() {
            prop_assert_eq!(&step.before, layout);
            let sent = simulate(step, &mut now);
            for (at, local) in &now {
                prop_assert_eq!(step.sent_elems(at).unwrap(), sent[at], "{:?} at {:?}", step, at);
                prop_assert_eq!(&step.after.local_shape(at).unwrap(), &local.shape, "{:?} at {:?}", step, at);
            }
            check(&step.after, &now)?;
            layout = &step.after;
        }
        prop_assert_eq!(layout, &to);
    }

    #[test]
    fn axes_of_one_rank_add_no_step((from, to) in pairs(2)) {
        let kinds = |from: &Layout, to: &Layout| -> Vec<_> {
            redistribute(from, to).unwrap().steps().iter().map(|step| (step.before.axes()[step.axis].name.clone(), step.kind)).collect()
        };
        prop_assert_eq!(kinds(&from, &to), kinds(&without_single_ranks(&from), &without_single_ranks(&to)));
    }

    #[test]
    fn a_plan_sends_no_more_than_gathers_and_sums_of_everything((from, to) in pairs(4)) {
        // So that everything is divided evenly, and sums are large.
        let scaled = |layout: &Layout| {
            let factors = [1728 << 12, 1728, 1728];
            let shape: Vec<usize> = layout.shape().iter().zip(factors).map(|(len, factor)| len * factor).collect();
            Layout::new(shape, layout.axes().to_vec()).unwrap()
        };
        let (from, to) = (scaled(&from), scaled(&to));
        let plan = redistribute(&from, &to).unwrap();
        let all = coordinates(&sizes(&from));
        let total = |elems: &dyn Fn(&[usize]) -> u64| all.iter().map(|at| elems(at)).sum::<u64>();
        let (planned, naive) =
            (total(&|at| plan.sent_elems(at).unwrap()), total(&|at| naive_elems(&from, &to, at)));
        prop_assert!(planned <= naive, "{planned} of {naive}: {plan:?}");
    }

    #[test]
    fn the_slices_of_the_ranks_cover_a_tensor_once_per_replica((layout, _) in pairs(4)) {
        let mut counts = vec![0; layout.shape().iter().product()];
        for at in coordinates(&sizes(&layout)) {
            values(&layout, &at).elements.iter().for_each(|position| counts[*position as usize - 1] += 1);
        }
        let replicas = layout.axes().iter().filter(|axis| !matches!(axis.placement, Shard(_)));
        let replicas: usize = replicas.map(|axis| axis.size).product();
        prop_assert!(counts.iter().all(|count| *count == replicas), "{layout}: {counts:?}");
    }
}

/// Runs a plan on threads and compares every rank's tensor, and the bytes that it sends, with the simulation.
fn execute(from: &Layout, to: &Layout, dtype: DType) -> Result<(), TestCaseError> {
    let plan = redistribute(from, to).unwrap();
    let inputs = locals(from);
    let mut expected = inputs.clone();
    plan.steps().iter().for_each(|step| drop(simulate(step, &mut expected)));
    let axes: Vec<(&str, i64)> =
        from.axes().iter().map(|axis| (axis.name.as_str(), axis.size as i64)).collect();
    let mesh = DeviceMesh::new(&axes, None).unwrap();
    let outcome = launch(mesh.world_size(), &LaunchOptions::default(), |rank| {
        let groups = MeshGroups::new(&mesh, rank.group.clone())?;
        let at = mesh.coordinate(rank.rank).unwrap();
        let elements: Vec<f32> = inputs[&at].elements.iter().map(|x| *x as f32).collect();
        let local = ulysses_kernels::tensor::from_slice(&elements, &Device::Cpu)?;
        let local = local.reshape(inputs[&at].shape.as_slice())?.to_dtype(dtype)?;
        let sent = || {
            groups
                .get_all_groups()
                .map(|groups| groups.iter().map(|group| group.stats().total().bytes_sent).sum::<u64>())
        };
        let before = sent()?;
        let result = plan.execute(&groups, &local)?;
        let elems = (sent()? - before) / dtype.size_in_bytes() as u64;
        assert_eq!(elems, plan.sent_elems(&at)?, "elements sent by {at:?}: {plan:?}");
        assert_eq!(result.dtype(), dtype);
        Ok::<_, PlacementError>((result.dims().to_vec(), to_vec::<f32>(&result.to_dtype(DType::F32)?)?))
    });
    let outcome = outcome.map_err(|error| TestCaseError::fail(format!("{from} to {to}: {error}")))?;
    for (rank, (shape, elements)) in outcome.into_iter().enumerate() {
        let at = mesh.coordinate(rank).unwrap();
        let got = Array { shape, elements: elements.iter().map(|x| *x as i64).collect() };
        prop_assert_eq!(&got, &expected[&at], "{} to {} at {:?}", from, to, at);
    }
    Ok(())
}

#[test]
fn a_plan_on_threads_is_its_simulation() {
    let mut runner = TestRunner::new(Settings { cases: 12, ..settings() });
    let cases = (pairs(3), any::<bool>());
    let run = |((from, to), is_f32): ((Layout, Layout), bool)| {
        execute(&from, &to, if is_f32 { DType::F32 } else { DType::BF16 })
    };
    runner.run(&cases, run).unwrap();
}

#[test]
fn every_kind_of_step_runs_on_threads_with_uneven_shards() {
    for (from, to) in [
        (Replicate, Shard(1)),
        (Partial, Shard(0)),
        (Partial, Shard(1)),
        (Shard(0), Shard(2)),
        (Shard(2), Shard(0)),
        (Partial, Replicate),
        (Shard(1), Replicate),
        (Shard(1), Partial),
    ] {
        for dtype in [DType::F32, DType::BF16] {
            let of = |placement| layout(&[4, 5, 2], &[(3, placement), (2, Shard(1))]);
            execute(&of(from), &of(to), dtype).unwrap();
        }
    }
}

fn steps(from: &[Placement], to: &[Placement]) -> Vec<(usize, StepKind)> {
    let of = |placements: &[Placement]| {
        layout(&[8, 8], &placements.iter().map(|placement| (2, *placement)).collect::<Vec<_>>())
    };
    redistribute(&of(from), &of(to)).unwrap().steps().iter().map(|step| (step.axis, step.kind)).collect()
}

#[test]
fn the_inner_of_two_axes_is_gathered_first_and_sharded_last() {
    use StepKind::{AllGather, Slice};
    let (sharded, whole) = ([Shard(0), Shard(0)], [Replicate, Replicate]);
    assert_eq!(steps(&sharded, &whole), [(1, AllGather { dim: 0 }), (0, AllGather { dim: 0 })]);
    assert_eq!(steps(&whole, &sharded), [(0, Slice { dim: 0 }), (1, Slice { dim: 0 })]);
    // The inner axis must make way for the outer one.
    let expected = [(1, AllGather { dim: 0 }), (0, Slice { dim: 0 }), (1, Slice { dim: 0 })];
    assert_eq!(steps(&[Replicate, Shard(0)], &sharded), expected);
}

#[test]
fn a_sum_that_cannot_be_scattered_yet_is_made_of_shards() {
    use StepKind::{AllGather, AllReduce, Slice};
    assert_eq!(
        steps(&[Partial, Shard(0)], &[Shard(0), Replicate]),
        [(0, AllReduce), (1, AllGather { dim: 0 }), (0, Slice { dim: 0 })]
    );
}

#[test]
fn axes_that_wait_for_each_other_are_resolved_by_one_gather() {
    use StepKind::{AllGather, AllToAll, Slice};
    let expected = [(1, AllGather { dim: 1 }), (0, AllToAll { from: 0, to: 1 }), (1, Slice { dim: 0 })];
    assert_eq!(steps(&[Shard(0), Shard(1)], &[Shard(1), Shard(0)]), expected);
}

#[test]
fn an_axis_of_one_rank_within_axes_that_wait_adds_no_step() {
    use StepKind::{AllGather, Slice};
    let of = |[a, b, c]: [Placement; 3]| layout(&[8], &[(2, a), (2, b), (1, c)]);
    let (from, to) = (of([Replicate, Shard(0), Replicate]), of([Shard(0); 3]));
    let plan = redistribute(&from, &to).unwrap();
    let steps: Vec<_> = plan.steps().iter().map(|step| (step.axis, step.kind)).collect();
    assert_eq!(steps, [(1, AllGather { dim: 0 }), (0, Slice { dim: 0 }), (1, Slice { dim: 0 })]);
}

#[test]
fn what_makes_tensors_smaller_runs_first() {
    use StepKind::{AllGather, AllReduce, ReduceScatter, Slice};
    assert_eq!(
        steps(&[Partial, Shard(0), Replicate], &[Replicate, Replicate, Shard(1)]),
        [(2, Slice { dim: 1 }), (0, AllReduce), (1, AllGather { dim: 0 })]
    );
    assert_eq!(
        steps(&[Shard(0), Partial], &[Replicate, Shard(1)]),
        [(1, ReduceScatter { dim: 1 }), (0, AllGather { dim: 0 })]
    );
}

#[test]
fn a_large_sum_sends_what_a_ring_would() {
    let of = |placement| layout(&[64_000], &[(4, placement)]);
    let plan = redistribute(&of(Partial), &of(Replicate)).unwrap();
    for rank in 0..4 {
        assert_eq!(plan.sent_elems(&[rank]).unwrap(), 2 * 64_000 * 3 / 4);
    }
}

#[test]
fn layouts_and_plans_name_what_is_wrong() {
    let axis = |size, placement| LayoutAxis::new("sp", size, placement);
    let error = |axes: Vec<LayoutAxis>| Layout::new([4, 2], axes).unwrap_err().to_string();
    assert_eq!(
        error(vec![axis(2, Shard(2))]),
        "axis `sp` shards dimension 2, but the shape [4, 2] has 2 dimensions"
    );
    assert_eq!(error(vec![axis(0, Partial)]), "axis `sp` of 0 ranks: an axis has at least one rank");
    let twice = vec![axis(2, Partial), axis(2, Replicate)];
    assert_eq!(error(twice), "axis `sp` of 2 ranks: a layout has each axis once");
    let of = |size| Layout::new([4], [axis(size, Replicate)]).unwrap();
    let error = of(2).local_slices(&[2]).unwrap_err().to_string();
    assert_eq!(error, "the coordinate [2] is outside of a mesh of [2] ranks");
    let error = redistribute(&of(2), &of(3)).unwrap_err().to_string();
    assert!(error.contains("`[4] sp=2: Replicate`") && error.contains("`[4] sp=3: Replicate`"), "{error}");
}

/// All slices of a tensor in which every dimension is whole or halved, to all such slices; elements encode their positions.
#[test]
fn slices_that_differ_in_any_dimensions_are_copied_to_their_places() {
    const SHAPE: [usize; 4] = [3, 4, 2, 3];
    let choices = |len: usize| [0..len, 0..len / 2, len / 2..len];
    let slices = |mut number: usize| {
        SHAPE.map(|len| {
            let range = choices(len)[number % 3].clone();
            number /= 3;
            range
        })
    };
    let positions = |slices: &[Range<usize>; 4]| {
        let starts = vec![0];
        slices.iter().zip(SHAPE).fold(starts, |positions, (range, len)| {
            positions
                .iter()
                .flat_map(|position| range.clone().map(move |index| position * len + index))
                .collect()
        })
    };
    for (held, needed) in (0..81).flat_map(|held| (0..81).map(move |needed| (slices(held), slices(needed)))) {
        let (from, expected) = (positions(&held), positions(&needed));
        let mut got = vec![usize::MAX; expected.len()];
        for copy in transfers(&held, &needed) {
            assert_eq!(copy.from.shape(), copy.to.shape());
            for (source, target) in copy.from.runs().zip(copy.to.runs()) {
                got[target..target + copy.to.run].copy_from_slice(&from[source..source + copy.to.run]);
            }
        }
        let known = |position: &usize| if from.contains(position) { *position } else { usize::MAX };
        assert_eq!(got, expected.iter().map(known).collect::<Vec<_>>(), "{held:?} to {needed:?}");
    }
}
