//! The CUDA kernels, compiled for the host and run on CPU tensors, for tests on machines without a GPU.

#[cfg(test)]
pub(super) mod tests;

use super::tensor_map::{TensorMap, TiledTensor};
use super::{Address, Arg, DeviceError, Grid, Kernel, Matmul, MatrixAt};
use crate::memory::FreshCounters;
use candle_core::DType;
use half::{bf16, f16};
use std::cell::{Cell, RefCell};
use std::ffi::{CStr, CString, c_char, c_void};

thread_local! {
    static IS_ACTIVE: Cell<bool> = const { Cell::new(false) };

    /// The tensors that are open.
    static MEMORY: RefCell<Vec<Memory>> = const { RefCell::new(Vec::new()) };
}

/// Memory that a kernel may access, as `Memory` in `cuda/emulation/state.h`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Memory {
    begin: u64,
    end: u64,
    is_writable: u32,
    reserved: u32,
}

/// Runs `run` with all ops of this thread on emulated kernels instead of the CPU kernels.
///
/// Each rank is a thread, so each rank's closure calls this itself. It tests the kernels' indexing and
/// arithmetic and the ops' host code. It does not show speed, nor what `cuda/emulation/emulation.h` lists as
/// impossible on a host.
pub fn emulate<R>(run: impl FnOnce() -> R) -> R {
    struct Restore(bool);
    impl Drop for Restore {
        fn drop(&mut self) {
            IS_ACTIVE.set(self.0);
        }
    }
    let _restore = Restore(IS_ACTIVE.replace(true));
    run()
}

/// Returns whether this thread is within [`emulate`].
pub(super) fn is_active() -> bool {
    IS_ACTIVE.get()
}

/// Calls `run`, whose launches may access these ranges, of as many elements each, and those opened before, but
/// no other memory.
pub(super) fn with_memory<R>(
    ranges: impl IntoIterator<Item = (Address, usize)>,
    run: impl FnOnce() -> R,
) -> R {
    struct Close(usize);
    impl Drop for Close {
        fn drop(&mut self) {
            MEMORY.with_borrow_mut(|open| open.truncate(self.0));
        }
    }
    let _close = Close(MEMORY.with_borrow(Vec::len));
    let opened = ranges.into_iter().map(|(address, elements)| Memory {
        begin: address.pointer,
        end: address.offset(elements).pointer,
        is_writable: u32::from(address.is_writable),
        reserved: 0,
    });
    MEMORY.with_borrow_mut(|open| open.extend(opened));
    run()
}

// SAFETY: the functions of `cuda/emulation/emulation.cpp`, which the build script links in.
unsafe extern "C" {
    fn ulysses_emulation_signature(name: *const c_char) -> *const c_char;
    fn ulysses_emulation_launch(
        name: *const c_char,
        grid: *const u32,
        threads: u32,
        shared_bytes: usize,
        arguments: *mut *mut c_void,
    ) -> *const c_char;
    fn ulysses_emulation_set_memory(memory: *const Memory, count: usize);
    fn ulysses_emulation_encode_tensor(
        map: *mut c_void,
        dtype: i32,
        rank: u32,
        address: u64,
        extents: *const u64,
        strides: *const u64,
        tile: *const u32,
        element_strides: *const u32,
        interleave: i32,
        swizzle: i32,
        out_of_bounds: i32,
    ) -> *const c_char;
}

/// Makes the map of a tensor, as `cuda::encode` does.
pub(super) fn encode(tensor: &TiledTensor) -> Result<TensorMap, String> {
    const F16: i32 = 6;
    const BF16: i32 = 9;
    const SWIZZLE_128_BYTES: i32 = 3;
    let TiledTensor { address, extents, strides, tile } = tensor;
    let dtype = if address.dtype == DType::BF16 { BF16 } else { F16 };
    let rank = extents.len() as u32;
    let mut map = TensorMap::empty();
    // SAFETY: arrays of four, or of three strides; the message is a constant.
    let failure = unsafe {
        text(ulysses_emulation_encode_tensor(
            map.as_mut_ptr(),
            dtype,
            rank,
            address.pointer,
            extents.as_ptr(),
            strides.as_ptr(),
            tile.as_ptr(),
            [1; 4].as_ptr(),
            0,
            SWIZZLE_128_BYTES,
            0,
        ))
    };
    failure.map_or(Ok(map), Err)
}

/// Runs a kernel to completion.
///
/// # Safety
/// As [`Launcher::launch`](super::Launcher::launch).
pub(super) unsafe fn launch(
    kernel: &Kernel,
    blocks: [u32; 3],
    grid: Grid,
    args: &[Arg<'_>],
) -> Result<(), DeviceError> {
    let error = |message: String| DeviceError::Launch { kernel: kernel.name.clone(), message };
    #[cfg(not(test))]
    let name = kernel.name.clone();
    #[cfg(test)]
    let name = tests::entry_point(&kernel.name);
    let name = CString::new(name).map_err(|nul| error(nul.to_string()))?;
    // SAFETY: `name` ends in a nul; the returned text is read at once.
    let signature = unsafe { text(ulysses_emulation_signature(name.as_ptr())) };
    let signature = signature.ok_or_else(|| error("there is no kernel of this name".to_owned()))?;
    let given: Vec<_> = args.iter().map(describe).collect();
    // A null pointer matches every pointer type.
    let agrees = signature.split(' ').count() == given.len()
        && signature.split(' ').zip(&given).all(|(expected, given)| is_same_parameter(expected, given));
    if !agrees {
        return Err(error(format!("expected the parameters {signature}, got {}", given.join(" "))));
    }
    let mut pointers: Vec<_> = args.iter().map(Arg::pointer).collect();
    // SAFETY: as many pointers as the kernel has parameters, each to a value of the right size; the caller
    // guarantees that the memory behind the addresses may be accessed.
    let failure = unsafe {
        MEMORY.with_borrow(|open| ulysses_emulation_set_memory(open.as_ptr(), open.len()));
        text(ulysses_emulation_launch(
            name.as_ptr(),
            blocks.as_ptr(),
            grid.threads,
            grid.shared_bytes,
            pointers.as_mut_ptr(),
        ))
    };
    failure.map_or(Ok(()), |message| Err(error(message)))
}

/// # Safety
/// `pointer` is null or a nul-terminated text.
unsafe fn text(pointer: *const c_char) -> Option<String> {
    // SAFETY: the caller's promise.
    (!pointer.is_null()).then(|| unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned())
}

/// The parameter in the notation of `emulation.h`.
fn describe(arg: &Arg<'_>) -> String {
    match arg {
        Arg::Address(address) => {
            let access = if address.is_writable { 'W' } else { 'R' };
            format!("{access}{}", address.dtype.size_in_bytes())
        }
        Arg::U32(_) => "u4".to_owned(),
        Arg::U64(_) => "U8".to_owned(),
        Arg::F32(_) => "f4".to_owned(),
        Arg::Struct(bytes) => format!("s{}", bytes.len()),
    }
}

/// Memory that is open for writing may also be read.
fn is_same_parameter(expected: &str, given: &str) -> bool {
    expected == given || (expected.starts_with('R') && given.starts_with('W') && expected[1..] == given[1..])
}

/// Multiplies with the `gemm` crate; 16-bit elements are converted to f32.
///
/// # Safety
/// As [`Launcher::gemm`](super::Launcher::gemm).
pub(super) unsafe fn gemm(matmul: &Matmul) -> Result<(), DeviceError> {
    // A GPU has none of this memory, whose size depends on the caches of the CPU.
    let _counters = FreshCounters::start();
    for index in 0..matmul.batch {
        let nth = |matrix: MatrixAt| MatrixAt {
            address: matrix.address.offset(index * matrix.batch_stride),
            ..matrix
        };
        // SAFETY: the caller guarantees the matrices of every matmul of the batch.
        unsafe { gemm_one(&Matmul { a: nth(matmul.a), b: nth(matmul.b), c: nth(matmul.c), ..*matmul })? };
    }
    Ok(())
}

/// # Safety
/// As [`gemm`], for one matmul.
unsafe fn gemm_one(matmul: &Matmul) -> Result<(), DeviceError> {
    let Matmul { alpha, a, b, beta, c, .. } = *matmul;
    // SAFETY: the caller guarantees every element of the three matrices.
    let (left, right) = unsafe { (read(&a)?, read(&b)?) };
    let mut result = if beta == 0.0 {
        vec![0.0; c.rows * c.cols]
    } else {
        // SAFETY: as above.
        unsafe { read(&c)? }
    };
    let (m, n, k) = (c.rows, c.cols, a.cols);
    // SAFETY: three dense row-major matrices of these sizes.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            result.as_mut_ptr(),
            1,
            n as isize,
            beta != 0.0,
            left.as_ptr(),
            1,
            k as isize,
            right.as_ptr(),
            1,
            n as isize,
            beta,
            alpha,
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
        write(&c, &result)
    }
}

/// The elements of a matrix as f32, row by row.
///
/// # Safety
/// They may be read.
unsafe fn read(matrix: &MatrixAt) -> Result<Vec<f32>, DeviceError> {
    let places = places(matrix);
    let address = matrix.address.pointer as usize;
    // SAFETY: the caller's promise, for each of the three element types.
    unsafe {
        Ok(match matrix.address.dtype {
            DType::F32 => {
                places.map(|at| std::ptr::with_exposed_provenance::<f32>(address).add(at).read()).collect()
            }
            DType::BF16 => places
                .map(|at| std::ptr::with_exposed_provenance::<bf16>(address).add(at).read().to_f32())
                .collect(),
            DType::F16 => places
                .map(|at| std::ptr::with_exposed_provenance::<f16>(address).add(at).read().to_f32())
                .collect(),
            dtype => return Err(DeviceError::NoKernel { kernel: "gemm", dtype }),
        })
    }
}

/// # Safety
/// The matrix's elements may be written.
unsafe fn write(matrix: &MatrixAt, values: &[f32]) -> Result<(), DeviceError> {
    let address = matrix.address.pointer as usize;
    for (at, value) in places(matrix).zip(values) {
        // SAFETY: the caller's promise, for each of the three element types.
        unsafe {
            match matrix.address.dtype {
                DType::F32 => std::ptr::with_exposed_provenance_mut::<f32>(address).add(at).write(*value),
                DType::BF16 => std::ptr::with_exposed_provenance_mut::<bf16>(address)
                    .add(at)
                    .write(bf16::from_f32(*value)),
                DType::F16 => {
                    std::ptr::with_exposed_provenance_mut::<f16>(address).add(at).write(f16::from_f32(*value))
                }
                dtype => return Err(DeviceError::NoKernel { kernel: "gemm", dtype }),
            }
        }
    }
    Ok(())
}

/// Offsets of a matrix's elements, row by row.
fn places(matrix: &MatrixAt) -> impl Iterator<Item = usize> + use<> {
    let MatrixAt { rows, cols, row_stride, col_stride, .. } = *matrix;
    (0..rows).flat_map(move |row| (0..cols).map(move |col| row * row_stride + col * col_stride))
}
