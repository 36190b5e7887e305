//! Helpers shared by the integration tests.

// Clippy knows `#[test]` functions, not the helpers that they call.
#![allow(clippy::unwrap_used)]

pub(crate) mod comm;
