//! Features that change no result.

use super::mesh_run::{Layout, Problem, assert_matches, layout};
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

/// Meshes of dp and sp with every stage, pipelines of these `(dp, sp, pp)`, tensor parallelism and rings; with and without accumulation.
pub fn layouts_with(pipelines: &[(usize, usize, usize)]) -> Vec<Layout> {
    let meshes = [(1, 1), (2, 1), (1, 2), (1, 3), (2, 2), (1, 4), (1, 5)];
    let with_stages = meshes.into_iter().flat_map(|(dp, sp)| [0, 1, 2, 3].map(|stage| layout(dp, sp, stage)));
    let pipelines = pipelines.iter().map(|&(dp, sp, pp)| Layout { pp, ..layout(dp, sp, 1) });
    let divided = [(1, 1, 2), (1, 2, 2), (2, 1, 3), (1, 2, 3), (1, 1, 4)];
    let divided = divided.map(|(dp, sp, tp)| Layout { tp, ..layout(dp, sp, 3) });
    let rings = [(2, 2, 1), (2, 4, 1), (3, 3, 1), (2, 2, 2)];
    let rings = rings.map(|(ring, sp, tp)| Layout { ring, tp, ..layout(1, sp, 2) });
    let all = with_stages.chain(pipelines).chain(divided).chain(rings);
    all.chain([Layout { pp: 2, tp: 2, ..layout(1, 2, 1) }])
        .flat_map(|layout| [1, 2].map(|accumulation| Layout { accumulation, ..layout }))
        .collect()
}
