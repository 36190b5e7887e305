//! The kernels against the f64 reference, and the reference against finite differences.

use super::*;
use crate::simd::at_every_level;

#[test]
fn causal_rows_match_the_reference_for_all_lengths_heads_and_dimensions() -> Result<()> {
    on_every_target(|_| {
        causal(1, 1, &[0], 1, 1)?.check("one token")?;
        causal(3, 7, &[0, 0, 1], 2, 4)?.check("uneven groups")?;
        causal(2, 64, &[0, 1, 1, 2], 3, 8)?.check("uneven groups in the middle")?;
        causal(1, 64, &[1, 0, 1], 3, 64)?.check("unordered groups and a KV head that no query head uses")?;
        causal(2, 300, &[0, 1, 2], 3, 80)?.check("MHA over more than one tile")?;
        causal(1, 300, &[0, 0, 0, 0], 1, 64)?.check("MQA over more than one tile")?;
        causal(1, 1100, &[0, 0, 1], 2, 8)?.check("several tiles")?;
        causal(1, 1100, &[0], 1, 1)?.check("head dimension 1")?;
        causal(1, 600, &[0], 1, 256)?.check("more keys than fit the cache budget")
    })
}

#[test]
fn packed_documents_match_the_reference() -> Result<()> {
    on_every_target(|_| {
        let rows: [&[u32]; 3] = [&[0, 300], &[0, 1, 2, 64, 65, 190, 300], &[0, 150, 150, 299, 300]];
        Case::new(packed(&rows, &[0, 0, 1], None)?, 2, 16)?.check("short documents")?;
        let rows: [&[u32]; 2] = [&[0, 600, 1100], &[0, 37, 293, 1100]];
        Case::new(packed(&rows, &[0, 1], None)?, 2, 8)?.check("long documents")
    })
}

#[test]
fn sliding_windows_match_the_reference() -> Result<()> {
    on_every_target(|_| {
        for window in [1, 5, 64, 257, 2000] {
            let rows: [&[u32]; 2] = [&[0, 700], &[0, 333, 700]];
            Case::new(packed(&rows, &[0, 0], Some(window))?, 1, 8)?.check(&format!("window {window}"))?;
        }
        Ok(())
    })
}

#[test]
fn shards_of_other_ranks_match_the_reference() -> Result<()> {
    on_every_target(|_| {
        Case::new(shards(350..700, 0..350)?, 2, 8)?.check("keys before the queries")?;
        Case::new(shards(0..350, 350..700)?, 2, 8)?.check("keys after the queries")?;
        Case::new(shards((0..90).chain(610..700), (90..180).chain(520..610))?, 2, 8)?
            .check("zigzag shards")?;
        Case::new(shards((0..350).map(|i| 2 * i), (0..350).map(|i| 2 * i + 1))?, 2, 8)?
            .check("striped shards")?;
        Case::new(shards(0..10, [])?, 2, 8)?.check("no keys")?;
        Case::new(shards([], 0..10)?, 2, 8)?.check("no queries")
    })
}

#[test]
fn large_logits_neither_overflow_nor_lose_accuracy() -> Result<()> {
    on_every_target(|_| {
        let mut case = causal(1, 300, &[0, 1], 2, 16)?;
        case.q = case.q.affine(50.0, 0.0)?;
        // Backward recomputes probabilities from the log-denominator, which in f32 is correspondingly less
        // accurate here.
        case.check_within(1e-5, "logits of several hundred")
    })
}

#[test]
fn soft_caps_match_the_reference() -> Result<()> {
    on_every_target(|_| {
        let rows: [&[u32]; 2] = [&[0, 300], &[0, 1, 2, 64, 190, 300]];
        for (softcap, window) in [(1.5, None), (4.0, Some(70)), (50.0, None)] {
            let layout = packed(&rows, &[0, 0, 1], window)?;
            let layout = layout.with_logits(Logits { softcap: Some(softcap), ..Logits::default() });
            Case::new(layout, 2, 16)?.check(&format!("soft cap {softcap}"))?;
        }
        let layout = shards(350..700, 0..350)?;
        let layout = layout.with_logits(Logits { softcap: Some(2.0), ..Logits::default() });
        Case::new(layout, 2, 8)?.check("soft cap of a shard")
    })
}

#[test]
fn the_reference_gradients_match_finite_differences() -> Result<()> {
    let layout = packed(&[&[0, 9], &[0, 4, 9]], &[0, 1, 1], Some(5))?;
    let capped = layout.clone().with_logits(Logits { softcap: Some(2.0), ..Logits::default() });
    assert_reference_gradients(&Case::new(layout, 2, 4)?)?;
    assert_reference_gradients(&Case::new(capped, 2, 4)?)
}

fn assert_reference_gradients(case: &Case) -> Result<()> {
    const STEP: f64 = 1e-5;
    let dout: Vec<f64> = read(&case.dout).into_iter().map(f64::from).collect();
    let inputs: Vec<Vec<f64>> = [&case.q, &case.k, &case.v]
        .into_iter()
        .map(|tensor| read(tensor).into_iter().map(f64::from).collect())
        .collect();
    let loss = |inputs: &[Vec<f64>]| {
        let problem = reference::Problem {
            q: &inputs[0],
            k: &inputs[1],
            v: &inputs[2],
            num_kv_heads: 2,
            head_dim: 4,
            scale: f64::from(case.scale()),
            layout: &case.layout,
        };
        reference::forward(&problem).0.iter().zip(&dout).map(|(o, dout)| o * dout).sum::<f64>()
    };
    let [_, _, gradients @ ..] = case.reference::<f64>()?;
    for (input, gradient) in gradients.iter().enumerate() {
        for (element, gradient) in gradient.iter().enumerate() {
            let mut moved = inputs.clone();
            moved[input][element] += STEP;
            let above = loss(&moved);
            moved[input][element] -= 2.0 * STEP;
            let numeric = (above - loss(&moved)) / (2.0 * STEP);
            assert!((numeric - gradient).abs() < 1e-8, "{input} [{element}]: {numeric} against {gradient}");
        }
    }
    Ok(())
}

#[test]
fn every_instruction_set_matches_the_reference() -> Result<()> {
    let case = Case::new(packed(&[&[0, 37, 300]], &[0, 0, 1], Some(200))?, 2, 24)?;
    // The level is limited on this thread only; a pool of one thread keeps the work on it.
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().map_err(AttentionError::other)?;
    pool.install(|| at_every_level(|level| case.check(&format!("{level:?}")).expect("operands fit")));
    Ok(())
}
