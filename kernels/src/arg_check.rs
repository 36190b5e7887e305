//! Argument checks and slice access that all ops share.

use super::OpError;
use super::cast::{Float, convert};
use crate::device::{DeviceError, Target, dry};
use crate::tensor::{Element, StorageId, with_slice_mut, with_slices};
use candle_core::{CpuStorage, DType, Device, Storage, Tensor};
use std::ops::{Deref, Range};

type Result<T> = std::result::Result<T, OpError>;

/// A tensor argument with its name in the op's signature.
pub(super) type Argument<'a> = (&'static str, &'a Tensor);

/// The shape of a tensor as a matrix.
#[derive(Debug, Clone, Copy)]
pub(super) struct RowSizes {
    /// The product of the leading dimensions.
    pub(super) count: usize,
    /// The last dimension.
    pub(super) width: usize,
}

impl RowSizes {
    pub(super) fn dims(self) -> [usize; 2] {
        [self.count, self.width]
    }
}

/// One call of an op, with the op's name for errors.
#[derive(Clone, Copy)]
pub(super) struct ArgCheck {
    pub(super) op: &'static str,
}

impl ArgCheck {
    pub(super) const fn new(op: &'static str) -> Self {
        Self { op }
    }

    /// The shape of a tensor as a matrix.
    pub(super) fn rows(&self, (argument, tensor): Argument<'_>) -> Result<RowSizes> {
        match tensor.dims() {
            &[ref leading @ .., width] if width > 0 => {
                Ok(RowSizes { count: leading.iter().product(), width })
            }
            dims => Err(OpError::Dimensions {
                op: self.op,
                argument,
                expected: "at least one dimension, the last of them not empty",
                got: dims.to_vec(),
            }),
        }
    }

    /// Checks that the tensor has shape `dims`; leading dimensions may be split further.
    pub(super) fn expect(&self, (argument, tensor): Argument<'_>, dims: &[usize]) -> Result<()> {
        let got = tensor.dims();
        let trailing = dims.get(1..).unwrap_or_default();
        if got.ends_with(trailing) && tensor.elem_count() == dims.iter().product::<usize>() {
            return Ok(());
        }
        Err(OpError::Shape { op: self.op, argument, expected: dims.to_vec(), got: got.to_vec() })
    }

    /// Checks that a slice along the tokens has one element per token.
    pub(super) fn expect_tokens(&self, argument: &'static str, got: usize, expected: usize) -> Result<()> {
        if got == expected {
            return Ok(());
        }
        Err(OpError::TokenCount { op: self.op, argument, expected, got })
    }

    /// Checks that a scalar argument satisfies `valid`.
    pub(super) fn expect_value(
        &self,
        argument: &'static str,
        value: f64,
        valid: bool,
        expected: &'static str,
    ) -> Result<()> {
        if valid {
            return Ok(());
        }
        Err(OpError::InvalidValue { op: self.op, argument, value, expected })
    }

    /// The target that computes the op. Checks that all tensors are contiguous, have a supported element type
    /// and are on one device, and that no output shares storage with another argument.
    pub(super) fn target(&self, outputs: &[Argument<'_>], inputs: &[Argument<'_>]) -> Result<Target> {
        let op = self.op;
        let arguments = || outputs.iter().chain(inputs);
        let device = arguments().next().map_or(&Device::Cpu, |(_, tensor)| tensor.device());
        let target = Target::of(device).map_err(|source| OpError::Device { op, source })?;
        for &(argument, tensor) in arguments() {
            if !matches!(tensor.dtype(), DType::F32 | DType::BF16 | DType::F16) {
                return Err(OpError::DType { op, argument, got: tensor.dtype() });
            }
            if !tensor.is_contiguous() {
                let (shape, strides) = (tensor.dims().to_vec(), tensor.stride().to_vec());
                return Err(OpError::NotContiguous { op, argument, shape, strides });
            }
            let (expected, got) = (device.location(), tensor.device().location());
            if got != expected {
                return Err(OpError::DeviceMismatch { op, argument, expected, got });
            }
        }
        for (i, &(output, tensor)) in outputs.iter().enumerate() {
            let storage = StorageId::of(tensor);
            for &(other, tensor) in arguments().skip(i + 1) {
                if StorageId::of(tensor) == storage {
                    return Err(OpError::SharedStorage { op, output, other });
                }
            }
        }
        Ok(target)
    }

    /// As [`target`](Self::target), for an op that reads or writes every element once; reports it in a dry
    /// run.
    pub(super) fn elementwise(&self, outputs: &[Argument<'_>], inputs: &[Argument<'_>]) -> Result<Target> {
        let target = self.target(outputs, inputs)?;
        dry::report_elementwise(outputs.iter().chain(inputs).map(|(_, tensor)| *tensor));
        Ok(target)
    }

    /// The common element type of all `elements`. The `sums` must be f32.
    pub(super) fn element_type(&self, elements: &[Argument<'_>], sums: &[Argument<'_>]) -> Result<DType> {
        let dtype = elements.first().map_or(DType::F32, |(_, tensor)| tensor.dtype());
        let expected = elements.iter().map(|argument| (argument, dtype));
        for (&(argument, tensor), expected) in expected.chain(sums.iter().map(|sum| (sum, DType::F32))) {
            let got = tensor.dtype();
            if got != expected {
                return Err(OpError::MixedDTypes { op: self.op, argument, expected, got });
            }
        }
        Ok(dtype)
    }

    /// The error for a tensor on a device without a kernel.
    fn unsupported<T>(&self, tensor: &Tensor) -> Result<T> {
        Err(OpError::UnsupportedDevice { op: self.op, device: tensor.device().location() })
    }

    /// Adds the op's name to an error of its kernels.
    pub(super) fn kernels<T>(&self, result: std::result::Result<T, DeviceError>) -> Result<T> {
        result.map_err(|source| OpError::Device { op: self.op, source })
    }

    /// A CPU tensor's elements as f32, locked for reading until the guard is dropped; 16-bit elements are
    /// converted.
    pub(super) fn read<'a>(&self, tensor: &'a Tensor) -> Result<impl Deref<Target = [f32]> + use<'a>> {
        let (storage, layout) = tensor.storage_and_layout();
        let (Storage::Cpu(elements), Some((start, end))) = (&*storage, layout.contiguous_offsets()) else {
            return self.unsupported(tensor);
        };
        match elements {
            CpuStorage::F32(_) => Ok(Elements::Locked { storage, range: start..end }),
            CpuStorage::BF16(elements) => Ok(Elements::Widened(widen(&elements[start..end]))),
            CpuStorage::F16(elements) => Ok(Elements::Widened(widen(&elements[start..end]))),
            _ => Err(OpError::DType { op: self.op, argument: "an input", got: tensor.dtype() }),
        }
    }

    /// Calls `write` with the elements of an f32 CPU tensor.
    pub(super) fn write<R>(&self, tensor: &Tensor, write: impl FnOnce(&mut [f32]) -> Result<R>) -> Result<R> {
        with_slice_mut(tensor, write).map_err(|source| OpError::Candle { op: self.op, source })?
    }

    /// Adds `sums` to a gradient in f32 on the CPU.
    pub(super) fn add_sums(&self, gradient: &Tensor, sums: &[f64]) -> Result<()> {
        self.write(gradient, |gradient| {
            gradient.iter_mut().zip(sums).for_each(|(gradient, sum)| *gradient += *sum as f32);
            Ok(())
        })
    }

    /// Calls `work` with the elements of CPU tensors of one type: inputs and outputs.
    pub(super) fn on_cpu<T: Element, R, const I: usize, const O: usize>(
        &self,
        inputs: [&Tensor; I],
        outputs: [&Tensor; O],
        work: impl FnOnce([&[T]; I], [&mut [T]; O]) -> R,
    ) -> Result<R> {
        let result = with_slices(&inputs, |inputs: &[&[T]]| {
            let inputs = std::array::from_fn(|index| inputs[index]);
            with_all_mut(&outputs, Vec::with_capacity(O), |outputs| {
                let outputs =
                    outputs.try_into().unwrap_or_else(|_| unreachable!("one slice for each tensor"));
                work(inputs, outputs)
            })
        });
        result.flatten().map_err(|source| OpError::Candle { op: self.op, source })
    }
}

/// Calls `work` with `slices` and those of the `tensors`.
fn with_all_mut<T: Element, R>(
    tensors: &[&Tensor],
    slices: Vec<&mut [T]>,
    work: impl FnOnce(Vec<&mut [T]>) -> R,
) -> candle_core::Result<R> {
    let [first, others @ ..] = tensors else { return Ok(work(slices)) };
    with_slice_mut(first, |slice| {
        let mut slices: Vec<&mut [T]> = slices;
        slices.push(slice);
        with_all_mut(others, slices, work)
    })?
}

fn widen<T: Float>(elements: &[T]) -> Vec<f32> {
    let mut wide = vec![0.0; elements.len()];
    convert(elements, &mut wide);
    wide
}

/// The elements of one tensor.
enum Elements<G> {
    /// f32 elements under the read lock on their storage.
    Locked { storage: G, range: Range<usize> },
    /// A copy of 16-bit elements, converted to f32.
    Widened(Vec<f32>),
}

impl<G: Deref<Target = Storage>> Deref for Elements<G> {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        match self {
            Self::Widened(elements) => elements,
            Self::Locked { storage, range } => match &**storage {
                Storage::Cpu(CpuStorage::F32(elements)) => &elements[range.clone()],
                _ => unreachable!("`ArgCheck::read` has seen f32 elements under the same lock"),
            },
        }
    }
}
