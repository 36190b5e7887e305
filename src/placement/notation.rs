//! Text notation of layouts, for the command line.

use super::{Layout, Placement, PlacementError};
use crate::mesh::DeviceMesh;
use std::str::FromStr;

/// Reads `Shard(0)`, `Replicate` or `Partial`, and PyTorch's short forms `S(0)`, `R` and `P`.
impl FromStr for Placement {
    type Err = PlacementError;

    fn from_str(text: &str) -> Result<Self, PlacementError> {
        let text = text.trim();
        match text {
            "Replicate" | "R" => return Ok(Self::Replicate),
            "Partial" | "P" => return Ok(Self::Partial),
            _ => {}
        }
        let dim = text.strip_prefix("Shard(").or_else(|| text.strip_prefix("S("));
        let dim = dim.and_then(|rest| rest.strip_suffix(')')?.trim().parse().ok());
        dim.map(Self::Shard)
            .ok_or_else(|| unreadable(text, "a placement is Shard(DIM), Replicate or Partial".to_owned()))
    }
}

impl Layout {
    /// Parses a shape and its placements on a mesh: `7,3:Shard(0),Replicate`. The shape of a number is empty.
    ///
    /// ```
    /// use ulysses::mesh::DeviceMesh;
    /// use ulysses::placement::Layout;
    ///
    /// let layout = Layout::parse("7,3:S(0),R", &DeviceMesh::parse("2x2", None)?)?;
    /// assert_eq!(layout.local_shape(&[1, 0])?, [3, 3]);
    /// # Ok::<(), anyhow::Error>(())
    /// ```
    ///
    /// # Errors
    /// Text in another notation, a tensor with too many elements to count, and as [`on_mesh`](Self::on_mesh).
    pub fn parse(text: &str, mesh: &DeviceMesh) -> Result<Self, PlacementError> {
        let Some((shape, placements)) = text.split_once(':') else {
            return Err(unreadable(text, "no `:` between shape and placements".to_owned()));
        };
        let lengths = shape.split(',').filter(|_| !shape.trim().is_empty());
        let length = |length: &str| {
            length.trim().parse().map_err(|_| unreadable(text, format!("`{length}` is not a length")))
        };
        let shape = lengths.map(length).collect::<Result<Vec<usize>, _>>()?;
        // Sizes in bytes must be numbers, too.
        if shape.iter().try_fold(16_usize, |bytes, len| bytes.checked_mul((*len).max(1))).is_none() {
            return Err(unreadable(text, "too many elements".to_owned()));
        }
        let placements = placements.split(',').map(str::parse).collect::<Result<Vec<_>, _>>()?;
        Self::on_mesh(shape, mesh, &placements)
    }
}

fn unreadable(text: &str, reason: String) -> PlacementError {
    PlacementError::Notation { text: text.to_owned(), reason }
}
