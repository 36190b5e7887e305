//! The fused forward kernel against the f64 reference, and which calls the fused kernels support.

use super::*;
use crate::attention::grouped_heads;

impl Case {
    /// The same inputs for the fused kernels, rounded to 16 bits. A call that they do not support fails.
    pub(super) fn fused(self, dtype: DType) -> Result<Self> {
        Ok(Self { kernels: AttentionKernels::Fused, ..self.rounded(dtype, Aligned)? })
    }

    /// `[o, lse]` of the fused kernel, on outputs that contain NaN.
    fn fused_forward(&self) -> Result<[Vec<f32>; 2]> {
        let (b, sq, hq, _) = self.q.dims4()?;
        let (o, lse) = (dirty(&self.q)?, testing::output(&[b, hq, sq]));
        forward(&self.operands(), &o, &lse)?;
        Ok([&o, &lse].map(read))
    }

    fn check_fused_forward(self, dtype: DType, name: &str) -> Result<()> {
        let case = self.fused(dtype)?;
        case.check_precision(&case.fused_forward()?, &format!("{name}, {dtype:?}, d {}", case.head_dim))
    }
}

/// Parts of two sequences of 260 tokens.
fn parts(q: impl IntoIterator<Item = u32>, kv: impl IntoIterator<Item = u32>) -> Result<AttentionLayout> {
    let (q, kv): (Vec<u32>, Vec<u32>) = (q.into_iter().collect(), kv.into_iter().collect());
    AttentionLayout::new(q, kv, vec![vec![0, 260], vec![0, 70, 201, 260]], vec![0], None)
}

/// Every kind of mask, with more than one block of rows and more than one tile of keys. Ranges begin and end at the
/// edges of tiles, and one key before and after.
fn masks() -> Result<Vec<(String, AttentionLayout)>> {
    let documents: [&[u32]; 2] = [&[0, 1, 2, 64, 65, 128, 191, 200], &[0, 63, 63, 127, 129, 200]];
    let mut masks = vec![
        ("documents".to_owned(), packed(&documents, &[0], None)?),
        ("documents and window".to_owned(), packed(&documents, &[0], Some(21))?),
        ("keys before the queries".to_owned(), parts(130..260, 0..130)?),
        ("keys after the queries".to_owned(), parts(0..130, 130..260)?),
        ("zigzag".to_owned(), parts((0..65).chain(195..260), (65..130).chain(130..195))?),
        ("striped".to_owned(), parts((0..130).map(|i| 2 * i), (0..130).map(|i| 2 * i + 1))?),
    ];
    // A tile of which the first row of a block does not see the last key, or the last row the first key.
    let of_rows = |q: std::ops::Range<u32>, window| {
        let keys: Vec<u32> = (0..130).collect();
        AttentionLayout::new(q.collect::<Vec<_>>(), keys, vec![vec![0, 260]], [0].as_slice(), window)
    };
    masks.push(("all but the last key".to_owned(), of_rows(62..190, None)?));
    masks.push(("all but the first key".to_owned(), of_rows(130..258, Some(193))?));
    for window in [1, 63, 64, 65, 150] {
        masks.push((format!("window {window}"), packed(&[&[0, 200]], &[0], Some(window))?));
    }
    Ok(masks)
}

#[test]
fn every_head_dimension_and_element_type_errs_at_most_twice_as_much_as_the_naive_way() -> Result<()> {
    on_a_gpu(|| {
        for head_dim in [64, 96, 128] {
            for dtype in [DType::BF16, DType::F16] {
                causal(1, 130, &[0, 0, 1], 2, head_dim)?.check_fused_forward(dtype, "causal")?;
            }
        }
        Ok(())
    })
}

#[test]
fn so_does_every_mask() -> Result<()> {
    on_a_gpu(|| {
        for (index, (name, layout)) in masks()?.into_iter().enumerate() {
            let dtype = [DType::BF16, DType::F16][index % 2];
            Case::new(layout, 1, 64)?.check_fused_forward(dtype, &name)?;
        }
        Ok(())
    })
}

#[test]
fn so_does_every_length_and_grouping_of_heads() -> Result<()> {
    on_a_gpu(|| {
        for (index, seq_len) in [1, 63, 64, 65, 127, 128, 129].into_iter().enumerate() {
            let dtype = [DType::F16, DType::BF16][index % 2];
            causal(1, seq_len, &[0], 1, 64)?.check_fused_forward(dtype, &format!("{seq_len} tokens"))?;
        }
        let cases = [
            ("32 heads on 8", causal(1, 33, &grouped_heads(32, 8), 8, 64)?),
            ("8 heads on 1", causal(1, 37, &grouped_heads(8, 1), 1, 96)?),
            ("6 heads on 3", causal(2, 17, &grouped_heads(6, 3), 3, 64)?),
            ("unordered, uneven, one unused", causal(2, 50, &[1, 0, 1, 3, 1], 4, 128)?),
            ("one query of many", Case::new(parts([259], 0..260)?, 1, 64)?),
            ("no keys", Case::new(parts(0..10, [])?, 1, 64)?),
            ("no queries", Case::new(parts([], 0..10)?, 1, 64)?),
        ];
        for (name, case) in cases {
            case.check_fused_forward(DType::BF16, name)?;
        }
        Ok(())
    })
}

#[test]
fn a_query_that_sees_nothing_gives_zero_and_minus_infinity_in_a_tile_that_others_see() -> Result<()> {
    on_a_gpu(|| {
        let case = Case::new(parts(0..70, 35..105)?, 1, 64)?.fused(DType::F16)?;
        let [o, lse] = case.fused_forward()?;
        for (token, lse) in lse[..70].iter().enumerate() {
            assert_eq!(*lse == f32::NEG_INFINITY, token < 35, "token {token}: {lse}");
            assert_eq!(o[64 * token..][..64].iter().all(|x| *x == 0.0), token < 35, "token {token}");
        }
        Ok(())
    })
}

#[test]
fn a_nan_shows_in_the_output_of_its_query() -> Result<()> {
    on_a_gpu(|| {
        let mut case = causal(1, 40, &[0], 1, 64)?;
        let mut q = read(&case.q);
        q[33 * 64] = f32::NAN;
        case.q = tensor(q, [1, 40, 1, 64])?;
        let [o, lse] = case.fused(DType::BF16)?.fused_forward()?;
        for (token, (o, lse)) in o.chunks(64).zip(lse).enumerate() {
            assert_eq!(o.iter().all(|x| x.is_nan()) && lse.is_nan(), token == 33, "token {token}");
            assert_eq!(o.iter().any(|x| x.is_nan()) || lse.is_nan(), token == 33, "token {token}");
        }
        Ok(())
    })
}

#[test]
fn calls_that_the_fused_kernels_do_not_support_are_refused_only_if_they_are_forced() -> Result<()> {
    on_a_gpu(|| {
        let refused = |case: &Case, scale: f32, expected: &str| -> Result<()> {
            let (b, sq, hq, _) = case.q.dims4()?;
            let (o, lse) = (dirty(&case.q)?, testing::output(&[b, hq, sq]));
            let forced = Operands { scale, kernels: AttentionKernels::Fused, ..case.operands() };
            let error = forward(&forced, &o, &lse).expect_err(expected).to_string();
            assert!(error.starts_with("attention::forward: there is no fused kernel for "), "{error}");
            assert!(
                error.contains(expected) && error.contains("a head dimension of 64, 96 or 128"),
                "{error}"
            );
            forward(&Operands { kernels: AttentionKernels::Auto, ..forced }, &o, &lse)
        };
        refused(&causal(1, 3, &[0], 1, 64)?, 1.0, "f32 elements")?;
        refused(&causal(1, 3, &[0], 1, 80)?.rounded(DType::BF16, Aligned)?, 1.0, "a head dimension of 80")?;
        let case = causal(1, 3, &[0], 1, 64)?;
        refused(&case.clone().rounded(DType::F16, Odd)?, 1.0, "begins 6 bytes into its storage")?;
        let case = case.rounded(DType::F16, Aligned)?;
        for scale in [0.0, -1.0, f32::INFINITY] {
            refused(&case, scale, &format!("a scale of {scale}"))?;
        }
        let mut capped = case;
        capped.layout = capped.layout.with_logits(Logits { softcap: Some(30.0), ..Logits::default() });
        refused(&capped, 1.0, "a soft cap of the logits")?;
        Ok(())
    })
}
