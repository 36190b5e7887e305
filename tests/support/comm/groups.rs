//! split.

use super::Backend;
use ulysses::comm::{ProcessGroupExt, ReduceOp};

pub(crate) fn split_orders_members_by_key_then_rank(backend: &dyn Backend) {
    backend.run(4, |group| {
        // Even and odd ranks; keys reverse the even group, and tie in the odd one.
        let rank = group.rank();
        let key = if rank % 2 == 0 { 10 - rank } else { 0 };
        let half = group.split("half", Some(rank % 2), key)?.unwrap();
        assert_eq!(half.name(), "half");
        assert_eq!(half.global_ranks(), if rank % 2 == 0 { [2, 0] } else { [1, 3] });
        assert_eq!(half.global_ranks()[half.rank()], rank);
        let gathered = half.all_gather_values(&[rank as u32])?;
        assert_eq!(gathered, if rank % 2 == 0 { [2, 0] } else { [1, 3] });
        Ok(())
    });
}

pub(crate) fn ranks_without_a_color_join_no_group(backend: &dyn Backend) {
    backend.run(3, |group| {
        let color = (group.rank() != 1).then_some(7);
        let outer = group.split("outer", color, group.rank())?;
        assert_eq!(outer.as_ref().map(|outer| outer.global_ranks().to_vec()), color.map(|_| vec![0, 2]));
        if let Some(outer) = outer {
            assert_eq!(outer.all_reduce_values(&[group.rank() as f32 + 1.0], ReduceOp::Sum)?, [4.0]);
        }
        group.barrier()
    });
}

pub(crate) fn groups_can_be_split_again_and_work_side_by_side(backend: &dyn Backend) {
    backend.run(8, |group| {
        let rank = group.rank();
        let node = group.split("node", Some(rank / 4), rank)?.unwrap();
        let pair = node.split("pair", Some(node.rank() / 2), node.rank())?.unwrap();
        assert_eq!(pair.global_ranks(), [rank / 2 * 2, rank / 2 * 2 + 1]);
        for round in 0..10 {
            // Pairs may run ahead of nodes, and nodes ahead of the world.
            let sums =
                [&pair, &node, &group].map(|g| g.all_reduce_values(&[(rank + round) as i64], ReduceOp::Sum));
            let sum = |ranks: std::ops::Range<usize>| ranks.map(|r| (r + round) as i64).sum::<i64>();
            let (pair_start, node_start) = (rank / 2 * 2, rank / 4 * 4);
            let expected = [sum(pair_start..pair_start + 2), sum(node_start..node_start + 4), sum(0..8)];
            assert_eq!(sums.map(|sum| sum.unwrap()[0]), expected);
        }
        Ok(())
    });
}

pub(crate) fn a_group_of_one_moves_and_counts_nothing(backend: &dyn Backend) {
    backend.run(2, |group| {
        let solo = group.split("solo", Some(group.rank()), 0)?.unwrap();
        assert_eq!((solo.world_size(), solo.rank(), solo.global_ranks()), (1, 0, &[group.rank()][..]));
        assert_eq!(solo.all_reduce_values(&[3_u8; 5000], ReduceOp::Sum)?, [3; 5000]);
        assert_eq!(solo.all_gather_values(&[4_i64])?, [4]);
        assert_eq!(solo.all_gather_varied(&[5.0_f32, 6.0])?, [[5.0, 6.0]]);
        solo.barrier()?;
        assert_eq!(solo.stats().ops.len(), 0);
        Ok(())
    });
}
