//! Tables of text.

use std::fmt::{self, Formatter};

/// Right-aligned columns.
pub(super) fn write_table(f: &mut Formatter<'_>, rows: &[Vec<String>]) -> fmt::Result {
    let columns = rows.first().map_or(0, Vec::len);
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns).map(width).collect();
    for row in rows {
        for (cell, width) in row.iter().zip(&widths) {
            write!(f, "  {cell:>width$}")?;
        }
        writeln!(f)?;
    }
    Ok(())
}

/// Whole bytes with separators.
pub(super) fn bytes(bytes: u64) -> String {
    let digits = bytes.to_string();
    let groups: Vec<&str> =
        digits.as_bytes().rchunks(3).rev().map(|group| str::from_utf8(group).unwrap_or_default()).collect();
    groups.join("_")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_grouped_by_thousands() {
        assert_eq!([0, 999, 1000, 1_234_567].map(bytes), ["0", "999", "1_000", "1_234_567"]);
    }
}
