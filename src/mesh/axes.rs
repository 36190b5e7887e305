//! The axes of a training mesh, by name, and a value for each of them.

use super::{Axis, DeviceMesh, MeshError, PP_AXIS, TP_AXIS, axis};
use std::fmt;

/// Returns whether a mesh has the axis only if it has more than one rank.
fn is_optional(axis: &str) -> bool {
    [PP_AXIS, TP_AXIS].contains(&axis)
}

/// A value for each axis of a training mesh: its size, say.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct PerAxis<T> {
    /// That of pp, the pipeline stages.
    pub pp: T,
    /// That of dp, data parallelism.
    pub dp: T,
    /// That of sp, sequence parallelism.
    pub sp: T,
    /// That of tp, tensor parallelism.
    pub tp: T,
}

/// The axes, outermost first.
const AXES: PerAxis<&str> = PerAxis { pp: PP_AXIS, dp: "dp", sp: "sp", tp: TP_AXIS };

impl<T> PerAxis<T> {
    /// Returns the values, outermost axis first.
    pub fn into_array(self) -> [T; 4] {
        let Self { pp, dp, sp, tp } = self;
        [pp, dp, sp, tp]
    }

    /// Returns the value of `f` for each axis. `f` gets the axis and its value.
    pub fn map<U>(self, mut f: impl FnMut(&'static str, T) -> U) -> PerAxis<U> {
        let Self { pp, dp, sp, tp } = self;
        PerAxis { pp: f(AXES.pp, pp), dp: f(AXES.dp, dp), sp: f(AXES.sp, sp), tp: f(AXES.tp, tp) }
    }

    /// As [`map`](Self::map), until `f` fails.
    ///
    /// # Errors
    /// The first error of `f`.
    pub fn try_map<U, E>(self, mut f: impl FnMut(&'static str, T) -> Result<U, E>) -> Result<PerAxis<U>, E> {
        let Self { pp, dp, sp, tp } = self;
        Ok(PerAxis { pp: f(AXES.pp, pp)?, dp: f(AXES.dp, dp)?, sp: f(AXES.sp, sp)?, tp: f(AXES.tp, tp)? })
    }

    /// Returns the value of `f` for each axis. `f` gets the axis and both values for it.
    pub fn zip_with<U, V>(
        self,
        others: PerAxis<U>,
        mut f: impl FnMut(&'static str, T, U) -> V,
    ) -> PerAxis<V> {
        let Self { pp, dp, sp, tp } = self;
        PerAxis {
            pp: f(AXES.pp, pp, others.pp),
            dp: f(AXES.dp, dp, others.dp),
            sp: f(AXES.sp, sp, others.sp),
            tp: f(AXES.tp, tp, others.tp),
        }
    }
}

/// The sizes of the axes of a training mesh. Written as `dp 2 × sp 4`, with pp and tp if they are larger than 1.
pub type MeshShape = PerAxis<usize>;

impl MeshShape {
    /// The mesh of one rank.
    pub const ONE_RANK: Self = Self { pp: 1, dp: 1, sp: 1, tp: 1 };

    /// Returns the sizes of dp and sp, without other axes.
    pub fn dp_sp(dp: usize, sp: usize) -> Self {
        Self { dp, sp, ..Self::ONE_RANK }
    }

    /// Returns whether ranks divide the model: its layers (pp) or the weights of each (tp).
    pub fn divides_model(self) -> bool {
        self.pp > 1 || self.tp > 1
    }

    /// Returns the number of ranks, if it is not too large to be counted.
    pub fn checked_num_ranks(self) -> Option<usize> {
        self.into_array().into_iter().try_fold(1_usize, usize::checked_mul)
    }

    /// Returns the number of ranks.
    pub fn num_ranks(self) -> usize {
        self.checked_num_ranks().unwrap_or(usize::MAX)
    }

    /// Returns the axes that a mesh of these sizes has, outermost first.
    pub fn axes(self) -> Vec<Axis> {
        let axes = self.map(Axis::new).into_array().into_iter();
        axes.filter(|axis| axis.size != 1 || !is_optional(&axis.name)).collect()
    }

    /// Returns the mesh of row-major ranks: the axes `dp` and `sp`, and outside of them `pp`, innermost `tp`, if they have more
    /// than one rank.
    ///
    /// # Errors
    /// When a size is zero or the mesh has more than [`MAX_RANKS`](super::MAX_RANKS) ranks.
    pub fn row_major(self) -> Result<DeviceMesh, MeshError> {
        DeviceMesh::new(&self.axes(), None)
    }

    /// Returns the sizes as the flag `--mesh` takes them: `2x4`, `2x4x2` with tp, and by name with pp.
    pub fn notation(self) -> String {
        match self.pp {
            1 => self.axes().iter().map(|axis| axis.size.to_string()).collect::<Vec<_>>().join("x"),
            _ => axis::list(&self.axes()),
        }
    }
}

/// [`ONE_RANK`](MeshShape::ONE_RANK).
impl Default for MeshShape {
    fn default() -> Self {
        Self::ONE_RANK
    }
}

impl fmt::Display for MeshShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let axes: Vec<_> = self.axes().iter().map(|Axis { name, size }| format!("{name} {size}")).collect();
        f.write_str(&axes.join(" × "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meshes_have_pp_outermost_and_tp_innermost_if_they_have_ranks() {
        let plain = MeshShape::dp_sp(2, 4);
        assert_eq!((plain.to_string(), plain.notation()), ("dp 2 × sp 4".into(), "2x4".into()));
        assert_eq!(plain.row_major(), DeviceMesh::dp_sp(2, 4));
        let divided = MeshShape { tp: 2, ..plain };
        assert_eq!((divided.to_string(), divided.notation()), ("dp 2 × sp 4 × tp 2".into(), "2x4x2".into()));
        let staged = MeshShape { pp: 3, ..divided };
        assert_eq!(staged.to_string(), "pp 3 × dp 2 × sp 4 × tp 2");
        assert_eq!(staged.notation(), "pp=3,dp=2,sp=4,tp=2");
        assert_eq!(DeviceMesh::parse(&staged.notation(), None), staged.row_major());
        // rank = ((pp·dp + d)·sp + s)·tp + t
        let mesh = staged.row_major().unwrap();
        assert_eq!(mesh.coordinate(((2 * 2 + 1) * 4 + 3) * 2 + 1).unwrap(), [2, 1, 3, 1]);
        assert_eq!(mesh.group_of(PP_AXIS, 5).unwrap(), [5, 21, 37]);
        assert_eq!(MeshShape { pp: usize::MAX, ..plain }.checked_num_ranks(), None);
        assert!(MeshShape { pp: 0, ..plain }.row_major().is_err());
    }
}
