//! Tables of text.

/// Formats rows as aligned columns: the first `num_left` to the left, the others to the right.
pub fn format_table(rows: &[Vec<String>], num_left: usize) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let cells = |column: usize| rows.iter().filter_map(move |row| row.get(column));
    let width = |column: usize| cells(column).map(|cell| cell.chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut text = String::new();
    for row in rows {
        for (column, (cell, &width)) in row.iter().zip(&widths).enumerate() {
            let is_left = column < num_left;
            text += &if is_left { format!("  {cell:<width$}") } else { format!("  {cell:>width$}") };
        }
        text.push('\n');
    }
    text
}

/// Formats bytes with separators: `1_234_567`.
pub fn bytes(bytes: u64) -> String {
    let digits = bytes.to_string();
    let groups: Vec<&str> =
        digits.as_bytes().rchunks(3).rev().map(|group| str::from_utf8(group).unwrap_or_default()).collect();
    groups.join("_")
}

/// Formats bytes in the unit that leaves one to four digits: `1.50 GiB`.
pub fn format_bytes(bytes: f64) -> String {
    scaled(bytes, 1024.0, &["B", "KiB", "MiB", "GiB", "TiB", "PiB"])
}

/// Formats floating-point operations: `31.95 MFLOP`.
pub fn format_flops(flops: f64) -> String {
    scaled(flops, 1000.0, &["FLOP", "KFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP"])
}

/// Formats a count with its noun, whose plural is regular: `1 rank`, `4 ranks`, `2 batches`.
pub fn counted(count: usize, noun: &str) -> String {
    let plural = match noun {
        _ if count == 1 => "",
        noun if noun.ends_with('s') || noun.ends_with("ch") => "es",
        _ => "s",
    };
    format!("{count} {noun}{plural}")
}

fn scaled(mut number: f64, step: f64, units: &[&str]) -> String {
    let mut unit = 0;
    while number >= step && unit + 1 < units.len() {
        number /= step;
        unit += 1;
    }
    let decimals = if unit == 0 || number >= 100.0 { 0 } else { 2 };
    format!("{number:.decimals$} {}", units[unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_readable_units() {
        let shown = [0.0, 1023.0, 1536.0, 3.0e9].map(format_bytes);
        assert_eq!(shown, ["0 B", "1023 B", "1.50 KiB", "2.79 GiB"]);
        assert_eq!(format_flops(31.95e6), "31.95 MFLOP");
    }

    #[test]
    fn bytes_are_grouped_by_thousands() {
        assert_eq!([0, 999, 1000, 1_234_567].map(bytes), ["0", "999", "1_000", "1_234_567"]);
    }
}
