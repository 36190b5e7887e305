//! What a ZeRO stage without partitions is to the user.

use super::Config;

impl Config {
    /// Says that a ZeRO stage partitions nothing, where it has a single partition.
    pub fn zero_partition_note(&self) -> Option<String> {
        let stage = u8::from(self.zero_stage);
        if stage == 0 || self.zero_world_size() != 1 {
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
