//! Every kind of mask × grouping of heads × head dimension × element type on both sets of fused kernels, emulated:
//! forward and all gradients, at odd lengths.

use super::*;
use crate::attention::grouped_heads;
use crate::device::{emulate, set_seed};

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

/// Runs both directions in two orders of blocks and threads, and compares them with f64.
fn check(case: &Case, seed: u64, name: &str) -> Result<()> {
    let outputs = emulate(|| case.run())?;
    case.check_precision(&outputs, name)?;
    set_seed(seed);
    let again = emulate(|| case.run());
    set_seed(0);
    assert!(bits(&again?) == bits(&outputs), "{name}: order {seed} changes bits");
    Ok(())
}

fn check_all(kernels: AttentionKernels, head_dims: &[usize]) -> Result<()> {
    let mut seed = 0;
    for (grouping, heads) in groupings() {
        let num_kv_heads = heads.iter().max().map_or(0, |last| last + 1);
        for (mask, layout) in masks(&heads)? {
            for head_dim in head_dims {
                for dtype in [DType::BF16, DType::F16] {
                    seed += 1;
                    let case = Case::new(layout.clone(), num_kv_heads, *head_dim)?.fused(dtype)?;
                    let name = format!("{kernels:?}, {mask}, {grouping}, d {head_dim}, {dtype:?}");
                    check(&Case { kernels, ..case }, seed, &name)?;
                }
            }
        }
    }
    Ok(())
}

#[test]
fn every_mask_and_grouping_of_heads_errs_at_most_twice_as_much_as_the_naive_way_in_any_order() -> Result<()> {
    check_all(AttentionKernels::Fused, &[64, 96, 128])
}

#[test]
fn so_does_every_one_with_products_of_warpgroups() -> Result<()> {
    check_all(AttentionKernels::Wgmma, &[64, 128])
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

#[test]
fn so_does_every_mask_of_many_tiles() -> Result<()> {
    for kernels in [AttentionKernels::Wgmma, AttentionKernels::Fused] {
        for (index, (mask, layout)) in masks_of_many_tiles(&[0, 1, 1])?.into_iter().enumerate() {
            let (head_dim, dtype) = ([64, 128][index / 2 % 2], [DType::BF16, DType::F16][index % 2]);
            let case = Case::new(layout, 2, head_dim)?.fused(dtype)?;
            let name = format!("{kernels:?}, {mask}, d {head_dim}, {dtype:?}");
            check(&Case { kernels, ..case }, index as u64 + 1, &name)?;
        }
    }
    Ok(())
}
