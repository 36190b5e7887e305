//! Fused operations.

pub mod attention;
#[allow(dead_code, reason = "shared with the other ops")]
pub mod simd;
