//! An axis and its size.

use std::fmt::{self, Display};

/// An axis of a mesh, and its size.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Axis<S = usize> {
    /// The name.
    pub name: String,
    /// The number of ranks along it.
    pub size: S,
}

/// An axis as it is stated: a size of -1 is inferred.
pub type StatedAxis = Axis<i64>;

impl<S> Axis<S> {
    /// An axis of this size.
    pub fn new(name: impl Into<String>, size: S) -> Self {
        Self { name: name.into(), size }
    }
}

impl From<(&str, usize)> for StatedAxis {
    fn from((name, size): (&str, usize)) -> Self {
        // A size beyond i64 also exceeds MAX_RANKS, so saturation does not hide it.
        Self::new(name, i64::try_from(size).unwrap_or(i64::MAX))
    }
}

impl From<&(&str, i64)> for StatedAxis {
    fn from((name, size): &(&str, i64)) -> Self {
        Self::new(*name, *size)
    }
}

impl From<&Axis> for StatedAxis {
    fn from(Axis { name, size }: &Axis) -> Self {
        Self::from((name.as_str(), *size))
    }
}

impl From<&Self> for StatedAxis {
    fn from(axis: &Self) -> Self {
        axis.clone()
    }
}

/// Writes `dp=2`.
impl<S: Display> Display for Axis<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.name, self.size)
    }
}

/// Formats axes as `dp=2,sp=4`.
pub(super) fn list<S: Display>(axes: &[Axis<S>]) -> String {
    axes.iter().map(Axis::to_string).collect::<Vec<_>>().join(",")
}
