//! Rules, refusals and printing, on a mesh of 2 × 2 ranks.

use super::*;

/// Runs on a mesh of 2 × 2 ranks.
fn on_four(run: impl Fn(&Arc<MeshGroups>) -> Outcome<()> + Sync) {
    let case = Case {
        shape: vec![],
        sizes: vec![2, 2],
        first: vec![],
        second: vec![],
        repeated: [false; 3],
        lacks: 0,
    };
    case.run(run);
}

#[test]
fn rules_compute_on_shards_without_communication() {
    on_four(|groups| {
        let make = |shape: &[usize], placements: [Placement; 2]| sharded(groups, &whole(shape), &placements);
        let before = traffic(groups)?[0];
        let x = make(&[5, 3], [Shard(0), Shard(1)])?;
        let product = x.matmul(&make(&[3, 4], [Replicate, Shard(0)])?)?;
        assert_eq!(product.placements(), [Shard(0), Partial]);
        assert_eq!(product.add(&product)?.scale(0.5)?.placements(), [Shard(0), Partial]);
        let columns = make(&[5, 3], [Partial, Replicate])?.matmul(&make(&[3, 4], [Replicate, Shard(1)])?)?;
        assert_eq!(columns.placements(), [Partial, Shard(1)]);
        let bias = make(&[4], [Replicate, Shard(0)])?;
        assert_eq!(columns.mul(&bias)?.placements(), [Partial, Shard(1)]);
        assert_eq!(columns.sum(0)?.placements(), [Partial, Shard(0)]);
        assert_eq!(columns.sum(1)?.placements(), [Partial, Partial]);
        assert_eq!(x.transpose(0, 1)?.placements(), [Shard(1), Shard(0)]);
        assert_eq!(make(&[4, 3], [Shard(0), Replicate])?.reshape(&[12])?.placements(), [Shard(0), Replicate]);
        assert_eq!(
            make(&[2, 3, 4], [Shard(0), Shard(2)])?.reshape(&[6, 4])?.placements(),
            [Shard(0), Shard(1)]
        );
        assert_eq!(traffic(groups)?[0], before);
        Ok(())
    });
}

#[test]
fn refusals_name_placements_axis_and_what_would_work() {
    on_four(|groups| {
        let make = |shape: &[usize], placements: [Placement; 2]| sharded(groups, &whole(shape), &placements);
        let message = |outcome: Outcome<ShardedTensor>| outcome.unwrap_err().to_string();
        let (sum, whole) = (make(&[4, 3], [Partial, Shard(0)])?, make(&[4, 3], [Replicate, Shard(0)])?);
        assert_eq!(
            message(sum.add(&whole)),
            "`a.add(&b)` has no rule for Partial and Replicate along axis `a`; it works with \
             `b.redistribute(&[Partial, Shard(0)])?`"
        );
        assert_eq!(
            message(sum.map(Tensor::relu)),
            "`a.map(f)` has no rule for Partial along axis `a`; it works with \
             `a.redistribute(&[Replicate, Shard(0)])?`"
        );
        assert_eq!(
            message(make(&[3, 3], [Shard(0), Replicate])?.reshape(&[9])),
            "`a.reshape(shape)` has no rule for Shard(0) along axis `a`; it works with \
             `a.redistribute(&[Replicate, Replicate])?`"
        );
        assert_eq!(
            message(whole.narrow(0, 1, 2)),
            "`a.narrow(dim, start, len)` has no rule for Shard(0) along axis `b`; it works with \
             `a.redistribute(&[Replicate, Replicate])?`"
        );
        assert!(message(whole.narrow(1, 2, 2)).ends_with("at most 3 items in dimension 1, got 2 from 2"));
        assert!(message(whole.unsqueeze(3)).ends_with("a dimension up to 2, got 3"));
        assert!(message(whole.squeeze(1)).ends_with("dimension 1 of length 1"));
        let shapes = message(whole.matmul(&whole));
        assert_eq!(shapes, "`a.matmul(&b)` of shape [4, 3] and [4, 3]: expected [m, k] and [k, n]");
        assert_eq!(
            message(whole.sum(2)),
            "`a.sum(dim)` of shape [4, 3]: expected dimensions below 2, got [2]"
        );
        assert_eq!(
            message(whole.redistribute(&[Replicate])),
            "the placements &[Replicate] on the mesh a=2,b=2: expected one per axis"
        );
        assert!(message(whole.map(|x| x.sum(0))).contains("got [3]"));
        let integers = make(&[4], [Partial, Replicate])?.redistribute(&[Replicate; 2])?;
        let integers = integers.map(|x| x.to_dtype(DType::I64))?;
        assert!(message(integers.mean_all()).contains("I64"));
        Ok(())
    });
}

#[test]
fn local_tensors_that_are_not_of_one_tensor_are_refused_on_all_ranks() {
    on_four(|groups| {
        let rank = groups.world().rank();
        let take = |len: usize, shape| {
            let local = whole(&[len, 2]);
            ShardedTensor::from_local(groups, &local, &[Shard(0), Replicate], shape)
                .map_err(|error| error.to_string())
        };
        // Rows 0..3 and 3..5, on two ranks each.
        assert_eq!(take(3 - rank / 2, None).unwrap().shape(), [5, 2]);
        assert_eq!(take(3 - rank / 2, Some(&[5, 2])).unwrap().shape(), [5, 2]);
        let uneven = take(if rank < 2 { 2 } else { 3 }, None).unwrap_err();
        let expected = "the rank at [0, 0] needs a tensor of f64 [3, 2]; it has f64 [2, 2]";
        assert!(uneven.contains(expected), "{uneven}");
        assert!(take(3, Some(&[5, 2])).is_err() == (rank >= 2));
        let other =
            ShardedTensor::distribute(groups, &whole(&[2 + rank / 3, 2]), &[Replicate; 2]).unwrap_err();
        let expected = "the rank at [1, 1] needs a tensor of f64 [2, 2]; it has f64 [3, 2]";
        assert!(other.to_string().contains(expected), "{other}");
        Ok(())
    });
}

#[test]
fn a_tensor_prints_its_layout_slices_and_elements() {
    on_four(|groups| {
        let tensor = sharded(groups, &whole(&[3, 2]), &[Shard(0), Replicate])?;
        let rows = if groups.world().rank() < 2 { "0..2" } else { "2..3" };
        let text = tensor.to_string();
        assert!(text.starts_with("ShardedTensor [3, 2] a=2: Shard(0) b=2: Replicate, f64;"), "{text}");
        assert!(text.contains(&format!("has [{rows}, 0..2]:\n[[")), "{text}");
        assert!(
            ShardedTensor::zeros(groups, &[3, 2], DType::F64, &[Shard(0), Replicate])?.local().dims()[1] == 2
        );
        Ok(())
    });
}
