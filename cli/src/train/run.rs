//! A run that all processes can start.

use super::planned_memory::PlannedMemory;
use serde_json::Value;
use std::fmt::{self, Display, Formatter};
use std::path::PathBuf;
use ulysses::config::{MeshConfig, ParameterGroup};
use ulysses::mesh::SeqSharding;
use ulysses::model::LlamaConfig;
use ulysses::monitor::{Tracer, counted};
use ulysses::trainer::job::PreparedJob;

/// The state that all ranks share.
pub(super) struct Run {
    pub(super) job: PreparedJob,
    /// The memory plan, if the model can be planned.
    pub(super) planned: Option<PlannedMemory>,
    pub(super) output: PathBuf,
    pub(super) tracer: Option<Tracer>,
    /// The content of `run.json` before the run starts.
    pub(super) record: Value,
}

impl Display for Run {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let PreparedJob { config, model, data, launch, .. } = &self.job;
        let (llama, data): (&LlamaConfig, _) = (&model.config, &data.phases()[0].data);
        let MeshConfig { dp_size, sp_size } = config.mesh;
        let partitions = config.zero_world_size();
        let replicas = config.zero_shard_size().map_or_else(String::new, |size| {
            format!(" ({} of {})", counted(dp_size / size, "replica"), counted(partitions, "partition"))
        });
        let is_frozen = |name: &str| ParameterGroup::is_frozen(&config.ulysses.parameter_groups, name);
        let frozen = match llama.num_parameters_where(is_frozen) {
            0 => String::new(),
            frozen => format!(" ({:.2} M frozen)", frozen as f64 / 1e6),
        };
        let ring = match config.seq_sharding() {
            SeqSharding { ring_size: 1, .. } => String::new(),
            SeqSharding { ring_size, ulysses_size } => {
                format!(" (ring {ring_size} × ulysses {ulysses_size})")
            }
        };
        write!(
            f,
            "mesh dp {dp_size} × sp {sp_size}{ring}, ZeRO stage {}{replicas}, {:.2} M parameters{frozen}, {} of {} tokens, \
             {} per rank",
            config.zero_axes().with_stage(config.zero.stage),
            llama.num_parameters() as f64 / 1e6,
            counted(data.num_sequences(), "sequence"),
            data.seq_len(),
            counted(launch.threads_per_rank, "thread"),
        )
    }
}
