//! Features of DeepSpeed that this version does not have.

use super::build::{COUNT, INDEX, NOT_NEGATIVE, flag, idle, key, section, switch};
use super::key::{Key, Literal, Value};

const SAVE_MEMORY: &str = "activations are recomputed by `ulysses.activation_checkpointing`";

pub(super) const ACTIVATION_CHECKPOINTING: &[Key] = &[
    flag("partition_activations", "Spreads checkpoints over model-parallel ranks.")
        .no_effect("each sp rank holds the activations of its own tokens only"),
    flag(
        "cpu_checkpointing",
        "Moves checkpoints out of the way until the backward pass: from a GPU to the host's memory, from a CPU to a file.",
    ),
    flag("contiguous_memory_optimization", "Copies checkpoints to one buffer.").no_effect(SAVE_MEMORY),
    key("number_checkpoints", INDEX, "Checkpoints that the buffer is made for.")
        .or_null()
        .no_effect(SAVE_MEMORY),
    flag("synchronize_checkpoint_boundary", "Waits for the device at each checkpoint.")
        .no_effect(SAVE_MEMORY),
    flag("profile", "Times forward and backward passes.").no_effect("every step is timed anyway"),
];

const NOT_WRITTEN: &str = "it belongs to DeepSpeed's own checkpoint files, which are not written";

pub(super) const CHECKPOINT: &[Key] = &[
    key("interval", COUNT, "Steps between two checkpoints; without it the last step only is saved."),
    key(
        "keep_last",
        INDEX,
        "Checkpoints to keep: older ones are removed once a new one was saved and read back. 0 keeps all.",
    )
    .integer(10),
    flag(
        "keep_best",
        "Saves each step whose evaluation loss is the lowest so far, and keeps the best of them in addition to the last ones; \
         the file `best` names it. Needs `ulysses.validation`.",
    ),
    flag("async", "Writes from a copy of the state while training goes on."),
    key("on_error", Value::Choice(&["stop", "continue"]), "What a save that fails does to the run.")
        .text("stop"),
    key("tag_validation", Value::Choice(&["Ignore", "Warn", "Fail"]), "Compares the tag among ranks.")
        .text("Warn")
        .no_effect(NOT_WRITTEN),
    flag("load_universal", "Loads a universal checkpoint.")
        .only_off("DeepSpeed's universal checkpoints are not read: set it to false"),
    flag("use_node_local_storage", "Saves on every node.").no_effect(NOT_WRITTEN),
    section(
        "parallel_write",
        &[flag("pipeline_stage", "Writes pipeline stages in parallel.").no_effect(NOT_WRITTEN)],
        "Parallel writing.",
    ),
    flag("checkpoint_serialization", "Serialises with `torch.save`.").boolean(true).no_effect(NOT_WRITTEN),
    key("writer", Value::Anything, "How files are written.").or_null().no_effect(NOT_WRITTEN),
];

const NO_NVME: &str = "what is offloaded is read and written by ordinary calls";

pub(super) const AIO: &[Key] = &[
    key("block_size", NOT_NEGATIVE, "Bytes of a request.").integer(1_048_576).no_effect(NO_NVME),
    key("queue_depth", INDEX, "Requests in flight.").integer(8).no_effect(NO_NVME),
    key("thread_count", INDEX, "Threads per request.").integer(1).no_effect(NO_NVME),
    key("intra_op_parallelism", INDEX, "Threads per request.").integer(1).no_effect(NO_NVME),
    flag("single_submit", "Submits requests one by one.").no_effect(NO_NVME),
    flag("overlap_events", "Overlaps submission and completion.").boolean(true).no_effect(NO_NVME),
    flag("use_gds", "Uses GPUDirect Storage.").no_effect(NO_NVME),
];

pub(super) const ELASTICITY: &[Key] = &[
    switch("the batch size is the file's and not chosen by the number of ranks: set `enabled` to false"),
    idle("max_train_batch_size", COUNT).integer(2000),
    idle("micro_batch_sizes", Value::List).derived("`[2, 4, 6]`"),
    idle("min_gpus", COUNT).integer(1),
    idle("max_gpus", COUNT).integer(10000),
    idle("num_gpus_per_node", COUNT).integer(1),
    idle("model_parallel_size", COUNT).integer(1),
    idle("min_time", INDEX).integer(0),
    idle("prefer_larger_batch", Value::Boolean).boolean(true),
    idle("prefer_large_batch", Value::Boolean).boolean(true),
    idle("ignore_non_elastic_batch_info", Value::Boolean).boolean(false),
    idle("version", NOT_NEGATIVE).number(0.2),
];

pub(super) const AUTOTUNING: &[Key] = &[
    switch("settings are not searched for: set `enabled` to false"),
    idle("fast", Value::Boolean).boolean(true),
    idle("results_dir", Value::Text).text("autotuning_results"),
    idle("exps_dir", Value::Text).text("autotuning_exps"),
    idle("overwrite", Value::Boolean).boolean(true),
    idle("start_profile_step", INDEX).integer(3),
    idle("end_profile_step", INDEX).integer(5),
    idle("metric", Value::Text).text("throughput"),
    idle("metric_path", Value::Text).or_null(),
    idle("tuner_type", Value::Text).text("gridsearch"),
    idle("tuner_early_stopping", INDEX).integer(5),
    idle("tuner_num_trials", INDEX).integer(50),
    idle("arg_mappings", Value::Anything),
    idle("max_train_batch_size", COUNT).or_null(),
    idle("min_train_batch_size", COUNT).integer(1),
    idle("max_train_micro_batch_size_per_gpu", COUNT).integer(1024),
    idle("min_train_micro_batch_size_per_gpu", COUNT).integer(1),
    idle("num_tuning_micro_batch_sizes", COUNT).integer(3),
    idle("mp_size", COUNT).integer(1),
    idle("model_info_path", Value::Text).or_null(),
    idle("model_info", Value::Anything),
];

const AS_THEY_ARE: &str = "models are trained as they are: leave it out";

pub(super) const COMPRESSION_TRAINING: &[Key] = &[
    key("layer_reduction", Value::Anything, "Drops layers.").only_disabled(AS_THEY_ARE),
    key("weight_quantization", Value::Anything, "Quantises weights.").only_disabled(AS_THEY_ARE),
    key("activation_quantization", Value::Anything, "Quantises activations.").only_disabled(AS_THEY_ARE),
    key("sparse_pruning", Value::Anything, "Prunes weights.").only_disabled(AS_THEY_ARE),
    key("row_pruning", Value::Anything, "Prunes rows.").only_disabled(AS_THEY_ARE),
    key("head_pruning", Value::Anything, "Prunes heads.").only_disabled(AS_THEY_ARE),
    key("channel_pruning", Value::Anything, "Prunes channels.").only_disabled(AS_THEY_ARE),
];

pub(super) const DATA_EFFICIENCY: &[Key] = &[
    switch("samples come in the order of `seed`, all tokens of them: set `enabled` to false"),
    idle("seed", INDEX).integer(1234),
    idle("data_sampling", Value::Anything),
    idle("data_routing", Value::Anything),
];

pub(super) const CURRICULUM_LEARNING: &[Key] = &[
    switch("rows grow by `ulysses.seq_len_schedule`: give that, and set `enabled` to false"),
    idle("curriculum_type", Value::Text),
    idle("min_difficulty", INDEX),
    idle("max_difficulty", INDEX),
    idle("schedule_type", Value::Text),
    idle("schedule_config", Value::Anything),
];

pub(super) const PROGRESSIVE_LAYER_DROP: &[Key] = &[
    switch("no layer is skipped: set `enabled` to false"),
    idle("theta", NOT_NEGATIVE).number(1.0),
    idle("gamma", NOT_NEGATIVE).number(0.001),
];

pub(super) const EIGENVALUE: &[Key] = &[
    switch("it serves quantised training, which is not implemented: set `enabled` to false"),
    idle("verbose", Value::Boolean).boolean(false),
    idle("max_iter", INDEX).integer(100),
    idle("tol", NOT_NEGATIVE).number(0.01),
    idle("stability", NOT_NEGATIVE).number(1e-6),
    idle("gas_boundary_resolution", INDEX).integer(1),
    idle("layer_name", Value::Text).text("bert.encoder.layer"),
    idle("layer_num", INDEX).integer(0),
];

pub(super) const HYBRID_ENGINE: &[Key] = &[
    switch("there is no generation between steps: set `enabled` to false"),
    idle("max_out_tokens", INDEX).integer(512),
    idle("inference_tp_size", COUNT).integer(1),
    idle("release_inference_cache", Value::Boolean).boolean(false),
    idle("pin_parameters", Value::Boolean).boolean(true),
    idle("tp_gather_partition_size", COUNT).integer(8),
    idle("enable_cuda_graph", Value::Boolean).boolean(false),
];

const ONE_STAGE: &str = "the model is not cut into pipeline stages";

pub(super) const PIPELINE: &[Key] = &[
    key("stages", Value::Anything, "Pipeline stages.").text("auto").only(
        &[Literal::Text("auto"), Literal::Integer(1)],
        "there is no pipeline axis: use dp and sp, with `zero_optimization.stage` 3 for less memory",
    ),
    key("partition", Value::Text, "How layers are dealt out.").text("best").no_effect(ONE_STAGE),
    flag("seed_layers", "Seeds each layer.").no_effect(ONE_STAGE),
    key("activation_checkpoint_interval", INDEX, "Layers between checkpoints.")
        .integer(0)
        .missed(SAVE_MEMORY),
    flag("pipe_partitioned", "Partitions activations between stages.").boolean(true).no_effect(ONE_STAGE),
    flag("grad_partitioned", "Partitions gradients between stages.").boolean(true).no_effect(ONE_STAGE),
    flag("use_reentrant", "Kind of checkpointing.").boolean(true).no_effect(ONE_STAGE),
];

pub(super) const TENSOR_PARALLEL: &[Key] = &[
    key("autotp_size", INDEX, "Ranks that share each weight.").integer(0).only(
        &[Literal::Integer(0), Literal::Integer(1)],
        "there is no tensor-parallel axis: use sp for long rows and ZeRO stage 3 for large models",
    ),
    idle("dtype", Value::Text),
    idle("tp_overlap_comm", Value::Boolean).boolean(false),
    idle("tensor_parallel", Value::Anything),
    idle("tp", Value::Anything),
    idle("injection_policy_tuple", Value::Anything),
    idle("partition_config", Value::Anything),
    idle("preset_model", Value::Text).or_null(),
    idle("keep_module_on_host", Value::Boolean).boolean(false),
    idle("replace_with_kernel_inject", Value::Boolean).boolean(false),
    idle("kernel_inject", Value::Boolean).boolean(false),
    idle("vocab_parallel_lm_head", Value::Boolean).or_null(),
    idle("vocab_parallel_ce_backend", Value::Choice(&["torch", "liger"])).text("torch"),
];

pub(super) const NEBULA: &[Key] = &[
    switch("DeepSpeed's checkpoint services are not used: set `enabled` to false"),
    idle("enable_nebula_load", Value::Boolean).boolean(true),
    idle("nebula_load_path", Value::Text).or_null(),
    idle("load_path", Value::Text).or_null(),
    idle("persistent_storage_path", Value::Text).or_null(),
    idle("persistent_time_interval", INDEX).integer(100),
    idle("num_of_version_in_retention", INDEX).integer(2),
];

const NO_COMPILER: &str = "layers are compiled already";
const NOT_MOVED: &str = "nothing is moved to the host: set it to false";

pub(super) const COMPILE: &[Key] = &[
    flag("deepcompile", "Compiles the model's graph.").no_effect(NO_COMPILER),
    flag("free_activation", "Frees large activations early.")
        .no_effect("they are freed after their last use"),
    key("free_activation_threshold", INDEX, "Bytes of a large one.")
        .integer(10_485_760)
        .no_effect(NO_COMPILER),
    flag("offload_activation", "Moves activations to the host.").only_off(NOT_MOVED),
    flag("offload_activation_pin_memory", "Pins that memory.").boolean(true).no_effect(NO_COMPILER),
    flag("offload_opt_states", "Moves optimizer state to the host.").only_off(NOT_MOVED),
    flag("offload_parameters", "Moves parameters to the host.").only_off(NOT_MOVED),
    flag("double_buffer", "Uses two buffers.").boolean(true).no_effect(NO_COMPILER),
    flag("symmetric_memory", "Uses symmetric memory.").no_effect(NO_COMPILER),
    flag("debug_log", "Dumps graphs.").no_effect(NO_COMPILER),
    flag("sync_before_reduce", "Waits before a reduction.").no_effect(NO_COMPILER),
    flag("sync_after_reduce", "Waits after a reduction.").no_effect(NO_COMPILER),
    flag("sync_before_allgather", "Waits before a gather.").no_effect(NO_COMPILER),
    flag("sync_after_allgather", "Waits after a gather.").no_effect(NO_COMPILER),
    flag("keep_int_input_tensors", "Keeps integer inputs.").boolean(true).no_effect(NO_COMPILER),
    flag("keep_all_input_tensors", "Keeps all inputs.").no_effect(NO_COMPILER),
    flag("autoep_non_moe", "Compiles what is around layers of experts.").no_effect(NO_COMPILER),
    key("passes", Value::List, "Passes of the compiler.")
        .or_null()
        .refused("the compiler's passes are not there: for `autosp` set `sequence_parallel_size`"),
];
