//! With the feature `nccl`, finds `libnccl.so.2` where the name for linkers, `libnccl.so`, is missing; else does nothing.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    #[cfg(all(feature = "nccl", unix))]
    nccl::link();
}

#[cfg(all(feature = "nccl", unix))]
mod nccl {
    use std::path::PathBuf;
    use std::process::Command;

    /// The toolkit's folder, as cudarc's build script reads it.
    const TOOLKIT: [&str; 4] = ["CUDA_HOME", "CUDA_PATH", "CUDA_ROOT", "CUDA_TOOLKIT_ROOT_DIR"];

    /// Where NCCL is only installed to run programs (the package `libnccl2`, PyTorch's wheels), links `libnccl.so` to it in
    /// a folder that the linker searches.
    pub(super) fn link() {
        // Not LD_LIBRARY_PATH: rustup and `cargo test` change it, and everything would be built again.
        println!("cargo:rerun-if-env-changed=LIBRARY_PATH");
        TOOLKIT.into_iter().for_each(|name| println!("cargo:rerun-if-env-changed={name}"));
        let folders = folders();
        let find = |name: &str| folders.iter().map(|folder| folder.join(name)).find(|path| path.exists());
        if let Some(folder) = find("libnccl.so").and_then(|path| Some(path.parent()?.to_owned())) {
            return println!("cargo:rustc-link-search=native={}", folder.display());
        }
        let Some(library) = find("libnccl.so.2") else {
            let advice = "set LIBRARY_PATH to its folder if the linker does not find it";
            return println!(
                "cargo:warning=libnccl.so and libnccl.so.2 were not found in the usual folders: {advice}"
            );
        };
        let Some(out) = std::env::var_os("OUT_DIR").map(PathBuf::from) else { return };
        let link = out.join("libnccl.so");
        // The link of an earlier build may lead elsewhere.
        _ = std::fs::remove_file(&link);
        match std::os::unix::fs::symlink(&library, &link) {
            Ok(()) => println!("cargo:rustc-link-search=native={}", out.display()),
            Err(error) => {
                println!("cargo:warning=cannot link {} to {}: {error}", link.display(), library.display())
            }
        }
    }

    fn folders() -> Vec<PathBuf> {
        let lists = ["LIBRARY_PATH", "LD_LIBRARY_PATH"].into_iter().filter_map(std::env::var_os);
        let mut folders: Vec<PathBuf> =
            lists.flat_map(|list| std::env::split_paths(&list).collect::<Vec<_>>()).collect();
        let toolkits = TOOLKIT.into_iter().filter_map(std::env::var_os).map(PathBuf::from);
        for toolkit in toolkits.chain([PathBuf::from("/usr/local/cuda")]) {
            folders.extend(["lib", "lib64", "lib/stubs", "lib64/stubs"].map(|name| toolkit.join(name)));
        }
        folders.extend(cached());
        let usual = ["/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib"];
        folders.extend(usual.map(PathBuf::from));
        folders
    }

    /// Folders of the NCCL libraries that the loader knows.
    fn cached() -> Vec<PathBuf> {
        let listed = Command::new("ldconfig").arg("-p").output();
        let text =
            listed.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
        let nccl = text.lines().filter(|line| line.contains("libnccl.so"));
        nccl.filter_map(|line| Some(PathBuf::from(line.split("=> ").nth(1)?).parent()?.to_owned())).collect()
    }
}
