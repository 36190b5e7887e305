//! From candle's run-time dtype to a Rust type, and the arithmetic of reductions.

use super::CommError;
use crate::tensor::{Element, to_vec, with_slice, with_slice_mut};
use candle_core::{Device, Tensor};

/// Runs `$body` with `$element` standing for the Rust type of `$dtype`.
/// `$body` is a `Result<_, CommError>`.
macro_rules! for_dtype {
    ($dtype:expr, $element:ident => $body:expr) => {{
        use candle_core::DType;
        match $dtype {
            DType::F32 => {
                type $element = f32;
                $body
            }
            DType::F64 => {
                type $element = f64;
                $body
            }
            DType::BF16 => {
                type $element = half::bf16;
                $body
            }
            DType::F16 => {
                type $element = half::f16;
                $body
            }
            DType::I64 => {
                type $element = i64;
                $body
            }
            DType::U32 => {
                type $element = u32;
                $body
            }
            DType::U8 => {
                type $element = u8;
                $body
            }
            other => Err($crate::comm::CommError::Tensor(format!("collectives do not carry {other:?}"))),
        }
    }};
}
pub(super) use for_dtype;

/// The dtypes that [`for_dtype!`] knows, for error messages.
pub(super) const SUPPORTED_DTYPES: &str = "f32, f64, bf16, f16, i64, u32 or u8";

/// A type that reductions compute in.
pub(super) trait Number: Copy + PartialOrd + Send + Sync + 'static {
    /// The sum; integers wrap.
    fn plus(self, other: Self) -> Self;

    /// Whether this is a NaN.
    fn is_nan(self) -> bool;
}

macro_rules! number {
    (float: $($float:ty),*; integer: $($integer:ty),*) => {
        $(impl Number for $float {
            #[inline(always)]
            fn plus(self, other: Self) -> Self { self + other }
            #[inline(always)]
            fn is_nan(self) -> bool { self.is_nan() }
        })*
        $(impl Number for $integer {
            #[inline(always)]
            fn plus(self, other: Self) -> Self { self.wrapping_add(other) }
            #[inline(always)]
            fn is_nan(self) -> bool { false }
        })*
    };
}
number!(float: f32, f64; integer: i64, u32, u8);

/// An element type together with the type that it is reduced in: itself, or `f32`
/// for the 16-bit floats, which are rounded once at the end.
pub(super) trait Arithmetic: Element {
    /// The type that sums are held in.
    type Wide: Number;

    /// Exact.
    fn widen(self) -> Self::Wide;

    /// Rounds to nearest even.
    fn narrow(wide: Self::Wide) -> Self;
}

macro_rules! arithmetic {
    (itself: $($itself:ty),*; in_f32: $($half:ty),*) => {
        $(impl Arithmetic for $itself {
            type Wide = Self;
            #[inline(always)]
            fn widen(self) -> Self { self }
            #[inline(always)]
            fn narrow(wide: Self) -> Self { wide }
        })*
        $(impl Arithmetic for $half {
            type Wide = f32;
            #[inline(always)]
            fn widen(self) -> f32 { self.to_f32() }
            #[inline(always)]
            fn narrow(wide: f32) -> Self { Self::from_f32(wide) }
        })*
    };
}
arithmetic!(itself: f32, f64, i64, u32, u8; in_f32: half::bf16, half::f16);

/// A flat copy of a contiguous tensor in storage of its own.
pub(super) fn copy_of(tensor: &Tensor) -> Result<Tensor, CommError> {
    for_dtype!(tensor.dtype(), T => {
        Ok(Tensor::from_vec(to_vec::<T>(tensor)?, tensor.elem_count(), &Device::Cpu)?)
    })
}

/// Overwrites `target` with `source`; both contiguous, of one dtype and length, and
/// in different storages.
pub(super) fn copy_into(source: &Tensor, target: &Tensor) -> Result<(), CommError> {
    for_dtype!(target.dtype(), T => {
        with_slice_mut::<T, _>(target, |to| with_slice::<T, _>(source, |from| to.copy_from_slice(from)))??;
        Ok(())
    })
}
