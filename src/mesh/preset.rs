//! Named meshes whose sizes follow from the cluster.

use super::{Cluster, DeviceMesh, HybridMeshShape, MeshError};

/// A parallelism scheme whose mesh follows from the cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Preset {
    /// Data parallelism with a full replica per rank: `dp`, ZeRO stage 0.
    Ddp,
    /// The model partitioned over all ranks: `dp`, ZeRO stage 3.
    Fsdp,
    /// The model partitioned within each node and replicated across nodes: `dp_replicate` × `dp_shard`.
    Hsdp,
    /// Each sequence sharded over the ranks of a node: `dp` × `sp`.
    Ulysses,
    /// `dp_shard` × `sp` within each node, as square as possible, and `dp_replicate` across nodes.
    UlyssesHsdp,
}

/// A preset on a cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PresetOnCluster {
    /// The preset.
    pub preset: Preset,
    /// The cluster.
    pub cluster: Cluster,
}

impl Preset {
    /// All presets.
    pub const ALL: [Self; 5] = [Self::Ddp, Self::Fsdp, Self::Hsdp, Self::Ulysses, Self::UlyssesHsdp];

    /// Returns the name of the preset.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ddp => "ddp",
            Self::Fsdp => "fsdp",
            Self::Hsdp => "hsdp",
            Self::Ulysses => "ulysses",
            Self::UlyssesHsdp => "ulysses_hsdp",
        }
    }

    /// Returns the preset named by `fsdp` or `fsdp=…`, whatever follows the `=`.
    pub fn named(text: &str) -> Option<Self> {
        let name = text.split_once('=').map_or(text, |(name, _)| name);
        Self::ALL.into_iter().find(|preset| preset.name() == name)
    }

    /// Parses `fsdp`, whose sizes follow from `cluster`, or `fsdp=2x4`: 2 nodes of 4 ranks (`fsdp=8`: one node of 8).
    ///
    /// Returns `None` if the text does not name a preset.
    ///
    /// # Errors
    /// Fails if the text after `=` is not a cluster or has another world size than `cluster`, or if neither is given.
    pub fn parse(text: &str, cluster: Option<Cluster>) -> Result<Option<PresetOnCluster>, MeshError> {
        let Some(preset) = Self::named(text) else { return Ok(None) };
        let given = text.split_once('=').map(|(_, sizes)| parse_cluster(text, sizes)).transpose()?;
        match (given, cluster) {
            (Some(given), Some(cluster)) if given.world_size() != cluster.world_size() => {
                Err(MeshError::WorldSizeMismatch {
                    mesh: text.to_owned(),
                    product: given.world_size(),
                    world_size: cluster.world_size(),
                })
            }
            (Some(cluster), _) | (None, Some(cluster)) => Ok(Some(PresetOnCluster { preset, cluster })),
            (None, None) => Err(MeshError::PresetWithoutCluster { preset: preset.name().to_owned() }),
        }
    }

    /// Returns the ZeRO stage that the preset implies, if any.
    pub fn zero_stage(self) -> Option<u8> {
        match self {
            Self::Ddp => Some(0),
            Self::Fsdp | Self::Hsdp | Self::UlyssesHsdp => Some(3),
            Self::Ulysses => None,
        }
    }

    /// Returns the shape on a cluster.
    ///
    /// # Errors
    /// Fails if the cluster has no ranks, or more than [`MAX_RANKS`](super::MAX_RANKS).
    pub fn shape(self, cluster: Cluster) -> Result<HybridMeshShape, MeshError> {
        let as_size = |size: usize| i64::try_from(size).unwrap_or(i64::MAX);
        let (nodes, ranks) = (as_size(cluster.nodes), as_size(cluster.ranks_per_node));
        let new =
            |names: &[&str], intra: &[i64], inter: &[i64]| HybridMeshShape::new(names, intra, inter, cluster);
        match self {
            Self::Ddp | Self::Fsdp => new(&["dp", "sp"], &[ranks, 1], &[nodes, 1]),
            Self::Hsdp => new(&["dp_replicate", "dp_shard"], &[1, ranks], &[nodes, 1]),
            Self::Ulysses => new(&["dp", "sp"], &[1, ranks], &[nodes, 1]),
            Self::UlyssesHsdp => {
                let shard = largest_divisor_up_to_root(cluster.ranks_per_node);
                let sp = cluster.ranks_per_node / shard.max(1);
                let intra = [1, as_size(shard), as_size(sp)];
                new(&["dp_replicate", "dp_shard", "sp"], &intra, &[nodes, 1, 1])
            }
        }
    }

    /// Returns the mesh on a cluster.
    ///
    /// # Errors
    /// Fails like [`shape`](Self::shape).
    pub fn mesh(self, cluster: Cluster) -> Result<DeviceMesh, MeshError> {
        self.shape(cluster)?.mesh()
    }
}

/// Parses `8`, or `2x4` for 2 nodes of 4 ranks.
fn parse_cluster(text: &str, sizes: &str) -> Result<Cluster, MeshError> {
    let unreadable = || MeshError::Notation {
        text: text.to_owned(),
        reason: format!("`{sizes}` is neither a number of ranks nor NODESxRANKS"),
    };
    let size = |size: &str| size.trim().parse().ok().filter(|size| *size > 0).ok_or_else(unreadable);
    match sizes.split_once(['x', 'X']) {
        Some((nodes, ranks)) => Ok(Cluster { nodes: size(nodes)?, ranks_per_node: size(ranks)? }),
        None => Ok(Cluster { nodes: 1, ranks_per_node: size(sizes)? }),
    }
}

fn largest_divisor_up_to_root(number: usize) -> usize {
    let up_to_root = (1..=number).take_while(|divisor| divisor * divisor <= number);
    up_to_root.filter(|divisor| number.is_multiple_of(*divisor)).last().unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TWO_OF_8: Cluster = Cluster { nodes: 2, ranks_per_node: 8 };

    fn mesh(text: &str) -> DeviceMesh {
        let PresetOnCluster { preset, cluster } = Preset::parse(text, Some(TWO_OF_8)).unwrap().unwrap();
        preset.mesh(cluster).unwrap()
    }

    #[test]
    fn presets_take_their_sizes_from_the_cluster() {
        for (name, axes) in [
            ("ddp", "dp=16,sp=1"),
            ("fsdp", "dp=16,sp=1"),
            ("hsdp", "dp_replicate=2,dp_shard=8"),
            ("ulysses", "dp=2,sp=8"),
            ("ulysses_hsdp", "dp_replicate=2,dp_shard=2,sp=4"),
            ("ulysses=4x4", "dp=4,sp=4"),
            ("ulysses_hsdp=1x16", "dp_replicate=1,dp_shard=4,sp=4"),
            ("hsdp=16", "dp_replicate=1,dp_shard=16"),
        ] {
            assert_eq!(mesh(name).to_string(), axes, "{name}");
        }
    }

    #[test]
    fn only_the_first_axis_crosses_nodes() {
        for name in ["hsdp", "ulysses", "ulysses_hsdp"] {
            let mesh = mesh(name);
            for axis in mesh.axis_names().iter().skip(1) {
                let groups = mesh.all_groups(axis).unwrap();
                let within = |group: &Vec<usize>| group.iter().all(|rank| rank / 8 == group[0] / 8);
                assert!(groups.iter().all(within), "{name}: {axis} {groups:?}");
            }
        }
    }

    #[test]
    fn other_texts_are_not_presets_and_invalid_clusters_are_errors() {
        assert_eq!(Preset::parse("2x4", None), Ok(None));
        assert_eq!(Preset::parse("dp=2,sp=4", None), Ok(None));
        let error = |text: &str, cluster| Preset::parse(text, cluster).unwrap_err().to_string();
        assert!(error("hsdp", None).contains("`hsdp=NODESxRANKS`"), "{}", error("hsdp", None));
        assert!(error("hsdp=0x4", None).contains("neither a number of ranks nor NODESxRANKS"));
        assert!(error("fsdp=3x4", Some(TWO_OF_8)).contains("needs 12 ranks, but the world size is 16"));
        assert!(Preset::Ulysses.mesh(Cluster { nodes: 0, ranks_per_node: 1 }).is_err());
    }

    #[test]
    fn largest_divisor_is_at_most_the_square_root() {
        assert_eq!([1, 2, 4, 6, 7, 8, 12, 16].map(largest_divisor_up_to_root), [1, 1, 2, 2, 1, 2, 3, 4]);
    }
}
