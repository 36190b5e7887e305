//! The element types of communication, and the arithmetic of reductions.

use super::OpError;
use super::arg_check::ArgCheck;
use crate::device::Target;
use crate::tensor::{DTYPES, Element, StorageId};
use candle_core::{DType, Tensor};

/// Runs `$body` with `$element` as the Rust type of `$dtype`, or `$otherwise` for a dtype that is not in
/// [`DTYPES`](crate::tensor::DTYPES).
#[macro_export]
macro_rules! for_dtype {
    ($dtype:expr, $element:ident => $body:expr, else $otherwise:expr) => {{
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
            _ => $otherwise,
        }
    }};
}
pub(crate) use for_dtype;

/// A type that reductions are computed in.
pub(super) trait Number: Copy + PartialOrd + Send + Sync + 'static {
    /// The sum; integers wrap.
    fn plus(self, other: Self) -> Self;

    /// The product; integers wrap.
    fn times(self, other: Self) -> Self;

    /// The quotient by a count of at least 1; integers are truncated.
    fn over(self, count: usize) -> Self;

    /// Returns whether this is a NaN.
    fn is_nan(self) -> bool;
}

macro_rules! number {
    (float: $($float:ty),*; integer: $($integer:ty),*) => {
        $(impl Number for $float {
            #[inline(always)]
            fn plus(self, other: Self) -> Self { self + other }
            #[inline(always)]
            fn times(self, other: Self) -> Self { self * other }
            #[inline(always)]
            fn over(self, count: usize) -> Self { self / count as Self }
            #[inline(always)]
            fn is_nan(self) -> bool { self.is_nan() }
        })*
        $(impl Number for $integer {
            #[inline(always)]
            fn plus(self, other: Self) -> Self { self.wrapping_add(other) }
            #[inline(always)]
            fn times(self, other: Self) -> Self { self.wrapping_mul(other) }
            #[inline(always)]
            fn over(self, count: usize) -> Self { (i128::from(self) / count as i128) as Self }
            #[inline(always)]
            fn is_nan(self) -> bool { false }
        })*
    };
}
number!(float: f32, f64; integer: i64, u32, u8);

/// An element type with the type that it is reduced in: itself, or `f32` for 16-bit floats, which are rounded
/// once at the end.
pub(super) trait Arithmetic: Element {
    /// The type of sums.
    type Wide: Number;

    /// Converts exactly.
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

impl ArgCheck {
    /// The target that computes an op on tensors of any type in [`DTYPES`], and that type. All tensors must
    /// be contiguous, of one type and on one device. Ranks that share a GPU have separate candle devices for
    /// it; the first output's is used. No output may share storage with an input.
    pub(super) fn carried(
        &self,
        outputs: &[&Tensor],
        inputs: &[&Tensor],
    ) -> Result<(Target, DType), OpError> {
        let op = self.op;
        let Some(first) = outputs.first() else { return Ok((Target::Cpu, DType::F32)) };
        let (dtype, location) = (first.dtype(), first.device().location());
        let target = Target::of(first.device()).map_err(|source| OpError::Device { op, source })?;
        let named_outputs = outputs.iter().map(|tensor| ("output", tensor));
        for (argument, tensor) in named_outputs.chain(inputs.iter().map(|tensor| ("input", tensor))) {
            let got = tensor.dtype();
            if !DTYPES.contains(&got) {
                return Err(OpError::ElementType { op, argument, got });
            }
            if got != dtype {
                return Err(OpError::MixedDTypes { op, argument, expected: dtype, got });
            }
            if !tensor.is_contiguous() {
                let (shape, strides) = (tensor.dims().to_vec(), tensor.stride().to_vec());
                return Err(OpError::NotContiguous { op, argument, shape, strides });
            }
            let got = tensor.device().location();
            if got != location {
                return Err(OpError::DeviceMismatch { op, argument, expected: location, got });
            }
        }
        let written: Vec<StorageId> = outputs.iter().map(|output| StorageId::of(output)).collect();
        if inputs.iter().any(|input| written.contains(&StorageId::of(input))) {
            return Err(OpError::SharedStorage { op, output: "output", other: "input" });
        }
        Ok((target, dtype))
    }
}
