//! ulysses (tour to be written)
pub mod comm;
pub mod config;
pub mod mesh;
pub mod ops;
pub mod tensor;
