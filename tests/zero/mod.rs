//! ZeRO and the engine: stages agree bit for bit, and calls out of order are refused.

mod engine_protocol;
mod engine_state;
mod frozen;
mod partitions;
mod stages;
