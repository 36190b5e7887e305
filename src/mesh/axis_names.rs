//! The names of axes, in one place.

/// The axis of pipeline parallelism: ranks that divide the layers, outermost.
pub const PP_AXIS: &str = "pp";

/// The axis of tensor parallelism: ranks that divide the weights of each layer, innermost.
pub const TP_AXIS: &str = "tp";

/// The axis of the ranks with other tokens of the same sequences, if there are tensor-parallel ranks: those of sp and tp.
pub const TOKENS_AXIS: &str = "tokens";

/// The axis of a ring within sp.
pub const RING_AXIS: &str = "ring";

/// The axis of a Ulysses group within sp.
pub const ULYSSES_AXIS: &str = "ulysses";

/// The axis of the ranks that together hold the partitions of one replica.
pub const SHARD_AXIS: &str = "shard";

/// The axis of the ranks that hold the same partition.
pub const REPLICAS_AXIS: &str = "replicas";

/// The part of `dp` along which partitions are replicated.
pub(super) const DP_REPLICATE_AXIS: &str = "dp_replicate";

/// The part of `dp` over which ZeRO partitions.
pub(super) const DP_SHARD_AXIS: &str = "dp_shard";

/// Axes of a training mesh, slowest first. Axes that are stated in another order are sorted.
pub(super) const AXIS_ORDER: [&str; 8] =
    [PP_AXIS, DP_REPLICATE_AXIS, DP_SHARD_AXIS, "dp", "sp", RING_AXIS, ULYSSES_AXIS, TP_AXIS];

/// Resolves the aliases of axis names: DeepSpeed's `data_parallel` and `sequence_parallel` are `dp` and `sp`.
pub fn canonical_axis_name(name: &str) -> &str {
    match name {
        "data_parallel" => "dp",
        "sequence_parallel" => "sp",
        name => name,
    }
}
