//! The error of every op.

use super::strided_copy::StridedBlock;
use crate::device::DeviceError;
use crate::tensor::DTYPE_NAMES;
use candle_core::{DType, DeviceLocation};

/// Why an op refused its arguments. No output has been touched when one is returned,
/// except by [`OpError::Candle`].
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum OpError {
    /// An argument does not have the shape that the other arguments imply.
    #[error("{op}: `{argument}` has shape {got:?}, expected {expected:?} (leading dimensions may be split)")]
    Shape {
        /// The op, such as `rms_norm::forward`.
        op: &'static str,
        /// The argument's name in the op's signature.
        argument: &'static str,
        /// The shape that would be valid, with all leading dimensions multiplied into the first.
        expected: Vec<usize>,
        /// The shape that was passed.
        got: Vec<usize>,
    },
    /// An argument has no dimensions where the op needs some, or an empty last one.
    #[error("{op}: `{argument}` has shape {got:?}, expected {expected}")]
    Dimensions {
        /// The op.
        op: &'static str,
        /// The argument's name.
        argument: &'static str,
        /// What would be valid.
        expected: &'static str,
        /// The shape that was passed.
        got: Vec<usize>,
    },
    /// An argument holds an element type that the op has no kernel for on its device.
    #[error("{op}: `{argument}` holds {got:?}, expected F32, BF16 or F16")]
    DType {
        /// The op.
        op: &'static str,
        /// The argument's name.
        argument: &'static str,
        /// The element type that was passed.
        got: DType,
    },
    /// An argument holds an element type that tensors do not travel in.
    #[error("{op}: an {argument} holds {got:?}, expected {DTYPE_NAMES}")]
    ElementType {
        /// The op.
        op: &'static str,
        /// Whether it is an input or an output.
        argument: &'static str,
        /// The element type that was passed.
        got: DType,
    },
    /// A block of a list of copies does not fit its tensor or its partner.
    #[error("{op}: copy {index} has a block that {fault}: {block:?}")]
    Block {
        /// The op.
        op: &'static str,
        /// Index in the list of copies.
        index: usize,
        /// What is wrong.
        fault: String,
        /// The block.
        block: Box<StridedBlock>,
    },
    /// An argument holds another element type than the others ask for.
    #[error("{op}: `{argument}` holds {got:?}, expected {expected:?}")]
    MixedDTypes {
        /// The op.
        op: &'static str,
        /// The argument's name.
        argument: &'static str,
        /// The element type that would be valid.
        expected: DType,
        /// The element type that was passed.
        got: DType,
    },
    /// The device's kernel failed.
    #[error("{op}")]
    Device {
        /// The op.
        op: &'static str,
        /// Why.
        source: DeviceError,
    },
    /// An argument's elements do not lie one after the other.
    #[error("{op}: `{argument}` of shape {shape:?} has strides {strides:?}, expected a contiguous tensor")]
    NotContiguous {
        /// The op.
        op: &'static str,
        /// The argument's name.
        argument: &'static str,
        /// Its shape.
        shape: Vec<usize>,
        /// Its strides.
        strides: Vec<usize>,
    },
    /// The arguments live on different devices.
    #[error("{op}: `{argument}` is on {got:?}, the first output on {expected:?}")]
    DeviceMismatch {
        /// The op.
        op: &'static str,
        /// The argument's name.
        argument: &'static str,
        /// The device of the first output.
        expected: DeviceLocation,
        /// The argument's device.
        got: DeviceLocation,
    },
    /// The op has no kernel for the device.
    #[error("{op}: no kernel for {device:?}, only for the CPU")]
    UnsupportedDevice {
        /// The op.
        op: &'static str,
        /// The arguments' device.
        device: DeviceLocation,
    },
    /// An output shares storage with another argument: candle's lock on it would wait for itself.
    #[error("{op}: output `{output}` shares storage with `{other}`; each output needs storage of its own")]
    SharedStorage {
        /// The op.
        op: &'static str,
        /// The output.
        output: &'static str,
        /// The argument it shares storage with.
        other: &'static str,
    },
    /// A slice or table covers another number of tokens than the tensors.
    #[error("{op}: `{argument}` covers {got} tokens, expected {expected}")]
    TokenCount {
        /// The op.
        op: &'static str,
        /// The argument's name.
        argument: &'static str,
        /// The number of tokens of the tensors.
        expected: usize,
        /// The number of tokens of the argument.
        got: usize,
    },
    /// A token id or label does not name a row of the vocabulary.
    #[error("{op}: `{argument}[{position}]` is {value}, valid are 0..{vocab_size}{also_valid}")]
    IdOutOfRange {
        /// The op.
        op: &'static str,
        /// The argument's name.
        argument: &'static str,
        /// Where in the argument.
        position: usize,
        /// The id found there.
        value: i64,
        /// Rows of the vocabulary.
        vocab_size: usize,
        /// Further valid values, for the message (empty or ` and …`).
        also_valid: &'static str,
    },
    /// An environment variable has a value without a meaning.
    #[error("{variable} is `{value}`, expected {expected}")]
    Environment {
        /// Its name.
        variable: &'static str,
        /// The value that it has.
        value: String,
        /// What would be valid.
        expected: &'static str,
    },
    /// A scalar argument is outside its range.
    #[error("{op}: `{argument}` is {value}, expected {expected}")]
    InvalidValue {
        /// The op.
        op: &'static str,
        /// The argument's name.
        argument: &'static str,
        /// The value that was passed.
        value: f64,
        /// What would be valid.
        expected: &'static str,
    },
    /// A matrix view reaches past the end of its slice, or a writable one overlaps itself.
    #[error(
        "matrix of {rows}x{cols} with strides ({row_stride}, {col_stride}) does not fit {len} elements \
         without overlap"
    )]
    MatrixLayout {
        /// Rows of the view.
        rows: usize,
        /// Columns of the view.
        cols: usize,
        /// Elements from one row to the next.
        row_stride: usize,
        /// Elements from one column to the next.
        col_stride: usize,
        /// Elements of the slice.
        len: usize,
    },
    /// candle failed to give access to a tensor.
    #[error("{op}: {source}")]
    Candle {
        /// The op.
        op: &'static str,
        /// candle's error.
        source: candle_core::Error,
    },
}
