//! f32 kernels over elements of any type: one piece at a time is converted into a buffer that stays in the
//! cache.

use super::Float;
use half::{bf16, f16};

/// Elements per piece of operands without rows.
pub(crate) const PIECE: usize = 1024;

/// Number of rows, of `row_elems` elements each, per piece.
pub(crate) fn rows_per_piece(row_elems: usize) -> usize {
    (4 * PIECE / row_elems.max(1)).max(1)
}

/// The old content of a piece to write.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Before {
    /// Unspecified content that is never read.
    Garbage,
    /// Values that are read.
    Values,
}

/// Elements that can be processed as f32 pieces.
pub(crate) trait Pieces: Float {
    /// The piece's values, in `buffer` if they need conversion.
    fn read<'a>(piece: &'a [Self], buffer: &'a mut Vec<f32>) -> &'a [f32];

    /// Calls `work` with the piece's values, in `buffer` if they are rounded afterwards.
    fn update<R>(
        piece: &mut [Self],
        before: Before,
        buffer: &mut Vec<f32>,
        work: impl FnOnce(&mut [f32]) -> R,
    ) -> R;
}

impl Pieces for f32 {
    fn read<'a>(piece: &'a [Self], _: &'a mut Vec<f32>) -> &'a [f32] {
        piece
    }

    fn update<R>(piece: &mut [Self], _: Before, _: &mut Vec<f32>, work: impl FnOnce(&mut [f32]) -> R) -> R {
        work(piece)
    }
}

macro_rules! converted_pieces {
    ($($type:ty),*) => {$(
        impl Pieces for $type {
            fn read<'a>(piece: &'a [Self], buffer: &'a mut Vec<f32>) -> &'a [f32] {
                buffer.resize(piece.len(), 0.0);
                Self::widen(piece, buffer);
                buffer
            }

            fn update<R>(
                piece: &mut [Self],
                before: Before,
                buffer: &mut Vec<f32>,
                work: impl FnOnce(&mut [f32]) -> R,
            ) -> R {
                buffer.resize(piece.len(), 0.0);
                if before == Before::Values {
                    Self::widen(piece, buffer);
                }
                let result = work(buffer);
                Self::round(buffer, piece);
                result
            }
        }
    )*};
}
converted_pieces!(bf16, f16);

/// Evaluates an expression with `$element` as the Rust type of a floating-point dtype that ops compute with.
macro_rules! with_element_type {
    ($dtype:expr, $element:ident => $body:expr) => {
        match $dtype {
            candle_core::DType::BF16 => {
                type $element = half::bf16;
                $body
            }
            candle_core::DType::F16 => {
                type $element = half::f16;
                $body
            }
            _ => {
                type $element = f32;
                $body
            }
        }
    };
}
pub(crate) use with_element_type;
