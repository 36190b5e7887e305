# Lists the recipes.
default:
    @just --list

# Everything that CI runs: format, lints, documentation, tests.
check:
    .ci/run

# Runs the tests whose names contain a filter, or all of them.
test *args:
    cargo test --release {{args}}

# Formats the code.
fmt:
    cargo fmt

# Licences, advisories, duplicates and sources of the dependencies (needs cargo-deny).
deny:
    cargo deny check

# Trains: `just train CONFIG.json --mesh 2x2`.
train *args:
    cargo run --release -- train {{args}}
