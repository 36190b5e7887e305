//! Text notation of meshes, for the command line and for messages.

use super::{Axis, DeviceMesh, MeshError, MeshShape, StatedAxis, TP_AXIS, axis, canonical_axis_name};
use std::fmt;
use std::str::FromStr;

/// Maximum number of ranks that [`Display`](fmt::Display) lists before `…`.
const MAX_LISTED_RANKS: usize = 16;

impl DeviceMesh {
    /// Parses `DPxSP` (`2x4`), `DPxSPxTP` (`2x4x2`) or named axes (`dp=2,sp=4`).
    ///
    /// A size of `-1` is inferred from `world_size`, as in [`new`](Self::new).
    ///
    /// # Errors
    /// Fails if the text is in neither notation, or the axes are not a valid mesh.
    pub fn parse(text: &str, world_size: Option<usize>) -> Result<Self, MeshError> {
        Self::new(&parse_axes(text)?, world_size)
    }

    /// Parses sizes such as `2x2x4` for axes with the given names.
    ///
    /// # Errors
    /// Fails if the numbers of sizes and names differ, or the axes are not a valid mesh.
    pub fn parse_with_names(
        text: &str,
        names: &[&str],
        world_size: Option<usize>,
    ) -> Result<Self, MeshError> {
        Self::new(&parse_sizes(text, names)?, world_size)
    }
}

/// Parses the axes of `2x4`, `2x4x2` or `dp=2,sp=4`.
pub(super) fn parse_axes(text: &str) -> Result<Vec<StatedAxis>, MeshError> {
    if !text.contains('=') {
        return match text.split(['x', 'X']).count() {
            3 => parse_sizes(text, &["dp", "sp", TP_AXIS]),
            4 => Err(pp_without_name(text)),
            _ => parse_sizes(text, &["dp", "sp"]),
        };
    }
    let axis = |axis: &str| match axis.split_once('=') {
        Some((name, size)) => Ok(Axis::new(canonical_axis_name(name.trim()), parse_size(text, size)?)),
        None => Err(unreadable(text, format!("`{axis}` has no `=`"))),
    };
    text.split(',').map(axis).collect()
}

/// The error of four sizes: which of them is pp cannot be seen.
fn pp_without_name(text: &str) -> MeshError {
    let sizes: Option<Vec<usize>> = text.split(['x', 'X']).map(|size| size.trim().parse().ok()).collect();
    let named = match sizes.as_deref() {
        Some(&[pp, dp, sp, tp]) if pp > 1 && tp > 1 => MeshShape { pp, dp, sp, tp }.notation(),
        _ => "pp=2,dp=2,sp=2,tp=2".to_owned(),
    };
    unreadable(text, format!("4 sizes for the axes dp, sp, tp: name them, such as {named}, to add pp"))
}

/// Parses sizes such as `2x2x4`, one for each name.
fn parse_sizes(text: &str, names: &[&str]) -> Result<Vec<StatedAxis>, MeshError> {
    let sizes = text.split(['x', 'X']).map(|size| parse_size(text, size)).collect::<Result<Vec<_>, _>>()?;
    if sizes.len() != names.len() {
        let reason = format!("{} sizes for the axes {}", sizes.len(), names.join(", "));
        return Err(unreadable(text, reason));
    }
    Ok(names.iter().zip(sizes).map(|(name, size)| Axis::new(*name, size)).collect())
}

impl FromStr for DeviceMesh {
    type Err = MeshError;

    fn from_str(text: &str) -> Result<Self, MeshError> {
        Self::parse(text, None)
    }
}

/// Writes `dp=2,sp=4`, which [`DeviceMesh::parse`] reads back. A rank map other than the identity follows.
impl fmt::Display for DeviceMesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&axis::list(&self.axes))?;
        if self.ranks.iter().enumerate().any(|(position, &rank)| rank != position) {
            write!(f, " over ranks {}", ranks(&self.ranks))?;
        }
        Ok(())
    }
}

/// Formats ranks as `0..=7`, or as a list if they are not consecutive.
pub(super) fn ranks(ranks: &[usize]) -> String {
    match ranks {
        [first, .., last] if ranks.windows(2).all(|pair| pair[0] + 1 == pair[1]) => {
            format!("{first}..={last}")
        }
        ranks if ranks.len() <= MAX_LISTED_RANKS => format!("{ranks:?}"),
        ranks => {
            let listed: Vec<_> = ranks[..MAX_LISTED_RANKS].iter().map(usize::to_string).collect();
            format!("[{}, …]", listed.join(", "))
        }
    }
}

fn parse_size(text: &str, size: &str) -> Result<i64, MeshError> {
    size.trim().parse().map_err(|_| unreadable(text, format!("`{size}` is not a size")))
}

pub(super) fn unreadable(text: &str, reason: String) -> MeshError {
    MeshError::Notation { text: text.to_owned(), reason }
}
