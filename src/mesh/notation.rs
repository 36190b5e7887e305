//! Meshes as text: what the command line reads and what messages print.

use super::{DeviceMesh, MeshError};
use std::fmt;
use std::str::FromStr;

/// Ranks that [`Display`](fmt::Display) lists before it writes `…`.
const MAX_LISTED_RANKS: usize = 16;

impl DeviceMesh {
    /// Reads `DPxSP` (`2x4`) or named axes in the order given (`dp=2,sp=4`).
    ///
    /// A size of `-1` is inferred from `world_size`, as in [`new`](Self::new).
    ///
    /// # Errors
    /// When the text is neither notation, or the axes do not make a mesh.
    pub fn parse(text: &str, world_size: Option<usize>) -> Result<Self, MeshError> {
        if !text.contains('=') {
            return Self::parse_with_names(text, &["dp", "sp"], world_size);
        }
        let axes = text
            .split(',')
            .map(|axis| match axis.split_once('=') {
                Some((name, size)) => Ok((name.trim(), parse_size(text, size)?)),
                None => Err(unreadable(text, format!("`{axis}` has no `=`"))),
            })
            .collect::<Result<Vec<_>, _>>()?;
        Self::new(&axes, world_size)
    }

    /// Reads sizes such as `2x2x4` for axes whose names are given beside them.
    ///
    /// # Errors
    /// When there are not as many sizes as names, or the axes do not make a mesh.
    pub fn parse_with_names(
        text: &str,
        names: &[&str],
        world_size: Option<usize>,
    ) -> Result<Self, MeshError> {
        let sizes =
            text.split(['x', 'X']).map(|size| parse_size(text, size)).collect::<Result<Vec<_>, _>>()?;
        if sizes.len() != names.len() {
            let reason = format!("it has {} sizes for the axes {}", sizes.len(), names.join(", "));
            return Err(unreadable(text, reason));
        }
        let axes: Vec<_> = names.iter().copied().zip(sizes).collect();
        Self::new(&axes, world_size)
    }
}

impl FromStr for DeviceMesh {
    type Err = MeshError;

    fn from_str(text: &str) -> Result<Self, MeshError> {
        Self::parse(text, None)
    }
}

/// `dp=2,sp=4`, which [`DeviceMesh::parse`] reads back, followed by the rank map where it is not the usual one.
impl fmt::Display for DeviceMesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&axes(&self.axis_names, &self.shape))?;
        if self.ranks.iter().enumerate().any(|(position, &rank)| rank != position) {
            write!(f, " over ranks {}", ranks(&self.ranks))?;
        }
        Ok(())
    }
}

/// `dp=2,sp=4`.
pub(super) fn axes(names: &[String], shape: &[usize]) -> String {
    let axes: Vec<_> = names.iter().zip(shape).map(|(name, size)| format!("{name}={size}")).collect();
    axes.join(",")
}

/// `0..=7`, or a list where the ranks are not consecutive.
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

fn unreadable(text: &str, reason: String) -> MeshError {
    MeshError::Notation { text: text.to_owned(), reason }
}
