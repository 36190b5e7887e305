//! The memory of ranks, by the allocator: against formulas, against the plan, and for single ops.

mod dry_run;
mod engine;
mod exchange_overlap;
mod features;
mod node_traffic;
mod ops;
mod plan;
mod saved_state;
