//! Features that change no result.

use super::mesh_run::{Layout, Problem, assert_matches};
use super::sample::{axes, sampled};

/// Trains problems that differ in their features only, on a sample of layouts. The reference is that of the first.
#[track_caller]
pub fn check_features(problems: &[Problem], layouts: impl Iterator<Item = Layout>) {
    let expected = problems[0].reference().unwrap();
    let cases = layouts.flat_map(|layout| (0..problems.len()).map(move |feature| (layout, feature)));
    // A chunk of two has four heads; those of one of three or four ranks of tp have too few KV heads for two chunks.
    let fits = |layout: &Layout| layout.sp / layout.ring * layout.tp <= 4 && layout.tp < 3;
    let is_whole = |feature: usize| problems[feature].extra["ulysses"]["head_chunks"].is_null();
    let cases = cases.filter(|(layout, feature)| is_whole(*feature) || fits(layout));
    let axes = |(layout, feature): &(Layout, usize)| {
        let Layout { sp, ring, tp, pp, stage, .. } = layout;
        axes![feature, sp, ring, tp, pp, stage]
    };
    for (layout, feature) in sampled(cases, axes) {
        let outcome = problems[feature].run(layout).unwrap();
        assert_matches(&outcome, &expected, 5e-5, &format!("features {feature}, {layout:?}"));
    }
}
