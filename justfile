# Lists the recipes.
default:
    @just --list

# Everything that CI runs: format, lints, documentation, tests, and the checks of the CUDA code that need no GPU.
check:
    .ci/run

# Format, lints and the tests of what changed since a commit: about a minute.
check-fast commit="HEAD":
    .ci/check-fast {{commit}}

# What CI runs, with whole test matrices instead of samples, all suites of the fake driver, and 40 times as many random inputs: an hour.
nightly:
    ULYSSES_TEST_SEED=all PROPTEST_CASES=10000 .ci/run

# Runs the tests whose names contain a filter, or all of them.
test *args:
    cargo test --release {{args}}

# Formats the code.
fmt:
    cargo fmt --all

# Compiles the CUDA kernels and checks their registers; `--write` puts the tables into gpu/kernels.md.
kernels-check *args:
    gpu/kernels-check.sh {{args}}

# Makes the folder that checks a machine with GPUs: docs/gpu.md.
gpu-build:
    gpu/build.sh

# Licenses, advisories, duplicates and sources of the dependencies (needs cargo-deny).
deny:
    cargo deny check

# Trains: `just train configs/sequence_parallel.json --steps 10`.
train *args:
    cargo run --release -- train {{args}}

# Compares exported and imported models with Python's transformers, and event files with TensorBoard. Installs both into `target/interop`.
interop:
    python3 -m venv target/interop
    target/interop/bin/pip install --quiet torch transformers tensorboard
    ULYSSES_PYTHON="$PWD/target/interop/bin/python" cargo test --release --test interop -- --nocapture

# Trains on long sequences of this repository's text, on a 2 × 2 mesh.
example:
    cargo run --release --example train_long_sequence

# Rates, each with a baseline from the same run: `just bench attention --seq-len 4096`, `just bench checkpoint`.
bench *args:
    cargo run --release -- bench {{args}}

# Makes pages of the book in docs/ (needs mdbook): book/index.html.
book:
    mdbook build docs

# ulysses against PyTorch + DeepSpeed, which it installs into `target/peer` (5 GB): `just bench-peer`, `just bench-peer small-2048 collectives`.
bench-peer *args:
    python3 -m venv target/peer
    target/peer/bin/pip install --quiet --requirement benches/peer/requirements.txt
    cargo build --release
    target/peer/bin/python benches/peer/compare.py {{args}}

# ulysses against transformers on the CPU, by family, which it installs into `target/interop`: `just bench-families "gated delta rule"`.
bench-families *args:
    python3 -m venv target/interop
    target/interop/bin/pip install --quiet torch transformers
    cargo build --release
    target/interop/bin/python benches/peer/families.py {{args}}

# Validates the manifests of configs/clusters against the CRDs of the MPI operator and the training operator: two files of their repositories.
manifests mpijobs_crd pytorchjobs_crd:
    python3 -m venv target/manifests
    target/manifests/bin/pip install --quiet kubernetes-validate jsonschema pyyaml
    target/manifests/bin/python tests/clusters/manifests.py {{mpijobs_crd}} {{pytorchjobs_crd}}
