# shellcheck shell=bash
# Adds this machine's CUDA libraries to LD_LIBRARY_PATH, from the toolkit's folders and PyTorch's packages.
# Source it before running anything in this folder.

wheel_folders() {
    command -v python3 >/dev/null || return 0
    python3 -c '
import glob, site, sys
roots = {path for path in sys.path + site.getsitepackages() + [site.getusersitepackages()] if path}
print("\n".join(found for root in sorted(roots) for found in sorted(glob.glob(root + "/nvidia/*/lib"))))' 2>/dev/null || true
}

library_folders() {
    local folder
    for folder in /usr/local/cuda/lib64 /usr/local/cuda-1[23]*/lib64; do
        [[ -d $folder ]] && echo "$folder"
    done
    wheel_folders
    # Last, as a fallback: the CUDA runtime, and a stub of cuRAND.
    echo "$(dirname "${BASH_SOURCE[0]}")/lib"
}

LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$(library_folders | paste -sd:)
export LD_LIBRARY_PATH
