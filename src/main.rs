//! The `ulysses` command line.
fn main() {}
