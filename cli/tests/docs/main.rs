//! README and book: the commands that they show run, plans print what is quoted of them, and links lead somewhere.

#![allow(clippy::unwrap_used)]

mod book;
mod commands;
#[path = "../../../tests/support/documented.rs"]
mod documented;
mod quoted;

use std::path::Path;

fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}
