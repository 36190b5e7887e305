//! Tests every collective on ranks of this process: correct data, and bus bandwidth.

use super::machine::REPEATS;
use super::{Finding, State};
use crate::bench::{BenchRanks, Figure, collectives};
use crate::failure::Failure;
use anyhow::{Context, Result};
use candle_core::{Device, Tensor};
use std::sync::Arc;
use ulysses::comm::{LaunchOptions, ProcessGroup, ProcessGroupExt, ReduceOp};
use ulysses::kernels::Workspace;
use ulysses::kernels::attention::grouped_heads;
use ulysses::sequence_parallel::{AttentionShape, Exchange, ExchangePlan, SeqSharded};
use ulysses::tensor::{TensorOptions, from_slice, to_vec};
use ulysses::trainer::job::{DevicePlacement, JobRanks};

/// More elements than one block of a reduction, and not a multiple of any block size.
const ELEMS: usize = 5001;

/// Tests each collective.
pub(super) fn check(
    section: &'static str,
    placement: DevicePlacement,
    ranks: usize,
    options: &LaunchOptions,
    mib: u16,
) -> Vec<Finding> {
    let outcomes = placement.launch(ranks, options, |rank, device| check_all(&rank.group, &device));
    let checked = match outcomes {
        Ok(checked) => checked,
        Err(error) => return vec![Finding::failed(section, "all", error)],
    };
    let mut all =
        BenchRanks { on: &mut JobRanks::threads(placement), count: ranks, options: options.clone() };
    let rates = match collectives(&mut all, usize::from(mib) << 18, REPEATS) {
        Ok(figures) => figures,
        Err(Failure::Run(error) | Failure::Usage(error)) => {
            return vec![Finding::failed(section, "rates", error)];
        }
        Err(Failure::Stopped { .. } | Failure::Ended { .. }) => Vec::new(),
    };
    let finding = |(index, Checked { name, .. }): (usize, &Checked)| {
        let fault = |(rank, checked): (usize, &Vec<Checked>)| {
            Some(format!("rank {rank}: {}", checked[index].fault.as_ref()?))
        };
        let fault = checked.iter().enumerate().find_map(fault);
        match (fault, rates.iter().find(|figure| figure.name == *name).map(Figure::rate)) {
            (Some(fault), _) => Finding::new(section, *name, State::Failed, fault),
            (None, None) => Finding::ok(section, *name, "correct"),
            (None, Some(rate)) => {
                Finding::ok(section, *name, format!("correct, busbw {rate:.2} GB/s")).with_value(rate)
            }
        }
    };
    checked.first().map_or_else(Vec::new, |first| first.iter().enumerate().map(finding).collect())
}

/// A tested collective.
struct Checked {
    name: &'static str,
    /// The first wrong element, if any.
    fault: Option<String>,
}

/// Compares the result of each collective with the expected one. Wrong data does not end the test early, so that all
/// ranks make the same calls.
fn check_all(group: &Arc<dyn ProcessGroup>, device: &Device) -> Result<Vec<Checked>> {
    let tensor = |values: Vec<f32>| from_slice(&values, device);
    let zeros = |len: usize| tensor(vec![0.0; len]);
    let (me, n) = (group.rank(), group.world_size());
    // The value encodes rank and index, exactly in f32.
    let value = |rank: usize, index: usize| (10_000 * rank + index) as f32;
    let of = |rank: usize, count: usize| (0..count).map(|index| value(rank, index)).collect::<Vec<_>>();
    let sum = |index: usize| (0..n).map(|rank| value(rank, index)).sum::<f32>();
    let mut all = Vec::new();
    let mut checked = |name, fault| all.push(Checked { name, fault });

    let reduced = tensor(of(me, ELEMS))?;
    group.all_reduce(&reduced, ReduceOp::Sum)?;
    checked("all_reduce", differs(&reduced, (0..ELEMS).map(sum))?);

    let (whole, part) = (tensor(of(me, 101 * n))?, zeros(101)?);
    group.reduce_scatter(&whole, &part, ReduceOp::Sum)?;
    checked("reduce_scatter", differs(&part, (101 * me..101 * (me + 1)).map(sum))?);

    let gathered = zeros(ELEMS * n)?;
    group.all_gather(&tensor(of(me, ELEMS))?, &gathered)?;
    checked("all_gather", differs(&gathered, (0..n).flat_map(|rank| of(rank, ELEMS)))?);

    // Rank i sends 7i + j elements to rank j; rank 0 sends none to itself.
    let count = |from: usize, to: usize| 7 * from + to;
    let sent = (0..n).flat_map(|to| (0..count(me, to)).map(move |index| value(me, 100 * to + index)));
    let (to, from): (Vec<_>, Vec<_>) = (0..n).map(|peer| (count(me, peer), count(peer, me))).unzip();
    let received = zeros(from.iter().sum())?;
    group.all_to_all(&tensor(sent.collect())?, &received, &to, &from)?;
    let expected =
        (0..n).flat_map(|peer| (0..count(peer, me)).map(move |index| value(peer, 100 * me + index)));
    checked("all_to_all", differs(&received, expected)?);

    checked("Ulysses exchange", check_exchange(group, device)?);

    let sent = tensor(of(me, ELEMS))?;
    group.broadcast(&sent, n - 1)?;
    checked("broadcast", differs(&sent, of(n - 1, ELEMS))?);

    let (mine, received) = (tensor(of(me, ELEMS))?, zeros(ELEMS)?);
    let pending = [group.start_send(&mine, (me + 1) % n)?, group.start_recv(&received, (me + n - 1) % n)?];
    pending.into_iter().try_for_each(|pending| pending.wait())?;
    checked("send, recv", differs(&received, of((me + n - 1) % n, ELEMS))?);

    let half = group.split("half", Some(me % 2), me)?.context("every rank has a color")?;
    let ranks = half.all_gather_values(&[me as f32])?;
    checked("split", differs(&tensor(ranks)?, (me % 2..n).step_by(2).map(|rank| rank as f32))?);

    group.barrier()?;
    checked("barrier", None);
    Ok(all)
}

/// Tests the exchange between tokens and heads, both with uneven shards.
fn check_exchange(group: &Arc<dyn ProcessGroup>, device: &Device) -> Result<Option<String>> {
    let (me, n) = (group.rank(), group.world_size());
    let (seq_len, heads, head_dim) = (5 * n + 1, 2 * n + 1, 2);
    let shape = AttentionShape {
        batch: 1,
        seq_len,
        num_heads: heads,
        num_kv_heads: heads,
        head_dim,
        value_head_dim: head_dim,
    };
    let plan = ExchangePlan::new(shape, &grouped_heads(heads, heads), n, me)?;
    let element = |token: usize, head: usize| (1000 * token + head) as f32;
    let block = |tokens: std::ops::Range<usize>, heads: std::ops::Range<usize>| -> Vec<f32> {
        let of_token = |token| heads.clone().flat_map(move |head| vec![element(token, head); head_dim]);
        tokens.flat_map(of_token).collect()
    };
    let (own_tokens, own_heads) = (plan.seq_ranges()[me].clone(), plan.q_head_ranges()[me].clone());
    let local = block(own_tokens.clone(), 0..heads);
    let qkv = || from_slice(&local, device)?.reshape((1, own_tokens.len(), heads, head_dim));
    let options = TensorOptions { device: device.clone(), ..TensorOptions::default() };
    let (exchange, workspace) = (Exchange::new(plan, group.clone()), Workspace::with_options(options));
    let exchanged = exchange.qkv_seq_to_head(&SeqSharded([qkv()?, qkv()?, qkv()?]), &workspace)?.wait()?;
    let expected = block(0..seq_len, own_heads);
    let fault = exchanged.0.iter().map(|tensor| differs(&tensor.flatten_all()?, expected.clone()));
    let fault = fault.collect::<Result<Vec<_>>>()?.into_iter().flatten().next();
    let back = exchange.qkv_head_to_seq(&exchanged, &workspace)?.wait()?;
    let back = back.0.iter().map(|tensor| differs(&tensor.flatten_all()?, local.clone()));
    Ok(fault.or(back.collect::<Result<Vec<_>>>()?.into_iter().flatten().next()))
}

/// Describes the first wrong element.
fn differs(tensor: &Tensor, expected: impl IntoIterator<Item = f32>) -> Result<Option<String>> {
    let (got, expected) = (to_vec::<f32>(tensor)?, expected.into_iter().collect::<Vec<_>>());
    if got.len() != expected.len() {
        return Ok(Some(format!("got {} elements, expected {}", got.len(), expected.len())));
    }
    let wrong = got.iter().zip(&expected).position(|(got, expected)| got != expected);
    Ok(wrong.map(|at| format!("element {at} is {}, expected {}", got[at], expected[at])))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ulysses::comm::fake::FakeGroup;
    use ulysses::comm::launch;

    #[test]
    fn correct_data_passes_on_any_number_of_ranks() {
        for ranks in [2, 3, 5] {
            let checked =
                launch(ranks, &LaunchOptions::default(), |rank| check_all(&rank.group, &Device::Cpu))
                    .unwrap();
            for Checked { name, fault } in checked.iter().flatten() {
                assert_eq!(*fault, None, "{name} on {ranks} ranks");
            }
            assert!(checked.iter().all(|of_rank| of_rank.len() == 9));
        }
    }

    #[test]
    fn wrong_data_is_detected() {
        // A group that moves nothing.
        let group: Arc<dyn ProcessGroup> = Arc::new(FakeGroup::new("fake", vec![0, 1, 2], 1).unwrap());
        let fault = check_exchange(&group, &Device::Cpu).unwrap().expect("zeros are not the peers' tokens");
        assert!(fault.starts_with("element 0 is 0"), "{fault}");
        let [gathered, own] =
            [&[0.0_f32; 3][..], &[5.0]].map(|values| from_slice(values, &Device::Cpu).unwrap());
        group.all_gather(&own, &gathered).unwrap();
        let fault = differs(&gathered, [4.0, 5.0, 6.0]).unwrap();
        assert_eq!(fault.as_deref(), Some("element 0 is 0, expected 4"));
        assert_eq!(differs(&gathered, [5.0]).unwrap().as_deref(), Some("got 3 elements, expected 1"));
    }
}
