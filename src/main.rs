//! The `ulysses` command line.

mod cli;

use std::process::ExitCode;

/// Counts what every rank's thread holds. mimalloc returns freed blocks to the next
/// allocation without giving their pages back, which glibc does above 32 MiB.
#[global_allocator]
static ALLOCATOR: ulysses::memory::CountingAllocator<mimalloc::MiMalloc> =
    ulysses::memory::CountingAllocator(mimalloc::MiMalloc);

fn main() -> ExitCode {
    cli::settings::limit_candle_threads();
    cli::run()
}
