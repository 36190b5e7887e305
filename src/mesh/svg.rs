//! SVG drawings of meshes: one panel per axis, in which ranks of the same group have the same color.

use super::node_layout::AxisPlacement;
use super::{DeviceMesh, MeshError, axis};
use std::fmt::Write as _;

/// Size of a rank's square, and the gap between nodes, in pixels.
const CELL: usize = 34;
const GAP: usize = 14;
const TITLE: usize = 34;
/// Maximum width of a title letter, and the height of title and legend, in pixels.
const LETTER: usize = 9;
const HEADER: usize = 96;
/// Maximum number of squares in a row of a node, and of nodes in a row of a panel.
const MAX_COLUMNS: usize = 8;
const MAX_NODES_ACROSS: usize = 4;
/// Maximum number of nodes drawn; the rest of a larger mesh is omitted.
const MAX_NODES: usize = 32;

/// The colors of the Okabe-Ito palette (safe for color blindness) on which black text is legible.
const COLORS: [&str; 6] = ["#56b4e9", "#e69f00", "#009e73", "#f0e442", "#cc79a7", "#d0d0d0"];

/// Draws nodes, ranks and groups as SVG. Each node has `ranks_per_node` consecutive ranks.
///
/// # Errors
/// Fails like [`AxisPlacement::of_mesh`].
pub fn svg(mesh: &DeviceMesh, ranks_per_node: usize) -> Result<String, MeshError> {
    let layout = Layout::new(mesh, ranks_per_node.max(1));
    let placements = AxisPlacement::of_mesh(mesh, layout.ranks_per_node)?;
    let title = title(mesh, layout.ranks_per_node);
    let width = layout.panel_width().max(LETTER * title.chars().count()) + 2 * GAP;
    let height = HEADER + placements.len() * layout.panel_height() + GAP;
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
         font-family=\"sans-serif\" font-size=\"13\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    draw_header(&mut text, &title);
    for (panel, axis) in placements.iter().enumerate() {
        let top = HEADER + panel * layout.panel_height() + GAP;
        let omitted = layout.num_nodes - layout.nodes_drawn();
        let more = if omitted > 0 { format!("; {omitted} more nodes are not drawn") } else { String::new() };
        let _ =
            writeln!(text, "<text x=\"{GAP}\" y=\"{}\" font-weight=\"bold\">{axis}{more}</text>", top + 16);
        layout.draw_nodes(&mut text, top + TITLE);
        for (group, ranks) in mesh.all_groups(&axis.axis)?.iter().enumerate() {
            let color = COLORS[group % COLORS.len()];
            for &rank in ranks {
                layout.draw_rank(&mut text, rank, color, group, top + TITLE);
            }
        }
    }
    text.push_str("</svg>\n");
    Ok(text)
}

/// Returns the title: axes, number of ranks, ranks per node.
fn title(mesh: &DeviceMesh, ranks_per_node: usize) -> String {
    let plural = |count: usize| if count == 1 { "" } else { "s" };
    let ranks = mesh.world_size();
    let axes = axis::list(mesh.axes());
    format!("Mesh {axes}: {ranks} rank{}, {ranks_per_node} per node", plural(ranks))
}

/// Draws the title and the legend.
fn draw_header(text: &mut String, title: &str) {
    let (symbol, label) = (GAP, GAP + 32);
    let _ = writeln!(text, "<title>{title}</title>");
    let _ = writeln!(text, "<text x=\"{GAP}\" y=\"26\" font-size=\"16\" font-weight=\"bold\">{title}</text>");
    let square = |x: usize, y: usize| {
        let fill = COLORS[0];
        format!("<rect x=\"{x}\" y=\"{y}\" width=\"12\" height=\"12\" fill=\"{fill}\"/>")
    };
    let _ = writeln!(
        text,
        "<rect x=\"{symbol}\" y=\"40\" width=\"26\" height=\"14\" rx=\"4\" fill=\"none\" stroke=\"#444\"/>\
         <text x=\"{label}\" y=\"52\">node</text>"
    );
    let _ =
        writeln!(text, "{}<text x=\"{label}\" y=\"72\">rank, with its number</text>", square(symbol + 7, 61));
    let _ = writeln!(
        text,
        "{}{}<text x=\"{label}\" y=\"92\">same color: same group of the axis ({} colors, repeated)</text>",
        square(symbol, 81),
        square(symbol + 14, 81),
        COLORS.len()
    );
}

/// A position or an extent, in pixels.
struct Point {
    x: usize,
    y: usize,
}

struct Layout {
    ranks_per_node: usize,
    num_nodes: usize,
    columns: usize,
    rows: usize,
}

impl Layout {
    fn new(mesh: &DeviceMesh, ranks_per_node: usize) -> Self {
        let num_nodes = mesh.ranks().iter().max().map_or(0, |rank| rank / ranks_per_node + 1);
        let columns = ranks_per_node.min(MAX_COLUMNS);
        Self { ranks_per_node, num_nodes, columns, rows: ranks_per_node.div_ceil(columns) }
    }

    fn nodes_drawn(&self) -> usize {
        self.num_nodes.min(MAX_NODES)
    }

    fn node_size(&self) -> Point {
        Point { x: self.columns * CELL + GAP, y: self.rows * CELL + GAP }
    }

    fn panel_width(&self) -> usize {
        let across = self.nodes_drawn().min(MAX_NODES_ACROSS);
        // Leaves room for the title of a small mesh.
        (across * (self.node_size().x + GAP)).max(360)
    }

    fn panel_height(&self) -> usize {
        let down = self.nodes_drawn().div_ceil(MAX_NODES_ACROSS);
        TITLE + down * (self.node_size().y + GAP) + GAP
    }

    fn node_at(&self, node: usize, top: usize) -> Point {
        let size = self.node_size();
        let (column, row) = (node % MAX_NODES_ACROSS, node / MAX_NODES_ACROSS);
        Point { x: GAP + column * (size.x + GAP), y: top + row * (size.y + GAP) }
    }

    fn draw_nodes(&self, text: &mut String, top: usize) {
        let Point { x: width, y: height } = self.node_size();
        for node in 0..self.nodes_drawn() {
            let Point { x, y } = self.node_at(node, top);
            let _ = writeln!(
                text,
                "<rect x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\" rx=\"6\" fill=\"none\" \
                 stroke=\"#444\"><title>node {node}</title></rect>"
            );
        }
    }

    fn draw_rank(&self, text: &mut String, rank: usize, color: &str, group: usize, top: usize) {
        let (node, local) = (rank / self.ranks_per_node, rank % self.ranks_per_node);
        if node >= self.nodes_drawn() {
            return;
        }
        let Point { x, y } = self.node_at(node, top);
        let x = x + GAP / 2 + local % self.columns * CELL;
        let y = y + GAP / 2 + local / self.columns * CELL;
        let (middle, baseline, side) = (x + CELL / 2, y + CELL / 2 + 5, CELL - 2);
        let _ = writeln!(
            text,
            "<g><title>rank {rank}, group {group}</title><rect x=\"{x}\" y=\"{y}\" width=\"{side}\" \
             height=\"{side}\" fill=\"{color}\"/><text x=\"{middle}\" y=\"{baseline}\" \
             text-anchor=\"middle\">{rank}</text></g>"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_panel_draws_every_rank_in_the_color_of_its_group() {
        let drawing = svg(&DeviceMesh::dp_sp(2, 4).unwrap(), 4).unwrap();
        assert_eq!(drawing.matches("<title>rank ").count(), 16);
        let (header, _) = drawing.split_once("dp: 4 groups").unwrap();
        assert!(header.contains("<title>Mesh dp=2,sp=4: 8 ranks, 4 per node</title>"), "{header}");
        for legend in [">node<", ">rank, with its number<", ">same color: same group of the axis "] {
            assert!(header.contains(legend), "no {legend} in {header}");
        }
        assert_eq!(drawing.matches("<title>node ").count(), 4, "two nodes in each panel");
        let (dp, sp) = drawing.split_once("sp: 2 groups of 4, within a node").unwrap();
        assert!(dp.contains("dp: 4 groups of 2, each across up to 2 nodes"));
        let color = |panel: &str, rank: usize| {
            let (_, square) = panel.split_once(&format!("<title>rank {rank}, ")).unwrap();
            square.split_once("fill=\"").unwrap().1[..7].to_owned()
        };
        assert_eq!(color(dp, 1), color(dp, 5));
        assert_ne!(color(dp, 1), color(dp, 2));
        assert_eq!(color(sp, 0), color(sp, 3));
        assert_ne!(color(sp, 3), color(sp, 4));
    }

    #[test]
    fn all_shapes_are_inside_the_drawing_and_omitted_nodes_are_counted() {
        for (dp, sp, ranks_per_node) in [(1, 1, 1), (3, 5, 4), (64, 8, 8), (2, 100, 50)] {
            let drawing = svg(&DeviceMesh::dp_sp(dp, sp).unwrap(), ranks_per_node).unwrap();
            let sizes = |name: &str| -> Vec<usize> {
                let mark = format!(" {name}=\"");
                drawing.split(&mark).skip(1).filter_map(|rest| rest.split_once('"')?.0.parse().ok()).collect()
            };
            let (widths, heights) = (sizes("width"), sizes("height"));
            let inside = |positions: Vec<usize>, whole: usize| positions.iter().all(|at| *at < whole);
            assert!(inside(sizes("x"), widths[0]) && inside(sizes("y"), heights[0]), "{dp}x{sp}");
            assert_eq!(drawing.contains("more nodes are not drawn"), dp == 64);
        }
    }
}
