//! Every kind of mask × grouping of heads × head dimension × element type on both sets of fused kernels:
//! forward and all gradients, at odd lengths.

use super::*;
use crate::attention::grouped_heads;
use crate::sample::{Sample, axes, sampled};

/// The KV head of each query head.
fn groupings() -> [(&'static str, Vec<usize>); 4] {
    [
        ("32 heads on 8", grouped_heads(32, 8)),
        ("8 heads on 1", grouped_heads(8, 1)),
        ("6 heads on 3", grouped_heads(6, 3)),
        ("uneven, unordered", vec![2, 0, 2, 1, 2, 0, 2]),
    ]
}

/// A mask of every kind, of odd numbers of queries.
fn masks(heads: &[usize]) -> Result<[(&'static str, AttentionLayout); 6]> {
    let part =
        |q: Vec<u32>, kv: Vec<u32>| AttentionLayout::new(q, kv, vec![vec![0, 29, 73, 130]], heads, Some(50));
    Ok([
        ("causal", AttentionLayout::causal(1, 29, heads)?),
        ("documents", packed(&[&[0, 1, 13, 31]], heads, None)?),
        ("window", packed(&[&[0, 35]], heads, Some(9))?),
        ("documents and window", packed(&[&[0, 14, 33]], heads, Some(5))?),
        // Two chunks of a zigzag sharding, with a gap between them, against keys of other ranks.
        ("zigzag", part((5..18).chain(112..126).collect(), (0..15).chain(40..60).chain(100..118).collect())?),
        // The first queries precede all keys of their document, others are of a document without keys.
        ("rows that see nothing", part((20..45).collect(), (24..29).chain(34..60).collect())?),
    ])
}

/// A case of the matrix.
struct Cell {
    mask: String,
    grouping: &'static str,
    kernels: AttentionKernels,
    layout: AttentionLayout,
    num_kv_heads: usize,
    head_dim: usize,
    dtype: DType,
    /// The second order of blocks and threads.
    seed: u64,
}

impl Cell {
    /// Runs both directions in two orders of blocks and threads, and compares them with f64.
    fn check(&self) -> Result<()> {
        let case = Case::new(self.layout.clone(), self.num_kv_heads, self.head_dim)?.fused(self.dtype)?;
        let case = Case { kernels: self.kernels, ..case };
        let Self { mask, grouping, kernels, head_dim, dtype, seed, .. } = self;
        let name = format!("{kernels:?}, {mask}, {grouping}, d {head_dim}, {dtype:?}");
        let outputs = case.run()?;
        case.check_precision(&outputs, &name)?;
        let again = in_order(*seed, || case.run())?;
        assert!(bits(&again) == bits(&outputs), "{name}: order {seed} changes bits");
        Ok(())
    }
}

/// A sample of the cells, or all.
#[track_caller]
fn sample(cells: Vec<Cell>) -> Sample<Cell> {
    sampled(cells, |Cell { mask, grouping, head_dim, dtype, .. }| axes![mask, grouping, head_dim, dtype])
}

/// Every mask × grouping × head dimension × element type.
fn cells(kernels: AttentionKernels, head_dims: &[usize]) -> Result<Vec<Cell>> {
    let mut cells = Vec::new();
    for (grouping, heads) in groupings() {
        let num_kv_heads = heads.iter().max().map_or(0, |last| last + 1);
        for (mask, layout) in masks(&heads)? {
            for (head_dim, dtype) in head_dims.iter().flat_map(|d| [(*d, DType::BF16), (*d, DType::F16)]) {
                let (mask, seed, layout) = (mask.to_owned(), cells.len() as u64 + 1, layout.clone());
                cells.push(Cell { mask, grouping, kernels, layout, num_kv_heads, head_dim, dtype, seed });
            }
        }
    }
    Ok(cells)
}

#[test]
fn every_mask_and_grouping_of_heads_errs_at_most_twice_as_much_as_the_naive_way_in_any_order() -> Result<()> {
    on_a_gpu(|| sample(cells(AttentionKernels::Fused, &[64, 96, 128])?).try_for_each(|cell| cell.check()))
}

#[test]
fn so_does_every_one_with_products_of_warpgroups() -> Result<()> {
    on_a_gpu(|| sample(cells(AttentionKernels::Wgmma, &[64, 128])?).try_for_each(|cell| cell.check()))
}

/// Few queries of many keys: stages of shared memory are used several times, with tiles that all rows of a block see
/// between others, and ranges that begin and end at the edge of a tile, one key before and one after.
fn masks_of_many_tiles(heads: &[usize]) -> Result<Vec<(String, AttentionLayout)>> {
    let part = |q: Vec<u32>, keys: u32, documents: &[u32], window| {
        AttentionLayout::new(q, (0..keys).collect::<Vec<_>>(), vec![documents.to_vec()], heads, window)
    };
    let mut masks = Vec::new();
    for keys in [385, 513] {
        masks.push((format!("{keys} keys"), part((keys - 12..keys).collect(), keys, &[0, keys], None)?));
    }
    let around = |at: u32| at - 4..at + 4;
    let queries = around(127).chain(around(255)).chain(around(384)).chain(505..513).collect();
    masks.push(("documents".to_owned(), part(queries, 513, &[0, 127, 255, 384, 513], None)?));
    for edge in 126..=129 {
        let name = format!("windows that begin at key {edge}");
        masks.push((name, part((500..513).collect(), 513, &[0, 513], Some(513 - edge as usize))?));
        let name = format!("queries from {}", 128 + edge);
        masks.push((name, part((128 + edge..150 + edge).collect(), 385, &[0, 385], None)?));
    }
    Ok(masks)
}

fn cells_of_many_tiles(kernels: AttentionKernels) -> Result<Vec<Cell>> {
    let masks = masks_of_many_tiles(&[0, 1, 1])?.into_iter().enumerate();
    let cell = |(index, (mask, layout)): (usize, (String, AttentionLayout))| Cell {
        mask,
        grouping: "3 heads on 2",
        kernels,
        layout,
        num_kv_heads: 2,
        head_dim: [64, 128][index / 2 % 2],
        dtype: [DType::BF16, DType::F16][index % 2],
        seed: index as u64 + 1,
    };
    Ok(masks.map(cell).collect())
}

#[test]
fn so_does_every_mask_of_many_tiles() -> Result<()> {
    on_a_gpu(|| sample(cells_of_many_tiles(AttentionKernels::Fused)?).try_for_each(|cell| cell.check()))
}

#[test]
fn so_does_every_mask_of_many_tiles_with_products_of_warpgroups() -> Result<()> {
    on_a_gpu(|| sample(cells_of_many_tiles(AttentionKernels::Wgmma)?).try_for_each(|cell| cell.check()))
}
