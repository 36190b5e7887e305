//! Text drawings of layouts.

use super::{Layout, Placement, PlacementError, redistribute};
use candle_core::DType;
use std::fmt::Write as _;

/// Maximum number of ranks in a drawing.
const MAX_RANKS: usize = 64;

/// Draws which part of a tensor each rank has, with its bytes, and the bytes that the rank sends to make it whole on all ranks.
/// `ranks` are the ranks of the mesh in row-major order.
///
/// ```
/// use ulysses::candle::DType;
/// use ulysses::mesh::DeviceMesh;
/// use ulysses::placement::{Layout, draw};
///
/// let mesh = DeviceMesh::parse("2x1", None)?;
/// let layout = Layout::parse("7,3:Shard(0),Replicate", &mesh)?;
/// let expected = "tensor [7, 3] dp=2: Shard(0) sp=1: Replicate, f32, 84 bytes
///
/// rank  dp,sp       bytes  sends for all  slices
///    0  0,0            48             48  [0..4, 0..3]
///    1  1,0            36             36  [4..7, 0..3]
/// ";
/// assert_eq!(draw(&layout, mesh.ranks(), DType::F32)?, expected);
/// # Ok::<(), anyhow::Error>(())
/// ```
///
/// # Errors
/// Those of [`redistribute`], which a valid layout does not have.
pub fn draw(layout: &Layout, ranks: &[usize], dtype: DType) -> Result<String, PlacementError> {
    let elem_bytes = dtype.size_in_bytes();
    let whole = layout.with_placements(&vec![Placement::Replicate; layout.axes().len()])?;
    let plan = redistribute(layout, &whole)?;
    let bytes = layout.shape().iter().product::<usize>() * elem_bytes;
    let axes = layout.axes().iter().map(|axis| axis.name.as_str()).collect::<Vec<_>>().join(",");
    let mut text = format!("tensor {layout}, {}, {bytes} bytes\n\n", dtype.as_str());
    let _ = writeln!(text, "rank  {axes:<10}{:>7}  {:>13}  slices", "bytes", "sends for all");
    for (coordinate, rank) in layout.coordinates().zip(ranks).take(MAX_RANKS) {
        let (held, sent) = (layout.local_numel(&coordinate)? * elem_bytes, plan.sent_elems(&coordinate)?);
        let slices = layout.local_slices(&coordinate)?;
        let is_partial = layout.axes().iter().any(|axis| axis.placement == Placement::Partial);
        let note = if is_partial { ", a partial sum" } else { "" };
        let at = coordinate.iter().map(usize::to_string).collect::<Vec<_>>().join(",");
        let sent = sent * elem_bytes as u64;
        let _ = writeln!(text, "{rank:>4}  {at:<10}{held:>7}  {sent:>13}  {slices:?}{note}");
    }
    if ranks.len() > MAX_RANKS {
        let _ = writeln!(text, "…     {} more ranks", ranks.len() - MAX_RANKS);
    }
    Ok(text)
}
