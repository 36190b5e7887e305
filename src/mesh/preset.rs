//! Meshes by the name of what they are for.

use super::{Cluster, DeviceMesh, HybridMeshShape, MeshError};

/// A way to use a cluster, whose sizes follow from it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Preset {
    /// Every rank holds the whole model: `dp`, ZeRO stage 0.
    Ddp,
    /// All ranks partition the model: `dp`, ZeRO stage 3.
    Fsdp,
    /// The ranks of a node partition the model, every node has a copy: `dp_replicate` × `dp_shard`.
    Hsdp,
    /// The ranks of a node share each sequence: `dp` × `sp`.
    Ulysses,
    /// Within a node `dp_shard` × `sp`, as even as divides, and a copy on every node: `dp_replicate`.
    UlyssesHsdp,
}

impl Preset {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Ddp, Self::Fsdp, Self::Hsdp, Self::Ulysses, Self::UlyssesHsdp];

    /// The name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ddp => "ddp",
            Self::Fsdp => "fsdp",
            Self::Hsdp => "hsdp",
            Self::Ulysses => "ulysses",
            Self::UlyssesHsdp => "ulysses_hsdp",
        }
    }

    /// The preset that a text names: `fsdp`, or `fsdp=` and whatever comes then.
    pub fn named(text: &str) -> Option<Self> {
        let name = text.split_once('=').map_or(text, |(name, _)| name);
        Self::ALL.into_iter().find(|preset| preset.name() == name)
    }

    /// Reads `fsdp`, whose sizes follow from `cluster`, or `fsdp=2x4`: 2 nodes of 4 ranks (`fsdp=8`: one of 8). `None`
    /// for what is no preset's name.
    ///
    /// # Errors
    /// When what follows `=` is no cluster, or is another one than `cluster`, or there is none to infer from.
    pub fn parse(text: &str, cluster: Option<Cluster>) -> Result<Option<(Self, Cluster)>, MeshError> {
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
            (Some(cluster), _) | (None, Some(cluster)) => Ok(Some((preset, cluster))),
            (None, None) => Err(MeshError::PresetWithoutCluster { preset: preset.name().to_owned() }),
        }
    }

    /// The ZeRO stage that the name stands for, if it stands for one.
    pub fn zero_stage(self) -> Option<u8> {
        match self {
            Self::Ddp => Some(0),
            Self::Fsdp | Self::Hsdp | Self::UlyssesHsdp => Some(3),
            Self::Ulysses => None,
        }
    }

    /// The shape on a cluster.
    ///
    /// # Errors
    /// When the cluster has no rank, or more than [`MAX_RANKS`](super::MAX_RANKS).
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

    /// The mesh on a cluster.
    ///
    /// # Errors
    /// As [`shape`](Self::shape).
    pub fn mesh(self, cluster: Cluster) -> Result<DeviceMesh, MeshError> {
        self.shape(cluster)?.mesh()
    }
}

/// `8`, or `2x4` for 2 nodes of 4.
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
        let (preset, cluster) = Preset::parse(text, Some(TWO_OF_8)).unwrap().unwrap();
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
    fn only_replicas_and_data_parallel_ranks_are_on_other_nodes() {
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
    fn what_is_no_preset_or_no_cluster_is_told() {
        assert_eq!(Preset::parse("2x4", None), Ok(None));
        assert_eq!(Preset::parse("dp=2,sp=4", None), Ok(None));
        let error = |text: &str, cluster| Preset::parse(text, cluster).unwrap_err().to_string();
        assert!(error("hsdp", None).contains("`hsdp=NODESxRANKS`"), "{}", error("hsdp", None));
        assert!(error("hsdp=0x4", None).contains("neither a number of ranks nor NODESxRANKS"));
        assert!(error("fsdp=3x4", Some(TWO_OF_8)).contains("takes 12 ranks, but there are 16"));
        assert!(Preset::Ulysses.mesh(Cluster { nodes: 0, ranks_per_node: 1 }).is_err());
    }

    #[test]
    fn divisors_are_as_near_to_the_root_as_they_come() {
        assert_eq!([1, 2, 4, 6, 7, 8, 12, 16].map(largest_divisor_up_to_root), [1, 1, 2, 2, 1, 2, 3, 4]);
    }
}
