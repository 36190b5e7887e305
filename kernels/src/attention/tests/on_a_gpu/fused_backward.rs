//! The fused backward kernels after the fused forward kernel.

use super::*;
use crate::attention::grouped_heads;
use crate::sample::{axes, sampled};

impl Case {
    /// Checks the kernels of every GPU, and those with products of warpgroups where there are some.
    fn check_fused(self, dtype: DType, name: &str) -> Result<()> {
        let case = self.fused(dtype)?;
        for kernels in [AttentionKernels::Fused, AttentionKernels::Wgmma] {
            if kernels == AttentionKernels::Fused || case.head_dim != 96 {
                let case = Self { kernels, ..case.clone() };
                let name = format!("{name}, {dtype:?}, d {}, {kernels:?}", case.head_dim);
                case.check_precision(&case.run()?, &name)?;
            }
        }
        Ok(())
    }
}

/// Parts of two sequences of 140 tokens, for three query heads on two KV heads.
fn parts(q: impl IntoIterator<Item = u32>, kv: impl IntoIterator<Item = u32>) -> Result<AttentionLayout> {
    let (q, kv): (Vec<u32>, Vec<u32>) = (q.into_iter().collect(), kv.into_iter().collect());
    AttentionLayout::new(q, kv, vec![vec![0, 140], vec![0, 30, 101, 140]], vec![0, 1, 1], None)
}

/// Every kind of mask, with more than one tile of keys and of packed rows.
fn masks() -> Result<[(&'static str, AttentionLayout); 9]> {
    let documents: [&[u32]; 2] = [&[0, 1, 2, 64, 65, 80], &[0, 40, 40, 79, 80]];
    Ok([
        ("causal", AttentionLayout::causal(1, 80, [0, 1, 1].as_slice())?),
        ("documents", packed(&documents, &[0, 0, 1], None)?),
        ("window", packed(&[&[0, 150]], &[0, 0], Some(40))?),
        ("window of one", packed(&[&[0, 70]], &[0, 0], Some(1))?),
        ("documents and window", packed(&documents, &[1, 0, 1], Some(21))?),
        ("keys before the queries", parts(70..140, 0..70)?),
        ("keys after the queries", parts(0..35, 100..135)?),
        ("zigzag", parts((0..20).chain(120..140), (20..40).chain(90..125))?),
        ("striped", parts((0..47).map(|i| 3 * i), (0..70).map(|i| 2 * i))?),
    ])
}

#[test]
fn gradients_of_every_mask_err_at_most_twice_as_much_as_the_naive_way() -> Result<()> {
    on_a_gpu(|| {
        let mut cases = Vec::new();
        for (mask, layout) in masks()? {
            let kinds = [DType::BF16, DType::F16].into_iter().flat_map(|d| [64, 96, 128].map(|dim| (d, dim)));
            cases.extend(kinds.map(|(dtype, head_dim)| (mask, layout.clone(), dtype, head_dim)));
        }
        for (mask, layout, dtype, head_dim) in
            sampled(cases, |(mask, _, dtype, head_dim)| axes![mask, dtype, head_dim])
        {
            Case::new(layout, 2, head_dim)?.check_fused(dtype, mask)?;
        }
        Ok(())
    })
}

#[test]
fn so_do_gradients_of_every_length_and_grouping_of_heads() -> Result<()> {
    on_a_gpu(|| {
        let of_rows = |q: std::ops::Range<u32>, window, head_dim| {
            let (queries, keys): (Vec<u32>, Vec<u32>) = (q.collect(), (0..130).collect());
            let layout = AttentionLayout::new(queries, keys, vec![vec![0, 260]], [0; 8].as_slice(), window);
            Case::new(layout?, 1, head_dim)
        };
        let cases = [
            ("the rows of five tiles", causal(1, 130, &[0, 0], 1, 64)?, DType::BF16),
            ("the rows of nine tiles and one", causal(1, 577, &[0], 1, 128)?, DType::F16),
            // A tile of which the first row does not see the last key, or the last row the first key.
            ("all but the last key", of_rows(62..70, None, 64)?, DType::F16),
            ("all but the last key", of_rows(126..134, None, 64)?, DType::F16),
            ("all but the last key", of_rows(126..134, None, 128)?, DType::BF16),
            ("all but the first key", of_rows(186..194, Some(193), 64)?, DType::F16),
            // Rows of another document in a tile of which all other rows see the whole tile of keys.
            ("the end of a document", Case::new(packed(&[&[0, 100, 128]], &[0], None)?, 1, 64)?, DType::F16),
            ("one token", causal(3, 1, &[0, 0, 1], 2, 64)?, DType::BF16),
            ("one token less than a tile", causal(1, 63, &[0], 1, 128)?, DType::F16),
            ("a tile", causal(2, 64, &[0], 1, 64)?, DType::BF16),
            ("one token more", causal(1, 65, &[0], 1, 96)?, DType::F16),
            ("two tiles less one", causal(1, 127, &[0], 1, 64)?, DType::F16),
            ("two tiles and one", causal(1, 129, &[0], 1, 128)?, DType::BF16),
            ("200 tokens", causal(1, 200, &[0], 1, 64)?, DType::F16),
            ("32 heads on 8", causal(1, 37, &grouped_heads(32, 8), 8, 64)?, DType::BF16),
            ("8 heads on 1", causal(1, 25, &grouped_heads(8, 1), 1, 128)?, DType::F16),
            ("6 heads on 3", causal(2, 33, &grouped_heads(6, 3), 3, 96)?, DType::BF16),
            ("unordered, uneven, one unused", causal(2, 30, &[1, 0, 1, 3, 1], 4, 64)?, DType::F16),
            (
                "documents that end within a tile",
                Case::new(packed(&[&[0, 66, 100, 200]], &[0, 0], None)?, 1, 64)?,
                DType::F16,
            ),
            ("one query sees all", Case::new(parts([139], 0..140)?, 2, 64)?, DType::BF16),
            ("no keys", Case::new(parts(0..10, [])?, 2, 64)?, DType::BF16),
            ("no queries", Case::new(parts([], 0..10)?, 2, 64)?, DType::BF16),
        ];
        for (name, case, dtype) in cases {
            case.check_fused(dtype, name)?;
        }
        Ok(())
    })
}

#[test]
fn the_order_of_blocks_and_threads_does_not_change_a_bit() -> Result<()> {
    on_a_gpu(|| {
        for (kernels, head_dim) in [
            (AttentionKernels::Fused, 64),
            (AttentionKernels::Fused, 96),
            (AttentionKernels::Wgmma, 64),
            (AttentionKernels::Wgmma, 128),
        ] {
            let layout = packed(&[&[0, 37, 150]], &[0, 0, 1], None)?;
            let case = Case { kernels, ..Case::new(layout, 2, head_dim)?.fused(DType::BF16)? };
            let expected = bits(&case.run()?);
            for seed in 0..3 {
                let again = in_order(seed, || case.run())?;
                assert_eq!(bits(&again), expected, "{kernels:?}, head dimension {head_dim}, seed {seed}");
            }
        }
        Ok(())
    })
}

#[test]
fn matrices_in_shared_memory_have_no_bank_conflicts_on_the_fake_driver() -> Result<()> {
    on_a_gpu(|| {
        for head_dim in [64, 96, 128] {
            let case = causal(1, 70, &[0, 0], 1, head_dim)?.fused(DType::F16)?;
            bank_conflicts();
            case.run()?;
            assert_eq!(bank_conflicts(), 0, "head dimension {head_dim}");
        }
        Ok(())
    })
}

/// As a ring over ranks computes them: with `lse` and `delta` of the whole sequence.
#[test]
fn gradients_of_key_shards_sum_to_those_of_the_sequence() -> Result<()> {
    on_a_gpu(|| {
        let positions: Vec<u32> = (0..150).collect();
        let layout = |kv: &[u32]| {
            AttentionLayout::new(positions.clone(), kv, vec![vec![0, 60, 150]], vec![0, 0, 1], None)
        };
        let whole = Case::new(layout(&positions)?, 2, 64)?.fused(DType::F16)?;
        let of_shards = whole.run_with(
            |o, lse| forward(&whole.operands(), o, lse),
            |upstream, gradients| {
                let mut dq = whole.q.zeros_like()?.to_dtype(DType::F32)?;
                for shard in [0..70, 70..150usize] {
                    let cut =
                        |tensor: &Tensor| tensor.narrow(1, shard.start, shard.len())?.force_contiguous();
                    let (k, v) = (cut(&whole.k)?, cut(&whole.v)?);
                    let of_shard = [dirty(&whole.q)?, dirty(&k)?, dirty(&v)?];
                    let layout = layout(&positions[shard.clone()])?;
                    let operands = Operands { k: &k, v: &v, layout: &layout, ..whole.operands() };
                    let [dq_part, dk, dv] = of_shard.each_ref();
                    backward(&operands, upstream, &Gradients { dq: dq_part, dk, dv })?;
                    dq = (dq + dq_part.to_dtype(DType::F32)?)?;
                    gradients.dk.slice_set(dk, 1, shard.start)?;
                    gradients.dv.slice_set(dv, 1, shard.start)?;
                }
                Ok(gradients.dq.slice_set(&dq.to_dtype(DType::F16)?, 1, 0)?)
            },
        )?;
        whole.check_precision(&of_shards, "two shards of keys")
    })
}
