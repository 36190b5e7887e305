//! Features that change no result.

use super::mesh_run::{Layout, Problem, assert_matches, layout};
use super::sample::{axes, sampled};

/// Trains problems with and without features on a sample of layouts, and compares them with the reference.
#[track_caller]
pub fn check_features(problems: &[Problem], layouts: impl IntoIterator<Item = Layout>) {
    check_features_where(problems, layouts, 5e-5, |_, _| true);
}

/// As [`check_features`], within another tolerance, and for each problem on the layouts that `fits` accepts.
#[track_caller]
pub fn check_features_where(
    problems: &[Problem],
    layouts: impl IntoIterator<Item = Layout>,
    tolerance: f64,
    fits: impl Fn(&Problem, &Layout) -> bool,
) {
    // Features do not change the reference.
    let reference_of = |number: usize| {
        let Problem { config, batch, .. } = &problems[number];
        problems.iter().position(|first| first.config == *config && first.batch == *batch).unwrap()
    };
    let expected = |number| (reference_of(number) == number).then(|| problems[number].reference());
    let expected: Vec<_> = (0..problems.len()).map(|number| expected(number).transpose().unwrap()).collect();
    let cases =
        layouts.into_iter().flat_map(|layout| (0..problems.len()).map(move |number| (layout, number)));
    // A chunk of two has four heads; those of one of three or four ranks of tp have too few KV heads for two chunks.
    let has_chunks = |layout: &Layout| layout.sp / layout.ring * layout.tp <= 4 && layout.tp < 3;
    let cases = cases.filter(|(layout, number)| {
        let problem = &problems[*number];
        let is_whole = problem.extra["ulysses"]["head_chunks"].is_null();
        (is_whole || has_chunks(layout)) && fits(problem, layout)
    });
    let axes = |(layout, number): &(Layout, usize)| [axes![number], layout.axes()].concat();
    for (layout, number) in sampled(cases, axes) {
        let outcome = problems[number].run(layout).unwrap();
        let expected = expected[reference_of(number)].as_ref().unwrap();
        assert_matches(&outcome, expected, tolerance, &format!("problem {number}, {layout:?}"));
    }
}

/// Layouts that differ in all axes.
pub struct Grid {
    /// `(dp, sp)`, with every stage.
    pub meshes: &'static [(usize, usize)],
    /// `(dp, sp, pp)`.
    pub pipelines: &'static [(usize, usize, usize)],
    /// `(dp, sp, tp)`.
    pub divided: &'static [(usize, usize, usize)],
    /// `(ring, sp, tp)`.
    pub rings: &'static [(usize, usize, usize)],
}

pub const GRID: Grid = Grid {
    meshes: &[(1, 1), (2, 1), (1, 2), (1, 3), (2, 2), (1, 4), (1, 5)],
    pipelines: &[(1, 1, 2), (2, 1, 2), (1, 3, 2)],
    divided: &[(1, 1, 2), (1, 2, 2), (2, 1, 3), (1, 2, 3), (1, 1, 4)],
    rings: &[(2, 2, 1), (2, 4, 1), (3, 3, 1), (2, 2, 2)],
};

impl Grid {
    /// Returns the layouts, and one with pp, sp and tp, each with and without accumulation.
    pub fn layouts(&self) -> impl Iterator<Item = Layout> {
        let Self { meshes, pipelines, divided, rings } = *self;
        let meshes = meshes.iter().flat_map(|&(dp, sp)| [0, 1, 2, 3].map(|stage| layout(dp, sp, stage)));
        let pipelines = pipelines.iter().map(|&(dp, sp, pp)| Layout { pp, ..layout(dp, sp, 1) });
        let divided = divided.iter().map(|&(dp, sp, tp)| Layout { tp, ..layout(dp, sp, 3) });
        let rings = rings.iter().map(|&(ring, sp, tp)| Layout { ring, tp, ..layout(1, sp, 2) });
        let all = meshes.chain(pipelines).chain(divided).chain(rings);
        all.chain([Layout { pp: 2, tp: 2, ..layout(1, 2, 1) }])
            .flat_map(|layout| [1, 2].map(|accumulation| Layout { accumulation, ..layout }))
    }
}
