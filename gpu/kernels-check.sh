#!/usr/bin/env bash
# Compiles the CUDA kernels without a GPU and checks the rules of gpu/kernels_check.
#
#     gpu/kernels-check.sh [--write]
#     gpu/kernels-check.sh --if-changed     only if a kernel or a tool changed since the table in gpu/kernels.md was made
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

export PYTHONDONTWRITEBYTECODE=1 PYTHONUTF8=1
if [[ ${1:-} == --if-changed ]]; then
    shift
    if python3 -m kernels_check --is-current; then
        echo "kernels-check.sh: no kernel changed since the table in gpu/kernels.md was made"
        exit
    fi
fi
python3 -m unittest --quiet kernels_check.test_kernels_check
python3 -m kernels_check "$@"
