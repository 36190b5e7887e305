//! The tiled kernels on tiles so small that every loop of the host code runs more than once.

use super::*;
use crate::arg_check::ArgCheck;
use crate::attention::cuda::{self, Tiling};
use crate::attention::operands::Problem;
use crate::device::Target;

/// Blocks of a few queries, tiles of at most 48 keys, and sums for one tile's keys.
pub(super) const SMALL: Tiling = Tiling { rows: 64, keys: 48, heads: 4, sums: 0 };

impl Case {
    pub(super) fn run_in_tiles(&self, tiling: &Tiling) -> Result<Outputs> {
        let problem = Problem::new(ArgCheck::new("test"), &self.operands())?;
        let Ok(Target::Kernels(launcher)) = Target::of(&testing::device()) else { panic!("a GPU") };
        self.run_with(
            |o, lse| cuda::forward(&launcher, &problem, o, lse, tiling).map_err(AttentionError::other),
            |upstream, gradients| {
                cuda::backward(&launcher, &problem, upstream, gradients, tiling)
                    .map_err(AttentionError::other)
            },
        )
    }

    fn check_in_tiles(&self, name: &str) -> Result<()> {
        // One block of keys after the other, then two at a time.
        for sums in [0, 4 * 48 * self.head_dim] {
            let tiling = Tiling { sums, ..SMALL };
            self.check_outputs(&self.run_in_tiles(&tiling)?, 2e-6, &format!("{name}, room for {sums}"))?;
        }
        Ok(())
    }
}

#[test]
fn heads_and_dimensions_match_the_reference_in_small_tiles() -> Result<()> {
    on_a_gpu(|| {
        causal(2, 150, &[0, 1, 2, 3, 4], 5, 8)?.check_in_tiles("MHA")?;
        causal(1, 150, &[0, 0, 0, 1, 1, 1], 2, 12)?.check_in_tiles("GQA")?;
        causal(1, 150, &[0; 9], 1, 4)?.check_in_tiles("MQA with more heads than a chunk")?;
        causal(2, 100, &[1, 0, 1, 3, 1], 4, 5)?.check_in_tiles("unordered, uneven, one unused")?;
        causal(1, 100, &[0; 70], 1, 2)?.check_in_tiles("more heads than rows of a tile")
    })
}

#[test]
fn visible_keys_match_the_reference_in_small_tiles() -> Result<()> {
    on_a_gpu(|| {
        let rows: [&[u32]; 2] = [&[0, 1, 2, 64, 65, 190, 300], &[0, 150, 150, 299, 300]];
        for window in [None, Some(1), Some(49), Some(130)] {
            let case = Case::new(packed(&rows, &[0, 0, 1], window)?, 2, 8)?;
            case.check_in_tiles(&format!("documents, window {window:?}"))?;
        }
        Case::new(shards((0..90).chain(610..700), (90..180).chain(520..610))?, 2, 8)?
            .check_in_tiles("zigzag")?;
        Case::new(shards((0..200).map(|i| 3 * i), (0..340).map(|i| 2 * i))?, 2, 8)?.check_in_tiles("striped")
    })
}

#[test]
fn the_same_call_gives_the_same_bits() -> Result<()> {
    on_a_gpu(|| {
        let case = Case::new(packed(&[&[0, 37, 300]], &[0, 0, 1], None)?, 2, 8)?;
        assert_eq!(bits(&case.run_in_tiles(&SMALL)?), bits(&case.run_in_tiles(&SMALL)?));
        Ok(())
    })
}

#[test]
fn other_kernels_of_a_layout_use_its_tables_again() -> Result<()> {
    on_a_gpu(|| {
        let layout = AttentionLayout::causal(1, 20, vec![1, 0, 1])?;
        let (ranges, heads) =
            (layout.ranges_on(&testing::device())?, layout.heads_by_kv_head_on(&testing::device())?);
        assert_eq!(ranges.to_vec1::<u32>()?[..6], [0, 1, 0, 2, 0, 3]);
        assert_eq!(heads.to_vec1::<u32>()?, [1, 0, 2]);
        let others = layout.with_heads([0, 0].as_slice());
        assert_eq!(others.heads_by_kv_head_on(&testing::device())?.to_vec1::<u32>()?, [0, 1]);
        assert_eq!(others.ranges_on(&testing::device())?.id(), ranges.id());
        Ok(())
    })
}
