//! `ulysses plan --scaling`: the study as a table, as JSON and as a drawing.

use super::table::{bytes, row, write_table};
use crate::cli::{Failure, OrFail, note, print};
use anyhow::Context;
use std::fmt::{self, Display, Formatter, Write};
use std::path::Path;
use ulysses::engine::plan::scaling::{ModelScaling, Point, RANKS, study};

pub(super) fn run(tokens_per_rank: usize, svg: Option<&Path>, json: bool) -> Result<(), Failure> {
    let models = study(tokens_per_rank).or_run()?;
    if let Some(path) = svg {
        let drawing = drawing(&models).or_run()?;
        std::fs::write(path, drawing).with_context(|| path.display().to_string()).or_run()?;
        note(format_args!("drawn to {}", path.display()));
    }
    if json {
        return print(format_args!("{}\n", serde_json::to_string_pretty(&models).or_run()?));
    }
    print(Study { models: &models, tokens_per_rank })
}

struct Study<'a> {
    models: &'a [ModelScaling],
    tokens_per_rank: usize,
}

impl Display for Study<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "bytes that a rank sends in a layer, forward and backward, 16 bits an element, {} tokens per rank\n\
             claim: 8·N·h/P elements, constant when N and P grow together (arXiv 2309.14509)",
            self.tokens_per_rank
        )?;
        for model in self.models {
            let ModelScaling { model: name, hidden_size, num_heads, num_kv_heads, .. } = model;
            writeln!(
                f,
                "\n{name}: {hidden_size} wide, {num_heads} query heads over {num_kv_heads} KV heads"
            )?;
            let mut rows =
                vec![row(["ranks", "tokens", "Ulysses", "of it K and V", "claim", "Megatron", "ring"])];
            rows.extend(model.points.iter().map(cells));
            write_table(f, &rows)?;
        }
        Ok(())
    }
}

fn cells(point: &Point) -> Vec<String> {
    let exchanged = |sent: Option<f64>| sent.map_or_else(|| "too few heads".to_owned(), bytes);
    vec![
        point.ranks.to_string(),
        point.seq_len.to_string(),
        exchanged(point.ulysses_bytes),
        exchanged(point.ulysses_kv_bytes),
        bytes(point.claimed_bytes),
        bytes(point.megatron_bytes),
        bytes(point.ring_bytes),
    ]
}

/// A curve's name, colour and height at a point.
type Curve = (&'static str, &'static str, fn(&Point) -> Option<f64>);

const CURVES: [Curve; 4] = [
    ("Megatron SP", "#b5541c", |point| Some(point.megatron_bytes)),
    ("ring", "#7a7a7a", |point| Some(point.ring_bytes)),
    ("claim 8·N·h/P", "#7fb2d9", |point| Some(point.claimed_bytes)),
    ("Ulysses", "#14568c", |point| point.ulysses_bytes),
];

/// Sizes of a panel and what is around its axes, in pixels.
const WIDTH: f64 = 420.0;
const HEIGHT: f64 = 300.0;
const MARGIN: f64 = 56.0;

/// The logarithmic axes of a panel.
struct Panel {
    left: f64,
    top: f64,
    /// Powers of two of bytes at the bottom and the top.
    low: f64,
    high: f64,
}

impl Panel {
    fn x(&self, ranks: usize) -> f64 {
        let (first, last) = (RANKS[0] as f64, RANKS[RANKS.len() - 1] as f64);
        self.left + MARGIN + (WIDTH - 2.0 * MARGIN) * (ranks as f64 / first).log2() / (last / first).log2()
    }

    fn y(&self, bytes: f64) -> f64 {
        self.top + HEIGHT
            - MARGIN
            - (HEIGHT - 2.0 * MARGIN) * (bytes.log2() - self.low) / (self.high - self.low)
    }

    fn draw(&self, svg: &mut String, model: &ModelScaling) -> fmt::Result {
        let (left, right) = (self.left + MARGIN, self.left + WIDTH - MARGIN);
        writeln!(
            svg,
            r#"<text x="{left}" y="{}" font-weight="bold">{}</text>"#,
            self.top + 30.0,
            model.model
        )?;
        for ranks in RANKS {
            let (x, y) = (self.x(ranks), self.top + HEIGHT - MARGIN + 18.0);
            writeln!(svg, r#"<text x="{x:.1}" y="{y:.1}" text-anchor="middle">{ranks}</text>"#)?;
        }
        let mut power = self.low;
        while power <= self.high {
            let y = self.y(power.exp2());
            writeln!(svg, r##"<path d="M{left} {y:.1}H{right}" stroke="#ddd"/>"##)?;
            let label = bytes(power.exp2());
            writeln!(
                svg,
                r#"<text x="{:.1}" y="{:.1}" text-anchor="end">{label}</text>"#,
                left - 4.0,
                y + 4.0
            )?;
            power += 2.0;
        }
        CURVES.iter().try_for_each(|curve| self.draw_curve(svg, model, curve))
    }

    fn draw_curve(&self, svg: &mut String, model: &ModelScaling, (_, colour, height): &Curve) -> fmt::Result {
        let at = |point: &Point| height(point).map(|sent| (self.x(point.ranks), self.y(sent)));
        let corners = model.points.iter().filter_map(at).map(|(x, y)| format!("{x:.1},{y:.1}"));
        let corners = corners.collect::<Vec<_>>().join(" ");
        writeln!(svg, r#"<polyline points="{corners}" fill="none" stroke="{colour}" stroke-width="2"/>"#)
    }
}

/// A panel for every model, all with the same axes.
fn drawing(models: &[ModelScaling]) -> Result<String, fmt::Error> {
    let heights = models.iter().flat_map(|model| &model.points);
    let heights: Vec<f64> = heights
        .flat_map(|point| CURVES.iter().filter_map(|(_, _, height)| height(point)))
        .map(f64::log2)
        .collect();
    let low = heights.iter().copied().fold(f64::INFINITY, f64::min).floor();
    let high = heights.iter().copied().fold(0.0, f64::max).ceil();
    let (width, height) = (2.0 * WIDTH, HEIGHT * models.len().div_ceil(2) as f64 + MARGIN);
    let mut svg = String::new();
    writeln!(
        svg,
        r#"<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="11">"#
    )?;
    writeln!(svg, r#"<rect width="100%" height="100%" fill="white"/>"#)?;
    for (index, model) in models.iter().enumerate() {
        let panel = Panel { left: WIDTH * (index % 2) as f64, top: HEIGHT * (index / 2) as f64, low, high };
        panel.draw(&mut svg, model)?;
    }
    let title =
        "bytes that a rank sends in a layer, forward and backward, by ranks; tokens grow with the ranks";
    let (above, bottom) = (height - 36.0, height - 16.0);
    writeln!(svg, r#"<text x="{MARGIN}" y="{above}">{title}</text>"#)?;
    for (index, (name, colour, _)) in CURVES.iter().enumerate() {
        let x = MARGIN + 110.0 * index as f64;
        writeln!(svg, r#"<text x="{x:.1}" y="{bottom}" fill="{colour}" font-weight="bold">{name}</text>"#)?;
    }
    svg.push_str("</svg>\n");
    Ok(svg)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_drawing_has_a_curve_for_everything_that_the_table_has() {
        let svg = drawing(&study(64).unwrap()).unwrap();
        assert_eq!(svg.matches("<polyline").count(), 4 * CURVES.len());
        assert!(svg.starts_with("<svg") && svg.ends_with("</svg>\n") && !svg.contains("NaN"));
    }
}
