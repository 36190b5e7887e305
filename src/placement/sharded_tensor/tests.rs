//! Sharded tensors on threads, compared with the whole tensor.

mod cases;

use super::*;
use crate::comm::{CollectiveOp, LaunchOptions, launch};
use crate::mesh::DeviceMesh;
use candle_core::Device;
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::{Config as Settings, TestRunner};
use ulysses_kernels::tensor::{from_slice, to_vec};

type Outcome<T> = Result<T, PlacementError>;

/// A shape and placements of two tensors on a mesh of at most eight ranks.
#[derive(Debug, Clone)]
struct Case {
    shape: Vec<usize>,
    sizes: Vec<usize>,
    first: Vec<usize>,
    second: Vec<usize>,
    /// Which dimensions the second operand repeats, and how many of the first ones it lacks.
    repeated: [bool; 3],
    lacks: usize,
}

fn cases() -> impl Strategy<Value = Case> {
    let axes = vec((1..=4_usize, 0..60_usize, 0..60_usize), 1..=3);
    (vec(0..6_usize, 1..=3), axes, any::<[bool; 3]>(), 0..4_usize).prop_map(
        |(shape, axes, repeated, lacks)| {
            let mut ranks = 1;
            let size = |axis: &(usize, usize, usize)| {
                let size = axis.0.min(8 / ranks);
                ranks *= size;
                size
            };
            let sizes = axes.iter().map(size).collect();
            let (first, second) = axes.iter().map(|axis| (axis.1, axis.2)).unzip();
            Case { lacks: lacks % (shape.len() + 1), shape, sizes, first, second, repeated }
        },
    )
}

/// Placements of a tensor with these dimensions, chosen by numbers.
fn placements(numbers: &[usize], dims: usize) -> Vec<Placement> {
    let placement = |number: &usize| match number % (dims + 2) {
        0 => Replicate,
        1 => Partial,
        dim => Shard(dim - 2),
    };
    numbers.iter().map(placement).collect()
}

impl Case {
    fn mesh(&self) -> DeviceMesh {
        let axes = ["a", "b", "c"].into_iter().zip(self.sizes.iter().map(|size| *size as i64));
        DeviceMesh::new(&axes.collect::<Vec<_>>(), None).unwrap()
    }

    fn run(&self, run: impl Fn(&Arc<MeshGroups>) -> Outcome<()> + Sync) {
        let mesh = self.mesh();
        let outcome = launch(mesh.world_size(), &LaunchOptions::default(), |rank| {
            run(&Arc::new(MeshGroups::new(&mesh, rank.group.clone())?))
        });
        outcome.unwrap_or_else(|error| panic!("{self:?}: {:#}", anyhow::Error::from(error)));
    }
}

fn check(cases: u32, run: impl Fn(Case)) {
    let mut runner = TestRunner::new(Settings { cases, failure_persistence: None, ..Settings::default() });
    let run = |case| {
        run(case);
        Ok(())
    };
    runner.run(&self::cases(), run).unwrap();
}

/// Numbers that encode their positions.
fn whole(shape: &[usize]) -> Tensor {
    let numbers: Vec<f64> = (1..=shape.iter().product()).map(|position: usize| position as f64).collect();
    from_slice(&numbers, &Device::Cpu).unwrap().reshape(shape).unwrap()
}

/// The whole tensor in these placements, of which pending sums have summands that differ.
fn sharded(groups: &Arc<MeshGroups>, whole: &Tensor, placements: &[Placement]) -> Outcome<ShardedTensor> {
    let layout = Layout::on_mesh(whole.dims(), groups.mesh(), placements)?;
    let coordinate = coordinate(&groups.get_all_groups()?);
    let (mut local, mut weight) = (whole.clone(), 1.0);
    for (dim, range) in layout.local_slices(&coordinate)?.into_iter().enumerate() {
        local = local.narrow(dim, range.start, range.len())?;
    }
    for (axis, index) in layout.axes().iter().zip(coordinate).filter(|(axis, _)| axis.placement == Partial) {
        // The weights along an axis are 1 in all.
        let rest = 1.0 - (2..=axis.size).sum::<usize>() as f64;
        weight *= if index == 0 { rest } else { (index + 1) as f64 };
    }
    ShardedTensor::from_local(groups, &local.affine(weight, 0.0)?, placements, Some(whole.dims()))
}

#[track_caller]
fn assert_same(got: &Tensor, expected: &Tensor, what: &str) {
    assert_eq!(got.dims(), expected.dims(), "{what}");
    let values = |tensor: &Tensor| to_vec::<f64>(&tensor.contiguous().unwrap()).unwrap();
    for (got, expected) in values(got).into_iter().zip(values(expected)) {
        let is_close = (got - expected).abs() <= 1e-9 * expected.abs().max(1.0);
        assert!(is_close || got.is_nan() && expected.is_nan(), "{what}: {got}, expected {expected}");
    }
}

/// Bytes of all groups by now: sent, and received of the tensors' own elements.
fn traffic(groups: &MeshGroups) -> Outcome<[u64; 2]> {
    let stats: Vec<_> = groups.get_all_groups()?.iter().map(|group| group.stats()).collect();
    let own = [CollectiveOp::Broadcast, CollectiveOp::AllToAllStrided];
    let received = stats.iter().flat_map(|stats| own.map(|op| stats.get(op).bytes_received));
    Ok([stats.iter().map(|stats| stats.total().bytes_sent).sum(), received.sum()])
}

#[test]
fn a_distributed_tensor_is_whole_again_and_every_rank_receives_once() {
    check(40, |case| {
        case.run(|groups| {
            let (whole, given) = (whole(&case.shape), placements(&case.first, case.shape.len()));
            // The elements of the other ranks do not count.
            let own = whole.affine(1.0, groups.world().rank() as f64)?;
            let before = traffic(groups)?[1];
            let tensor = ShardedTensor::distribute(groups, &own, &given)?;
            let received = traffic(groups)?[1] - before;
            let is_zero = |(at, placement): (&usize, &Placement)| *at > 0 && *placement == Partial;
            let has_zeros = tensor.coordinate().iter().zip(&given).any(is_zero);
            // It gets what it keeps, and what it passes on along later axes.
            let last = tensor.coordinate().iter().rposition(|index| *index > 0);
            let mut passed = given.clone();
            passed[last.map_or(0, |last| last + 1)..].fill(Replicate);
            let elems = tensor.layout().with_placements(&passed)?.local_numel(tensor.coordinate())?;
            let gets_nothing = has_zeros || last.is_none();
            assert_eq!(received, if gets_nothing { 0 } else { elems as u64 * 8 }, "{tensor:?}");
            assert_eq!(tensor.placements(), given);
            assert_same(&tensor.full_tensor()?, &whole, "full_tensor");
            let agreed = ShardedTensor::from_local(groups, tensor.local(), &given, None)?;
            assert_eq!(agreed.layout(), tensor.layout(), "agreed by the ranks");
            Ok(())
        });
    });
}

#[test]
fn tensors_move_between_any_placements_and_send_the_bytes_that_they_say() {
    check(40, |case| {
        case.run(|groups| {
            let dims = case.shape.len();
            let whole = whole(&case.shape);
            let first = sharded(groups, &whole, &placements(&case.first, dims))?;
            let to = placements(&case.second, dims);
            let before = traffic(groups)?[0];
            // Another tensor moves at the same time, and is waited for later.
            let pending = first.start_redistribute(&to)?;
            let other = first.scale(-1.0)?.start_redistribute(&to)?;
            let second = pending.wait()?;
            assert_same(other.wait()?.local(), &second.local().affine(-1.0, 0.0)?, "the other one");
            assert_eq!(traffic(groups)?[0] - before, 2 * first.sent_bytes(&to)?, "{first:?}");
            assert_eq!(second.placements(), to);
            assert_same(&second.full_tensor()?, &whole, "redistributed");
            assert!(first.equals(&second)? && second.equals(&first)?);
            // One element that differs, on some ranks, is known to all.
            let mut changed = to_vec::<f64>(&whole)?;
            if let Some(last) = changed.last_mut() {
                *last += 1.0;
                let changed = from_slice(&changed, &Device::Cpu)?.reshape(whole.dims())?;
                assert!(!second.equals(&sharded(groups, &changed, &placements(&case.first, dims))?)?);
            }
            Ok(())
        });
    });
}

/// Runs an operation and compares the result with that of whole tensors. Where there is no rule, the named redistributions
/// must make it possible.
fn compare(
    what: &str,
    operands: &[&ShardedTensor],
    expected: &Tensor,
    run: impl Fn(&[&ShardedTensor]) -> Outcome<ShardedTensor>,
) -> Outcome<()> {
    let result = match run(operands) {
        Err(PlacementError::NoRule { valid, .. }) => {
            assert_eq!(valid.len(), operands.len(), "{what}");
            let moved = valid.into_iter().zip(operands).map(|(placements, operand)| match placements {
                Some(placements) => operand.redistribute(&placements),
                None => Ok((*operand).clone()),
            });
            let moved = moved.collect::<Outcome<Vec<_>>>()?;
            run(&moved.iter().collect::<Vec<_>>())
        }
        result => result,
    }?;
    assert_same(&result.full_tensor()?, expected, what);
    Ok(())
}

#[test]
fn operations_of_one_tensor_are_those_of_the_whole() {
    check(40, |case| {
        case.run(|groups| {
            let dims = case.shape.len();
            let whole = whole(&case.shape);
            let tensor = sharded(groups, &whole, &placements(&case.first, dims))?;
            let compare =
                |what: &str, expected: Tensor, run: &dyn Fn(&ShardedTensor) -> Outcome<ShardedTensor>| {
                    compare(what, &[&tensor], &expected, |operands| run(operands[0]))
                };
            let total = to_vec::<f64>(&whole)?.iter().sum::<f64>();
            let squares = to_vec::<f64>(&whole)?.iter().map(|x| x * x).sum::<f64>();
            let number = |value: f64| Tensor::new(value, &Device::Cpu);
            compare("map", whole.sqr()?, &|x| x.map(Tensor::sqr))?;
            compare("scale", whole.affine(-2.0, 0.0)?, &|x| x.scale(-2.0))?;
            compare("sum_all", number(total)?, &ShardedTensor::sum_all)?;
            compare("mean_all", number(total / whole.elem_count() as f64)?, &ShardedTensor::mean_all)?;
            compare("norm", number(squares.sqrt())?, &ShardedTensor::norm)?;
            for dim in 0..dims {
                let mean = whole.sum_keepdim(dim)?.affine(1.0 / case.shape[dim] as f64, 0.0)?;
                compare("sum", whole.sum(dim)?, &|x| x.sum(dim))?;
                compare("sum_keepdim", whole.sum_keepdim(dim)?, &|x| x.sum_keepdim(dim))?;
                compare("mean", mean.squeeze(dim)?, &|x| x.mean(dim))?;
                compare("mean_keepdim", mean, &|x| x.mean_keepdim(dim))?;
                compare("transpose", whole.transpose(0, dim)?, &|x| x.transpose(0, dim))?;
                let (start, len) = (case.shape[dim] / 3, case.shape[dim] / 2);
                compare("narrow", whole.narrow(dim, start, len)?, &|x| x.narrow(dim, start, len))?;
                let unsqueezed = whole.unsqueeze(dim)?;
                compare("unsqueeze", unsqueezed.clone(), &|x| x.unsqueeze(dim))?;
                let unsqueezed = sharded(groups, &unsqueezed, &placements(&case.second, dims + 1))?;
                self::compare("squeeze", &[&unsqueezed], &whole, |x| x[0].squeeze(dim))?;
                // Two dimensions become one, and back.
                let mut merged = case.shape.clone();
                if dim + 1 < dims {
                    merged[dim] *= merged.remove(dim + 1);
                }
                let flat = whole.reshape(merged.as_slice())?;
                compare("merge", flat.clone(), &|x| x.reshape(&merged))?;
                let flat = sharded(groups, &flat, &placements(&case.second, merged.len()))?;
                self::compare("split", &[&flat], &whole, |x| x[0].reshape(&case.shape))?;
            }
            Ok(())
        });
    });
}

#[test]
fn operations_of_two_tensors_are_those_of_the_whole() {
    check(60, |case| {
        case.run(|groups| {
            let a = whole(&case.shape);
            let repeated = case.shape.iter().zip(case.repeated);
            let shape: Vec<usize> = repeated.map(|(len, repeated)| if repeated { 1 } else { *len }).collect();
            let b = whole(&shape[case.lacks..]);
            let [one, two] = [(&a, &case.first), (&b, &case.second)]
                .map(|(whole, numbers)| sharded(groups, whole, &placements(numbers, whole.dims().len())));
            let (one, two) = (one?, two?);
            compare("add", &[&one, &two], &a.broadcast_add(&b)?, |x| x[0].add(x[1]))?;
            compare("sub", &[&two, &one], &b.broadcast_sub(&a)?, |x| x[0].sub(x[1]))?;
            compare("mul", &[&one, &two], &a.broadcast_mul(&b)?, |x| x[0].mul(x[1]))?;
            compare("div", &[&two, &one], &b.broadcast_div(&a)?, |x| x[0].div(x[1]))?;
            let (m, k, n) = (case.shape[0], case.lacks + 2, case.second[0] % 6);
            let (a, b) = (whole(&[m, k]), whole(&[k, n]));
            let one = sharded(groups, &a, &placements(&case.first, 2))?;
            let two = sharded(groups, &b, &placements(&case.second, 2))?;
            let product = if m * n == 0 { whole(&[m, n]) } else { a.matmul(&b)? };
            compare("matmul", &[&one, &two], &product, |x| x[0].matmul(x[1]))
        });
    });
}
