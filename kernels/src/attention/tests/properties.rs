//! Properties independent of the values: determinism, independence, the trait, refusals.

use super::*;
use crate::Workspace;
use crate::attention::{QkvGradients, SavedAttention};
use crate::tensor::TensorOptions;

/// A workspace for attention over the case's tensors.
fn workspace(case: &Case) -> Workspace {
    Workspace::with_options(TensorOptions { device: case.q.device().clone(), dtype: case.q.dtype() })
}

fn flash_forward(case: &Case) -> Result<(Tensor, SavedAttention)> {
    let Case { q, k, v, layout, .. } = case;
    FlashAttention::default().forward(q.clone(), k.clone(), v.clone(), layout, &workspace(case))
}

#[test]
fn a_query_that_sees_nothing_gives_zero_and_minus_infinity() -> Result<()> {
    on_every_target(|_| {
        let [o, lse, dq, dk, dv] = Case::new(shards(0..350, 350..700)?, 2, 8)?.run()?;
        assert!(lse.iter().all(|x| *x == f32::NEG_INFINITY));
        assert!([o, dq, dk, dv].iter().flatten().all(|x| *x == 0.0));
        Ok(())
    })
}

#[test]
fn packing_documents_equals_running_them_one_by_one() -> Result<()> {
    on_every_target(|_| {
        let lengths = [150usize, 290];
        let whole = Case::new(packed(&[&[0, 150, 440]], &[0, 0, 1], None)?, 2, 16)?;
        let [o, _, dq, dk, dv] = whole.run()?;
        let mut start = 0;
        for length in lengths {
            let cut = |tensor: &Tensor| -> Result<Tensor> { Ok(tensor.narrow(1, start, length)?) };
            let alone = Case {
                layout: AttentionLayout::causal(1, length as u32, [0, 0, 1].as_slice())?,
                q: cut(&whole.q)?,
                k: cut(&whole.k)?,
                v: cut(&whole.v)?,
                dout: cut(&whole.dout)?,
                ..whole
            };
            let [o_alone, _, dq_alone, dk_alone, dv_alone] = alone.run()?;
            for (packed, alone, token_elems) in
                [(&o, o_alone, 48), (&dq, dq_alone, 48), (&dk, dk_alone, 32), (&dv, dv_alone, 32)]
            {
                let alone: Vec<f64> = alone.into_iter().map(f64::from).collect();
                let size = alone.iter().fold(1f64, |a, b| a.max(b.abs()));
                let error = max_error(&packed[start * token_elems..][..length * token_elems], &alone);
                assert!(error <= 1e-6 * size, "document at {start}: off by {error:e} of {size}");
            }
            start += length;
        }
        Ok(())
    })
}

#[test]
fn the_number_of_threads_does_not_change_a_bit() -> Result<()> {
    let rows: [&[u32]; 2] = [&[0, 600, 1100], &[0, 37, 293, 1100]];
    let cases = [
        // Two KV heads in all: one or two threads process whole heads, five divide them.
        Case::new(packed(&rows, &[0, 0, 0], None)?, 1, 16)?,
        causal(1, 600, &[1, 0, 1], 2, 8)?,
        causal(1, 600, &[0, 0], 1, 64)?,
        // Alone, a thread processes two blocks of queries at a time; and more keys than fit the cache budget.
        causal(1, 1100, &[0, 0, 0, 1, 1, 1], 2, 8)?,
        causal(1, 600, &[0], 1, 256)?,
        Case::new(packed(&rows, &[0], Some(100))?, 1, 8)?,
        Case::new(shards((0..90).chain(400..700), (90..180).chain(300..610))?, 2, 8)?,
    ];
    for (index, case) in cases.iter().enumerate() {
        let one = bits(&case.run_with_threads(1)?);
        for num_threads in [1, 2, 5] {
            let again = bits(&case.run_with_threads(num_threads)?);
            assert!(again == one, "case {index}: {num_threads} threads give other bits than one");
        }
    }
    Ok(())
}

#[test]
fn gradients_of_key_shards_sum_to_those_of_the_sequence() -> Result<()> {
    on_every_target(|_| {
        let rows = vec![vec![0, 130, 400]];
        let positions: Vec<u32> = (0..400).collect();
        let layout =
            |kv: &[u32]| AttentionLayout::new(positions.clone(), kv, rows.clone(), vec![0, 0, 1], None);
        let whole = Case::new(layout(&positions)?, 2, 16)?;
        let (o, saved) = flash_forward(&whole)?;
        let row_terms = saved.lse.zeros_like()?;
        delta(&o, &whole.dout, &row_terms)?;
        let upstream = Upstream { dout: &whole.dout, lse: &saved.lse, delta: &row_terms };
        let [_, _, dq_whole, dk_whole, dv_whole] = whole.run()?;

        let mut dq_sum = whole.q.zeros_like()?;
        let (mut dk_all, mut dv_all) = (Vec::new(), Vec::new());
        for shard in [0..170, 170..400usize] {
            let cut = |tensor: &Tensor| tensor.narrow(1, shard.start, shard.len());
            let (k, v) = (cut(&whole.k)?, cut(&whole.v)?);
            let (dq, dk, dv) = (whole.q.zeros_like()?, k.zeros_like()?, v.zeros_like()?);
            let layout = layout(&positions[shard.clone()])?;
            let operands = Operands { k: &k, v: &v, layout: &layout, ..whole.operands() };
            backward(&operands, &upstream, &Gradients { dq: &dq, dk: &dk, dv: &dv })?;
            dq_sum = (dq_sum + dq)?;
            dk_all.extend(to_vec::<f32>(&dk)?);
            dv_all.extend(to_vec::<f32>(&dv)?);
        }
        for (sum, whole) in [(to_vec(&dq_sum)?, dq_whole), (dk_all, dk_whole), (dv_all, dv_whole)] {
            let whole: Vec<f64> = whole.into_iter().map(f64::from).collect();
            let size = whole.iter().fold(0f64, |a, b| a.max(b.abs()));
            assert!(max_error(&sum, &whole) <= 2e-6 * size);
        }
        Ok(())
    })
}

#[test]
fn flash_attention_runs_the_kernels_with_the_usual_scale() -> Result<()> {
    on_every_target(|_| {
        let case = causal(2, 40, &[0, 0, 1], 2, 16)?;
        let expected = case.run()?;
        let (o, saved) = flash_forward(&case)?;
        let q_elems = 2 * 40 * 3 * 16;
        assert_eq!(saved.bytes(), 4 * (2 * q_elems + 2 * (2 * 40 * 2 * 16) + 2 * 3 * 40));
        let lse = to_vec(&saved.lse)?;
        let QkvGradients { dq, dk, dv } =
            FlashAttention::default().backward(saved, &case.dout, &case.layout, &workspace(&case))?;
        let got = [to_vec(&o)?, lse, to_vec(&dq)?, to_vec(&dk)?, to_vec(&dv)?];
        assert_eq!(bits(&got), bits(&expected));
        Ok(())
    })
}

#[test]
fn a_nan_input_shows_in_the_output() -> Result<()> {
    on_every_target(|_| {
        let mut case = causal(1, 40, &[0], 1, 4)?;
        let mut q = to_vec::<f32>(&case.q)?;
        q[33 * 4] = f32::NAN;
        case.q = tensor(q, [1, 40, 1, 4])?;
        let [o, ..] = case.run()?;
        for (token, o) in o.chunks(4).enumerate() {
            assert_eq!(o.iter().all(|x| x.is_nan()), token == 33, "token {token}");
        }
        Ok(())
    })
}

#[test]
fn a_nan_does_not_outlive_its_call() -> Result<()> {
    let clean = causal(1, 40, &[0], 1, 4)?;
    let nan = |like: &Tensor| Tensor::full(f32::NAN, like.shape(), like.device());
    let poisoned = Case { q: nan(&clean.q)?, v: nan(&clean.v)?, ..causal(1, 40, &[0], 1, 4)? };
    // One thread, so that both calls use the same scratch memory.
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().map_err(AttentionError::other)?;
    let [before, after] = pool.install(|| -> Result<_> {
        let before = clean.run()?;
        poisoned.run()?;
        Ok([before, clean.run()?])
    })?;
    assert_eq!(bits(&after), bits(&before));
    Ok(())
}

#[test]
fn operands_that_do_not_fit_are_refused_by_name() -> Result<()> {
    let case = causal(2, 8, &[0, 1], 2, 4)?;
    let (o, lse) = (case.q.zeros_like()?, Tensor::zeros((2, 2, 8), DType::F32, case.q.device())?);
    let attempt = |operands: Operands<'_>, o: &Tensor| forward(&operands, o, &lse).expect_err("misfit");

    let short = case.k.narrow(0, 0, 1)?;
    let error = attempt(Operands { k: &short, ..case.operands() }, &o);
    assert!(matches!(error, AttentionError::Shape { tensor: "k", .. }), "{error}");

    let double = case.v.to_dtype(DType::F64)?;
    let error = attempt(Operands { v: &double, ..case.operands() }, &o);
    assert!(matches!(error, AttentionError::Op(OpError::DType { argument: "v", .. })), "{error}");

    let strided = tensor(random(5, 2 * 8 * 2 * 4), [2, 2, 8, 4])?.transpose(1, 2)?;
    let error = attempt(Operands { q: &strided, ..case.operands() }, &o);
    assert!(matches!(error, AttentionError::Op(OpError::NotContiguous { argument: "q", .. })), "{error}");

    let many = case.layout.with_heads([0, 2].as_slice());
    let error = attempt(Operands { layout: &many, ..case.operands() }, &o);
    assert!(
        matches!(error, AttentionError::NoSuchKvHead { q_head: 1, kv_head: 2, num_kv_heads: 2, .. }),
        "{error}"
    );

    let error = attempt(case.operands(), &case.q);
    let shared = OpError::SharedStorage { op: "attention::forward", output: "o", other: "q" };
    assert_eq!(error.to_string(), shared.to_string());
    Ok(())
}

#[test]
fn gradients_that_share_storage_are_refused_instead_of_deadlocking() -> Result<()> {
    let case = causal(1, 8, &[0], 1, 4)?;
    let lse = Tensor::zeros((1, 1, 8), DType::F32, &testing::device())?;
    let flat = Tensor::zeros((3, 8, 1, 4), DType::F32, &testing::device())?;
    let (dq, dk, dv) = (flat.narrow(0, 0, 1)?, flat.narrow(0, 1, 1)?, case.v.zeros_like()?);
    let upstream = Upstream { dout: &case.dout, lse: &lse, delta: &lse };
    let error = backward(&case.operands(), &upstream, &Gradients { dq: &dq, dk: &dk, dv: &dv });
    assert!(matches!(
        error,
        Err(AttentionError::Op(OpError::SharedStorage { output: "dq", other: "dk", .. }))
    ));
    Ok(())
}
