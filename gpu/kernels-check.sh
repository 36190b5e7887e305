#!/usr/bin/env bash
# Compiles the CUDA kernels without a GPU and checks the rules of gpu/kernels_check.
#
#     gpu/kernels-check.sh [--write]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

export PYTHONDONTWRITEBYTECODE=1 PYTHONUTF8=1
python3 -m unittest --quiet kernels_check.test_kernels_check
python3 -m kernels_check "$@"
