//! The fused kernels, emulated, against the f64 reference.

use super::precision::Layout;
use super::*;
use crate::attention::{AttentionKernels, with_attention_kernels};
use crate::device::emulate;

const DTYPES: [DType; 2] = [DType::BF16, DType::F16];
const HEAD_DIMS: [usize; 3] = [64, 96, 128];

/// Runs on the emulated fused kernels; a call that they do not support fails.
fn fused<R>(run: impl FnOnce() -> R) -> R {
    emulate(|| with_attention_kernels(AttentionKernels::Fused, run))
}

impl Case {
    /// `[o, lse]` of the fused kernel, on outputs that contain NaN.
    fn fused_forward(&self) -> Result<[Vec<f32>; 2]> {
        let (b, sq, hq, _) = self.q.dims4()?;
        let (o, lse) = (dirty(&self.q)?, testing::output(&[b, hq, sq]));
        fused(|| forward(&self.operands(), &o, &lse))?;
        Ok([&o, &lse].map(read))
    }

    /// Checks the fused kernel in one element type.
    fn check_fused_forward(self, dtype: DType, name: &str) -> Result<()> {
        let case = self.rounded(dtype, Layout::Aligned)?;
        case.check_precision(&case.fused_forward()?, &format!("{name}, {dtype:?}, d {}", case.head_dim))
    }
}

/// A causal case of one sequence.
fn of_length(seq_len: u32, q_to_kv: &[usize], num_kv_heads: usize, head_dim: usize) -> Result<Case> {
    causal(1, seq_len, q_to_kv, num_kv_heads, head_dim)
}

#[test]
fn every_head_dimension_and_element_type_matches_the_reference() -> Result<()> {
    for head_dim in HEAD_DIMS {
        for dtype in DTYPES {
            of_length(130, &[0, 0, 1], 2, head_dim)?.check_fused_forward(dtype, "two tiles and a rest")?;
        }
    }
    Ok(())
}
