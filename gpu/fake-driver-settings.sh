# shellcheck shell=bash
# The environment of every build that is to run on the fake driver, or is only checked. Source it in the repository's root.

# An nvcc that writes empty files, because the kernels run by emulation. A build for a GPU must not find those files, so this
# one has a target folder of its own.
export NVCC=$PWD/gpu/nvcc-for-check CUDA_COMPUTE_CAP=80 CUDA_HOME=$PWD/target/fake-driver CARGO_TARGET_DIR=target/fake
export PYTHONDONTWRITEBYTECODE=1
