//! Cases that take turns, and the figures that they leave.

use super::dtype_name;
use anyhow::Result;
use candle_core::{DType, Device};
use std::rc::Rc;
use std::time::Instant;
use ulysses::comm::{ProcessGroup, ProcessGroupExt, RankContext, ReduceOp};

type Work<'a> = Box<dyn FnMut() -> Result<()> + 'a>;

/// An operation to measure on one rank.
pub(crate) struct Case<'a> {
    figure: Figure,
    prepare: Work<'a>,
    run: Work<'a>,
}

impl<'a> Case<'a> {
    /// Returns a case whose repetitions do `work` on all ranks together, in bytes or FLOPs.
    pub(crate) fn new<E: Into<anyhow::Error>>(
        name: impl Into<String>,
        work: f64,
        mut run: impl FnMut() -> Result<(), E> + 'a,
    ) -> Self {
        let figure = Figure::new(name, work);
        Self { figure, prepare: Box::new(|| Ok(())), run: Box::new(move || run().map_err(E::into)) }
    }

    /// Returns a case on operands that other cases share.
    pub(super) fn on<T: 'a, E: Into<anyhow::Error> + 'a>(
        operands: &Rc<T>,
        name: impl Into<String>,
        work: f64,
        run: fn(&T) -> Result<(), E>,
    ) -> Self {
        let operands = operands.clone();
        Self::new(name, work, move || run(&operands))
    }

    /// Adds an unmeasured preparation before every run.
    pub(super) fn after(self, prepare: impl FnMut() -> Result<()> + 'a) -> Self {
        Self { prepare: Box::new(prepare), ..self }
    }

    /// Compares the rate with that of another case of the benchmark, if it is measured.
    pub(super) fn against(mut self, baseline: impl Into<String>) -> Self {
        self.figure.baselines.push(baseline.into());
        self
    }

    pub(super) fn name(&self) -> &str {
        &self.figure.name
    }

    /// Adds the dtype to the name, unless it is f32.
    pub(super) fn in_dtype(mut self, dtype: DType) -> Self {
        if dtype != DType::F32 {
            self.figure.name += &format!(" {}", dtype_name(dtype));
        }
        self
    }

    /// Multiplies the work.
    pub(super) fn times(mut self, factor: f64) -> Self {
        self.figure.work *= factor;
        self
    }
}

/// A measured case.
#[derive(Clone, Debug)]
pub(crate) struct Figure {
    pub(crate) name: String,
    /// Seconds of every repetition.
    pub(super) seconds: Vec<f64>,
    /// Work of one repetition on all ranks together.
    pub(super) work: f64,
    /// Names of the cases to compare with.
    pub(super) baselines: Vec<String>,
    /// Further values by key.
    pub(super) values: Vec<(&'static str, f64)>,
}

impl Figure {
    pub(super) fn new(name: impl Into<String>, work: f64) -> Self {
        Self { name: name.into(), seconds: Vec::new(), work, baselines: Vec::new(), values: Vec::new() }
    }

    /// Returns the median seconds of a repetition.
    pub(super) fn seconds(&self) -> f64 {
        median(&self.seconds)
    }

    /// Returns the rate in GB/s or GFLOP/s.
    pub(crate) fn rate(&self) -> f64 {
        self.work / self.seconds() * 1e-9
    }

    /// Returns the ratio of the rates: the median over repetitions, in each of which a disturbance affects both.
    pub(super) fn ratio(&self, baseline: &Self) -> f64 {
        let both = self.seconds.iter().zip(&baseline.seconds);
        median(&both.map(|(own, base)| (self.work / own) / (baseline.work / base)).collect::<Vec<_>>())
    }
}

/// One of the ranks that measure.
pub(crate) struct BenchRank<'a> {
    pub(crate) rank: &'a RankContext,
    pub(crate) device: Device,
    /// Number of measured repetitions.
    pub(crate) repeats: u32,
}

impl BenchRank<'_> {
    pub(super) fn group(&self) -> &dyn ProcessGroup {
        &*self.rank.group
    }

    /// Measures the cases alternately. All ranks start a case together, and the slowest rank counts. One warm-up
    /// repetition touches fresh memory and compiles kernels. Collective; returns the same on all ranks.
    pub(crate) fn take_turns(&self, mut cases: Vec<Case<'_>>) -> Result<Vec<Figure>> {
        for repeat in 0..=self.repeats {
            for Case { figure, prepare, run } in &mut cases {
                prepare()?;
                self.device.synchronize()?;
                self.group().barrier()?;
                let start = Instant::now();
                run()?;
                self.device.synchronize()?;
                if repeat > 0 {
                    figure.seconds.push(start.elapsed().as_secs_f64());
                }
            }
        }
        let slowest = |Case { figure, .. }: Case<'_>| {
            let seconds = self.group().all_reduce_values(&figure.seconds, ReduceOp::Max)?;
            Ok(Figure { seconds, ..figure })
        };
        cases.into_iter().map(slowest).collect()
    }
}

/// Returns the median.
pub(super) fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let half = sorted.len() / 2;
    match sorted.len() {
        0 => f64::NAN,
        odd if odd % 2 == 1 => sorted[half],
        _ => f64::midpoint(sorted[half - 1], sorted[half]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ulysses::comm::{LaunchOptions, launch};

    #[test]
    fn the_median_of_an_even_number_is_a_mean() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert!(median(&[]).is_nan());
    }

    #[test]
    fn a_ratio_is_the_median_over_repetitions() {
        // Half the rate each time, whatever the machine did in the second repetition.
        let [baseline, figure] = [("copy", 8.0), ("exchange", 4.0)]
            .map(|(name, work)| Figure { seconds: vec![1.0, 10.0, 1.0], ..Figure::new(name, work) });
        assert_eq!(figure.ratio(&baseline), 0.5);
        assert_eq!(figure.rate(), 4e-9);
    }

    #[test]
    fn cases_take_turns_and_the_slowest_rank_counts() {
        let outcomes = launch(2, &LaunchOptions::default(), |rank| {
            let order = std::cell::RefCell::new(String::new());
            let say = |name: char| {
                order.borrow_mut().push(name);
                anyhow::Ok(())
            };
            let sleep = std::time::Duration::from_millis(20 * rank.rank as u64);
            let first = Case::new("a", 1.0, || {
                std::thread::sleep(sleep);
                say('a')
            });
            let second = Case::new("b", 1.0, || say('b')).after(|| say('p'));
            let bench = BenchRank { rank: &rank, device: Device::Cpu, repeats: 2 };
            let seconds = bench.take_turns(vec![first, second])?.into_iter().map(|figure| figure.seconds);
            let seconds: Vec<_> = seconds.collect();
            anyhow::Ok((order.into_inner(), seconds))
        });
        let outcomes = outcomes.expect("both ranks measure");
        assert_eq!(outcomes[0], outcomes[1]);
        let (order, seconds) = &outcomes[0];
        assert_eq!(order, "apbapbapb");
        assert_eq!(seconds.iter().map(Vec::len).collect::<Vec<_>>(), [2, 2]);
        assert!(seconds[0].iter().all(|seconds| *seconds >= 0.02), "rank 1 slept: {seconds:?}");
    }
}
