//! Files that a run writes about itself, and reports of them.

mod monitors;
mod parts;
mod report;
mod trace;
