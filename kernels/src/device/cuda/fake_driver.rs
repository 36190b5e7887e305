//! Test controls of the fake driver (`gpu/fake_driver/controls.cpp`). They affect the kernels that the calling thread launches.
//!
//! A real driver has none of these functions. A test that needs them is named `on_the_fake_driver`, and fails on a GPU.

use crate::device::{Address, Arg, DeviceError, Kernel};
use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char};

thread_local! {
    /// The tensors that are open.
    static MEMORY: RefCell<Vec<Memory>> = const { RefCell::new(Vec::new()) };
}

/// Memory that a kernel may access, as `Memory` of `cuda/emulation/state.h`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Memory {
    begin: u64,
    end: u64,
    is_writable: u32,
    reserved: u32,
}

/// Returns whether `gpu/fake-driver.sh` runs the tests.
fn is_fake() -> bool {
    std::env::var_os("FAKE_DRIVER_GPUS").is_some()
}

/// A function of the fake driver.
///
/// # Safety
/// `F` is the type of a function of this name.
unsafe fn function<F: Copy>(name: &CStr) -> F {
    assert!(
        is_fake(),
        "a test of the fake driver, which gpu/fake-driver.sh runs: leave it out with `--skip on_the_fake_driver`"
    );
    // SAFETY: both texts end in a nul, and the library stays loaded. A function's address has the size of `F`.
    unsafe {
        let library = libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW);
        assert!(!library.is_null(), "there is no libcuda.so.1");
        let address = libc::dlsym(library, name.as_ptr());
        assert!(!address.is_null(), "libcuda.so.1 has no {}", name.to_string_lossy());
        std::mem::transmute_copy(&address)
    }
}

/// Calls `run`, whose kernels may access these ranges, of as many elements each, and those opened before.
pub(in crate::device) fn with_memory<R>(
    ranges: impl IntoIterator<Item = (Address, usize)>,
    run: impl FnOnce() -> R,
) -> R {
    let already_open = MEMORY.with_borrow(Vec::len);
    let opened = ranges.into_iter().map(|(address, elements)| Memory {
        begin: address.pointer,
        end: address.offset(elements).pointer,
        is_writable: u32::from(address.is_writable),
        reserved: 0,
    });
    MEMORY.with_borrow_mut(|open| open.extend(opened));
    let result = run();
    MEMORY.with_borrow_mut(|open| open.truncate(already_open));
    result
}

/// Tells a fake driver which memory the next launch may access, and checks its parameters, whose types a driver does not
/// know.
pub(super) fn before_launch(kernel: &Kernel, args: &[Arg<'_>]) -> Result<(), String> {
    if !is_fake() {
        return Ok(());
    }
    let name = CString::new(kernel.name()).expect("a name");
    // SAFETY: the types of the functions. The first copies as many elements as the list has, and the second returns a
    // text or null.
    let signature = unsafe {
        let set = function::<unsafe extern "C" fn(*const Memory, usize)>(c"ulysses_fake_set_memory");
        MEMORY.with_borrow(|open| set(open.as_ptr(), open.len()));
        let signature =
            function::<unsafe extern "C" fn(*const c_char) -> *const c_char>(c"ulysses_fake_signature");
        let text = signature(name.as_ptr());
        assert!(!text.is_null(), "there is no kernel {name:?}");
        CStr::from_ptr(text).to_string_lossy().into_owned()
    };
    let given: Vec<_> = args.iter().map(describe).collect();
    let agrees = signature.split(' ').count() == given.len()
        && signature.split(' ').zip(&given).all(|(expected, given)| is_same_parameter(expected, given));
    let given = given.join(" ");
    if agrees { Ok(()) } else { Err(format!("expected the parameters {signature}, got {given}")) }
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

/// Calls `run`, whose launches run blocks and threads in another order for each seed; 0 is ascending. On a GPU the order
/// is the GPU's own.
pub(crate) fn in_order<R>(seed: u64, run: impl FnOnce() -> R) -> R {
    if !is_fake() {
        return run();
    }
    // SAFETY: the function's type; it sets variables of this thread.
    let set = |seed| unsafe { function::<unsafe extern "C" fn(u64)>(c"ulysses_fake_set_seed")(seed) };
    set(seed);
    let result = run();
    set(0);
    result
}

/// Calls `run` with a fault of `cuda/tests/attention_faults.txt` in the kernels that it launches.
pub(crate) fn with_fault<R>(fault: &str, run: impl FnOnce() -> R) -> R {
    let set = |fault: &str| {
        let fault = CString::new(fault).expect("a name");
        // SAFETY: the function's type; it copies a text that ends in a nul.
        unsafe { function::<unsafe extern "C" fn(*const c_char)>(c"ulysses_fake_set_fault")(fault.as_ptr()) }
    };
    set(fault);
    let result = run();
    set("");
    result
}

/// Bank conflicts of the launches that have run since the last call.
pub(crate) fn bank_conflicts() -> u64 {
    wait();
    // SAFETY: the function's type.
    unsafe { function::<unsafe extern "C" fn() -> u64>(c"ulysses_fake_bank_conflicts")() }
}

/// Calls `run`; also returns the message of the first of its kernels that failed.
pub(crate) fn with_failure<R>(run: impl FnOnce() -> R) -> (R, Option<String>) {
    wait();
    // SAFETY: the types of the functions; the message is copied at once.
    unsafe {
        function::<unsafe extern "C" fn()>(c"ulysses_fake_expect_failure")();
        let result = run();
        wait();
        let take = function::<unsafe extern "C" fn() -> *const c_char>(c"ulysses_fake_take_failure");
        let message = CStr::from_ptr(take()).to_string_lossy().into_owned();
        (result, (!message.is_empty()).then_some(message))
    }
}

/// The message of the kernel that `run` launches, which fails.
#[track_caller]
pub(super) fn failure(run: impl FnOnce() -> Result<(), DeviceError>) -> String {
    let (launched, failure) = with_failure(run);
    launched.expect("the kernel starts");
    failure.expect("the fault is found")
}

/// Makes the GPU run what is queued.
fn wait() {
    crate::testing::device().synchronize().expect("a GPU");
}
