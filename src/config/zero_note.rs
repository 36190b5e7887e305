//! The note on a ZeRO stage with a single partition.

use super::Config;

impl Config {
    /// Says that a ZeRO stage partitions nothing, where it has a single partition; none in a world of one rank.
    pub fn zero_partition_note(&self) -> Option<String> {
        let stage = u8::from(self.zero_stage);
        if stage == 0 || self.zero_world_size() != 1 || self.world_size() == 1 {
            return None;
        }
        let (why, remedy) = match self.dp_size {
            1 => ("dp_size is 1", "a mesh with dp_size > 1"),
            _ => ("its shard size is 1", "a shard size > 1 (`zero_optimization.mics_shard_size`)"),
        };
        Some(format!(
            "ZeRO stage {stage} has 1 partition, because {why}: every rank stores the whole model state of its sp group; \
             {remedy} partitions it"
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn note(stage: u8, dp: usize, sp: usize, shard_size: i64) -> Option<String> {
        let text = format!(
            r#"{{"train_batch_size": {dp}, "mesh_param": [{dp}, {sp}],
                "zero_optimization": {{"stage": {stage}, "mics_shard_size": {shard_size}}}}}"#
        );
        Config::from_json_str(&text, "c.json").unwrap().zero_partition_note()
    }

    #[test]
    fn a_stage_with_one_partition_says_so_and_no_other() {
        assert!(note(3, 1, 4, -1).unwrap().starts_with("ZeRO stage 3 has 1 partition, because dp_size is 1"));
        assert!(note(1, 2, 2, 1).unwrap().contains("because its shard size is 1"));
        for (stage, dp, sp, shard_size) in [(0, 1, 4, -1), (2, 2, 4, -1), (3, 1, 1, -1), (3, 4, 1, 2)] {
            assert_eq!(note(stage, dp, sp, shard_size), None, "stage {stage} on {dp} × {sp}");
        }
    }
}
