//! Mistakes in the use of groups, each with what the dry run says. `src/zero/README.md` lists those of the code.

use super::*;
use crate::comm::{Call, CallSignature, CommError, GroupWrapper, Pending, ProcessGroup, ReduceOp};
use candle_core::DType;

/// A mistake in the collectives of a group.
#[derive(Debug, Clone)]
enum Mistake {
    /// Gradients are not summed.
    NotSummed,
    /// Gradients are summed, and again.
    SummedTwice,
    /// Gradients are summed over another group.
    SummedOver(Arc<dyn ProcessGroup>),
    /// Gradients are summed over another group, too.
    AlsoSummedOver(Arc<dyn ProcessGroup>),
    /// Numbers are not gathered: those of the norm.
    NotGathered,
    /// Numbers are not summed: the losses.
    NumbersNotSummed,
}

#[derive(Debug)]
struct Mistaken {
    inner: Arc<dyn ProcessGroup>,
    mistake: Mistake,
}

impl GroupWrapper for Mistaken {
    fn inner(&self) -> &Arc<dyn ProcessGroup> {
        &self.inner
    }

    fn start(&self, call: Call<'_>) -> Result<Pending, CommError> {
        let is_sum =
            matches!(call.signature(), CallSignature::AllReduce { .. } | CallSignature::ReduceScatter { .. });
        let are_numbers = call.inputs().first().is_some_and(|tensor| tensor.dtype() == DType::F64);
        let sum_again = |group: &Arc<dyn ProcessGroup>| {
            let sum = &call.outputs()[0];
            self.inner.start(call.clone())?.wait()?;
            group.start_all_reduce(sum, ReduceOp::Sum)
        };
        match &self.mistake {
            Mistake::NotSummed if is_sum && !are_numbers => Ok(Pending::ready()),
            Mistake::NumbersNotSummed if is_sum && are_numbers => Ok(Pending::ready()),
            Mistake::NotGathered if !is_sum && are_numbers => Ok(Pending::ready()),
            Mistake::SummedTwice if is_sum && !are_numbers => sum_again(&self.inner),
            Mistake::AlsoSummedOver(other) if is_sum && !are_numbers => sum_again(other),
            Mistake::SummedOver(other) if is_sum && !are_numbers => other.start(call),
            _ => self.inner.start(call),
        }
    }
}

/// Makes a mistake in the groups along an axis.
fn along(axis: &'static str, mistake: Mistake) -> impl Fn(TrainingGroups) -> TrainingGroups {
    move |groups| {
        groups.map(|name, inner| match name == axis {
            true => Arc::new(Mistaken { inner, mistake: mistake.clone() }),
            false => inner,
        })
    }
}

/// The error of a step on the last rank, with some groups.
fn error(shape: Shape, stage: u8, change: impl Fn(TrainingGroups) -> TrainingGroups) -> String {
    let mut workload = workload(&config(&shape, &json!({}), stage), DeviceKind::Cpu, 1);
    workload.model.tie_word_embeddings = true;
    let mesh = workload.mesh().unwrap();
    let last = mesh.world_size() - 1;
    let step = workload.dry_on(&mesh, last, MAX_MICRO_BATCHES, change, |rank, accumulation| {
        rank.step(accumulation)?;
        rank.engine.check_replicas()
    });
    step.map_or_else(|error| error.to_string(), |()| "no error".to_owned())
}

#[test]
fn a_mistake_along_any_axis_is_named_with_the_parameter_and_the_axis() {
    use Mistake::{NotGathered, NotSummed, NumbersNotSummed, SummedTwice};
    let plain = Shape { mesh: [2, 2], tp: 1, pp: 1, ring_size: 1, shard_size: -1, spans_sp: false };
    let hybrid = Shape { mesh: [4, 2], shard_size: 2, ..plain };
    let over_sp = Shape { spans_sp: true, ..hybrid };
    let (tp, pp) = (Shape { tp: 2, ..plain }, Shape { pp: 3, ..plain });
    let cases = [
        (plain, 0, "dp", NotSummed, "used without its sum over `dp`"),
        (plain, 1, "dp", NotSummed, "used without its sum over `dp`"),
        (plain, 2, "dp", NotSummed, "used without its sum over `dp`"),
        (plain, 0, "dp", SummedTwice, "summed over `dp` twice"),
        (plain, 3, "dp", SummedTwice, "summed over `dp` twice"),
        (plain, 1, "sp", NotSummed, "used without its sum over `sp`"),
        (plain, 3, "sp", SummedTwice, "summed over `sp` twice"),
        (tp, 0, "tokens", NotSummed, "used without its sum over `sp`"),
        (tp, 2, "sp", NotSummed, "used without its sum over `sp`"),
        (hybrid, 2, "replicas", NotSummed, "used without its sum over `dp_replicate`"),
        (over_sp, 2, "replicas", SummedTwice, "summed over `dp_replicate` twice"),
        (over_sp, 0, "shard", NotSummed, "used without its sum over `dp_shard`"),
        (over_sp, 1, "shard", SummedTwice, "summed over `dp_shard` twice"),
        (pp, 0, "pp", NotSummed, "used without its sum over `pp`"),
        (pp, 3, "pp", SummedTwice, "summed over `pp` twice"),
        (plain, 1, "dp", NotGathered, "the norm of the gradients is used without its sum over `dp`"),
        (
            over_sp,
            2,
            "shard",
            NotGathered,
            "the norm of the gradients is used without its sum over `dp_shard`",
        ),
        (tp, 0, "tp", NotGathered, "the norm of the gradients is used without its sum over `tp`"),
        (pp, 1, "pp", NotGathered, "the norm of the gradients is used without its sum over `pp`"),
        (plain, 0, "sp", NumbersNotSummed, "the sum of the losses is used without its sum over `sp`"),
        (pp, 0, "pp", NumbersNotSummed, "the sum of the losses is used without its sum over `pp`"),
    ];
    for (shape, stage, axis, mistake, expected) in cases {
        let error = error(shape, stage, along(axis, mistake.clone()));
        let is_named = error.contains("model.") || expected.starts_with("the ");
        assert!(error.contains(expected) && is_named, "{mistake:?} along {axis}, stage {stage}: {error}");
    }
    for shape in [plain, hybrid, over_sp, tp, pp] {
        assert_eq!(error(shape, 1, |groups| groups), "no error", "{shape:?}");
    }
}

#[test]
fn sums_over_other_axes_are_mistakes() {
    let with_other = |axis, other: &'static str, mistake: fn(Arc<dyn ProcessGroup>) -> Mistake| {
        move |groups: TrainingGroups| {
            let by_axis = groups.by_axis();
            let (_, group) = by_axis.into_iter().find(|(name, _)| *name == other).unwrap();
            along(axis, mistake(group.clone()))(groups)
        }
    };
    let plain = Shape { mesh: [2, 2], tp: 1, pp: 1, ring_size: 1, shard_size: -1, spans_sp: false };
    let ring = Shape { mesh: [2, 4], ring_size: 2, ..plain };
    let of_ring = error(ring, 0, with_other("sp", "ring", Mistake::SummedOver));
    assert!(of_ring.contains("used without its sum over `ulysses`"), "{of_ring}");
    let tp = Shape { tp: 2, ..plain };
    let of_sp = error(tp, 2, with_other("tokens", "sp", Mistake::SummedOver));
    assert!(of_sp.contains("used without its sum over `tp`"), "{of_sp}");
    let of_tokens = error(tp, 2, with_other("sp", "tokens", Mistake::SummedOver));
    assert!(of_tokens.contains("summed over `tp` twice"), "{of_tokens}");
    let over_sp = Shape { spans_sp: true, ..plain };
    let sp_again = error(over_sp, 1, with_other("shard", "sp", Mistake::AlsoSummedOver));
    assert!(sp_again.contains("summed over `sp` twice"), "{sp_again}");
}
