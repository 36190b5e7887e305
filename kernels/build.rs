//! Compiles the CUDA kernels for the host, with the feature `kernel-emulation`; else does nothing.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    #[cfg(feature = "kernel-emulation")]
    emulation::build();
}

#[cfg(feature = "kernel-emulation")]
mod emulation {
    use std::path::{Path, PathBuf};

    pub(super) fn build() {
        println!("cargo:rerun-if-changed=cuda");
        let mut kernels = sources(Path::new("cuda"), "cu");
        kernels.extend(sources(Path::new("cuda/tests"), "cu"));
        kernels.sort();
        let mut build = cc::Build::new();
        build.cpp(true).std("c++17").opt_level(2).warnings_into_errors(true);
        // The scheduler jumps between stacks, which a fortified longjmp refuses.
        build.flag("-U_FORTIFY_SOURCE").flag("-Wno-unknown-pragmas");
        // Kernels register themselves at start: no symbol of theirs is referenced by name.
        build.link_lib_modifier("+whole-archive").include("cuda");
        let mut scheduler = build.clone();
        scheduler.files(sources(Path::new("cuda/emulation"), "cpp"));
        scheduler.compile("ulysses_emulation");
        build.flags(["-fsanitize=thread", "-fno-sanitize-recover=all"]);
        build.flag("-fsanitize=alignment,null,bounds,shift,signed-integer-overflow,integer-divide-by-zero");
        build.flags(contraction());
        build.files(kernels.iter().map(|kernel| as_cpp(kernel))).compile("ulysses_kernels");
    }

    /// Products and sums are contracted to one rounding, as CUDA's compilers do, if this CPU can.
    fn contraction() -> &'static [&'static str] {
        #[cfg(target_arch = "x86_64")]
        if !std::is_x86_feature_detected!("fma") {
            return &[];
        }
        if cfg!(target_arch = "x86_64") { &["-mfma", "-ffp-contract=fast"] } else { &["-ffp-contract=fast"] }
    }

    fn sources(folder: &Path, extension: &str) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(folder).expect("the folder `cuda` is part of the package");
        let paths = entries.map(|entry| entry.expect("a readable folder").path());
        paths.filter(|path| path.extension().is_some_and(|found| found == extension)).collect()
    }

    /// A C++ file that is the kernel with the emulation before it: compilers tell languages by file names.
    fn as_cpp(kernel: &Path) -> PathBuf {
        let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
        let root = std::env::var("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR");
        let stem = kernel.file_stem().expect("a file").to_string_lossy();
        let cpp = out.join(format!("{stem}.cpp"));
        let text = format!(
            "#include \"{root}/cuda/emulation/emulation.h\"\n#include \"{root}/{}\"\n",
            kernel.display()
        );
        std::fs::write(&cpp, text).expect("a writable OUT_DIR");
        cpp
    }
}
