//! Charts as SVG. Colors and fonts are style classes, so that they follow light and dark mode.

mod frame;
mod units;

pub(crate) use units::{Unit, text};

use super::escape;
use frame::{Frame, Range};
use std::fmt::Write;

/// Size of a chart. It scales down to fit its container.
const WIDTH: f64 = 440.0;
const HEIGHT: f64 = 240.0;

/// Maximum points per curve; more would be narrower than a pixel.
const MAX_POINTS: usize = 600;

/// A value at a position.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Point {
    pub(crate) x: f64,
    pub(crate) y: f64,
}

/// A curve.
pub(crate) struct Series {
    pub(crate) label: String,
    pub(crate) points: Vec<Point>,
    /// Index of its color and dash pattern.
    pub(crate) style: usize,
    /// Whether it is drawn as single dots.
    pub(crate) is_dotted: bool,
}

/// The style of a highlighted curve.
pub(crate) const INK: usize = usize::MAX;

impl Series {
    /// A curve that is drawn as a line.
    pub(crate) fn new(label: impl Into<String>, points: Vec<Point>, style: usize) -> Self {
        Self { label: label.into(), points, style, is_dotted: false }
    }

    /// Returns its class number in the style sheet.
    fn class(&self) -> usize {
        if self.style == INK { 8 } else { self.style % 8 }
    }

    fn values(&self) -> impl Iterator<Item = f64> {
        self.points.iter().map(|point| point.y)
    }

    fn max(&self) -> f64 {
        self.values().fold(0.0, f64::max)
    }
}

/// The scale of the value axis.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Scale {
    /// The value axis starts at 0.
    #[default]
    FromZero,
    /// The value axis starts below the smallest value.
    Around,
}

/// A chart of curves over whole numbers.
#[derive(Default)]
pub(crate) struct Chart {
    pub(crate) title: String,
    /// Label of the position axis.
    pub(crate) along: &'static str,
    pub(crate) unit: Unit,
    pub(crate) scale: Scale,
    /// Whether curves are stacked and filled.
    pub(crate) is_stacked: bool,
    pub(crate) series: Vec<Series>,
    /// Curves drawn over the stack.
    pub(crate) lines: Vec<Series>,
}

impl Chart {
    /// Renders the content of a figure, with legend; `None` without points.
    pub(crate) fn content(&self) -> Option<String> {
        let (plot, legend) = (self.plot()?, self.legend());
        let (title, along) = (escape(&self.title), self.along);
        Some(format!(
            "<figcaption>{title}</figcaption>\n\
             <svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{title}, by {along}\">\n{plot}</svg>\n\
             <ul class=\"legend\">{legend}</ul>"
        ))
    }

    /// Renders the plot in an area of [`WIDTH`] × [`HEIGHT`]; `None` without points.
    fn plot(&self) -> Option<String> {
        let stacked = if self.is_stacked { stack(&self.series) } else { Vec::new() };
        let curves = if self.is_stacked { &self.lines } else { &self.series };
        let frame = self.frame(stacked.iter().chain(curves))?;
        let mut svg = String::new();
        frame.draw_axes(&mut svg, self.unit, self.along);
        draw_areas(&mut svg, &frame, &stacked);
        curves.iter().for_each(|series| draw_curve(&mut svg, &frame, series));
        Some(svg)
    }

    /// Renders color, name and value of every curve with points.
    fn legend(&self) -> String {
        let series = self.series.iter().map(|series| (series, self.legend_value(series)));
        // Lines over a stack show their maximum.
        let lines = self.lines.iter().map(|line| (line, text(line.max(), self.unit)));
        let shown = series.chain(lines).filter(|(series, _)| !series.points.is_empty());
        let entry = |(series, value): (&Series, String)| {
            let (class, label) = (series.class(), escape(&series.label));
            format!("<li class=\"c{class}\"><i></i>{label} <b>{value}</b></li>")
        };
        shown.map(entry).collect()
    }

    /// Returns a curve's value in the legend: the last one; if stacked, the maximum of bytes or else the mean.
    fn legend_value(&self, series: &Series) -> String {
        let text = |value| text(value, self.unit);
        match (self.is_stacked, self.unit) {
            (true, Unit::Bytes) => format!("max {}", text(series.max())),
            (true, _) => {
                let mean = series.values().sum::<f64>() / series.points.len().max(1) as f64;
                format!("mean {}", text(mean))
            }
            (false, _) => text(series.values().last().unwrap_or(0.0)),
        }
    }

    fn frame<'a>(&self, series: impl Iterator<Item = &'a Series> + Clone) -> Option<Frame> {
        let points = || series.clone().flat_map(|series| &series.points).filter(|point| point.y.is_finite());
        points().next()?;
        let (x, y) = (Range::over(points().map(|point| point.x)), Range::over(points().map(|point| point.y)));
        let (low, high) = (if self.scale == Scale::FromZero { y.low.min(0.0) } else { y.low }, y.high);
        // Values that differ only in their last digits are drawn as one: ticks could not resolve them.
        let is_flat = high - low <= 1e-9 * high.abs().max(low.abs()).max(1e-30);
        let margin = if is_flat { high.abs().max(1e-9) * 0.5 } else { 0.06 * (high - low) };
        let y = Range {
            low: if self.scale == Scale::FromZero { low } else { low - margin },
            high: if self.is_stacked && self.lines.is_empty() && !is_flat { high } else { high + margin },
        };
        Some(Frame { x: Range { high: x.high.max(x.low + 1.0), ..x }, y })
    }
}

fn draw_curve(svg: &mut String, frame: &Frame, series: &Series) {
    let (style, points) = (series.class(), thin(&series.points));
    // Writing to a string cannot fail.
    if series.is_dotted || points.len() == 1 {
        for point in &points {
            let (x, y) = (frame.x(point.x), frame.y(point.y));
            let _ = writeln!(svg, r#"<circle class="dot c{style}" cx="{x:.1}" cy="{y:.1}" r="3.5"/>"#);
        }
    } else {
        let _ = writeln!(svg, r#"<polyline class="curve c{style}" points="{}"/>"#, frame.corners(&points));
    }
}

/// Draws the areas between stacked curves.
fn draw_areas(svg: &mut String, frame: &Frame, stacked: &[Series]) {
    let mut below: Option<&Series> = None;
    for series in stacked.iter().filter(|series| !series.points.is_empty()) {
        let mut floor = below.map_or_else(|| series.points.clone(), |below| below.points.clone());
        if below.is_none() {
            floor.iter_mut().for_each(|point| point.y = frame.y.low);
        }
        let outline = frame.corners(series.points.iter().chain(floor.iter().rev()));
        let _ = writeln!(svg, r#"<polygon class="area c{}" points="{outline}"/>"#, series.class());
        below = Some(series);
    }
}

/// Stacks series over the union of their positions; a series without a value there adds nothing. Thins them, so that all
/// keep the same positions.
fn stack(series: &[Series]) -> Vec<Series> {
    let mut places: Vec<f64> = series.iter().flat_map(|series| &series.points).map(|point| point.x).collect();
    places.sort_by(f64::total_cmp);
    places.dedup();
    let every = places.len().div_ceil(MAX_POINTS / 2).max(1);
    let mut sums = vec![0.0; places.len().div_ceil(every)];
    let mut stacked = Vec::new();
    for series in series {
        let mut values = vec![0.0; places.len()];
        for Point { x, y } in &series.points {
            if let Ok(place) = places.binary_search_by(|place| place.total_cmp(x)) {
                values[place] = *y;
            }
        }
        let means = values.chunks(every).map(|chunk| chunk.iter().sum::<f64>() / chunk.len() as f64);
        sums.iter_mut().zip(means).for_each(|(sum, mean)| *sum += mean);
        let mut points = Vec::new();
        if !series.points.is_empty() {
            let tops = places.iter().step_by(every).zip(&sums);
            points.extend(tops.map(|(x, y)| Point { x: *x, y: *y }));
        }
        stacked.push(Series { label: series.label.clone(), points, ..*series });
    }
    stacked
}

/// Keeps the minimum and maximum of neighboring points, so that no spike is lost.
fn thin(points: &[Point]) -> Vec<Point> {
    if points.len() <= MAX_POINTS {
        return points.to_vec();
    }
    let extremes = |chunk: &[Point]| {
        let by_value = |a: &&Point, b: &&Point| a.y.total_cmp(&b.y);
        let low = chunk.iter().min_by(by_value).copied();
        let high = chunk.iter().max_by(by_value).copied();
        let mut both: Vec<Point> = low.into_iter().chain(high).collect();
        both.sort_by(|a, b| a.x.total_cmp(&b.x));
        both
    };
    points.chunks(points.len().div_ceil(MAX_POINTS / 2)).flat_map(extremes).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn curve(points: &[(f64, f64)]) -> Vec<Point> {
        points.iter().map(|(x, y)| Point { x: *x, y: *y }).collect()
    }

    #[test]
    fn thinning_keeps_a_single_spike() {
        let mut points: Vec<Point> = (0..10_000).map(|step| Point { x: f64::from(step), y: 1.0 }).collect();
        points[7777].y = 50.0;
        let thinned = thin(&points);
        assert!(thinned.len() <= MAX_POINTS && thinned.contains(&Point { x: 7777.0, y: 50.0 }));
    }

    #[test]
    fn stacked_values_are_added_at_their_positions() {
        let series = |points: &[(f64, f64)]| Series::new("", curve(points), 0);
        // The second has no value at the first position, the first none at the last.
        let first = series(&[(1.0, 10.0), (2.0, 20.0), (3.0, 30.0)]);
        let second = series(&[(2.0, 2.0), (3.0, 3.0), (4.0, 4.0)]);
        let stacked: Vec<_> =
            stack(&[first, series(&[]), second]).into_iter().map(|series| series.points).collect();
        assert_eq!(stacked[0], curve(&[(1.0, 10.0), (2.0, 20.0), (3.0, 30.0), (4.0, 0.0)]));
        assert_eq!(stacked[1], [], "a series without values has no area");
        assert_eq!(stacked[2], curve(&[(1.0, 10.0), (2.0, 22.0), (3.0, 33.0), (4.0, 4.0)]));
    }

    /// Extreme values that a metrics file may contain.
    #[test]
    fn values_at_the_limits_of_f64_give_numbers_and_few_ticks() {
        for values in [[-1e100, 1e100], [0.0, 5e-324], [1.0, 1.0 + f64::EPSILON], [0.0, 0.0], [1e100, 1e100]]
        {
            for is_stacked in [false, true] {
                let points = curve(&[(1.0, values[0]), (1e15, values[1])]);
                let chart = Chart {
                    title: "loss".to_owned(),
                    along: "step",
                    scale: if is_stacked { Scale::FromZero } else { Scale::Around },
                    is_stacked,
                    series: vec![Series::new("a", points, 0)],
                    ..Chart::default()
                };
                let figure = chart.content().unwrap();
                assert!(!figure.contains("NaN") && !figure.contains("inf"), "{values:?}: {figure}");
                assert!(figure.matches("class=\"grid\"").count() <= 12 && figure.len() < 4000, "{figure}");
            }
        }
    }

    #[test]
    fn a_chart_without_points_is_empty_and_one_value_is_a_dot() {
        let chart = |points: &[(f64, f64)]| Chart {
            title: "loss".to_owned(),
            along: "step",
            scale: Scale::Around,
            series: vec![Series::new("a<b", curve(points), 0)],
            ..Chart::default()
        };
        assert_eq!(chart(&[]).content(), None);
        let dot = chart(&[(1.0, 2.0)]).content().unwrap();
        assert!(dot.contains("<circle") && dot.contains("a&lt;b") && !dot.contains("NaN"), "{dot}");
    }
}
