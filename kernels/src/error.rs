//! The error of all ops.

use super::strided_copy::StridedBlock;
use crate::device::DeviceError;
use crate::tensor::DTYPE_NAMES;
use candle_core::{DType, DeviceLocation};

/// The reason why an op refused its arguments. Outputs are then unchanged, except after [`OpError::Candle`].
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
        /// The expected shape, with all leading dimensions multiplied into the first.
        expected: Vec<usize>,
        /// The actual shape.
        got: Vec<usize>,
    },
    /// An argument lacks a dimension, or its last dimension is empty.
    #[error("{op}: `{argument}` has shape {got:?}, expected {expected}")]
    Dimensions {
        /// The op.
        op: &'static str,
        /// The argument's name.
        argument: &'static str,
        /// The expected shape, in words.
        expected: &'static str,
        /// The actual shape.
        got: Vec<usize>,
    },
    /// The op has no kernel for an argument's element type on its device.
    #[error("{op}: `{argument}` holds {got:?}, expected F32, BF16 or F16")]
    DType {
        /// The op.
        op: &'static str,
        /// The argument's name.
        argument: &'static str,
        /// The actual element type.
        got: DType,
    },
    /// An argument's element type is not one that ranks exchange.
    #[error("{op}: an {argument} holds {got:?}, expected {DTYPE_NAMES}")]
    ElementType {
        /// The op.
        op: &'static str,
        /// `input` or `output`.
        argument: &'static str,
        /// The actual element type.
        got: DType,
    },
    /// A block in a list of copies does not fit its tensor or its counterpart.
    #[error("{op}: copy {index} has a block that {fault}: {block:?}")]
    Block {
        /// The op.
        op: &'static str,
        /// Index in the list of copies.
        index: usize,
        /// The problem.
        fault: String,
        /// The block.
        block: Box<StridedBlock>,
    },
    /// An argument's element type differs from the others'.
    #[error("{op}: `{argument}` holds {got:?}, expected {expected:?}")]
    MixedDTypes {
        /// The op.
        op: &'static str,
        /// The argument's name.
        argument: &'static str,
        /// The expected element type.
        expected: DType,
        /// The actual element type.
        got: DType,
    },
    /// A device kernel failed.
    #[error("{op}")]
    Device {
        /// The op.
        op: &'static str,
        /// The cause.
        source: DeviceError,
    },
    /// An argument is not contiguous.
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
    /// The arguments are on different devices.
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
    /// An output shares storage with another argument: candle's lock on it would deadlock.
    #[error("{op}: output `{output}` shares storage with `{other}`; each output needs storage of its own")]
    SharedStorage {
        /// The op.
        op: &'static str,
        /// The output.
        output: &'static str,
        /// The argument with the same storage.
        other: &'static str,
    },
    /// A slice or table has another number of tokens than the tensors.
    #[error("{op}: `{argument}` covers {got} tokens, expected {expected}")]
    TokenCount {
        /// The op.
        op: &'static str,
        /// The argument's name.
        argument: &'static str,
        /// Number of tokens of the tensors.
        expected: usize,
        /// Number of tokens of the argument.
        got: usize,
    },
    /// The boundaries of the documents do not cover their sequence.
    #[error(
        "sequence {sequence}: `cu_seqlens` must ascend from 0 to {seq_len} (the length of the first sequence) in each of \
         one or more sequences, got {boundaries:?}"
    )]
    Boundaries {
        /// Index of the sequence.
        sequence: usize,
        /// Length of the sequences.
        seq_len: u32,
        /// Its boundaries.
        boundaries: Vec<u32>,
    },
    /// A token id or label is outside the vocabulary.
    #[error("{op}: `{argument}[{position}]` is {value}, valid are 0..{vocab_size}{also_valid}")]
    IdOutOfRange {
        /// The op.
        op: &'static str,
        /// The argument's name.
        argument: &'static str,
        /// Position within the argument.
        position: usize,
        /// The id.
        value: i64,
        /// Size of the vocabulary.
        vocab_size: usize,
        /// Further valid values, for the message: empty or ` and …`.
        also_valid: &'static str,
    },
    /// An environment variable has an invalid value.
    #[error("{variable} is `{value}`, expected {expected}")]
    Environment {
        /// Name of the variable.
        variable: &'static str,
        /// Its value.
        value: String,
        /// The expected value, in words.
        expected: &'static str,
    },
    /// A scalar argument is out of range.
    #[error("{op}: `{argument}` is {value}, expected {expected}")]
    InvalidValue {
        /// The op.
        op: &'static str,
        /// The argument's name.
        argument: &'static str,
        /// The actual value.
        value: f64,
        /// The expected value, in words.
        expected: &'static str,
    },
    /// A matrix view reaches beyond its slice, or a writable view overlaps itself.
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
    /// candle failed to access a tensor.
    #[error("{op}: {source}")]
    Candle {
        /// The op.
        op: &'static str,
        /// candle's error.
        source: candle_core::Error,
    },
}
