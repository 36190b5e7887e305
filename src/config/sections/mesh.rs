//! The sizes of the mesh, at the top of the file.

use crate::config::mesh_shape::{SizeOrigin, StatedSize, StatedSizes};
use crate::config_file::define::keys;
use crate::config_file::define::words::count;
use crate::config_file::reader::Section;
use crate::mesh::MeshShape;

keys! {
    /// The sizes of the mesh. Flags, `mesh_param`, `ulysses.mesh_rules` and the number of ranks determine them too.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct MeshConfig {
        /// Pipeline-parallel ranks: they share the layers, each a stage of consecutive ones. `pipeline.stages` is DeepSpeed's key
        /// for it.
        pub pp_size: usize = count().named("pipeline_parallel_size").integer(1),
        /// Data-parallel ranks: they process different sequences.
        pub dp_size: usize = count().named("data_parallel_size").derived("the world size / (pp × sp × tp), or 1"),
        /// Sequence-parallel ranks: they share each sequence. A file that sets this key above 1, and neither `mesh_param`
        /// nor `data_parallel_size`, also partitions ZeRO over dp × sp (`ulysses.zero_partition_axes`), as in DeepSpeed.
        pub sp_size: usize = count().named("sequence_parallel_size").integer(1),
        /// Tensor-parallel ranks: they share the weights, heads and tokens of each sequence-parallel rank.
        /// `tensor_parallel.autotp_size` is DeepSpeed's key for it.
        pub tp_size: usize = count().named("tensor_parallel_size").integer(1),
    }
}

impl From<MeshShape> for MeshConfig {
    fn from(MeshShape { pp, dp, sp, tp }: MeshShape) -> Self {
        Self { pp_size: pp, dp_size: dp, sp_size: sp, tp_size: tp }
    }
}

impl MeshConfig {
    /// Returns the sizes.
    pub fn shape(self) -> MeshShape {
        let Self { pp_size, dp_size, sp_size, tp_size } = self;
        MeshShape { pp: pp_size, dp: dp_size, sp: sp_size, tp: tp_size }
    }

    /// Returns the number of ranks of one stage that share each sequence: those of sp and tp.
    pub fn ranks_per_sequence(self) -> usize {
        self.sp_size * self.tp_size
    }
}

/// Returns every size that the file states.
pub(crate) fn stated_sizes(root: &Section<'_>) -> StatedSizes {
    let stated = |key, size, position| StatedSize { size, origin: SizeOrigin::Key { key, position } };
    let size =
        |section: &Section<'_>, key, path| Some(stated(path, section.get(key)?, section.position(key, &[])?));
    let axis = |key| size(root, key, key);
    let of_mesh = |index: usize| {
        let sizes: [usize; 2] = root.get("mesh_param")?;
        Some(stated("mesh_param", sizes[index], root.position("mesh_param", &[index])?))
    };
    let sizes = |mesh_size: Option<_>, key| mesh_size.into_iter().chain(axis(key)).collect();
    let stages = size(&root.section("pipeline"), "stages", "pipeline.stages");
    let autotp = size(&root.section("tensor_parallel"), "autotp_size", "tensor_parallel.autotp_size");
    StatedSizes {
        pp: sizes(stages, "pipeline_parallel_size"),
        dp: sizes(of_mesh(0), "data_parallel_size"),
        sp: sizes(of_mesh(1), "sequence_parallel_size"),
        // DeepSpeed's 0 leaves the size open.
        tp: sizes(autotp.filter(|stated| stated.size > 0), "tensor_parallel_size"),
    }
}
