//! Tables and units of the plan.

use std::fmt::{self, Formatter};
pub(crate) use ulysses::monitor::{format_bytes as bytes, format_flops as flops};

/// Writes a table whose first column is left-aligned and whose other columns are right-aligned.
pub(super) fn write_table(f: &mut Formatter<'_>, rows: &[Vec<String>]) -> fmt::Result {
    write_table_with_notes(f, rows, usize::MAX)
}

/// As [`write_table`], with the columns from `first_note` on left-aligned.
pub(super) fn write_table_with_notes(
    f: &mut Formatter<'_>,
    rows: &[Vec<String>],
    first_note: usize,
) -> fmt::Result {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let cells = |column: usize| rows.iter().filter_map(move |row| row.get(column));
    let widths: Vec<usize> = (0..columns)
        .map(|column| cells(column).map(|cell| cell.chars().count()).max().unwrap_or(0))
        .collect();
    for row in rows {
        for (column, (cell, &width)) in row.iter().zip(&widths).enumerate() {
            match column {
                note if note >= first_note => write!(f, "  {cell}")?,
                0 => write!(f, "  {cell:<width$}")?,
                _ => write!(f, "  {cell:>width$}")?,
            }
        }
        writeln!(f)?;
    }
    Ok(())
}

/// Converts string literals into a row.
pub(super) fn row<const N: usize>(cells: [&str; N]) -> Vec<String> {
    cells.map(str::to_owned).into()
}

/// Formats a number of parameters.
pub(super) fn parameters(count: usize) -> String {
    let (unit, size) = if count < 1_000_000_000 { ("M", 1e6) } else { ("B", 1e9) };
    format!("{:.2} {unit} parameters", count as f64 / size)
}

/// Formats a duration.
pub(super) fn seconds(seconds: f64) -> String {
    match seconds {
        0.0 => "0 s".to_owned(),
        short if short < 1e-3 => format!("{:.3} ms", 1e3 * short),
        short if short < 1.0 => format!("{:.2} ms", 1e3 * short),
        long => format!("{long:.3} s"),
    }
}

/// Formats a duration under a head that names the unit.
pub(super) fn plain_seconds(seconds: f64) -> String {
    if seconds < 1.0 { format!("{seconds:.6}") } else { format!("{seconds:.3}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_readable_units() {
        let counts = [123_712, 999_999_999, 8_030_261_248].map(parameters);
        assert_eq!(counts, ["0.12 M parameters", "1000.00 M parameters", "8.03 B parameters"]);
        assert_eq!([0.0, 2.5e-6, 0.0123, 61.5].map(seconds), ["0 s", "0.003 ms", "12.30 ms", "61.500 s"]);
    }
}
