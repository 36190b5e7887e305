//! The axes of a chart: coordinates and ticks.

use super::units::{Unit, text};
use super::{HEIGHT, WIDTH};
use std::fmt::Write;

/// Margins around the plot area.
const LEFT: f64 = 56.0;
const RIGHT: f64 = 10.0;
const TOP: f64 = 10.0;
const BOTTOM: f64 = 34.0;

/// The ranges of both axes.
pub(super) struct Frame {
    pub(super) x: (f64, f64),
    pub(super) y: (f64, f64),
}

impl Frame {
    pub(super) fn x(&self, value: f64) -> f64 {
        LEFT + (WIDTH - LEFT - RIGHT) * share(value, self.x)
    }

    pub(super) fn y(&self, value: f64) -> f64 {
        HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share(value, self.y)
    }

    pub(super) fn corners(&self, points: &[(f64, f64)]) -> String {
        let corner = |(x, y): &(f64, f64)| format!("{:.1},{:.1}", self.x(*x), self.y(*y));
        points.iter().map(corner).collect::<Vec<_>>().join(" ")
    }

    /// Returns ticks of the value axis, round in the displayed unit.
    fn value_ticks(&self, unit: Unit) -> Vec<f64> {
        let unit = match unit {
            Unit::Bytes => 1024_f64.powf(self.y.1.max(1.0).log(1024.0).floor()),
            Unit::Number | Unit::Percent => 1.0,
        };
        ticks((self.y.0 / unit, self.y.1 / unit), 5).into_iter().map(|tick| tick * unit).collect()
    }

    fn position_ticks(&self) -> Vec<f64> {
        ticks(self.x, 6).into_iter().filter(|tick| tick.fract() == 0.0).collect()
    }

    /// Draws the axes. `along` labels the position axis.
    pub(super) fn draw_axes(&self, svg: &mut String, unit: Unit, along: &str) {
        // Writing to a string cannot fail.
        for tick in self.value_ticks(unit) {
            let y = self.y(tick);
            let _ = writeln!(svg, "<path class=\"grid\" d=\"M{LEFT} {y:.1}H{:.1}\"/>", WIDTH - RIGHT);
            let label = text(tick, unit);
            let _ = writeln!(
                svg,
                "<text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{label}</text>",
                LEFT - 6.0,
                y + 4.0
            );
        }
        let bottom = HEIGHT - BOTTOM;
        let _ = writeln!(svg, "<path class=\"axis\" d=\"M{LEFT} {bottom}H{:.1}\"/>", WIDTH - RIGHT);
        for tick in self.position_ticks() {
            let (x, y) = (self.x(tick), bottom + 16.0);
            let label = text(tick, Unit::Number);
            let _ = writeln!(svg, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"middle\">{label}</text>");
        }
        let (x, y) = (WIDTH - RIGHT, HEIGHT - 3.0);
        let _ = writeln!(svg, "<text x=\"{x}\" y=\"{y}\" text-anchor=\"end\" class=\"faint\">{along}</text>");
    }
}

/// Returns the position of a value in a range, 0 to 1.
fn share(value: f64, (low, high): (f64, f64)) -> f64 {
    (value - low) / (high - low)
}

/// Returns about `count` round numbers in a range.
fn ticks((low, high): (f64, f64), count: usize) -> Vec<f64> {
    let rough = (high - low) / count as f64;
    let power = 10_f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].map(|factor| factor * power).into_iter().find(|step| *step >= rough);
    let step = step.unwrap_or(rough);
    let first = (low / step).ceil() as i64;
    let last = (high / step + 1e-9).floor() as i64;
    (first..=last).map(|number| number as f64 * step).collect()
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
        let frame = Frame { x: (0.0, 1.0), y: (0.0, 11.0 * 1024.0 * 1024.0) };
        let ticks = frame.value_ticks(Unit::Bytes);
        let ticks: Vec<_> = ticks.into_iter().map(|tick| text(tick, Unit::Bytes)).collect();
        assert_eq!(ticks, ["0 B", "5 MiB", "10 MiB"]);
    }
}
