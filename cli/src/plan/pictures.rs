//! The chart of a plan: memory over a step. `ulysses report` uses it too, next to the measured memory.

use crate::template::chart::{Chart, INK, Point, Series, Unit};
use ulysses::estimate::MomentMemory;
use ulysses::memory::Category;

/// Bytes in the order of [`Category::ALL`].
type ByCategory = [u64; Category::ALL.len()];

/// Charts the planned peak of each part of a rank's last micro batch and of the optimizer step, by category. Each measured
/// peak is a named horizontal line.
pub(crate) fn memory(timeline: &[MomentMemory], measured: &[(String, u64)]) -> Chart {
    let line = |(label, bytes): &(String, u64)| line(label, timeline.iter().map(|_| *bytes));
    let is_compared = if measured.is_empty() { "" } else { ", planned" };
    let held: Vec<_> = timeline.iter().map(|moment| moment.by_category).collect();
    over_step(is_compared, &held, measured.iter().map(line).collect())
}

/// Charts the measured memory of a step, with the plan's total as a line.
pub(crate) fn measured_memory(step: u64, held: &[ByCategory], planned: &[MomentMemory]) -> Chart {
    let is_of_parts = held.len() == planned.len();
    let planned = is_of_parts.then(|| line("planned peak", planned.iter().map(|moment| moment.bytes)));
    over_step(&format!(", measured in step {step}"), held, planned.into_iter().collect())
}

/// Charts the stacked memory of the parts of a step.
fn over_step(how: &str, held: &[ByCategory], lines: Vec<Series>) -> Chart {
    let series = Category::ALL.iter().enumerate().map(|(index, category)| {
        Series::new(category.name(), points(held.iter().map(|held| held[index])), index)
    });
    Chart {
        title: format!("Memory over the last micro batch and the optimizer step{how}"),
        along: "part of the step",
        unit: Unit::Bytes,
        is_stacked: true,
        series: series.collect(),
        lines,
        ..Chart::default()
    }
}

fn line(label: &str, bytes: impl Iterator<Item = u64>) -> Series {
    Series::new(label, points(bytes), INK)
}

/// Numbers the parts of a step from 1.
fn points(bytes: impl Iterator<Item = u64>) -> Vec<Point> {
    (1..).zip(bytes).map(|(part, bytes)| Point { x: f64::from(part), y: bytes as f64 }).collect()
}
