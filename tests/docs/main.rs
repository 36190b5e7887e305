//! README and book: the commands that they show run, plans print what is quoted of them, and links lead somewhere.

#![allow(clippy::unwrap_used)]

mod book;
mod commands;
#[path = "../support/documented.rs"]
mod documented;
mod quoted;

use std::path::Path;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}
