//! The `ulysses` section: what DeepSpeed leaves to the training script.

use super::data::{DataSource, Packing, SeqLenChange, ValidationConfig};
use super::mesh_rules::MeshRule;
use super::parameter_groups::ParameterGroup;
use crate::config::define::words::{choice, count, flag, integer, section, text};
use crate::config::define::{choices, keys};
use crate::config::reader::Section;
use std::num::NonZero;
use std::time::Duration;
use ulysses_kernels::device::DeviceKind;

keys! {
    /// What DeepSpeed leaves to the training script.
    #[derive(Clone, Debug, PartialEq)]
    pub struct UlyssesConfig {
        /// A preset, or a directory in Hugging Face's layout.
        pub model: Option<String> = text(),
        /// A file of text, JSONL or tokens, a directory, or a pattern; or several of them, one after the other or, as
        /// objects with weights, mixed.
        pub data: Vec<DataSource> = section(),
        /// The field of a JSON line, or column of a Parquet file, that holds the text.
        pub text_field: String = text().text("text"),
        /// The token between documents in token files that do not say where these end (nanoGPT's and llm.c's); without
        /// it such a file is one document.
        pub end_of_document: Option<u32> = integer(0, u32::MAX as u64 - 1),
        /// A Hugging Face `tokenizer.json`.
        pub tokenizer: Option<String> = text().derived("the one in the model's directory, or bytes"),
        /// The directory for metrics and the resolved config.
        pub output: Option<String> = text().derived("`runs/NAME-N`"),
        /// Tokens per row, over all sequence-parallel ranks.
        pub seq_len: Option<usize> = count(),
        /// Optimizer steps to train.
        pub steps: Option<u64> = count(),
        /// Times that the data is gone through, instead of `steps`; what the last step lacks is masked.
        pub epochs: Option<u64> = count(),
        /// Tokens per row later on: `[[step, seq_len], …]`, each from the step after the given one; the data is packed
        /// anew.
        pub seq_len_schedule: Vec<SeqLenChange> = section(),
        /// Documents in rows. `greedy`: those that fit are not cut; `cut`: end to end, cut at row ends; `concat`: the same,
        /// attending across documents.
        pub packing: Packing = choice().text("greedy"),
        /// Held-out data, whose loss is computed as training goes on.
        pub validation: Option<ValidationConfig> = section(),
        /// CPU threads of one rank.
        pub threads_per_rank: Option<usize> = count().derived("a fair share of the cores"),
        /// What carries the communication.
        pub backend: Backend =
            choice().derived("what connects the processes that a launcher has started, else `thread`"),
        /// Meshes by machine, `[[pattern, mesh], …]`: the first pattern that matches all of `--mesh-selector`, or without
        /// it of `HOST/cpu` or `HOST/` and the GPU's name, gives the mesh, in the place of the sizes above; null leaves it
        /// to the number of ranks. `--mesh` comes before any rule.
        pub mesh_rules: Vec<MeshRule> = section(),
        /// How ranks watch over their communication.
        pub comm: CommConfig = section(),
        /// Recomputes activations in the backward pass.
        pub activation_checkpointing: bool = flag(),
        /// Of so many layers one is recomputed, the others keep their state.
        pub activation_checkpointing_interval: usize = count().integer(1),
        /// Tokens that norms, projections and the MLP work on at a time.
        pub tile_tokens: Option<NonZero<usize>> = count().derived("all"),
        /// Parts in which the heads pass through attention and its exchange; at most the KV heads.
        pub head_chunks: usize = count().integer(1),
        /// The directory of files for what is offloaded.
        pub offload_path: Option<String> = text().derived("the system's for temporary files"),
        /// Tokens whose logits exist at a time.
        pub loss_tile_tokens: usize = count().integer(1024),
        /// Parameters with settings of their own; each is in the first group that it matches.
        pub parameter_groups: Vec<ParameterGroup> = section(),
    }
}

keys! {
    /// How ranks watch over their communication.
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub struct CommConfig {
        /// Compares the calls of all ranks before data moves, and names the one that differs. Threads always do; between
        /// processes it costs a message per pair of ranks.
        pub check: CommCheck = choice().text("off"),
        /// How long a rank waits for the others in an operation before the run fails.
        pub timeout_seconds: u64 = count().integer(300),
    }
}

choices! {
    /// Whether the calls of all ranks are compared where that costs messages.
    pub enum CommCheck {
        /// They are not.
        #[default]
        Off = "off",
        /// They are.
        On = "on",
    }
}

choices! {
    /// What carries the communication between ranks.
    #[non_exhaustive]
    pub enum Backend {
        /// Ranks are threads of one process.
        #[default]
        Thread = "thread",
        /// The same, each with a GPU of its own and NCCL between them.
        Nccl = "nccl",
        /// Ranks are processes of an MPI job.
        Mpi = "mpi",
    }
}

impl Backend {
    /// What its ranks compute on, as long as nobody says otherwise.
    pub fn device(self) -> DeviceKind {
        if self == Self::Nccl { DeviceKind::Cuda } else { DeviceKind::Cpu }
    }
}

impl CommConfig {
    /// Whether the calls of all ranks are compared where that costs messages.
    pub fn is_checked(&self) -> bool {
        self.check == CommCheck::On
    }

    /// How long a rank waits for the others.
    pub fn timeout(&self) -> Duration {
        Duration::from_secs(self.timeout_seconds)
    }
}

impl UlyssesConfig {
    pub(crate) fn check(&self, section: &Section<'_>, optimizer_lr: f64) {
        if self.steps.is_some() && self.epochs.is_some() {
            section.contradiction("epochs", "no such key beside `steps`: give one of them");
        }
        if self.activation_checkpointing_interval > 1 && !self.activation_checkpointing {
            let expected = "1, unless `ulysses.activation_checkpointing` is true: no layer is recomputed";
            section.contradiction("activation_checkpointing_interval", expected);
        }
        ValidationConfig::check(section);
        ParameterGroup::check_all(section, optimizer_lr);
    }
}
