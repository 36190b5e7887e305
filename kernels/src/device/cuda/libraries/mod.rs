//! Loads CUDA's libraries when the program starts, if they are there. So a build for GPUs also starts on a machine
//! without them, and runs with the libraries of CUDA 12 and of 13.
//!
//! candle builds cudarc with `dynamic-linking`: CUDA's functions are symbols that the linker must find. They are defined
//! here, as jumps to the functions of the loaded libraries. The linker then takes none from the libraries, and the program
//! starts without them. A function that `functions.rs` lacks is linked as usual, and the program needs its library again:
//! `gpu/fake-driver-check.sh` fails then.

mod functions;

use candle_core::cuda::cudarc::driver::sys;
use functions::Function;
use std::ffi::{CStr, CString};
use std::sync::OnceLock;
use std::sync::atomic::Ordering;

/// Major versions of CUDA whose libraries have all functions in use, the best first.
const MAJOR_VERSIONS: [i32; 2] = [13, 12];

/// Before the constructors of other code: those of candle's kernels call the CUDA runtime.
#[used]
#[unsafe(link_section = ".init_array.00101")]
static AT_START: extern "C" fn() = load_all;

static LOADED: OnceLock<Loaded> = OnceLock::new();

/// Which libraries are loaded, or why not.
struct Loaded {
    driver: Result<(), String>,
    /// Those that every GPU needs.
    others: Result<(), String>,
}

/// Fails with the loader's message if there is no driver.
pub(super) fn need_driver() -> Result<(), String> {
    LOADED.get().map_or(Ok(()), |loaded| loaded.driver.clone())
}

/// Fails with the loader's message if there is no driver or another library is missing.
pub(super) fn need_all() -> Result<(), String> {
    need_driver()?;
    LOADED.get().map_or(Ok(()), |loaded| loaded.others.clone())
}

extern "C" fn load_all() {
    LOADED.get_or_init(|| {
        let driver = load(functions::driver::ALL, ["libcuda.so.1".to_owned()]);
        let others = if driver.is_ok() { load_others() } else { Ok(()) };
        Loaded { driver, others }
    });
}

fn load_others() -> Result<(), String> {
    let mut version = 0;
    // SAFETY: the result is written to a live variable; the call needs no initialization.
    _ = unsafe { sys::cuDriverGetVersion(&raw mut version) };
    // A driver may refuse what the compilers of a later release make.
    let versions = MAJOR_VERSIONS.iter().filter(|major| **major <= version / 1000);
    let load_version =
        |functions, name: &str| load(functions, versions.clone().map(|major| format!("{name}.{major}")));
    // Only several GPUs need it.
    #[cfg(feature = "nccl")]
    let _ = load(functions::nccl::ALL, ["libnccl.so.2".to_owned()]);
    load_version(functions::cublas::ALL, "libcublas.so")?;
    load_version(functions::nvrtc::ALL, "libnvrtc.so")?;
    load_version(functions::runtime::ALL, "libcudart.so")?;
    load(functions::curand::ALL, ["libcurand.so.10".to_owned()])
}

/// Loads functions from the first of some libraries that there is.
fn load(functions: &[Function], libraries: impl IntoIterator<Item = String>) -> Result<(), String> {
    let mut reasons = Vec::new();
    for name in libraries {
        let path = CString::new(name).map_err(|nul| nul.to_string())?;
        // SAFETY: a string that ends with a zero byte. The library stays loaded.
        let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_LAZY | libc::RTLD_GLOBAL) };
        if !library.is_null() {
            functions.iter().for_each(|function| resolve(function, library));
            return Ok(());
        }
        // SAFETY: the failed call has left a message, which is valid until the next call.
        reasons.push(unsafe { CStr::from_ptr(libc::dlerror()) }.to_string_lossy().into_owned());
    }
    Err(reasons.join("; "))
}

fn resolve(function: &Function, library: *mut libc::c_void) {
    // A preloaded library comes first.
    for scope in [libc::RTLD_NEXT, library] {
        // SAFETY: a loaded library, and a name that ends with a zero byte.
        let address = unsafe { libc::dlsym(scope, function.name.as_ptr().cast()) };
        if !address.is_null() {
            return function.target.store(address, Ordering::Relaxed);
        }
    }
}
