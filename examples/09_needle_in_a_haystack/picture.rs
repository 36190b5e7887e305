//! Draws the result.

use super::{BINS, KEYS, SEQ_LEN, SP};

/// Draws both curves over the distance; gray lines are the bounds of shards, the dashed line is chance.
pub(crate) fn picture(whole: &[f64], shard: &[f64]) -> String {
    let (x, y) = (|bin: f64| 60.0 + 560.0 * bin / BINS as f64, |share: f64| 230.0 - 200.0 * share);
    let curve = |(shares, color, name, at): (&[f64], &str, &str, usize)| {
        let point = |(bin, share): (usize, &f64)| format!("{:.1},{:.1} ", x(bin as f64 + 0.5), y(*share));
        let points: String = shares.iter().enumerate().map(point).collect();
        format!(
            "<polyline points='{points}' fill='none' stroke='{color}'/><text x='70' y='{at}' fill='{color}'>{name}</text>\n"
        )
    };
    let border = |border: usize| {
        let (at, tokens) = (x((border * BINS / SP) as f64), border * SEQ_LEN / SP);
        format!(
            "<path d='M{at} 30V230' stroke='#ccc'/><text x='{at}' y='248' text-anchor='middle'>{tokens}</text>\n"
        )
    };
    let curves = [
        (whole, "#14568c", "attention over whole sequences", 120),
        (shard, "#b5541c", "within a shard", 140),
    ];
    format!(
        "<svg xmlns='http://www.w3.org/2000/svg' width='640' height='280' font-family='sans-serif' font-size='12' \
         stroke-width='2'>\n<rect width='100%' height='100%' fill='white'/>\n<g stroke-width='1'>{}</g>\
         <path d='M60 {chance}H620' stroke='#999' stroke-dasharray='4'/>\n{}\
         <text x='340' y='270' text-anchor='middle'>tokens from the question back to its answer</text></svg>\n",
        (0..=SP).map(border).collect::<String>(),
        curves.map(curve).concat(),
        chance = y(1.0 / KEYS as f64),
    )
}
