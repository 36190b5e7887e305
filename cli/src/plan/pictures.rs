//! Charts of a plan: memory over a step, and traffic by number of ranks. `ulysses report` uses them too.

use crate::template::chart::{Chart, INK, Scale, Series, Unit};
use ulysses::estimate::MomentMemory;
use ulysses::estimate::scaling::{ModelScaling, Point};
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
fn points(bytes: impl Iterator<Item = u64>) -> Vec<(f64, f64)> {
    (1..).zip(bytes).map(|(part, bytes)| (f64::from(part), bytes as f64)).collect()
}

/// A curve: label, index of its color, value at a point.
type Curve = (&'static str, usize, fn(&Point) -> Option<f64>);

const CURVES: [Curve; 5] = [
    ("Ulysses", 0, |point| point.ulysses_bytes),
    ("Megatron SP", 1, |point| Some(point.megatron_bytes)),
    ("ring", 2, |point| Some(point.ring_bytes)),
    ("Ulysses × ring", 3, |point| Some(point.combined_bytes)),
    ("paper 8·N·h/P", 4, |point| Some(point.claimed_bytes)),
];

/// Charts the bytes sent per rank and layer when ranks and tokens grow together.
pub(crate) fn scaling(model: &ModelScaling) -> Chart {
    let curve = |(label, style, height): &Curve| {
        let at = |point: &Point| Some((point.ranks as f64, height(point)?));
        let points: Vec<_> = model.points.iter().filter_map(at).collect();
        let reach = match (points.last(), model.points.last()) {
            (Some((ranks, _)), Some(last)) if *ranks < last.ranks as f64 => format!(", up to {ranks} ranks"),
            _ => String::new(),
        };
        Series::new(format!("{label}{reach}"), points, *style)
    };
    let tokens = model.points.first().map_or(0, |point| point.seq_len / point.ranks.max(1));
    Chart {
        title: format!("{}: bytes sent per rank and layer, {tokens} tokens per rank", model.model),
        along: "ranks (constant tokens per rank)",
        unit: Unit::Bytes,
        scale: Scale::Logarithmic,
        series: CURVES.iter().map(curve).collect(),
        ..Chart::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::template::chart::drawing;
    use ulysses::estimate::scaling::study;

    #[test]
    fn the_drawing_has_a_curve_for_each_column_of_the_table() {
        let charts: Vec<Chart> = study(64).unwrap().iter().map(scaling).collect();
        let svg = drawing(&charts, 2);
        assert_eq!(svg.matches("<polyline").count(), 4 * CURVES.len());
        assert!(svg.starts_with("<svg") && svg.ends_with("</svg>\n") && !svg.contains("NaN"));
        assert!(svg.contains("Ulysses, up to 128 ranks"), "Llama 405B has 128 heads");
    }
}
