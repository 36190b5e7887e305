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
        build.files(kernels.iter().map(|kernel| as_cpp(kernel)).chain(faulty_attention()));
        build.compile("ulysses_kernels");
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

    include!("cuda/tests/attention_faults.rs");

    /// A C++ file for each kernel file that `ATTENTION_FAULTS` names, with a kernel per fault.
    fn faulty_attention() -> impl Iterator<Item = PathBuf> {
        let mut files: Vec<&str> = ATTENTION_FAULTS.iter().map(|[_, file, ..]| *file).collect();
        files.dedup();
        files.into_iter().map(|file| {
            let mut text = String::new();
            for header in ["emulation/emulation.h", "common.cuh", "mma.cuh", "wgmma.cuh", "tma.cuh"] {
                text += &format!("#include \"{header}\"\n");
            }
            for [name, _, from, to] in ATTENTION_FAULTS.iter().filter(|[_, of, ..]| *of == file) {
                text += &format!(
                    "#undef INSTANTIATE\n#undef PARAMETERS\n#undef OPERANDS\nnamespace {name} {{\n{}\n}}\n",
                    faulty(name, file, from, to)
                );
            }
            let cpp = out_dir().join(format!("faulty_{file}.cpp"));
            std::fs::write(&cpp, text).expect("a writable OUT_DIR");
            cpp
        })
    }

    /// The text of a kernel file and its headers with a fault, and with the name of the fault before that of a kernel.
    fn faulty(name: &str, file: &str, from: &str, to: &str) -> String {
        let read =
            |name: &str| std::fs::read_to_string(Path::new("cuda").join(name)).expect("a file of `cuda`");
        let mut text = read(&format!("{file}.cu"));
        for header in [
            "attention_fused.cuh",
            "attention_fused_wgmma.cuh",
            "attention_fused_backward.cuh",
            "attention_softmax.cuh",
        ] {
            let guard = format!("ULYSSES_{}", header.to_uppercase().replace('.', "_"));
            let include = format!("#include \"{header}\"");
            text = text.replace(&include, &format!("#undef {guard}\n{}", read(header)));
        }
        assert_eq!(text.matches(from).count(), 1, "the fault {name} needs this text once: {from}");
        let mut text = text.replace(from, to);
        for kernel in ["KERNEL(", "KERNEL_OF_THREADS("] {
            text = text.replace(&format!("{kernel}attention_"), &format!("{kernel}{name}_attention_"));
        }
        let is_other =
            |line: &&str| line.starts_with("INSTANTIATE(") && *line != "INSTANTIATE(bf16, bf16, 64)";
        text.lines().filter(|line| !is_other(line)).flat_map(|line| [line, "\n"]).collect()
    }

    fn out_dir() -> PathBuf {
        PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"))
    }

    /// A C++ file that is the kernel with the emulation before it: compilers tell languages by file names.
    fn as_cpp(kernel: &Path) -> PathBuf {
        let root = std::env::var("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR");
        let stem = kernel.file_stem().expect("a file").to_string_lossy();
        let cpp = out_dir().join(format!("{stem}.cpp"));
        let text = format!(
            "#include \"{root}/cuda/emulation/emulation.h\"\n#include \"{root}/{}\"\n",
            kernel.display()
        );
        std::fs::write(&cpp, text).expect("a writable OUT_DIR");
        cpp
    }
}
