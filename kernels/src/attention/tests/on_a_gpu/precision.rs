//! The tiled kernels with elements of 16 bits.

use super::*;

#[test]
fn elements_of_16_bits_err_at_most_twice_as_much_as_the_naive_way() -> Result<()> {
    on_a_gpu(check_16_bits)
}

#[test]
fn adding_up_dq_in_16_bits_keeps_within_the_same_error() -> Result<()> {
    on_a_gpu(|| {
        for_16_bits(|dtype, layout: Layout| {
            let case = causal(1, 200, &[0, 0, 1], 2, 16)?.rounded(dtype, layout)?;
            case.check_precision(&case.run_in_tiles(&tilings::SMALL)?, &format!("{dtype:?}, {layout:?}"))
        })
    })
}
