//! The sizes of the mesh, at the top of the file.

use crate::config::define::keys;
use crate::config::define::words::count;
use crate::config::mesh_shape::{SizeOrigin, StatedSize};
use crate::config::reader::Section;

keys! {
    /// The sizes of the mesh. Flags, `mesh_param`, `ulysses.mesh_rules` and the number of ranks determine them too.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct MeshConfig {
        /// Data-parallel ranks: they process different sequences.
        pub dp_size: usize = count().named("data_parallel_size").derived("the world size / sp, or 1"),
        /// Sequence-parallel ranks: they share each sequence. A file that sets this key above 1, and neither `mesh_param`
        /// nor `data_parallel_size`, also partitions ZeRO over dp × sp (`ulysses.zero_partition_axes`), as in DeepSpeed.
        pub sp_size: usize = count().named("sequence_parallel_size").integer(1),
        /// Tensor-parallel ranks: they share the weights, heads and tokens of each sequence-parallel rank.
        pub tp_size: usize = count().named("tensor_parallel_size").integer(1),
    }
}

/// Returns every size of dp and of sp that the file states.
pub(crate) fn stated_sizes(root: &Section<'_>) -> (Vec<StatedSize>, Vec<StatedSize>) {
    let stated = |key, size, position| StatedSize { size, origin: SizeOrigin::Key { key, position } };
    let axis = |key| Some(stated(key, root.count(key)?, root.position(root.range(key)?)));
    let mesh_sizes = root.two_counts("mesh_param");
    let mesh_sizes = mesh_sizes.map(|pair| pair.map(|(size, position)| stated("mesh_param", size, position)));
    let [mesh_dp, mesh_sp] = mesh_sizes.map_or([None, None], |sizes| sizes.map(Some));
    let sizes = |mesh_size: Option<_>, key| mesh_size.into_iter().chain(axis(key)).collect();
    (sizes(mesh_dp, "data_parallel_size"), sizes(mesh_sp, "sequence_parallel_size"))
}
