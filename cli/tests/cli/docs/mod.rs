//! README and book: commands run, quoted plans match the output, links work.

mod book;
mod commands;
#[path = "../../../../tests/support/documented.rs"]
mod documented;
mod quoted;

use std::path::Path;

fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}
