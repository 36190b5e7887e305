//! Charts as SVG. Colours and fonts are classes of the page's style, so that they follow light and dark.

use std::fmt::Write;

/// Size of a chart; it is scaled to its place, down to that of a phone.
const WIDTH: f64 = 440.0;
const HEIGHT: f64 = 240.0;
const LEFT: f64 = 56.0;
const RIGHT: f64 = 10.0;
const TOP: f64 = 10.0;
const BOTTOM: f64 = 34.0;

/// Points of a curve that are drawn; more are no wider than a pixel.
const MAX_POINTS: usize = 600;

/// A curve.
pub(in crate::cli) struct Series {
    pub(in crate::cli) label: String,
    pub(in crate::cli) points: Vec<(f64, f64)>,
    /// Number of its colour and dashes.
    pub(in crate::cli) style: usize,
    /// Drawn as single dots.
    pub(in crate::cli) is_dotted: bool,
}

/// How the values of an axis are written.
#[derive(Clone, Copy)]
pub(in crate::cli) enum Unit {
    Number,
    Bytes,
    Percent,
}

/// Curves over whole numbers.
pub(in crate::cli) struct Chart {
    pub(in crate::cli) title: &'static str,
    /// What the numbers count.
    pub(in crate::cli) along: &'static str,
    pub(in crate::cli) unit: Unit,
    /// Whether the axis begins at 0 rather than below the smallest value.
    pub(in crate::cli) from_zero: bool,
    /// Lay the curves on top of each other and fill them.
    pub(in crate::cli) is_stacked: bool,
    pub(in crate::cli) series: Vec<Series>,
}

/// The ranges of both axes.
struct Frame {
    x: (f64, f64),
    y: (f64, f64),
}

impl Frame {
    fn x(&self, value: f64) -> f64 {
        LEFT + (WIDTH - LEFT - RIGHT) * (value - self.x.0) / (self.x.1 - self.x.0)
    }

    fn y(&self, value: f64) -> f64 {
        HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - self.y.0) / (self.y.1 - self.y.0)
    }

    fn corners(&self, points: &[(f64, f64)]) -> String {
        let corner = |(x, y): &(f64, f64)| format!("{:.1},{:.1}", self.x(*x), self.y(*y));
        points.iter().map(corner).collect::<Vec<_>>().join(" ")
    }
}

impl Chart {
    /// The chart as a figure with its legend; nothing where there are no points.
    pub(in crate::cli) fn figure(&self) -> String {
        let stacked;
        let series = if self.is_stacked {
            stacked = stack(&self.series);
            &stacked
        } else {
            &self.series
        };
        let Some(frame) = self.frame(series) else { return String::new() };
        let mut svg = format!(
            "<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{}, by {}\">\n",
            self.title, self.along
        );
        self.draw_axes(&mut svg, &frame);
        if self.is_stacked {
            draw_areas(&mut svg, &frame, series);
        } else {
            series.iter().for_each(|series| draw_curve(&mut svg, &frame, series));
        }
        svg.push_str("</svg>\n");
        let entry = |series: &Series| {
            let (style, label) = (series.style % 6, super::page::escape(&series.label));
            format!("<li class=\"c{style}\"><i></i>{label} <b>{}</b></li>", self.told(series))
        };
        let legend: String =
            self.series.iter().filter(|series| !series.points.is_empty()).map(entry).collect();
        format!(
            "<figure><figcaption>{}</figcaption>\n{svg}<ul class=\"legend\">{legend}</ul></figure>\n",
            self.title
        )
    }

    /// What the legend says of a curve: its last value; of what is stacked the mean, or of bytes the most.
    fn told(&self, series: &Series) -> String {
        let values = || series.points.iter().map(|(_, value)| *value);
        let value = match (self.is_stacked, self.unit) {
            (true, Unit::Bytes) => values().fold(0.0, f64::max),
            (true, _) => values().sum::<f64>() / series.points.len().max(1) as f64,
            (false, _) => values().next_back().unwrap_or_default(),
        };
        let told = text(value, self.unit);
        match (self.is_stacked, self.unit) {
            (true, Unit::Bytes) => format!("up to {told}"),
            (true, _) => format!("mean {told}"),
            (false, _) => told,
        }
    }

    fn frame(&self, series: &[Series]) -> Option<Frame> {
        let points = || series.iter().flat_map(|series| &series.points).filter(|(_, y)| y.is_finite());
        let range = |values: &mut dyn Iterator<Item = f64>| {
            values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| {
                (low.min(value), high.max(value))
            })
        };
        points().next()?;
        let (first, last) = range(&mut points().map(|(x, _)| *x));
        let (mut low, mut high) = range(&mut points().map(|(_, y)| *y));
        if self.from_zero {
            low = low.min(0.0);
        }
        // What differs in its last digits only is drawn as one value: steps between ticks would vanish beside it.
        let is_flat = high - low <= 1e-9 * high.abs().max(low.abs()).max(1e-30);
        let margin = if is_flat { high.abs().max(1e-9) * 0.5 } else { 0.06 * (high - low) };
        high += if self.is_stacked && !is_flat { 0.0 } else { margin };
        low -= if self.from_zero { 0.0 } else { margin };
        Some(Frame { x: (first, last.max(first + 1.0)), y: (low, high) })
    }

    /// Round in the unit that they are written in.
    fn value_ticks(&self, range: (f64, f64)) -> Vec<f64> {
        let unit = match self.unit {
            Unit::Bytes => 1024_f64.powf(range.1.max(1.0).log(1024.0).floor()),
            Unit::Number | Unit::Percent => 1.0,
        };
        ticks((range.0 / unit, range.1 / unit), 5).into_iter().map(|tick| tick * unit).collect()
    }

    fn draw_axes(&self, svg: &mut String, frame: &Frame) {
        // Writing to a string cannot fail.
        for tick in self.value_ticks(frame.y) {
            let y = frame.y(tick);
            let _ = writeln!(svg, "<path class=\"grid\" d=\"M{LEFT} {y:.1}H{:.1}\"/>", WIDTH - RIGHT);
            let label = text(tick, self.unit);
            let _ = writeln!(
                svg,
                "<text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{label}</text>",
                LEFT - 6.0,
                y + 4.0
            );
        }
        let bottom = HEIGHT - BOTTOM;
        let _ = writeln!(svg, "<path class=\"axis\" d=\"M{LEFT} {bottom}H{:.1}\"/>", WIDTH - RIGHT);
        for tick in ticks(frame.x, 6).into_iter().filter(|tick| tick.fract() == 0.0) {
            let (x, y) = (frame.x(tick), bottom + 16.0);
            let label = text(tick, Unit::Number);
            let _ = writeln!(svg, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"middle\">{label}</text>");
        }
        let (x, y) = (WIDTH - RIGHT, HEIGHT - 3.0);
        let _ = writeln!(
            svg,
            "<text x=\"{x}\" y=\"{y}\" text-anchor=\"end\" class=\"faint\">{}</text>",
            self.along
        );
    }
}

fn draw_curve(svg: &mut String, frame: &Frame, series: &Series) {
    let (style, points) = (series.style % 6, thin(&series.points));
    if series.is_dotted || points.len() == 1 {
        for (x, y) in &points {
            let _ = writeln!(
                svg,
                "<circle class=\"dot c{style}\" cx=\"{:.1}\" cy=\"{:.1}\" r=\"3.5\"/>",
                frame.x(*x),
                frame.y(*y)
            );
        }
    } else {
        let _ = writeln!(svg, "<polyline class=\"curve c{style}\" points=\"{}\"/>", frame.corners(&points));
    }
}

/// Areas between curves that lie on top of each other.
fn draw_areas(svg: &mut String, frame: &Frame, stacked: &[Series]) {
    let mut below: Option<&Series> = None;
    for series in stacked.iter().filter(|series| !series.points.is_empty()) {
        let base = |(x, _): &(f64, f64)| (*x, frame.y.0);
        let floor: Vec<_> = match below {
            Some(below) => below.points.iter().rev().copied().collect(),
            None => series.points.iter().rev().map(base).collect(),
        };
        let outline = [series.points.clone(), floor].concat();
        let _ = writeln!(
            svg,
            "<polygon class=\"area c{}\" points=\"{}\"/>",
            series.style % 6,
            frame.corners(&outline)
        );
        below = Some(series);
    }
}

/// Each series with those before it under it; thinned before, so that all have the same steps.
fn stack(series: &[Series]) -> Vec<Series> {
    let every =
        series.iter().map(|series| series.points.len()).max().unwrap_or(0).div_ceil(MAX_POINTS / 2).max(1);
    let mut sum: Vec<f64> = Vec::new();
    let mut stacked = Vec::new();
    for Series { label, points, style, is_dotted } in series {
        let means = points.chunks(every).map(|chunk| {
            let count = chunk.len() as f64;
            (chunk[0].0, chunk.iter().map(|(_, y)| y).sum::<f64>() / count)
        });
        let means: Vec<(f64, f64)> = means.collect();
        sum.resize(means.len().max(sum.len()), 0.0);
        sum.iter_mut().zip(&means).for_each(|(sum, (_, y))| *sum += y);
        let points = means.iter().zip(&sum).map(|((x, _), sum)| (*x, *sum)).collect();
        stacked.push(Series { label: label.clone(), points, style: *style, is_dotted: *is_dotted });
    }
    stacked
}

/// Keeps the smallest and the largest of neighbouring points, so that no spike is lost.
fn thin(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    if points.len() <= MAX_POINTS {
        return points.to_vec();
    }
    let extremes = |chunk: &[(f64, f64)]| {
        let by_value = |a: &&(f64, f64), b: &&(f64, f64)| a.1.total_cmp(&b.1);
        let low = chunk.iter().min_by(by_value).copied();
        let high = chunk.iter().max_by(by_value).copied();
        let mut both: Vec<_> = low.into_iter().chain(high).collect();
        both.sort_by(|a, b| a.0.total_cmp(&b.0));
        both
    };
    points.chunks(points.len().div_ceil(MAX_POINTS / 2)).flat_map(extremes).collect()
}

/// Round numbers within a range, about `count` of them.
fn ticks((low, high): (f64, f64), count: usize) -> Vec<f64> {
    let rough = (high - low) / count as f64;
    let power = 10_f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].map(|factor| factor * power).into_iter().find(|step| *step >= rough);
    let step = step.unwrap_or(rough);
    let first = (low / step).ceil() as i64;
    let last = (high / step + 1e-9).floor() as i64;
    (first..=last).map(|number| number as f64 * step).collect()
}

/// A value as short as it can be said.
pub(in crate::cli) fn text(value: f64, unit: Unit) -> String {
    let scaled = |value: f64, base: f64, units: &[&str]| {
        let mut value = value;
        let mut units = units.iter();
        let mut unit = units.next().copied().unwrap_or_default();
        while value.abs() >= base {
            let Some(next) = units.next() else { break };
            (value, unit) = (value / base, next);
        }
        format!("{}{unit}", short(value))
    };
    match unit {
        Unit::Percent if value < 0.1 => format!("{} %", short((1e3 * value).round() / 10.0)),
        Unit::Percent => format!("{} %", short(100.0 * value)),
        Unit::Bytes => scaled(value, 1024.0, &[" B", " KiB", " MiB", " GiB", " TiB"]),
        Unit::Number if value != 0.0 && value.abs() < 1e-3 => format!("{value:.1e}").replace(".0e", "e"),
        Unit::Number if value.abs() >= 1e4 => scaled(value, 1000.0, &["", " k", " M", " G", " T", " P"]),
        Unit::Number => short(value),
    }
}

/// Three significant digits or so, without zeros at the end.
fn short(value: f64) -> String {
    let digits = match value.abs() {
        huge if huge >= 1e6 => return format!("{value:.1e}").replace(".0e", "e"),
        large if large >= 100.0 => 0,
        medium if medium >= 10.0 => 1,
        small if small >= 0.1 => 2,
        _ => 4,
    };
    let text = format!("{value:.digits$}");
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_inside() {
        assert_eq!(ticks((0.0, 10.0), 5), [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]);
        let small = ticks((2.31, 2.94), 5);
        assert_eq!(
            small.iter().map(|tick| text(*tick, Unit::Number)).collect::<Vec<_>>(),
            ["2.4", "2.6", "2.8"]
        );
    }

    #[test]
    fn ticks_of_bytes_are_round_in_their_unit() {
        let chart = Chart {
            title: "memory",
            along: "step",
            unit: Unit::Bytes,
            from_zero: true,
            is_stacked: false,
            series: vec![],
        };
        let ticks = chart.value_ticks((0.0, 11.0 * 1024.0 * 1024.0));
        let ticks: Vec<_> = ticks.into_iter().map(|tick| text(tick, Unit::Bytes)).collect();
        assert_eq!(ticks, ["0 B", "5 MiB", "10 MiB"]);
    }

    #[test]
    fn values_are_said_shortly() {
        let numbers =
            [0.0, 3e-4, 0.25, 2.5, 12.34, 345.6, 29_852.0, 3.5e9].map(|value| text(value, Unit::Number));
        assert_eq!(numbers, ["0", "3e-4", "0.25", "2.5", "12.3", "346", "29.9 k", "3.5 G"]);
        assert_eq!(text(3.0 * 1024.0 * 1024.0, Unit::Bytes), "3 MiB");
        assert_eq!(text(1e100, Unit::Number), "1e85 P", "as long as any other");
        assert_eq!([0.125, 0.01234].map(|share| text(share, Unit::Percent)), ["12.5 %", "1.2 %"]);
    }

    #[test]
    fn thinning_keeps_a_single_spike() {
        let mut points: Vec<(f64, f64)> = (0..10_000).map(|step| (f64::from(step), 1.0)).collect();
        points[7777].1 = 50.0;
        let thinned = thin(&points);
        assert!(thinned.len() <= MAX_POINTS && thinned.contains(&(7777.0, 50.0)));
    }

    /// Curves of the losses that a file can claim.
    #[test]
    fn values_at_the_limits_of_f64_give_numbers_and_few_ticks() {
        for values in [[-1e100, 1e100], [0.0, 5e-324], [1.0, 1.0 + f64::EPSILON], [0.0, 0.0], [1e100, 1e100]]
        {
            for is_stacked in [false, true] {
                let points = vec![(1.0, values[0]), (1e15, values[1])];
                let series = Series { label: "a".into(), points, style: 0, is_dotted: false };
                let (title, along, unit) = ("loss", "step", Unit::Number);
                let chart =
                    Chart { title, along, unit, from_zero: is_stacked, is_stacked, series: vec![series] };
                let figure = chart.figure();
                assert!(!figure.contains("NaN") && !figure.contains("inf"), "{values:?}: {figure}");
                assert!(figure.matches("class=\"grid\"").count() <= 12 && figure.len() < 4000, "{figure}");
            }
        }
    }

    #[test]
    fn a_chart_of_nothing_is_nothing_and_one_value_is_a_dot() {
        let chart = |points: Vec<(f64, f64)>| Chart {
            title: "loss",
            along: "step",
            unit: Unit::Number,
            from_zero: false,
            is_stacked: false,
            series: vec![Series { label: "a<b".into(), points, style: 0, is_dotted: false }],
        };
        assert_eq!(chart(vec![]).figure(), "");
        let dot = chart(vec![(1.0, 2.0)]).figure();
        assert!(dot.contains("<circle") && dot.contains("a&lt;b") && !dot.contains("NaN"), "{dot}");
    }
}
