//! Attention over parts of the keys, merged, is attention over all of them.

use super::*;
use crate::attention::merge;
use crate::testing::rounded;

/// `o` and `lse` of the keys of one part of two packed sequences of 700 tokens; every part sees the same queries.
fn part(case: &Case, keys: &[u32]) -> Result<[Tensor; 2]> {
    let cut = |tensor: &Tensor| -> Result<Tensor> {
        let on_the_host = tensor.to_device(&Device::Cpu)?.contiguous()?;
        let selected = on_the_host.index_select(&Tensor::new(keys, &Device::Cpu)?, 1)?;
        Ok(selected.contiguous()?.to_device(tensor.device())?)
    };
    let layout = shards(case.layout.q_positions().iter().copied(), keys.iter().copied())?;
    let part = Case { layout, k: cut(&case.k)?, v: cut(&case.v)?, ..case.clone() };
    let (b, sq, hq, _) = part.q.dims4()?;
    let (o, lse) = (dirty(&part.q)?, testing::output(&[b, hq, sq]));
    forward(&part.operands(), &o, &lse)?;
    Ok([o, lse])
}

#[test]
fn parts_of_the_keys_merge_to_all_keys() -> Result<()> {
    on_every_target(|target| {
        // The tokens of a zigzag shard. The first part is later than half of the queries, so that they see nothing of
        // it; nobody sees the second part.
        let queries = (60..120).chain(500..560);
        for head_dim in [7, 16] {
            let case = Case::new(shards(queries.clone(), 0..700)?, 2, head_dim)?;
            let parts: [Vec<u32>; 4] = [
                (130..410).collect(),
                (600..700).collect(),
                (0..130).chain(520..540).collect(),
                (410..520).chain(540..600).collect(),
            ];
            let [o, lse] = part(&case, &parts[0])?;
            for keys in &parts[1..] {
                let [part_o, part_lse] = part(&case, keys)?;
                merge(&o, &lse, &part_o, &part_lse)?;
            }
            let truth = case.reference::<f64>()?;
            for (name, got, truth) in [("o", &o, &truth[0]), ("lse", &lse, &truth[1])] {
                let error = max_error(&read(got), truth);
                assert!(error <= 2e-6, "{target}, head_dim {head_dim}: {name} is off by {error:e}");
            }
        }
        Ok(())
    })
}

#[test]
fn a_part_of_16_bits_is_merged_in_f32() -> Result<()> {
    on_every_target(|target| {
        for dtype in [DType::BF16, DType::F16] {
            let shape = [2, 3, 2, 5];
            let (part, elements) = rounded(dtype, &random(1, 60), &shape);
            let (o, part_lse) =
                (testing::tensor(&random(2, 60), &shape), testing::tensor(&random(3, 12), &[2, 2, 3]));
            let lse = testing::tensor(&random(4, 12), &[2, 2, 3]);
            let [old, old_lse, other_lse] =
                [&o, &lse, &part_lse].map(|tensor| testing::to_f64(&read(tensor)));
            merge(&o, &lse, &part, &part_lse)?;
            let (mut expected, mut expected_lse) = (vec![0.0; 60], vec![0.0; 12]);
            for (index, expected) in expected.iter_mut().enumerate() {
                let [column, head, token, sequence] = [index % 5, index / 5 % 2, index / 10 % 3, index / 30];
                let at = (sequence * 2 + head) * 3 + token;
                let sum = old_lse[at].exp() + other_lse[at].exp();
                assert_eq!(index, ((sequence * 3 + token) * 2 + head) * 5 + column);
                *expected = (old_lse[at].exp() * old[index] + other_lse[at].exp() * elements[index]) / sum;
                expected_lse[at] = sum.ln();
            }
            testing::assert_close(&format!("{target}, {dtype:?}: o"), &read(&o), &expected, 1e-6);
            testing::assert_close(&format!("{target}, {dtype:?}: lse"), &read(&lse), &expected_lse, 1e-6);
        }
        Ok(())
    })
}

#[test]
fn operands_of_other_shapes_are_refused_by_name() {
    let o = testing::tensor(&[0.0; 12], &[1, 3, 2, 2]);
    let (lse, short) = (testing::tensor(&[0.0; 6], &[1, 2, 3]), testing::tensor(&[0.0; 4], &[1, 2, 2]));
    let part = testing::tensor(&[0.0; 12], &[1, 3, 2, 2]);
    let error = merge(&o, &lse, &part, &short).expect_err("a part_lse of two tokens");
    assert!(matches!(error, AttentionError::Shape { tensor: "part_lse", .. }), "{error}");
}
