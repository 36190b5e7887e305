//! Tables and units of the plan.

use std::fmt::{self, Formatter};
pub(crate) use ulysses::monitor::{format_bytes as bytes, format_flops as flops};

/// A table with a row for each item, made column by column.
pub(super) struct Table<'a, T> {
    pub(super) items: Vec<&'a T>,
    pub(super) head: Vec<&'static str>,
    pub(super) rows: Vec<Vec<String>>,
    /// Text next to each row.
    pub(super) row_notes: Vec<Option<String>>,
    /// Head of these texts.
    pub(super) row_notes_head: &'static str,
    /// Notes on columns, and on rows without a time.
    pub(super) footnotes: Vec<String>,
}

impl<'a, T> Table<'a, T> {
    /// Begins a table with the first cells of each item's row.
    pub(super) fn new<const N: usize>(
        head: [&'static str; N],
        rows: impl Iterator<Item = (&'a T, [String; N])>,
    ) -> Self {
        let (items, rows): (Vec<_>, Vec<_>) = rows.map(|(item, cells)| (item, Vec::from(cells))).unzip();
        let (row_notes, footnotes) = (vec![None; rows.len()], Vec::new());
        Self { items, head: head.into(), rows, row_notes, row_notes_head: "", footnotes }
    }

    /// Adds a column.
    pub(super) fn push(&mut self, head: &'static str, cell: impl Fn(&T) -> String) {
        self.head.push(head);
        self.rows.iter_mut().zip(&self.items).for_each(|(row, item)| row.push(cell(item)));
    }

    /// Adds a column of bytes.
    pub(super) fn push_bytes(&mut self, head: &'static str, size: impl Fn(&T) -> u64) {
        self.push(head, |item| bytes(size(item) as f64));
    }

    /// Writes the first column left-aligned, the others right-aligned, and notes left-aligned.
    pub(super) fn write(self, f: &mut Formatter<'_>) -> fmt::Result {
        let head: Vec<String> = self.head.into_iter().map(str::to_owned).collect();
        let head_of_notes = (!self.row_notes_head.is_empty()).then(|| self.row_notes_head.to_owned());
        let rows: Vec<_> =
            std::iter::once((head, head_of_notes)).chain(self.rows.into_iter().zip(self.row_notes)).collect();
        let width =
            |column: usize| rows.iter().map(|(row, _)| row[column].chars().count()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..rows[0].0.len()).map(width).collect();
        for (row, note) in &rows {
            for (column, (cell, &width)) in row.iter().zip(&widths).enumerate() {
                match column {
                    0 => write!(f, "  {cell:<width$}")?,
                    _ => write!(f, "  {cell:>width$}")?,
                }
            }
            match note {
                Some(note) => writeln!(f, "  {note}")?,
                None => writeln!(f)?,
            }
        }
        self.footnotes.iter().try_for_each(|note| writeln!(f, "  {note}"))
    }
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
