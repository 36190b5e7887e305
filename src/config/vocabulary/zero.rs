//! The `zero_optimization` section.

use super::build::{FRACTION, INDEX, NOT_NEGATIVE, flag, key, renamed, section};
use super::key::{Key, Value};

const OLD_OPTIMIZER: &str = "the name is deprecated: use `offload_optimizer.device`";
const OLD_PARAM: &str = "the name is deprecated: use `offload_param.device`";
const DEVICES: Value = Value::Choice(&["none", "cpu", "nvme"]);
const ONE_UNIT: &str = "a layer goes away and comes back as one, and the next is read while one is in work";
const NO_PINNING: &str = "from a CPU's memory it goes to a file, from a GPU always to pinned memory";
const UNIT: &str = "a bucket is a layer";
const TWO_LAYERS: &str = "the layer in work and the next one are gathered, all others are not";
const QUANTIZED: &str = "quantised communication rounds the values and is not implemented: leave it out";
const MODEL_SAVE: &str =
    "checkpoints hold f32 weights: `ulysses checkpoint export --dtype bf16` gathers and rounds them";
const TORCH_HOOKS: &str = "it tunes hooks in PyTorch modules";

pub(super) const ZERO: &[Key] = &[
    key(
        "stage",
        Value::Integer { min: 0, max: 3 },
        "What is partitioned over dp: 0 nothing, 1 optimizer state, 2 and gradients, 3 and parameters. With dp 1 there is one \
         partition: every rank of an sp group stores the whole model state.",
    )
    .integer(0),
    flag("contiguous_gradients", "Copies gradients to one buffer.")
        .boolean(true)
        .no_effect("the gradients of a layer always are contiguous"),
    flag("reduce_scatter", "Reduce-scatters gradients instead of all-reducing them.")
        .boolean(true)
        .no_effect("from stage 2 on gradients always are reduce-scattered"),
    key("reduce_bucket_size", NOT_NEGATIVE, "Elements that are reduced at a time.")
        .integer(500_000_000)
        .no_effect(UNIT),
    flag("use_multi_rank_bucket_allreduce", "Joins the buckets of several ranks.")
        .boolean(true)
        .no_effect(UNIT),
    flag("allgather_partitions", "All-gathers parameters rather than broadcasting them.")
        .boolean(true)
        .no_effect("parameters always are all-gathered"),
    key("allgather_bucket_size", NOT_NEGATIVE, "Elements that are gathered at a time.")
        .integer(500_000_000)
        .no_effect(UNIT),
    flag("overlap_comm", "Overlaps the reduction with the backward pass.")
        .derived("true at stage 3")
        .or_null()
        .no_effect("the engine schedules its communication itself"),
    flag("load_from_fp32_weights", "Starts from the f32 weights of a checkpoint.")
        .boolean(true)
        .no_effect("checkpoints hold f32 weights, whatever precision computes"),
    flag("grad_hooks", "Reduces gradients from hooks.")
        .boolean(true)
        .no_effect("each layer reduces as it finishes"),
    flag("elastic_checkpoint", "An old format of checkpoints.")
        .no_effect("DeepSpeed's checkpoints are not written"),
    section("offload_param", OFFLOAD_PARAM, "Keeps parameters elsewhere between uses; stage 3 only.")
        .or_null(),
    section(
        "offload_optimizer",
        OFFLOAD_OPTIMIZER,
        "Keeps and updates optimizer state elsewhere; from stage 1 on.",
    )
    .or_null(),
    key("zenflow", Value::Anything, "Updates part of the weights late.")
        .or_null()
        .refused("late updates are not implemented: leave it out"),
    key("sub_group_size", NOT_NEGATIVE, "Elements that are updated at a time.")
        .integer(1_000_000_000)
        .no_effect("the update goes from layer to layer"),
    flag("compute_grad_norm", "Computes the norm of the gradient at stages 1 and 2.")
        .boolean(true)
        .no_effect("the norm is a metric of every step"),
    flag("parameter_alignment", "Aligns parameters in flat buffers to 16 bytes.")
        .no_effect("it costs memory and changes no value"),
    flag("cpu_offload", "Deprecated name of `\"offload_optimizer\": {\"device\": \"cpu\"}`.")
        .or_null()
        .only_off(OLD_OPTIMIZER),
    flag("cpu_offload_param", "Deprecated name of `\"offload_param\": {\"device\": \"cpu\"}`.")
        .or_null()
        .only_off(OLD_PARAM),
    flag("cpu_offload_use_pin_memory", "Deprecated name of `pin_memory` in the offload sections.")
        .or_null()
        .no_effect(NO_PINNING),
    key("stage3_prefetch_bucket_size", NOT_NEGATIVE, "Elements that are gathered ahead.")
        .integer(50_000_000)
        .no_effect("the next layer is gathered ahead"),
    key("stage3_param_persistence_threshold", NOT_NEGATIVE, "Smaller parameters stay whole.")
        .integer(100_000)
        .no_effect("a layer is partitioned as one, however small its parameters"),
    key("stage3_model_persistence_threshold", NOT_NEGATIVE, "Elements that may stay whole.")
        .derived("no limit")
        .no_effect("no parameter stays whole"),
    key("stage3_max_live_parameters", NOT_NEGATIVE, "Elements that may be gathered at a time.")
        .integer(1_000_000_000)
        .no_effect(TWO_LAYERS),
    key("stage3_max_reuse_distance", NOT_NEGATIVE, "Elements within which a parameter is kept for reuse.")
        .integer(1_000_000_000)
        .no_effect(TWO_LAYERS),
    flag("stage3_gather_16bit_weights_on_model_save", "Gathers weights for `save_16bit_model`.")
        .no_effect(MODEL_SAVE),
    key("stage3_module_granularity_threshold", INDEX, "Finer modules are fetched as one.")
        .integer(0)
        .no_effect(UNIT),
    flag("stage3_use_all_reduce_for_fetch_params", "Fetches parameters by all-reduce.")
        .no_effect("parameters always are all-gathered"),
    flag("stage3_allgather_sequential", "Gathers parameters one by one.").no_effect(UNIT),
    renamed(
        "stage3_gather_fp16_weights_on_model_save",
        "stage3_gather_16bit_weights_on_model_save",
        Value::Boolean,
    ),
    renamed("prefetch_bucket_size", "stage3_prefetch_bucket_size", NOT_NEGATIVE),
    renamed("param_persistence_threshold", "stage3_param_persistence_threshold", NOT_NEGATIVE),
    renamed("model_persistence_threshold", "stage3_model_persistence_threshold", NOT_NEGATIVE),
    renamed("max_live_parameters", "stage3_max_live_parameters", NOT_NEGATIVE),
    renamed("max_reuse_distance", "stage3_max_reuse_distance", NOT_NEGATIVE),
    renamed(
        "gather_16bit_weights_on_model_save",
        "stage3_gather_16bit_weights_on_model_save",
        Value::Boolean,
    ),
    renamed("module_granularity_threshold", "stage3_module_granularity_threshold", INDEX),
    renamed("use_all_reduce_for_fetch_params", "stage3_use_all_reduce_for_fetch_params", Value::Boolean),
    renamed("allgather_sequential", "stage3_allgather_sequential", Value::Boolean),
    flag("ignore_unused_parameters", "Accepts parameters without a gradient.")
        .boolean(true)
        .no_effect("every parameter has a gradient, be it zero"),
    flag("legacy_stage1", "Uses the old stage 1.").no_effect("there is one stage 1"),
    flag("round_robin_gradients", "Deals gradients out in turn.").no_effect("partitions are contiguous"),
    key(
        "zero_hpz_partition_size",
        INDEX,
        "Ranks of a nearer partition (ZeRO++), 1 for none. Here all that the stage partitions is partitioned over them, as with \
         `mics_shard_size`.",
    )
    .integer(1),
    flag("zero_quantized_weights", "Gathers weights quantised (ZeRO++).").only_off(QUANTIZED),
    flag("zero_quantized_nontrainable_weights", "Stores frozen weights quantised (ZeRO++).")
        .only_off(QUANTIZED),
    flag("zero_quantized_gradients", "Reduces gradients quantised (ZeRO++).").only_off(QUANTIZED),
    key("zeropp_loco_param", Value::Anything, "Corrects the error of quantised gradients.")
        .or_null()
        .refused(QUANTIZED),
    key(
        "mics_shard_size",
        Value::Signed,
        "Neighbours along dp that partition among them what the next ones hold once more (MiCS; PyTorch's HSDP): \
         more memory, shorter ways. -1: all of dp.",
    )
    .integer(-1),
    flag("mics_hierarchical_params_gather", "Gathers in two steps (MiCS).")
        .no_effect("a gather goes over one group"),
    flag("memory_efficient_linear", "Saves memory in linear layers.")
        .boolean(true)
        .no_effect("layers save what their backward pass needs, once"),
    flag("pipeline_loading_checkpoint", "Loads a checkpoint rank after rank.")
        .no_effect("each rank reads only what it keeps"),
    flag("override_module_apply", "Replaces `Module.apply`.").boolean(true).no_effect(TORCH_HOOKS),
    flag("log_trace_cache_warnings", "Logs when the order of modules changes.").no_effect(TORCH_HOOKS),
    flag("enable_sanity_checks", "Checks internal invariants.").no_effect("they are always checked"),
    flag("save_muon_momentum_buffer_in_memory", "Keeps Muon's momentum from NVMe.")
        .no_effect("there is no Muon"),
    key("leaf_module", Value::Anything, "Modules that are fetched as one.").no_effect(UNIT),
];

const OFFLOAD_PARAM: &[Key] = &[
    key(
        "device",
        DEVICES,
        "Where the partitions of parameters are between their uses: \"cpu\" is the host's memory, where a CPU's are anyway; \"nvme\" a file, from a CPU only.",
    )
    .text("none"),
    key("nvme_path", Value::Text, "The directory of that file; without it `ulysses.offload_path`.").or_null(),
    key("buffer_count", INDEX, "Buffers of the swapper.").integer(5).no_effect(ONE_UNIT),
    key("buffer_size", NOT_NEGATIVE, "Elements of a buffer.").integer(100_000_000).no_effect(ONE_UNIT),
    key("max_in_cpu", NOT_NEGATIVE, "Elements that stay in memory.").integer(1_000_000_000).missed(ONE_UNIT),
    flag("pin_memory", "Pins the host's memory.").boolean(true).no_effect(NO_PINNING),
];

const OFFLOAD_OPTIMIZER: &[Key] = &[
    key(
        "device",
        DEVICES,
        "Where optimizer state and f32 master copies are between updates: \"cpu\" is the host's memory, where a CPU's are anyway; \"nvme\" a file, from a CPU only.",
    )
    .text("none"),
    key("nvme_path", Value::Text, "The directory of that file; without it `ulysses.offload_path`.").or_null(),
    key("buffer_count", INDEX, "Buffers of the swapper.").integer(4).no_effect(ONE_UNIT),
    flag("pin_memory", "Pins the host's memory.").boolean(true).no_effect(NO_PINNING),
    flag("pipeline", "Reads and writes during the update.").no_effect(ONE_UNIT),
    flag("pipeline_read", "Reads during the update.").no_effect(ONE_UNIT),
    flag("pipeline_write", "Writes during the update.").no_effect(ONE_UNIT),
    flag("fast_init", "Initialises faster.").no_effect(ONE_UNIT),
    key("ratio", FRACTION, "The part of the state that is offloaded.")
        .number(1.0)
        .missed("all of it is offloaded: less memory, more reading"),
    flag("super_offload", "Overlaps for Grace-Hopper.").no_effect(ONE_UNIT),
    key("cpuadam_cores_perc", FRACTION, "The part of the cores that updates.")
        .number(0.8)
        .no_effect("an update uses the threads of its rank"),
];
