//! The axes of a chart: coordinates and ticks.

use super::units::{Unit, text};
use super::{HEIGHT, Point, WIDTH};
use std::fmt::Write;

/// Margins around the plot area.
const LEFT: f64 = 56.0;
const RIGHT: f64 = 10.0;
const TOP: f64 = 10.0;
const BOTTOM: f64 = 34.0;

/// The values of an axis.
#[derive(Clone, Copy)]
pub(super) struct Range {
    pub(super) low: f64,
    pub(super) high: f64,
}

/// The ranges of both axes.
pub(super) struct Frame {
    pub(super) x: Range,
    pub(super) y: Range,
}

impl Range {
    /// Returns the smallest range that has all values.
    pub(super) fn over(values: impl Iterator<Item = f64>) -> Self {
        let empty = Self { low: f64::INFINITY, high: f64::NEG_INFINITY };
        values.fold(empty, |range, value| Self { low: range.low.min(value), high: range.high.max(value) })
    }

    /// Returns the position of a value, 0 to 1.
    fn share(self, value: f64) -> f64 {
        (value - self.low) / (self.high - self.low)
    }

    /// Returns about `count` round numbers in the range.
    fn ticks(self, count: usize) -> Vec<f64> {
        let rough = (self.high - self.low) / count as f64;
        let power = 10_f64.powf(rough.log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0].map(|factor| factor * power).into_iter().find(|step| *step >= rough);
        let step = step.unwrap_or(rough);
        let first = (self.low / step).ceil() as i64;
        let last = (self.high / step + 1e-9).floor() as i64;
        (first..=last).map(|number| number as f64 * step).collect()
    }
}

impl Frame {
    pub(super) fn x(&self, value: f64) -> f64 {
        LEFT + (WIDTH - LEFT - RIGHT) * self.x.share(value)
    }

    pub(super) fn y(&self, value: f64) -> f64 {
        HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * self.y.share(value)
    }

    pub(super) fn corners<'a>(&self, points: impl IntoIterator<Item = &'a Point>) -> String {
        let corner = |point: &Point| format!("{:.1},{:.1}", self.x(point.x), self.y(point.y));
        points.into_iter().map(corner).collect::<Vec<_>>().join(" ")
    }

    /// Returns ticks of the value axis, round in the displayed unit.
    fn value_ticks(&self, unit: Unit) -> Vec<f64> {
        let Range { low, high } = self.y;
        let unit = match unit {
            Unit::Bytes => 1024_f64.powf(high.max(1.0).log(1024.0).floor()),
            Unit::Number | Unit::Percent => 1.0,
        };
        let scaled = Range { low: low / unit, high: high / unit };
        scaled.ticks(5).into_iter().map(|tick| tick * unit).collect()
    }

    /// Draws the axes. `along` labels the position axis.
    pub(super) fn draw_axes(&self, svg: &mut String, unit: Unit, along: &str) {
        let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
        // Writing to a string cannot fail.
        for tick in self.value_ticks(unit) {
            let (y, label, x) = (self.y(tick), text(tick, unit), LEFT - 6.0);
            let _ = writeln!(svg, r#"<path class="grid" d="M{LEFT} {y:.1}H{right:.1}"/>"#);
            let _ = writeln!(svg, r#"<text x="{x}" y="{:.1}" text-anchor="end">{label}</text>"#, y + 4.0);
        }
        let _ = writeln!(svg, r#"<path class="axis" d="M{LEFT} {bottom}H{right:.1}"/>"#);
        for tick in self.x.ticks(6).into_iter().filter(|tick| tick.fract() == 0.0) {
            let (x, y, label) = (self.x(tick), bottom + 16.0, text(tick, Unit::Number));
            let _ = writeln!(svg, r#"<text x="{x:.1}" y="{y:.1}" text-anchor="middle">{label}</text>"#);
        }
        let y = HEIGHT - 3.0;
        let _ = writeln!(svg, r#"<text x="{right}" y="{y}" text-anchor="end" class="faint">{along}</text>"#);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_inside() {
        assert_eq!(Range { low: 0.0, high: 10.0 }.ticks(5), [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]);
        let small = Range { low: 2.31, high: 2.94 }.ticks(5);
        assert_eq!(
            small.iter().map(|tick| text(*tick, Unit::Number)).collect::<Vec<_>>(),
            ["2.4", "2.6", "2.8"]
        );
    }

    #[test]
    fn ticks_of_bytes_are_round_in_their_unit() {
        let range = |high| Range { low: 0.0, high };
        let frame = Frame { x: range(1.0), y: range(11.0 * 1024.0 * 1024.0) };
        let ticks = frame.value_ticks(Unit::Bytes);
        let ticks: Vec<_> = ticks.into_iter().map(|tick| text(tick, Unit::Bytes)).collect();
        assert_eq!(ticks, ["0 B", "5 MiB", "10 MiB"]);
    }
}
