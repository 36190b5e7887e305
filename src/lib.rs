//! ulysses (tour to be written)
pub mod comm;
pub mod data;
pub mod mesh;
pub mod ops;
pub mod tensor;
