//! Timing of alternating cases.

use anyhow::Result;
use candle_core::Device;
use std::time::Instant;
use ulysses::comm::{ProcessGroup, ProcessGroupExt, ReduceOp};

type Work<'a> = Box<dyn FnMut() -> Result<()> + 'a>;

/// An operation to measure, on one rank.
pub(crate) struct Case<'a> {
    prepare: Work<'a>,
    run: Work<'a>,
}

impl<'a> Case<'a> {
    pub(crate) fn new(run: impl FnMut() -> Result<()> + 'a) -> Self {
        Self { prepare: Box::new(|| Ok(())), run: Box::new(run) }
    }

    /// Adds an unmeasured preparation before every run.
    pub(crate) fn after(self, prepare: impl FnMut() -> Result<()> + 'a) -> Self {
        Self { prepare: Box::new(prepare), ..self }
    }
}

/// Measures the cases alternately and returns the seconds of every repetition, by case. All ranks start a case together,
/// and the slowest rank counts. One warm-up repetition touches fresh memory and compiles kernels. Collective; returns
/// the same on all ranks.
pub(crate) fn take_turns(
    group: &dyn ProcessGroup,
    device: &Device,
    repeats: u32,
    mut cases: Vec<Case<'_>>,
) -> Result<Vec<Vec<f64>>> {
    let mut seconds = vec![Vec::new(); cases.len()];
    for repeat in 0..=repeats {
        for (case, seconds) in cases.iter_mut().zip(&mut seconds) {
            (case.prepare)()?;
            device.synchronize()?;
            group.barrier()?;
            let start = Instant::now();
            (case.run)()?;
            device.synchronize()?;
            if repeat > 0 {
                seconds.push(start.elapsed().as_secs_f64());
            }
        }
    }
    seconds.iter().map(|seconds| Ok(group.all_reduce_values(seconds, ReduceOp::Max)?)).collect()
}

/// Returns the median.
pub(crate) fn median(values: &[f64]) -> f64 {
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
    fn cases_take_turns_and_the_slowest_rank_counts() {
        let outcomes = launch(2, &LaunchOptions::default(), |rank| {
            let order = std::cell::RefCell::new(String::new());
            let say = |name: char| order.borrow_mut().push(name);
            let sleep = std::time::Duration::from_millis(20 * rank.rank as u64);
            let first = Case::new(|| {
                say('a');
                std::thread::sleep(sleep);
                Ok(())
            });
            let second = Case::new(|| {
                say('b');
                Ok(())
            });
            let second = second.after(|| {
                say('p');
                Ok(())
            });
            let seconds = take_turns(&*rank.group, &Device::Cpu, 2, vec![first, second])?;
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
