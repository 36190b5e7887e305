//! The ranks of ZeRO's partitions: the `dp` axis or a part of it (hybrid sharding, HSDP), and optionally the `sp` axis.

use super::axis_names::{AXIS_ORDER, DP_REPLICATE_AXIS, DP_SHARD_AXIS};
use super::{
    Axis, DeviceMesh, MeshError, MeshShape, PP_AXIS, REPLICAS_AXIS, RING_AXIS, SHARD_AXIS, StatedAxis,
    TP_AXIS, ULYSSES_AXIS, axis,
};
use std::fmt;

/// The ranks that together hold the partitions of one replica, in a mesh with the axes `dp` and `sp`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShardShape {
    /// Number of neighbors along dp.
    pub dp_size: usize,
    /// Whether partitions span sp too: over all sp ranks of these dp ranks, not only those with the same sp coordinate.
    pub spans_sp: bool,
}

/// Axis sizes of a training mesh, with the axes that `dp` and `sp` are split into.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TrainingShape {
    /// The sizes.
    pub sizes: MeshShape,
    /// Size of the ring, if the mesh has `ring` and `ulysses` in place of `sp`.
    pub ring_size: Option<usize>,
    /// Number of ranks that ZeRO partitions over, if the mesh has both `dp_replicate` and `dp_shard`. Otherwise it is `dp`.
    pub shard_size: Option<usize>,
}

impl TrainingShape {
    /// The mesh of one rank, without a ring.
    pub const ONE_RANK: Self = Self { sizes: MeshShape::ONE_RANK, ring_size: Some(1), shard_size: None };

    /// Returns the sizes as the flag `--mesh` takes them: `2x4`, or by name with pp, a ring or a shard size.
    pub fn notation(self) -> String {
        let Self { sizes, ring_size, shard_size } = self;
        let ring_size = ring_size.unwrap_or(1);
        if ring_size == 1 && shard_size.is_none() {
            return sizes.notation();
        }
        let divided = |axis: Axis| match (axis.name.as_str(), shard_size) {
            ("dp", Some(shard)) => {
                vec![Axis::new(DP_REPLICATE_AXIS, axis.size / shard), Axis::new(DP_SHARD_AXIS, shard)]
            }
            ("sp", _) if ring_size > 1 => {
                vec![Axis::new(RING_AXIS, ring_size), Axis::new(ULYSSES_AXIS, axis.size / ring_size)]
            }
            _ => vec![axis],
        };
        axis::list(&sizes.axes().into_iter().flat_map(divided).collect::<Vec<_>>())
    }
}

/// Writes `dp 2 × sp 4 (ring 2 × ulysses 2)`, with pp and tp if they are larger than 1.
impl fmt::Display for TrainingShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let written = |Axis { name, size }: Axis| match self.ring_size {
            Some(ring) if name == "sp" && ring > 1 => {
                format!("sp {size} ({RING_AXIS} {ring} × {ULYSSES_AXIS} {})", size / ring)
            }
            _ => format!("{name} {size}"),
        };
        f.write_str(&self.sizes.axes().into_iter().map(written).collect::<Vec<_>>().join(" × "))
    }
}

impl DeviceMesh {
    /// Returns the sizes of a mesh with the axes, first, `pp`, then `dp`, `sp` and, last, `tp`, each of which may be missing.
    ///
    /// The axes `dp_replicate` and `dp_shard`, in this order, may replace `dp`; `ring` and `ulysses`, in this order,
    /// `sp`.
    ///
    /// # Errors
    /// Fails if the mesh has any other axis.
    pub fn training_shape(&self) -> Result<TrainingShape, MeshError> {
        let names = self.axis_names();
        let (pp, names) = match names[..] {
            [PP_AXIS, ref others @ ..] => (self.axis_size(PP_AXIS)?, others),
            ref names => (1, names),
        };
        let (tp, names) = match names {
            [others @ .., TP_AXIS] => (self.axis_size(TP_AXIS)?, others),
            names => (1, names),
        };
        let (of_sp, others): (Vec<&str>, Vec<&str>) =
            names.iter().partition(|name| ["sp", RING_AXIS, ULYSSES_AXIS].contains(name));
        let (ring_size, sp) = match of_sp[..] {
            [] => (None, 1),
            ["sp"] => (None, self.axis_size("sp")?),
            [RING_AXIS, ULYSSES_AXIS] => {
                let ring_size = self.axis_size(RING_AXIS)?;
                (Some(ring_size), ring_size * self.axis_size(ULYSSES_AXIS)?)
            }
            [alone @ (RING_AXIS | ULYSSES_AXIS)] => return Err(self.half_of_sp(alone)),
            _ => return Err(self.not_for_training()),
        };
        let (dp, shard_size) = match others[..] {
            [] => (1, None),
            ["dp" | DP_SHARD_AXIS] => (self.axis_size(others[0])?, None),
            [DP_REPLICATE_AXIS, DP_SHARD_AXIS] => {
                let (replicas, shard) = (self.axis_size(DP_REPLICATE_AXIS)?, self.axis_size(DP_SHARD_AXIS)?);
                (replicas * shard, Some(shard))
            }
            _ => return Err(self.not_for_training()),
        };
        Ok(TrainingShape { sizes: MeshShape { pp, dp, sp, tp }, ring_size, shard_size })
    }

    fn half_of_sp(&self, axis: &str) -> MeshError {
        let reason =
            format!("`{axis}` alone is not valid: give both, such as {RING_AXIS}=2,{ULYSSES_AXIS}=1, or sp");
        MeshError::Notation { text: self.to_string(), reason }
    }

    fn not_for_training(&self) -> MeshError {
        let names = self.axis_names();
        let unknown = names.iter().find(|name| !AXIS_ORDER.contains(name));
        let unknown = unknown.map_or_else(String::new, |name| format!("unknown axis `{name}`: "));
        let names = names.join(", ");
        let reason = format!(
            "{unknown}the axes are, first, {PP_AXIS}, dp (or {DP_REPLICATE_AXIS} and {DP_SHARD_AXIS}), sp (or {RING_AXIS} and \
             {ULYSSES_AXIS}) and, last, {TP_AXIS}; got {names}"
        );
        MeshError::Notation { text: self.to_string(), reason }
    }

    /// Returns the mesh with `sp` split into the axes [`RING_AXIS`] and [`ULYSSES_AXIS`].
    ///
    /// # Errors
    /// Fails if the mesh has no `sp`, or `ring_size` does not divide it.
    pub fn ring(&self, ring_size: usize) -> Result<Self, MeshError> {
        self.unflatten("sp", [StatedAxis::from((RING_AXIS, ring_size)), Axis::new(ULYSSES_AXIS, -1)])
    }

    /// Returns a `dp`, `sp` mesh with both axes split into the parts that groups of ZeRO and of attention span: no group of
    /// theirs spans a part of an axis.
    ///
    /// # Errors
    /// As [`sharded`](Self::sharded) and [`ring`](Self::ring).
    pub fn split(&self, shape: Option<ShardShape>, ring_size: usize) -> Result<Self, MeshError> {
        let mesh = if ring_size == 1 { self.clone() } else { self.ring(ring_size)? };
        match shape {
            Some(shape) if shape.dp_size != self.axis_size("dp")? => mesh.replicated(shape.dp_size),
            _ => Ok(mesh),
        }
    }

    /// Returns the mesh with `dp` split into the axes [`DP_REPLICATE_AXIS`] and [`DP_SHARD_AXIS`].
    fn replicated(&self, shard_size: usize) -> Result<Self, MeshError> {
        self.unflatten(
            "dp",
            [Axis::new(DP_REPLICATE_AXIS, -1), StatedAxis::from((DP_SHARD_AXIS, shard_size))],
        )
    }

    /// Returns ZeRO's view of a `dp`, `sp` mesh: the axes [`REPLICAS_AXIS`] and [`SHARD_AXIS`], both row-major over
    /// their parts of dp and sp. Partitions over less than dp are PyTorch's HSDP and DeepSpeed's MiCS.
    ///
    /// # Errors
    /// Fails if the mesh lacks an axis or the shape's `dp_size` does not divide dp.
    pub fn sharded(&self, shape: ShardShape) -> Result<Self, MeshError> {
        let mesh = self.replicated(shape.dp_size)?;
        let (replicas, shard): (&[&str], &[&str]) = match shape.spans_sp {
            true => (&[DP_REPLICATE_AXIS], &[DP_SHARD_AXIS, "sp"]),
            false => (&[DP_REPLICATE_AXIS, "sp"], &[DP_SHARD_AXIS]),
        };
        mesh.flatten(replicas, REPLICAS_AXIS)?.flatten(shard, SHARD_AXIS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn partitions_span_adjacent_ranks_and_replicas_the_rest() {
        // dp 4 × sp 2: rank = 2·dp + sp.
        let groups = |dp_size, spans_sp| {
            let mesh = DeviceMesh::dp_sp(4, 2).unwrap().sharded(ShardShape { dp_size, spans_sp }).unwrap();
            [SHARD_AXIS, REPLICAS_AXIS].map(|axis| mesh.all_groups(axis).unwrap())
        };
        let of_dp = groups(2, false);
        assert_eq!(of_dp[0], [[0, 2], [1, 3], [4, 6], [5, 7]]);
        assert_eq!(of_dp[1], [[0, 1, 4, 5], [2, 3, 6, 7]]);
        let of_both = groups(2, true);
        assert_eq!(of_both[0], [[0, 1, 2, 3], [4, 5, 6, 7]]);
        assert_eq!(of_both[1], [[0, 4], [1, 5], [2, 6], [3, 7]]);
        let of_all = groups(4, true);
        assert_eq!(of_all[0], [[0, 1, 2, 3, 4, 5, 6, 7]]);
        assert_eq!(of_all[1], (0..8).map(|rank| [rank]).collect::<Vec<_>>());
    }

    #[test]
    fn a_split_mesh_has_the_axes_that_no_group_divides() {
        let mesh = DeviceMesh::dp_sp(4, 4).unwrap();
        let split = |dp_size, spans_sp, ring_size| {
            mesh.split(Some(ShardShape { dp_size, spans_sp }), ring_size).unwrap().to_string()
        };
        assert_eq!(split(4, true, 1), mesh.to_string());
        assert_eq!(mesh.split(None, 2).unwrap().axis_names(), ["dp", "ring", "ulysses"]);
        let whole = mesh.split(Some(ShardShape { dp_size: 2, spans_sp: false }), 2).unwrap();
        assert_eq!(whole.axis_names(), ["dp_replicate", "dp_shard", "ring", "ulysses"]);
        assert_eq!((whole.shape(), whole.ranks()), (vec![2; 4], mesh.ranks()));
    }

    #[test]
    fn dp_replicate_and_dp_shard_may_replace_dp_and_ring_and_ulysses_sp() {
        let shape = |text: &str| DeviceMesh::parse(text, None).unwrap().training_shape();
        let plain = |sizes, shard_size| TrainingShape { sizes, ring_size: None, shard_size };
        let sizes = |dp, sp, shard_size| Ok(plain(MeshShape::dp_sp(dp, sp), shard_size));
        assert_eq!(shape("3x2"), sizes(3, 2, None));
        assert_eq!(shape("sp=4"), sizes(1, 4, None));
        assert_eq!(shape("dp_replicate=3,dp_shard=2,sp=4"), sizes(6, 4, Some(2)));
        assert_eq!(shape("dp_shard=2,sp=4"), sizes(2, 4, None));
        let ring = TrainingShape { ring_size: Some(4), ..plain(MeshShape::dp_sp(2, 32), None) };
        assert_eq!(shape("dp=2,ring=4,ulysses=8"), Ok(ring));
        let all = MeshShape { pp: 3, dp: 2, sp: 32, tp: 2 };
        let all = TrainingShape { sizes: all, ..ring };
        assert_eq!(shape("pp=3,dp=2,ring=4,ulysses=8,tp=2"), Ok(all));
        assert_eq!(all.notation(), "pp=3,dp=2,ring=4,ulysses=8,tp=2");
        assert_eq!(all.to_string(), "pp 3 × dp 2 × sp 32 (ring 4 × ulysses 8) × tp 2");
        assert_eq!(
            shape("dp_replicate=3,dp_shard=2,sp=4").map(|shape| (shape.notation(), shape.to_string())),
            Ok(("dp_replicate=3,dp_shard=2,sp=4".into(), "dp 6 × sp 4".into()))
        );
        assert_eq!(shape("2x4x8"), Ok(plain(MeshShape { pp: 1, dp: 2, sp: 4, tp: 8 }, None)));
        assert_eq!(shape("tp=2"), Ok(plain(MeshShape { tp: 2, ..MeshShape::ONE_RANK }, None)));
        assert_eq!(shape("pp=2"), Ok(plain(MeshShape { pp: 2, ..MeshShape::ONE_RANK }, None)));
        for refused in [
            "dp=2,pp=2",
            "dp=2,tp=2,sp=2",
            "tp=2,dp=2",
            "dp_shard=2,dp_replicate=2",
            "dp=2,dp_shard=2",
            "dp_replicate=2",
        ]
        .into_iter()
        .chain(["ulysses=2,ring=2", "sp=2,ring=2,ulysses=2"])
        {
            let message = shape(refused).unwrap_err().to_string();
            assert!(message.contains("sp (or ring and ulysses) and, last, tp; got "), "{message}");
        }
        let message = shape("dp=2,ring=2").unwrap_err().to_string();
        assert!(
            message.contains("`ring` alone is not valid: give both, such as ring=2,ulysses=1"),
            "{message}"
        );
    }

    #[test]
    fn a_shard_size_that_does_not_divide_dp_is_an_error_with_both_sizes() {
        let message = DeviceMesh::dp_sp(4, 2)
            .unwrap()
            .sharded(ShardShape { dp_size: 3, spans_sp: false })
            .unwrap_err()
            .to_string();
        assert!(message.contains('4') && message.contains('3'), "{message}");
    }
}
