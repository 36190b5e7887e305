//! Tables of text.

use std::fmt::{self, Formatter};

/// Writes right-aligned columns.
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

/// Formats bytes with separators: `1_234_567`.
pub fn bytes(bytes: u64) -> String {
    let digits = bytes.to_string();
    let groups: Vec<&str> =
        digits.as_bytes().rchunks(3).rev().map(|group| str::from_utf8(group).unwrap_or_default()).collect();
    groups.join("_")
}

/// Formats memory with three or four digits.
pub(super) fn memory(bytes: u64) -> String {
    const MIB: f64 = (1_u64 << 20) as f64;
    let mib = bytes as f64 / MIB;
    match mib {
        mib if mib < 10.0 => format!("{mib:.2} MiB"),
        mib if mib < 1024.0 => format!("{mib:.0} MiB"),
        mib => format!("{:.2} GiB", mib / 1024.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_shown_in_the_unit_of_its_size() {
        let shown = [0, 3 << 19, 3 << 28, 3 << 29].map(memory);
        assert_eq!(shown, ["0.00 MiB", "1.50 MiB", "768 MiB", "1.50 GiB"]);
    }

    #[test]
    fn bytes_are_grouped_by_thousands() {
        assert_eq!([0, 999, 1000, 1_234_567].map(bytes), ["0", "999", "1_000", "1_234_567"]);
    }
}
