//! Text drawings of meshes for a terminal of 80 columns.

use super::{DeviceMesh, PP_AXIS, TP_AXIS, axis};
use std::fmt::Write as _;

pub(super) const WIDTH: usize = 80;
/// Maximum number of rows per grid, and of grids for a mesh with more than two axes.
const MAX_ROWS: usize = 16;
const MAX_GRIDS: usize = 4;
/// Maximum number of groups listed per axis.
const MAX_GROUPS: usize = 12;
const ELLIPSIS: &str = "…";

/// Draws the ranks and groups of a mesh, at most 80 columns wide for axis names of usual length.
///
/// The drawing has a grid of the last two axes (one per coordinate of the other axes), the groups of each axis,
/// and the purpose of the `dp` and `sp` groups. Long lists are truncated with `…`.
pub fn draw(mesh: &DeviceMesh) -> String {
    let ranks = if mesh.world_size() == 1 { "rank" } else { "ranks" };
    // Unlike `Display`, this omits the rank map, which the grid shows.
    let axes = axis::list(mesh.axes());
    let mut text = format!("mesh {axes}: {} {ranks}\n", mesh.world_size());
    draw_grids(mesh, &mut text);
    draw_groups(mesh, &mut text);
    draw_meaning(mesh, &mut text);
    text
}

fn draw_grids(mesh: &DeviceMesh, text: &mut String) {
    let (names, shape) = (mesh.axis_names(), mesh.shape());
    let num_leading = shape.len().saturating_sub(2);
    let num_columns = shape.last().copied().unwrap_or(1);
    let grid_len = shape[num_leading..].iter().product::<usize>();
    let corner = names[num_leading..].join("\\");
    for grid in elide(mesh.world_size() / grid_len, MAX_GRIDS) {
        text.push('\n');
        let Some(grid) = grid else {
            let _ = writeln!(text, "{ELLIPSIS}");
            continue;
        };
        if num_leading > 0 {
            let _ = writeln!(text, "{}", leading_coordinate(mesh, num_leading, grid));
        }
        let ranks = &mesh.ranks()[grid * grid_len..][..grid_len];
        draw_grid(&corner, num_columns, shape.len() > 1, ranks, text);
    }
}

/// Formats the coordinate of a grid on the leading axes: `pod=0, pp=1`.
fn leading_coordinate(mesh: &DeviceMesh, num_leading: usize, mut grid: usize) -> String {
    let mut parts = Vec::new();
    for axis in (0..num_leading).rev() {
        let size = mesh.axes()[axis].size;
        parts.push(format!("{}={}", mesh.axes()[axis].name, grid % size));
        grid /= size;
    }
    parts.reverse();
    parts.join(", ")
}

/// Draws ranks with the coordinates of the last axis as columns and of the second to last as rows.
fn draw_grid(corner: &str, num_columns: usize, has_rows: bool, ranks: &[usize], text: &mut String) {
    let cell = ranks.iter().max().map_or(1, |&rank| digits(rank)).max(digits(num_columns - 1)) + 1;
    let margin = corner.chars().count().max(digits(ranks.len() / num_columns)) + 2;
    let max_columns = (WIDTH.saturating_sub(margin + 3) / cell).max(3);
    let columns = elide(num_columns, max_columns);
    let line = |label: &str, entry: &dyn Fn(usize) -> String| {
        let entry = |column: &Option<usize>| column.map_or_else(|| ELLIPSIS.to_owned(), entry);
        let cells: String = columns.iter().map(|column| format!("{:>cell$}", entry(column))).collect();
        format!("{label:>margin$} │{cells}\n")
    };
    text.push_str(&line(corner, &|column| column.to_string()));
    let _ = writeln!(text, "  {}─┼{}", "─".repeat(margin - 2), "─".repeat(cell * columns.len()));
    for row in elide(ranks.len() / num_columns, MAX_ROWS) {
        match row {
            Some(row) => {
                let label = if has_rows { row.to_string() } else { String::new() };
                text.push_str(&line(&label, &|column| ranks[row * num_columns + column].to_string()));
            }
            None => text.push_str(&line(ELLIPSIS, &|_| ELLIPSIS.to_owned())),
        }
    }
}

fn draw_groups(mesh: &DeviceMesh, text: &mut String) {
    let name_width = mesh.axis_names().iter().map(|name| name.chars().count()).max().unwrap_or(0).max(4);
    let _ = writeln!(text, "\n{:name_width$}  groups  size  ranks", "axis");
    let indent = name_width + 16;
    let width = WIDTH.saturating_sub(indent);
    for name in mesh.axis_names() {
        // The axis exists, so this cannot fail.
        let groups = mesh.all_groups(name).unwrap_or_default();
        let size = groups.first().map_or(0, Vec::len);
        let lists = elide(groups.len(), MAX_GROUPS).into_iter().map(|group| match group {
            Some(group) => list(&groups[group], width),
            None => ELLIPSIS.to_owned(),
        });
        let listing = wrap(lists, width).join(&format!("\n{:indent$}", ""));
        let _ = writeln!(text, "{name:name_width$}  {:>6}  {size:>4}  {listing}", groups.len());
    }
}

fn draw_meaning(mesh: &DeviceMesh, text: &mut String) {
    let sentence_sp = match mesh.axis_size("sp") {
        Ok(1) => Some("sp = 1: each rank has whole sequences; attention heads are not exchanged.".to_owned()),
        Ok(sp) => {
            Some(format!("sp groups exchange attention heads: each sequence is sharded over {sp} ranks."))
        }
        Err(_) => None,
    };
    let sentence_dp = mesh.axis_size("dp").ok().map(|dp| match mesh.axis_size("sp") {
        Ok(sp) if sp > 1 && !mesh.has_axis(TP_AXIS) && !mesh.has_axis(PP_AXIS) => {
            format!("ZeRO partitions: {dp} over dp (the default), {} over dp × sp.", dp * sp)
        }
        _ => format!("ZeRO partitions: {dp} over dp."),
    });
    let tp = mesh.axis_size(TP_AXIS).ok().filter(|_| mesh.has_axis("sp"));
    let sentence_tp =
        tp.map(|tp| format!("tp groups divide the heads and the MLP of every layer: {tp} ranks."));
    let pp = mesh.axis_size(PP_AXIS).ok().filter(|_| mesh.training_shape().is_ok());
    let sentence_pp = pp
        .map(|pp| format!("pp groups pass activations from stage to stage: {pp} stages divide the layers."));
    let sentences: Vec<_> =
        [sentence_pp, sentence_sp, sentence_tp, sentence_dp].into_iter().flatten().collect();
    if !sentences.is_empty() {
        let _ = writeln!(text, "\n{}", sentences.join("\n"));
    }
}

/// Formats ranks as `[0 1 2 3]`, truncated to `width` columns.
pub(super) fn list(ranks: &[usize], width: usize) -> String {
    let widest = ranks.iter().max().map_or(1, |&rank| digits(rank));
    let max_entries = (width.saturating_sub(1) / (widest + 1)).max(3);
    let entry =
        |index: Option<usize>| index.map_or_else(|| ELLIPSIS.to_owned(), |index| ranks[index].to_string());
    let entries: Vec<_> = elide(ranks.len(), max_entries).into_iter().map(entry).collect();
    format!("[{}]", entries.join(" "))
}

/// Wraps words into lines of at most `width` columns; a longer word gets its own line.
fn wrap(words: impl Iterator<Item = String>, width: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in words {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 1 + word.chars().count() <= width => {
                line.push(' ');
                line.push_str(&word);
            }
            _ => lines.push(word),
        }
    }
    lines
}

/// Returns indices `0..len`, truncated to `max` entries: `None` replaces those omitted before the last.
fn elide(len: usize, max: usize) -> Vec<Option<usize>> {
    if len <= max {
        return (0..len).map(Some).collect();
    }
    (0..max - 2).map(Some).chain([None, Some(len - 1)]).collect()
}

fn digits(number: usize) -> usize {
    number.checked_ilog10().unwrap_or(0) as usize + 1
}
