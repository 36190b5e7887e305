//! Kernels of GPUs: the fused ones, and the tiled ones in small tiles and with 16-bit elements.

mod fused;
mod fused_backward;
mod fused_matrix;
mod precision;
mod tilings;

use super::precision::{
    Layout::{self, Aligned, Odd},
    check_16_bits, for_16_bits,
};
use super::*;
use crate::device::fake_driver::{bank_conflicts, in_order};
use crate::testing::on_a_gpu;
