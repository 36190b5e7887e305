mod scaled;

use super::*;
use crate::testing::*;

const THETA: f64 = 10_000.0;

/// (n, heads, head_dim); the last ones need several blocks of a kernel.
const SIZES: [[usize; 3]; 7] =
    [[1, 1, 2], [3, 2, 6], [5, 3, 64], [4, 1, 100], [7, 5, 14], [35, 4, 128], [9, 60, 144]];

/// Whole heads and parts of them, whose halves or neighbors form pairs.
fn ropes(head_dim: usize) -> Vec<Rope> {
    let plain = Rope::from(THETA);
    let ropes = [1.0, 0.5, 0.75].into_iter().flat_map(|partial_rotary_factor| {
        [false, true].map(|interleaved| Rope { partial_rotary_factor, interleaved, ..plain })
    });
    ropes.filter(|rope| rope.refused(head_dim).is_none()).collect()
}

/// Positions of packed documents, which restart, and reach far.
fn positions(n: usize) -> Vec<u32> {
    (0..n as u32).map(|i| if i % 3 == 2 { i * 9973 } else { i }).collect()
}

#[test]
fn both_directions_match_the_reference_on_every_target() {
    on_every_target(|target| {
        for [n, heads, head_dim] in SIZES {
            let data = random(n as u64, n * heads * head_dim);
            let positions = positions(n);
            for rope in ropes(head_dim) {
                let table = Table::scaled(&positions, &[], head_dim, &rope).unwrap();
                for (direction, sign) in [(Direction::Forward, 1.0), (Direction::Backward, -1.0)] {
                    let x = tensor(&data, &[n, heads, head_dim]);
                    apply(&x, &table, direction).unwrap();
                    let expected = reference::apply(&to_f64(&data), &positions, head_dim, rope, sign);
                    assert_close(&format!("{target} {direction:?} {rope:?}"), &read(&x), &expected, 2e-7);
                }
            }
        }
    });
}

#[test]
fn the_backward_rotation_is_the_derivative_of_the_forward_one() {
    let (positions, head_dim) = ([0, 1, 5], 6);
    let (x, dy) = (to_f64(&random(1, 3 * 2 * 6)), to_f64(&random(2, 3 * 2 * 6)));
    for rope in [Rope::from(THETA), Rope { partial_rotary_factor: 0.7, interleaved: true, ..THETA.into() }] {
        let dx = reference::apply(&dy, &positions, head_dim, rope, -1.0);
        let loss = |x: &[f64]| weighted_sum(&reference::apply(x, &positions, head_dim, rope, 1.0), &dy);
        assert_gradient("dx", loss, &x, &dx);
    }
}

#[test]
fn pairs_lie_half_a_head_apart_and_turn_by_the_position() {
    // Position 1 with head_dim 4: the pair (0, 2) rotates by 1, the pair (1, 3) by 1/100.
    let x = tensor(&[1.0, 10.0, 0.0, 0.0], &[1, 1, 4]);
    apply(&x, &Table::new(&[1], 4, THETA).unwrap(), Direction::Forward).unwrap();
    let expected = [1f64.cos(), 10.0 * 0.01f64.cos(), 1f64.sin(), 10.0 * 0.01f64.sin()];
    assert_close("x", &read(&x), &expected, 1e-7);
}

#[test]
fn a_part_of_a_head_rotates_as_a_smaller_head_and_neighbors_form_pairs() {
    let rope = Rope { partial_rotary_factor: 0.5, interleaved: true, ..THETA.into() };
    let x = tensor(&[1.0, 0.0, 0.0, 10.0, 5.0, 6.0, 7.0, 8.0], &[1, 1, 8]);
    apply(&x, &Table::scaled(&[1], &[], 8, &rope).unwrap(), Direction::Forward).unwrap();
    let (slow_sin, slow_cos) = 0.01f64.sin_cos();
    let turned = [1f64.cos(), 1f64.sin(), -10.0 * slow_sin, 10.0 * slow_cos];
    assert_close("x", &read(&x), &[&turned[..], &[5.0, 6.0, 7.0, 8.0]].concat(), 1e-7);

    for part in [0.0, 0.1, 0.4, 1.5, f64::NAN] {
        let error = Table::scaled(&[1], &[], 8, &Rope { partial_rotary_factor: part, ..rope }).unwrap_err();
        assert!(matches!(error, OpError::InvalidValue { argument: "partial_rotary_factor", .. }), "{error}");
    }
}

#[test]
fn backward_undoes_forward_on_a_large_tensor_in_any_number_of_threads() {
    let (n, heads, head_dim) = (600, 4, 32);
    let data = random(1, n * heads * head_dim);
    let positions: Vec<u32> = (0..n as u32).collect();
    assert_same_for_any_thread_count(|| {
        let table = Table::new(&positions, head_dim, THETA).unwrap();
        let x = tensor(&data, &[2, n / 2, heads, head_dim]);
        apply(&x, &table, Direction::Forward).unwrap();
        let turned = read(&x);
        apply(&x, &table, Direction::Backward).unwrap();
        assert_close("x", &read(&x), &to_f64(&data), 3e-7);
        turned
    });
}

#[test]
fn wrong_tables_and_shapes_are_named() {
    let error = Table::new(&[0], 7, THETA).unwrap_err();
    assert!(matches!(error, OpError::InvalidValue { argument: "head_dim", .. }), "{error}");
    let error = Table::new(&[0], 8, -1.0).unwrap_err();
    assert!(matches!(error, OpError::InvalidValue { argument: "theta", .. }), "{error}");
    let table = Table::new(&[0, 1], 4, THETA).unwrap();
    let error = apply(&output(&[3, 1, 4]), &table, Direction::Forward).unwrap_err();
    assert!(matches!(error, OpError::TokenCount { expected: 3, got: 2, .. }), "{error}");
    let error = apply(&output(&[2, 1, 6]), &table, Direction::Forward).unwrap_err();
    assert!(matches!(error, OpError::Shape { argument: "x", .. }), "{error}");
    let error = apply(&output(&[8]), &table, Direction::Forward).unwrap_err();
    assert!(matches!(error, OpError::Dimensions { argument: "x", .. }), "{error}");
}

#[test]
fn no_tokens_and_no_heads_are_no_error() {
    on_every_target(|_| {
        apply(&output(&[0, 1, 4]), &Table::new(&[], 4, THETA).unwrap(), Direction::Forward).unwrap();
        apply(&output(&[2, 0, 4]), &Table::new(&[0, 1], 4, THETA).unwrap(), Direction::Forward).unwrap();
    });
}

#[cfg(feature = "cuda")]
#[test]
fn kernels_of_every_element_type_round_once_on_a_gpu() {
    for_every_dtype(|dtype, rounding| {
        for [n, heads, head_dim] in SIZES {
            let positions = positions(n);
            for rope in ropes(head_dim) {
                let table = Table::scaled(&positions, &[], head_dim, &rope).unwrap();
                for (direction, sign) in [(Direction::Forward, 1.0), (Direction::Backward, -1.0)] {
                    let data = random(n as u64, n * heads * head_dim);
                    let (x, x64) = rounded(dtype, &data, &[n, heads, head_dim]);
                    apply(&x, &table, direction).unwrap();
                    let expected = reference::apply(&x64, &positions, head_dim, rope, sign);
                    assert_close(&format!("{direction:?} {rope:?}"), &read(&x), &expected, rounding + 2e-7);
                }
            }
        }
    });
}
