//! The division of layers into stages that cost about the same.

use std::ops::Range;

/// Divides layers of these `costs` into consecutive stages of at least one layer, so that the costliest stage costs least. The last
/// stage also has an objective. Of divisions that are equally good so far, the one with the smallest sum of squares.
///
/// There are at most as many stages as layers.
///
/// ```
/// use ulysses::pipeline::balanced_stages;
///
/// assert_eq!(balanced_stages(&[1; 8], 0, 3), [0..3, 3..6, 6..8]);
/// // A loss as costly as two layers.
/// assert_eq!(balanced_stages(&[1; 8], 2, 2), [0..5, 5..8]);
/// ```
pub fn balanced_stages(costs: &[u64], of_objective: u64, num_stages: usize) -> Vec<Range<usize>> {
    let before = |layer: usize| costs[..layer].iter().sum::<u64>();
    let sums: Vec<u64> = (0..=costs.len()).map(before).collect();
    // By number of layers: the largest cost and the sum of squares of the best division into the stages so far.
    let mut best = vec![None; sums.len()];
    best[0] = Some((0, 0));
    let mut first_layers: Vec<Vec<usize>> = Vec::new();
    for stage in 1..=num_stages {
        let extra = if stage == num_stages { of_objective } else { 0 };
        let mut with_stage = vec![None; sums.len()];
        let mut first_layer = vec![0; sums.len()];
        for end in 1..sums.len() {
            // Of equally good stages the shortest, so that earlier ones have one layer more.
            for start in (0..end).rev() {
                let Some((most, squares)) = best[start] else { continue };
                let cost = sums[end] - sums[start] + extra;
                let costs = (cost.max(most), squares + u128::from(cost).pow(2));
                if with_stage[end].is_none_or(|known| costs < known) {
                    (with_stage[end], first_layer[end]) = (Some(costs), start);
                }
            }
        }
        best = with_stage;
        first_layers.push(first_layer);
    }
    let mut end = costs.len();
    let mut stages = Vec::with_capacity(num_stages);
    for first_layer in first_layers.iter().rev() {
        stages.push(first_layer[end]..end);
        end = first_layer[end];
    }
    stages.reverse();
    stages
}
