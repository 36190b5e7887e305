//! Compiles kernel files with NVRTC, once per architecture, and loads them, once per GPU.
//!
//! All kernels of a GPU are loaded together when it is opened. Loading one later could deadlock: the driver
//! may wait for the GPU, which may wait for another rank, whose thread in this process waits for the loading
//! lock.
//!
//! A file that does not compile or load makes the GPU unusable, unless there are other kernels for what it computes:
//! then only its launches fail.
//!
//! Compiled kernels are cached by hash of the source, architecture and compiler. A cache that cannot be read or written only
//! costs some seconds at start.

use super::cache;
use crate::device::kernel::{Source, sources};
use crate::device::{DeviceError, Kernel};
use candle_core::CudaDevice;
use candle_core::cuda::cudarc::driver::{self, CudaContext};
use candle_core::cuda::cudarc::nvrtc::{result, sys};
use parking_lot::RwLock;
use std::collections::HashMap;
use std::ffi::{CStr, CString};
use std::path::PathBuf;
use std::sync::{Arc, LazyLock};

/// A kernel's handle.
#[derive(Debug, Clone, Copy)]
pub(super) struct Function(pub(super) driver::sys::CUfunction);

// SAFETY: the driver accepts handles from any thread.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

/// All kernels of a GPU. They stay loaded until the process ends, and so does the context.
#[derive(Debug)]
pub(super) struct Functions {
    by_name: HashMap<String, Function>,
    /// Why an optional file does not compile or load here, by its name.
    refused: HashMap<&'static str, String>,
    _context: Arc<CudaContext>,
}

/// By GPU ordinal. All contexts of a GPU are its primary one.
static LOADED: LazyLock<RwLock<HashMap<usize, Arc<Functions>>>> = LazyLock::new(RwLock::default);

/// Returns the kernel. Loads all kernels if the GPU was not opened here.
pub(super) fn function(context: &Arc<CudaContext>, kernel: &Kernel) -> Result<Function, DeviceError> {
    let error = |message: String| DeviceError::Launch { kernel: kernel.name.clone(), message };
    let functions = functions(context).map_err(error)?;
    if let Some(reason) = functions.refused.get(kernel.source.name) {
        return Err(error(reason.clone()));
    }
    let found = functions.by_name.get(&kernel.name).copied();
    found.ok_or_else(|| error(format!("kernels/cuda/{}.cu has no kernel of this name", kernel.source.name)))
}

/// All kernels of a GPU; loads them if necessary.
pub(super) fn functions(context: &Arc<CudaContext>) -> Result<Arc<Functions>, String> {
    let gpu = context.ordinal();
    if let Some(functions) = LOADED.read().get(&gpu) {
        return Ok(functions.clone());
    }
    // The other ranks of a GPU wait here for the first one.
    let mut loaded = LOADED.write();
    if let Some(functions) = loaded.get(&gpu) {
        return Ok(functions.clone());
    }
    let functions = Arc::new(load_all(context)?);
    loaded.insert(gpu, functions.clone());
    Ok(functions)
}

/// Why one of the files does not compile or load on a GPU that is usable without it.
pub(in crate::device) fn refusal(
    device: &CudaDevice,
    sources: &[&'static Source],
) -> Result<Option<String>, String> {
    let functions = functions(device.cuda_stream().context())?;
    Ok(sources.iter().find_map(|source| functions.refused.get(source.name).cloned()))
}

/// Loads the files in parallel: the first time, each is compiled.
fn load_all(context: &Arc<CudaContext>) -> Result<Functions, String> {
    std::thread::scope(|scope| {
        let load = |source: &'static Source| (source, scope.spawn(move || load(context, source)));
        let files = sources::ALL.iter().copied();
        #[cfg(test)]
        let files = files.chain(sources::tests::ALL.iter().copied());
        let files: Vec<_> = files.map(load).collect();
        let (mut by_name, mut refused) = (HashMap::new(), HashMap::new());
        for (source, file) in files {
            match file.join().map_err(|_| "the loading of a kernel panicked".to_owned())? {
                Ok(functions) => by_name.extend(functions),
                Err(reason) if source.is_optional() => _ = refused.insert(source.name, reason),
                Err(reason) => return Err(reason),
            }
        }
        Ok(Functions { by_name, refused, _context: context.clone() })
    })
}

fn load(context: &Arc<CudaContext>, source: &Source) -> Result<Vec<(String, Function)>, String> {
    context.bind_to_thread().map_err(|failure| failure.to_string())?;
    let (major, minor) = context.compute_capability().map_err(|failure| failure.to_string())?;
    let Some(architecture) = architecture(source, (major, minor)) else { return Ok(Vec::new()) };
    let text = whole_text(source);
    let key = (&text, &architecture, compiler());
    let cache = cache::path(&format!("{}-{architecture}", source.name.replace('/', "-")), key, "cubin");
    let cached = cache.as_deref().and_then(|path| std::fs::read(path).ok());
    if let Some(functions) = cached.and_then(|cubin| entry_points(&cubin).ok()) {
        return Ok(functions);
    }
    let (cubin, log) = compile(&text, &architecture).map_err(|failure| {
        format!("NVRTC refused kernels/cuda/{}.cu for {architecture}: {failure}", source.name)
    })?;
    if log.contains(PERFORMANCE_WARNING) {
        // Not cached, so that the next run compiles and warns again.
        let log = log.trim();
        tracing::warn!(
            "kernels/cuda/{}.cu for {architecture} is slower than it should be: {log}",
            source.name
        );
    } else if let Some(path) = &cache
        && let Err(failure) = cache::store(path, &cubin)
    {
        tracing::debug!(path = %path.display(), %failure, "compiled kernels are not cached");
    }
    entry_points(&cubin)
        .map_err(|failure| format!("the driver refused kernels/cuda/{}.cu: {failure}", source.name))
}

/// The architecture to compile a file for, if GPUs of this compute capability can run it.
fn architecture(source: &Source, (major, minor): (i32, i32)) -> Option<String> {
    let of_gpu = format!("sm_{major}{minor}");
    match source.only_for {
        None => Some(of_gpu),
        Some(only) => (only.strip_suffix('a') == Some(&of_gpu)).then(|| only.to_owned()),
    }
}

/// Loads a module and all its kernels, which the driver would otherwise load on first use.
fn entry_points(cubin: &[u8]) -> Result<Vec<(String, Function)>, driver::DriverError> {
    let mut count = 0;
    // SAFETY: an image made by NVRTC, or one that the driver rejects; the context is this thread's. The
    // module is never unloaded, so its functions and their names stay valid.
    unsafe {
        let module = driver::result::module::load_data(cubin.as_ptr().cast())?;
        driver::sys::cuModuleGetFunctionCount(&raw mut count, module).result()?;
        let mut functions = vec![std::ptr::null_mut(); count as usize];
        driver::sys::cuModuleEnumerateFunctions(functions.as_mut_ptr(), count, module).result()?;
        let named = |function| {
            let mut name = std::ptr::null();
            driver::sys::cuFuncGetName(&raw mut name, function).result()?;
            driver::sys::cuFuncLoad(function).result()?;
            Ok((CStr::from_ptr(name).to_string_lossy().into_owned(), Function(function)))
        };
        functions.into_iter().map(named).collect()
    }
}

/// The version of NVRTC: major, minor.
fn compiler() -> Option<(i32, i32)> {
    let (mut major, mut minor) = (0, 0);
    // SAFETY: the results are written to live variables.
    unsafe { sys::nvrtcVersion(&raw mut major, &raw mut minor).result().ok().map(|()| (major, minor)) }
}

/// Compiles to machine code, and returns the compiler's log with it. A driver rejects PTX of a newer toolkit.
fn compile(text: &str, architecture: &str) -> Result<(Vec<u8>, String), String> {
    let text = CString::new(text).map_err(|nul| nul.to_string())?;
    let program = Program(result::create_program(&text, None).map_err(|failure| failure.to_string())?);
    let options = [format!("--gpu-architecture={architecture}"), "--std=c++17".to_owned()];
    // SAFETY: the program was just created and lives to the end of this function.
    let compiled = unsafe { result::compile_program(program.0, &options) };
    let log = program.log();
    compiled.map_err(|failure| format!("{failure}: {log}"))?;
    let mut len = 0;
    // SAFETY: as above; the second call fills as many bytes as the first one requested.
    unsafe {
        sys::nvrtcGetCUBINSize(program.0, &raw mut len).result().map_err(|failure| failure.to_string())?;
        let mut cubin = vec![0u8; len];
        sys::nvrtcGetCUBIN(program.0, cubin.as_mut_ptr().cast())
            .result()
            .map_err(|failure| failure.to_string())?;
        Ok((cubin, log))
    }
}

/// An NVRTC program, destroyed on drop.
struct Program(sys::nvrtcProgram);

/// Prefix of ptxas's messages on serialized `wgmma` (C7510 to C7519) and on an ignored `setmaxnreg` (C7508).
const PERFORMANCE_WARNING: &str = "(C75";

impl Program {
    /// The compiler's log.
    fn log(&self) -> String {
        // SAFETY: created by `compile`, and not destroyed yet.
        let log = unsafe { result::get_program_log(self.0) }.unwrap_or_default();
        let log: Vec<u8> = log.into_iter().map(|byte| byte as u8).collect();
        String::from_utf8_lossy(&log).trim_end_matches('\0').to_owned()
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: created by `compile`, which is done with it. A failure only leaks it.
        let _ = unsafe { result::destroy_program(self.0) };
    }
}

/// The file with its headers inlined, since there is no include folder at run time.
fn whole_text(source: &Source) -> String {
    let headers = [
        ("common", include_str!("../../../cuda/common.cuh")),
        ("mma", include_str!("../../../cuda/mma.cuh")),
        ("wgmma", include_str!("../../../cuda/wgmma.cuh")),
        ("tma", include_str!("../../../cuda/tma.cuh")),
        ("attention_fused", include_str!("../../../cuda/attention_fused.cuh")),
        ("attention_fused_wgmma", include_str!("../../../cuda/attention_fused_wgmma.cuh")),
        ("attention_fused_backward", include_str!("../../../cuda/attention_fused_backward.cuh")),
        ("attention_softmax", include_str!("../../../cuda/attention_softmax.cuh")),
        ("linear_attention", include_str!("../../../cuda/linear_attention.cuh")),
        ("linear_attention_channels", include_str!("../../../cuda/linear_attention_channels.cuh")),
    ];
    headers.iter().fold(source.text.to_owned(), |text, (name, header)| {
        text.replace(&format!("#include \"{name}.cuh\""), header)
    })
}

/// The file of a verdict on kernels, which holds for a GPU model, a driver and a compiler.
pub(in crate::device) fn verdict_path(
    name: &str,
    kernels: &[&Source],
    device: &CudaDevice,
) -> Result<Option<PathBuf>, driver::DriverError> {
    let stream = device.cuda_stream();
    let texts: Vec<_> = kernels.iter().map(|source| whole_text(source)).collect();
    let driver = super::driver_version().ok();
    Ok(cache::path(name, (texts, stream.context().name()?, driver, compiler()), "verdict"))
}
