//! The `ulysses` section: settings that DeepSpeed leaves to the training script.

use super::data::{
    DataSource, LongConversations, OnBadLine, Packing, SeqLenChange, TokenDtype, ValidationConfig,
};
use super::mesh_rules::MeshRule;
use super::parameter_groups::ParameterGroup;
use super::pipeline::PipelineConfig;
use super::zero::{AXES, PartitionAxes};
use crate::config_file::define::words::{choice, count, flag, integer, key, section, text};
use crate::config_file::define::{choices, keys};
use crate::config_file::reader::Section;
use crate::config_file::vocabulary::Value;
use crate::mesh::MeshSpec;
use std::num::NonZero;
use std::time::Duration;
use ulysses_chat::ChatDate;

keys! {
    /// Settings that DeepSpeed leaves to the training script.
    #[derive(Clone, Debug, PartialEq)]
    pub struct UlyssesConfig {
        /// A preset's name, or a model directory in Hugging Face's layout.
        pub model: Option<String> = text(),
        /// A text, JSONL or token file, a directory, or a glob pattern; or an array of them: concatenated or, as objects with
        /// weights, mixed.
        pub data: Vec<DataSource> = section(),
        /// The field of a JSON line, or the column of a Parquet file, that contains the text.
        pub text_field: String = text().text("text"),
        /// The token that separates documents in token files without document bounds (nanoGPT's and llm.c's); if absent,
        /// such a file is one document.
        pub end_of_document: Option<u32> = integer(0, u32::MAX as u64 - 1),
        /// The type of tokens in `.bin` files without header (nanoGPT's).
        pub token_dtype: Option<TokenDtype> =
            choice().derived("`uint16`; required with a vocabulary of more than 65,536 ids"),
        /// Appends the tokenizer's `eos_token` to each document of text that does not end with it, as Megatron's `--append-eod` and
        /// TRL do. Conversations, completions and token files have their own ends.
        pub append_eod: bool = flag().boolean(true),
        /// Treatment of an invalid line of JSONL, row of a table or element of a JSON array. `error`: the run ends; `skip`: it is
        /// skipped and counted.
        pub on_bad_line: OnBadLine = choice().text("error"),
        /// The path of a Hugging Face `tokenizer.json`.
        pub tokenizer: Option<String> = text().derived("the one in the model's directory, or bytes"),
        /// The date that chat templates print with `strftime_now`, as `YYYY-MM-DD`. Data must not depend on the day.
        pub chat_date: ChatDate = text().text("2024-07-26"),
        /// The output directory: metrics, resolved config and checkpoints.
        pub output: Option<String> = text().derived("`runs/NAME-N`"),
        /// Tokens per sequence, over all sequence-parallel ranks.
        pub seq_len: Option<usize> = count(),
        /// Number of optimizer steps.
        pub steps: Option<u64> = count(),
        /// Number of epochs, instead of `steps`; the last step is padded with masked sequences.
        pub epochs: Option<u64> = count(),
        /// Later values of `seq_len`: `[[step, seq_len], …]`, each effective after `step` steps; the data is repacked.
        pub seq_len_schedule: Vec<SeqLenChange> = section(),
        /// Packing of documents into sequences. `greedy`: documents that fit are not cut; `cut`: concatenated and cut every
        /// `seq_len` tokens; `concat`: as `cut`, with attention across documents.
        pub packing: Packing = choice().text("greedy"),
        /// Conversations and completions of more than `seq_len` tokens. `truncate`: cut at the end; `drop`: left out; `error`: the
        /// run does not start; `split`: the rest is trained on as a document of its own, which does not see its prompt.
        pub long_conversations: LongConversations = choice().text("truncate"),
        /// Held-out data, evaluated during training.
        pub validation: Option<ValidationConfig> = section(),
        /// Mesh axes over which ZeRO partitions: `["dp"]`, or `["dp", "sp"]` for all ranks, which stores the model state once
        /// instead of sp times.
        pub zero_partition_axes: PartitionAxes = key(Value::Names(&AXES)).derived(
            "`[\"dp\"]`; `[\"dp\", \"sp\"]`, as in DeepSpeed, in a file with `sequence_parallel_size` but no other mesh or shard size",
        ),
        /// Number of Ulysses groups that form a ring; must divide sp. In attention, tokens are sharded over the ring, and heads
        /// over the sp / `ring_size` ranks of each group; keys and values travel around the ring. For more sequence-parallel
        /// ranks than heads, and between nodes. `auto`: the largest such groups that divide the model's heads evenly and fit a node.
        pub ring_size: usize = count().integer(1),
        /// Flexible sequence parallelism: each document of a step is computed by as few sp ranks as its tokens and FLOPs need, short
        /// ones on one rank without an exchange, to balance compute over all ranks. A step consumes the same
        /// sequences and has the same loss. The number of micro steps follows from the documents; the limit of tokens
        /// per rank and micro step is unchanged. Evaluation is not changed.
        pub flexible_sp: bool = flag(),
        /// Linear attention, Mamba 2 and short convolutions compute each rank's tokens on that rank, for all heads, and pass on the
        /// states after them, instead of exchanging tokens for heads. The bytes do not depend on `seq_len`, but grow with sp; the recurrence is
        /// computed two to three times. Attention is not changed.
        pub state_passing: bool = flag(),
        /// Stages of pipeline parallelism and the order of their passes.
        pub pipeline: PipelineConfig = section(),
        /// CPU threads per rank.
        pub threads_per_rank: Option<usize> = integer(1, 4096).derived("a fair share of the cores"),
        /// The communication backend.
        pub backend: Backend = choice().derived("the launcher's backend if processes were launched, else `nccl` for several ranks on several GPUs, else `thread`"),
        /// The mesh: `{"intra": {…}, "inter": {…}}` gives the sizes of dp and sp within a node and between nodes (`ici` and `dcn`
        /// are synonyms; an absent size is 1, one size of each may be -1). A string is any notation of `--mesh`: `"2x4"`,
        /// `"dp=2,sp=2@0,2,1,3"` (the rank at each coordinate) or a preset. It must agree with other sizes.
        pub mesh: Option<MeshSpec> = key(Value::Mesh).derived("row-major ranks"),
        /// Meshes by machine, `[[pattern, mesh, keys], …]`: the first pattern that matches the whole of `--mesh-selector`
        /// (default: `HOST/cpu`, or `HOST/` and the GPU's name) replaces the mesh of the file; a null mesh follows from the number
        /// of ranks. The optional object `keys` overrides other keys of the file. `--mesh` overrides all rules.
        pub mesh_rules: Vec<MeshRule> = section(),
        /// Checks and timeouts of collectives.
        pub comm: CommConfig = section(),
        /// Recomputes activations in the backward pass.
        pub activation_checkpointing: bool = flag(),
        /// Recomputes one layer in this many; the others keep their activations.
        pub activation_checkpointing_interval: usize = count().integer(1),
        /// Saves the attention output of recomputed layers, so that attention and the exchange of its output are not computed
        /// again. Uses about as much memory as the inputs of these layers; results are bit-identical.
        pub save_attention_output: Option<bool> = key(Value::Boolean).derived(
            "true, except with `activation_checkpointing.cpu_checkpointing`, and where `ulysses train` (host memory) or \
             `ulysses plan --memory-gib` finds that it does not fit",
        ),
        /// Tile size, in tokens, of norms, projections and the MLP.
        pub tile_tokens: Option<NonZero<usize>> = count().derived("all"),
        /// Number of head chunks that attention and its exchange process in turn; at most the number of KV heads.
        pub head_chunks: usize = count().integer(1),
        /// The kernels of attention on a GPU. `fused`: scores stay in registers, for bf16 and fp16 and head dimensions of 64, 96
        /// and 128; `tiled`: matmuls by cuBLAS.
        pub attention: Option<AttentionChoice> = choice().derived(
            "`fused` where it is supported, if its kernels agree with the tiled ones on this GPU; else `tiled`",
        ),
        /// With several head chunks and sequence-parallel ranks, the exchange of the next and of the previous chunk overlaps
        /// with the attention of one. Needs memory for up to three chunks instead of one; results are
        /// bit-identical.
        pub overlap_exchange: bool = flag(),
        /// The directory of offload files.
        pub offload_path: Option<String> = text().derived("the system's temporary directory"),
        /// Tile size, in tokens, of the logits and the loss.
        pub loss_tile_tokens: Option<NonZero<usize>> = count().derived(
            "1024; on a GPU up to 8192, as long as the logits of a tile take at most 1 GiB",
        ),
        /// Parameter groups with their own settings; a parameter belongs to the first group that it matches.
        pub parameter_groups: Vec<ParameterGroup> = section(),
    }
}

keys! {
    /// Checks and timeouts of collectives.
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub struct CommConfig {
        /// Compares the collective calls of all ranks before data moves, and reports the rank that differs. The thread backend
        /// always does; between processes it costs one message per pair of ranks.
        pub check: CommCheck = choice().text("off"),
        /// Timeout of a collective; the run fails when it expires.
        pub timeout_seconds: u64 = count().integer(300),
    }
}

choices! {
    /// The kernels of attention on a GPU.
    pub enum AttentionChoice {
        /// The fused kernels; a call that they do not support is an error.
        Fused = "fused",
        /// The tiled kernels.
        #[default]
        Tiled = "tiled",
    }
}

choices! {
    /// The check of collective calls between ranks that are processes.
    pub enum CommCheck {
        /// Calls are not compared.
        #[default]
        Off = "off",
        /// Calls are compared.
        On = "on",
    }
}

choices! {
    /// The communication backend.
    #[non_exhaustive]
    pub enum Backend {
        /// Ranks are threads of one process.
        #[default]
        Thread = "thread",
        /// Ranks are threads or processes, each with its own GPU, connected by NCCL.
        Nccl = "nccl",
        /// Ranks are processes of an MPI job.
        Mpi = "mpi",
    }
}

impl CommConfig {
    /// Returns whether ranks that are processes compare their collective calls.
    pub fn is_checked(&self) -> bool {
        self.check == CommCheck::On
    }

    /// Returns the timeout of a collective.
    pub fn timeout(&self) -> Duration {
        Duration::from_secs(self.timeout_seconds)
    }
}

impl UlyssesConfig {
    /// Reports keys that contradict each other, or the rest of the file.
    pub(crate) fn check(&self, section: &Section<'_>, is_f32: bool, averages_micro_batches: bool) {
        let refuse = |key: &str, is_refused: bool, expected: &str| {
            if is_refused {
                section.contradiction(key, expected);
            }
        };
        let recomputes = self.activation_checkpointing;
        let both = self.steps.is_some() && self.epochs.is_some();
        refuse("epochs", both, "either `steps` or `epochs`, not both");
        let expected = "1, unless `ulysses.activation_checkpointing` is true: no layer is recomputed";
        let skips_layers = self.activation_checkpointing_interval > 1;
        refuse("activation_checkpointing_interval", skips_layers && !recomputes, expected);
        let expected = "false, unless `ulysses.activation_checkpointing` is true: no layer is recomputed";
        let saves_output = self.save_attention_output == Some(true);
        refuse("save_attention_output", saves_output && !recomputes, expected);
        let is_fused = self.attention == Some(AttentionChoice::Fused);
        refuse("attention", is_fused && is_f32, "\"tiled\", unless `bf16` or `fp16` is enabled");
        // The mean of a micro batch depends on which documents are in it.
        let expected =
            "false, unless `loss_normalization` is \"global\": micro batches have other documents with it";
        refuse("flexible_sp", self.flexible_sp && averages_micro_batches, expected);
        ValidationConfig::check(section);
    }
}
