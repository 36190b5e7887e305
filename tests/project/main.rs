//! The repository itself: the rules of its source tree, and its examples.

#![allow(clippy::unwrap_used)]

mod architecture;
mod examples;
mod file_graph;
mod source_tree;
