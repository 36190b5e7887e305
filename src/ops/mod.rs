//! Fused operations.
