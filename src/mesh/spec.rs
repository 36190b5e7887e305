//! Meshes as flags and config files state them.

use super::axis_names::AXIS_ORDER;
use super::notation::{parse_axes, unreadable};
use super::stated_sizes::{Axes, hybrid_shape, place, resolve_axes, stated};
use super::{Cluster, DeviceMesh, HybridMeshShape, MeshError, Preset, RankHosts, TrainingShape, axis};
use std::fmt;

/// A training mesh as text: sizes, sizes within a node and between nodes, a rank map, or a preset.
///
/// | text | mesh |
/// |---|---|
/// | `2x4`, `dp=2,sp=4`, `2x2x4`, `dp=2,sp=2,tp=4` | row-major |
/// | `intra:sp=4/inter:dp=2` | a [`HybridMeshShape`]: sizes within a node and between nodes; a missing axis has size 1. `ici` and `dcn` are synonyms |
/// | `dp=2,sp=2@0,2,1,3` | the rank at each coordinate, row-major |
/// | `ulysses`, `hsdp=2x4` | a [`Preset`] |
///
/// ```
/// use ulysses::mesh::{Cluster, MeshSpec};
///
/// let cluster = Cluster { nodes: 2, ranks_per_node: 4 };
/// let spec = MeshSpec::parse("intra:sp=-1/inter:dp=-1")?.resolve(Some(cluster))?;
/// assert_eq!(spec.to_string(), "intra:dp=1,sp=4/inter:dp=2,sp=1");
/// assert_eq!(spec.training_shape()?.sizes.sp, 4);
/// # Ok::<(), ulysses::mesh::MeshError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum MeshSpec {
    /// Sizes of row-major ranks.
    Axes(Axes),
    /// Sizes within a node and between nodes.
    Hybrid {
        /// Sizes within a node.
        intra: Axes,
        /// Sizes between nodes.
        inter: Axes,
    },
    /// Sizes, and the rank at each coordinate.
    RankMap {
        /// The sizes.
        axes: Axes,
        /// The ranks, row-major.
        ranks: Vec<usize>,
    },
    /// A preset, and its cluster if the text has one.
    Preset(Preset, Option<Cluster>),
}

/// The mesh that a [`MeshSpec`] states.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SpecMesh {
    /// The mesh, for consecutive ranks on each node.
    pub mesh: DeviceMesh,
    /// The ranks of a node, if it states them.
    pub ranks_per_node: Option<usize>,
}

impl MeshSpec {
    /// Parses a mesh in any notation.
    ///
    /// # Errors
    /// Fails if the text is in none of the notations. Sizes are checked by [`resolve`](Self::resolve).
    pub fn parse(text: &str) -> Result<Self, MeshError> {
        if let Some((axes, ranks)) = text.split_once('@') {
            return Ok(Self::RankMap { axes: parse_axes(axes)?, ranks: parse_ranks(text, ranks)? });
        }
        if text.contains(':') {
            return parse_hybrid(text);
        }
        match Preset::named(text) {
            // Only the text decides about the cluster: any other would do.
            Some(preset) if text.contains('=') => {
                let cluster = Preset::parse(text, None)?.map(|parsed| parsed.cluster);
                Ok(Self::Preset(preset, cluster))
            }
            Some(preset) => Ok(Self::Preset(preset, None)),
            None => Ok(Self::Axes(parse_axes(text)?)),
        }
    }

    /// Infers all sizes and replaces presets by their shapes. The result is `Axes`, `Hybrid` or `RankMap`.
    ///
    /// On a cluster of one node, or without one, the stated sizes determine the nodes of a hybrid shape.
    ///
    /// # Errors
    /// Fails if a size cannot be inferred, or the sizes do not fit the cluster.
    pub fn resolve(&self, cluster: Option<Cluster>) -> Result<Self, MeshError> {
        let world_size = cluster.map(Cluster::world_size);
        match self {
            Self::Axes(axes) => Ok(Self::Axes(resolve_axes(axes, world_size)?)),
            Self::RankMap { axes, ranks } => {
                let mesh = DeviceMesh::with_ranks(axes, ranks.clone())?;
                if let Some(rank) = ranks.iter().find(|rank| **rank >= ranks.len()) {
                    let reason = format!("rank {rank} is not below the number of ranks, {}", ranks.len());
                    return Err(unreadable(&self.to_string(), reason));
                }
                Ok(Self::rank_map(&mesh))
            }
            Self::Hybrid { intra, inter } => Ok(Self::of_shape(&hybrid_shape(intra, inter, cluster)?)),
            Self::Preset(preset, Some(given)) => {
                Preset::parse(&self.to_string(), cluster)?;
                Ok(Self::Axes(stated(preset.mesh(*given)?.axes())))
            }
            Self::Preset(preset, None) => match cluster {
                Some(cluster) => Ok(Self::of_shape(&preset.shape(cluster)?)),
                None => Err(MeshError::PresetWithoutCluster { preset: preset.name().to_owned() }),
            },
        }
    }

    /// Returns the sizes of a resolved mesh.
    ///
    /// # Errors
    /// Fails if the mesh has other axes than a training mesh, or is not resolved.
    pub fn training_shape(&self) -> Result<TrainingShape, MeshError> {
        let mesh = match self {
            // Its ranks are checked elsewhere.
            Self::RankMap { axes, .. } => DeviceMesh::new(axes, None)?,
            _ => self.mesh()?.mesh,
        };
        let shape = mesh.training_shape()?;
        // The order of the axes gives a rank map its meaning, so it is not sorted.
        let names = mesh.axis_names();
        if matches!(self, Self::RankMap { .. }) && !names.is_sorted_by_key(|name| place(name)) {
            let reason = format!("the axes of a rank map are in the order {}", AXIS_ORDER.join(", "));
            return Err(unreadable(&self.to_string(), reason));
        }
        Ok(shape)
    }

    /// Returns the rank map of a mesh.
    pub fn rank_map(mesh: &DeviceMesh) -> Self {
        Self::RankMap { axes: stated(mesh.axes()), ranks: mesh.ranks().to_vec() }
    }

    /// Returns the preset that the text names.
    pub fn preset(&self) -> Option<Preset> {
        match self {
            Self::Preset(preset, _) => Some(*preset),
            _ => None,
        }
    }

    /// Returns the resolved mesh with its own axes.
    ///
    /// # Errors
    /// Fails if the mesh is invalid.
    pub fn mesh(&self) -> Result<SpecMesh, MeshError> {
        let (mesh, ranks_per_node) = match self {
            Self::Axes(axes) => (DeviceMesh::new(axes, None)?, None),
            Self::RankMap { axes, ranks } => (DeviceMesh::with_ranks(axes, ranks.clone())?, None),
            Self::Hybrid { intra, inter } => {
                let shape = hybrid_shape(intra, inter, None)?;
                (shape.mesh()?, Some(shape.ranks_per_node()))
            }
            Self::Preset(preset, cluster) => {
                let cluster = cluster
                    .ok_or_else(|| MeshError::PresetWithoutCluster { preset: preset.name().to_owned() })?;
                (preset.mesh(cluster)?, Some(cluster.ranks_per_node))
            }
        };
        Ok(SpecMesh { mesh, ranks_per_node })
    }

    /// Returns the ranks of a resolved mesh, row-major. `hosts` are several nodes.
    pub(super) fn ranks(&self, hosts: Option<&RankHosts>) -> Result<Vec<usize>, MeshError> {
        match self {
            Self::RankMap { ranks, .. } => Ok(ranks.clone()),
            Self::Hybrid { intra, inter } => {
                let shape = hybrid_shape(intra, inter, None)?;
                let Some(hosts) = hosts else { return Ok(shape.mesh()?.ranks().to_vec()) };
                let (nodes, ranks_per_node) = (shape.nodes(), shape.ranks_per_node());
                if hosts.cluster()? != (Cluster { nodes, ranks_per_node }) {
                    let (mesh, found) = (self.to_string(), hosts.to_string());
                    return Err(MeshError::OtherNodes { mesh, nodes, ranks_per_node, found });
                }
                Ok(shape.mesh_over(&hosts.devices())?.ranks().to_vec())
            }
            _ => {
                let shape = self.training_shape()?;
                Ok((0..shape.sizes.num_ranks()).collect())
            }
        }
    }

    fn of_shape(shape: &HybridMeshShape) -> Self {
        Self::Hybrid { intra: stated(shape.intra()), inter: stated(shape.inter()) }
    }
}

/// Writes the notation that [`MeshSpec::parse`] reads.
impl fmt::Display for MeshSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Axes(axes) => f.write_str(&axis::list(axes)),
            Self::Hybrid { intra, inter } => {
                write!(f, "intra:{}/inter:{}", axis::list(intra), axis::list(inter))
            }
            Self::RankMap { axes, ranks } => {
                let ranks: Vec<_> = ranks.iter().map(usize::to_string).collect();
                write!(f, "{}@{}", axis::list(axes), ranks.join(","))
            }
            Self::Preset(preset, None) => f.write_str(preset.name()),
            Self::Preset(preset, Some(Cluster { nodes, ranks_per_node })) => {
                write!(f, "{}={nodes}x{ranks_per_node}", preset.name())
            }
        }
    }
}

fn parse_ranks(text: &str, ranks: &str) -> Result<Vec<usize>, MeshError> {
    let rank = |rank: &str| {
        rank.trim().parse().map_err(|_| unreadable(text, format!("`{rank}` after `@` is not a rank")))
    };
    ranks.split(',').map(rank).collect()
}

/// Parses `intra:…/inter:…`, in any order; one of the two may be missing.
fn parse_hybrid(text: &str) -> Result<MeshSpec, MeshError> {
    let [mut intra, mut inter] = [None, None];
    for part in text.split('/') {
        let (name, axes) = part.split_once(':').unwrap_or((part, ""));
        let side = match name.trim() {
            "intra" | "ici" => &mut intra,
            "inter" | "dcn" => &mut inter,
            other => {
                let reason = match other {
                    // Notations that were removed.
                    "split" | "axlearn" => format!(
                        "there is no `{other}:`; write the sizes within a node and between nodes, `intra:…/inter:…`"
                    ),
                    other => format!("`{other}` is not `intra` or `inter` (`ici`, `dcn`)"),
                };
                return Err(unreadable(text, reason));
            }
        };
        if side.replace(parse_axes(axes)?).is_some() {
            return Err(unreadable(text, format!("`{}` is given twice", name.trim())));
        }
    }
    Ok(MeshSpec::Hybrid { intra: intra.unwrap_or_default(), inter: inter.unwrap_or_default() })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TWO_OF_4: Option<Cluster> = Some(Cluster { nodes: 2, ranks_per_node: 4 });

    fn resolved(text: &str, cluster: Option<Cluster>) -> Result<String, MeshError> {
        let spec = MeshSpec::parse(text)?.resolve(cluster)?;
        spec.training_shape()?;
        // The result reads back, and resolves to itself.
        assert_eq!(MeshSpec::parse(&spec.to_string())?.resolve(cluster)?, spec);
        Ok(spec.to_string())
    }

    #[test]
    fn every_notation_resolves_on_a_cluster() {
        for (text, expected) in [
            ("2x4", "dp=2,sp=4"),
            ("sp=4,dp=-1", "sp=4,dp=2"),
            ("ici:ulysses=4/dcn:ring=2", "intra:ring=1,ulysses=4/inter:ring=2,ulysses=1"),
            ("intra:sp=4/inter:dp=2", "intra:dp=1,sp=4/inter:dp=2,sp=1"),
            ("dcn:data_parallel=-1/ici:sp=2,dp=-1", "intra:dp=2,sp=2/inter:dp=2,sp=1"),
            (
                "intra:dp_shard=4/inter:dp_replicate=2",
                "intra:dp_replicate=1,dp_shard=4/inter:dp_replicate=2,dp_shard=1",
            ),
            ("dp=2,sp=4@0,1,2,3,7,6,5,4", "dp=2,sp=4@0,1,2,3,7,6,5,4"),
            ("ulysses", "intra:dp=1,sp=4/inter:dp=2,sp=1"),
            ("ulysses=4x2", "dp=4,sp=2"),
            ("2x2x2", "dp=2,sp=2,tp=2"),
            ("ici:tp=4/dcn:dp=2", "intra:dp=1,tp=4/inter:dp=2,tp=1"),
        ] {
            assert_eq!(resolved(text, TWO_OF_4).as_deref(), Ok(expected), "{text}");
        }
    }

    #[test]
    fn without_a_cluster_of_several_nodes_the_sizes_determine_the_nodes() {
        let one_of_8 = Some(Cluster { nodes: 1, ranks_per_node: 8 });
        let expected = Ok("intra:dp=1,sp=2/inter:dp=4,sp=1");
        for (text, cluster) in [
            ("intra:sp=2/inter:dp=4", None),
            ("intra:sp=2/inter:dp=4", one_of_8),
            ("intra:sp=-1/inter:dp=4", one_of_8),
            ("intra:sp=2/inter:dp=-1", one_of_8),
        ] {
            assert_eq!(resolved(text, cluster).as_deref(), expected, "{text} on {cluster:?}");
        }
        let both = resolved("intra:sp=-1/inter:dp=-1", one_of_8);
        assert_eq!(both.as_deref(), Ok("intra:dp=1,sp=8/inter:dp=1,sp=1"));
        let error = resolved("intra:sp=-1/inter:dp=4", None).unwrap_err();
        assert_eq!(error, MeshError::InferWithoutWorldSize { axis: "sp".into() });
    }

    #[test]
    fn invalid_meshes_are_errors_that_say_why() {
        for (text, expected) in [
            ("intra:sp=4/outer:dp=2", "`outer` is not `intra` or `inter`"),
            (
                "split:4x2",
                "there is no `split:`; write the sizes within a node and between nodes, `intra:…/inter:…`",
            ),
            ("axlearn:4x2", "there is no `axlearn:`"),
            ("intra:sp=4/ici:dp=2", "`ici` is given twice"),
            ("intra:sp=4,sp=2/inter:dp=2", "duplicate axis `sp`"),
            ("intra:ep=4/inter:dp=2", "sp (or ring and ulysses) and, last, tp; got ep, dp"),
            ("tp=4,dp=2", "sp (or ring and ulysses) and, last, tp; got tp, dp"),
            ("intra:sp=2/inter:dp=2", "within a node: mesh dp=1,sp=2 needs 2 ranks"),
            ("intra:sp=0/inter:dp=2", "within a node: axis `sp` has size 0"),
            ("dp=2,sp=2@0,1,2", "needs 4 ranks"),
            ("dp=2,sp=2@0,1,2,x", "`x` after `@` is not a rank"),
            ("dp=2,sp=2@0,1,2,2", "duplicate rank 2"),
            ("dp=2,sp=2@0,1,2,4", "rank 4 is not below the number of ranks, 4"),
            ("sp=2,dp=2@0,1,2,3", "the axes of a rank map are in the order"),
            ("", "`` is not a size"),
        ] {
            let error = resolved(text, TWO_OF_4).unwrap_err().to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
