//! 16-bit elements: the error against f64 is at most twice that of a plain computation that rounds every
//! intermediate tensor, which is how FlashAttention is tested (Dao, `tests/test_flash_attn.py`).

use super::super::{on_cpu, operands::Problem};
use super::*;
use crate::arg_check::ArgCheck;
use crate::gemm::bf16::Kernel;
use half::{bf16, f16};

/// Alignment of the tensors.
#[derive(Debug, Clone, Copy)]
pub(super) enum Layout {
    /// At the start of a buffer: kernels access 16 bytes at a time.
    Aligned,
    /// In the middle of a buffer, at an odd offset.
    Odd,
}

impl Case {
    /// The same inputs, rounded to `dtype`.
    pub(super) fn rounded(self, dtype: DType, layout: Layout) -> Result<Self> {
        let round = |tensor: &Tensor| -> Result<Tensor> {
            Ok(match layout {
                // candle casts no empty tensor on a GPU.
                Layout::Aligned => {
                    tensor.to_device(&Device::Cpu)?.to_dtype(dtype)?.to_device(tensor.device())?
                }
                Layout::Odd => testing::rounded(dtype, &read(tensor), tensor.dims()).0,
            })
        };
        let (q, k, v, dout) = (round(&self.q)?, round(&self.k)?, round(&self.v)?, round(&self.dout)?);
        Ok(Self { q, k, v, dout, ..self })
    }

    /// `[o, lse, dq, dk, dv]` with matmuls in f64, and scores, probabilities and their gradients stored in
    /// `dtype`.
    fn naive(&self) -> [Vec<f32>; 5] {
        let round = |x: f64| match self.q.dtype() {
            DType::BF16 => bf16::from_f64(x).to_f64(),
            DType::F16 => f16::from_f64(x).to_f64(),
            _ => f64::from(x as f32),
        };
        let numbers = |tensor| testing::to_f64(&read(tensor));
        let [q, k, v, dout] = [&self.q, &self.k, &self.v, &self.dout].map(numbers);
        let (heads, head_dim) = (self.layout.q_to_kv().len(), self.head_dim);
        let (queries, keys) = (self.layout.q_positions().len(), self.layout.kv_positions().len());
        let mut outputs = [q.len(), 0, q.len(), k.len(), v.len()].map(|len| vec![0.0; len]);
        for index in 0..self.layout.batch() * heads * queries {
            let (row, head, query) = (index / queries / heads, index / queries % heads, index % queries);
            let at = ((row * queries + query) * heads + head) * head_dim;
            let kv_head = self.layout.q_to_kv()[head];
            let seen: Vec<usize> = (0..keys)
                .filter(|key| reference::is_visible(&self.layout, row, query, *key))
                .map(|key| ((row * keys + key) * self.num_kv_heads + kv_head) * head_dim)
                .collect();
            let dot = |a: &[f64], b: &[f64], kv: usize| -> f64 {
                a[at..][..head_dim].iter().zip(&b[kv..]).map(|(a, b)| a * b).sum()
            };
            let scores: Vec<f64> =
                seen.iter().map(|kv| round(f64::from(self.scale()) * dot(&q, &k, *kv))).collect();
            let max = scores.iter().fold(f64::NEG_INFINITY, |max, score| max.max(*score));
            let sum: f64 = scores.iter().map(|score| (score - max).exp()).sum();
            outputs[1].push(max + sum.ln());
            let p: Vec<f64> = scores.iter().map(|score| round((score - max).exp() / sum)).collect();
            let dp: Vec<f64> = seen.iter().map(|kv| round(dot(&dout, &v, *kv))).collect();
            let mean: f64 = p.iter().zip(&dp).map(|(p, dp)| p * dp).sum();
            for ((kv, p), dp) in seen.into_iter().zip(p).zip(dp) {
                let ds = f64::from(self.scale()) * round(p * (dp - mean));
                for column in 0..head_dim {
                    outputs[0][at + column] += p * v[kv + column];
                    outputs[2][at + column] += ds * k[kv + column];
                    outputs[3][kv + column] += ds * q[at + column];
                    outputs[4][kv + column] += p * dout[at + column];
                }
            }
        }
        let [o, lse, dq, dk, dv] = outputs;
        let rounded = |values: Vec<f64>| values.into_iter().map(|x| round(x) as f32).collect();
        [rounded(o), lse.into_iter().map(|x| x as f32).collect(), rounded(dq), rounded(dk), rounded(dv)]
    }

    /// Checks the first of the outputs, in the order of [`NAMES`].
    pub(super) fn check_precision(&self, got: &[Vec<f32>], name: &str) -> Result<()> {
        let (truth, naive) = (self.reference::<f64>()?, self.naive());
        for (index, got) in got.iter().enumerate() {
            let (truth, output) = (&truth[index], NAMES[index]);
            let (error, naive) = (max_error(got, truth), max_error(&naive[index], truth));
            assert!(
                error <= 2.0 * naive + 1e-6,
                "{name}: {output} is off by {error:e}, the naive way by {naive:e}"
            );
        }
        Ok(())
    }
}

pub(super) fn for_16_bits(run: impl Fn(DType, Layout) -> Result<()>) -> Result<()> {
    for dtype in [DType::BF16, DType::F16] {
        for layout in [Layout::Aligned, Layout::Odd] {
            run(dtype, layout)?;
        }
    }
    Ok(())
}

/// Grouped heads, several sequences, documents with a window, and queries without visible keys.
fn cases() -> Result<[Case; 4]> {
    Ok([
        causal(1, 200, &[0, 0, 1, 1], 2, 64)?,
        causal(2, 90, &[1, 0, 1], 3, 20)?,
        Case::new(packed(&[&[0, 37, 300]], &[0, 0, 1], Some(200))?, 2, 16)?,
        Case::new(shards(350..500, 0..150)?, 2, 8)?,
    ])
}

/// Checks the cases with elements of 16 bits on the tests' device.
pub(super) fn check_16_bits() -> Result<()> {
    for_16_bits(|dtype, layout| {
        for (index, case) in cases()?.into_iter().enumerate() {
            let case = case.rounded(dtype, layout)?;
            case.check_precision(&case.run()?, &format!("case {index} in {dtype:?}, {layout:?}"))?;
        }
        Ok(())
    })
}

#[test]
fn elements_of_16_bits_err_at_most_twice_as_much_as_the_naive_way() -> Result<()> {
    check_16_bits()
}

#[test]
fn so_do_matmuls_of_16_bits_of_every_kernel_for_any_number_of_threads() -> Result<()> {
    let long = causal(1, 600, &[0, 0, 1], 2, 40)?;
    // Alone, a thread processes two blocks of queries at a time; and more keys than fit the cache budget.
    let (blocks, wide) = (causal(1, 1100, &[0, 0, 0, 1, 1, 1], 2, 8)?, causal(1, 600, &[0], 1, 256)?);
    // All sizes that kernels process in pairs are odd.
    let odd = Case::new(packed(&[&[0, 37, 90, 91, 601]], &[0, 0, 1], Some(301))?, 2, 9)?;
    for (index, case) in cases()?.into_iter().chain([long, blocks, wide, odd]).enumerate() {
        // For this test, attention by pairs falls back to plain instructions.
        let others = Kernel::all().filter(|kernel| *kernel != Kernel::Avx512);
        let kernels =
            others.chain([Kernel::Avx512, Kernel::Portable]).map(|kernel| (DType::BF16, Some(kernel)));
        for (dtype, kernel) in kernels.chain([(DType::BF16, None), (DType::F16, None)]) {
            let case = case.clone().rounded(dtype, Layout::Odd)?;
            let call = ArgCheck::new("test");
            let problem = Problem::new(call, &case.operands())?;
            let run = || {
                case.run_with(
                    |o, lse| on_cpu::forward(kernel, call, &problem, o, lse),
                    |upstream, gradients| on_cpu::backward(kernel, call, &problem, upstream, gradients),
                )
            };
            let [alone, together] = [1, 5].map(|threads| {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
                pool.map_err(AttentionError::other)?.install(run)
            });
            let alone = alone?;
            case.check_precision(&alone, &format!("case {index} in {dtype:?} by {kernel:?}"))?;
            let bits = |outputs: &Outputs| {
                outputs.clone().map(|o| o.into_iter().map(f32::to_bits).collect::<Vec<_>>())
            };
            assert!(
                bits(&alone) == bits(&together?),
                "case {index} in {dtype:?} by {kernel:?}: threads change bits"
            );
        }
    }
    Ok(())
}

#[test]
fn tensors_of_mixed_element_types_are_refused() -> Result<()> {
    let case = causal(1, 8, &[0], 1, 4)?.rounded(DType::BF16, Layout::Odd)?;
    let f32_q = case.q.to_dtype(DType::F32)?;
    let (o, lse) = (case.q.zeros_like()?, testing::output(&[1, 1, 8]));
    on_every_target(|target| {
        let error = forward(&Operands { k: &f32_q, ..case.operands() }, &o, &lse).expect_err("mixed");
        assert!(
            matches!(error, AttentionError::Op(OpError::MixedDTypes { argument: "k", got: DType::F32, .. })),
            "{target}: {error}"
        );
        Ok(())
    })
}
