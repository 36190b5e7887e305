//! The top of the file.

use super::build::{COUNT, INDEX, NOT_NEGATIVE, flag, key, renamed, section};
use super::features::*;
use super::key::{Key, Literal, Value};
use super::monitoring::{COMET, COMMS_LOGGER, CSV_MONITOR, FLOPS_PROFILER, TENSORBOARD, TIMERS, WANDB};
use super::optimizer::OPTIMIZER;
use super::precision::{AMP, BF16, DATA_TYPES, FP16, TORCH_AUTOCAST, communication};
use super::scheduler::SCHEDULER;
use super::ulysses::ULYSSES;
use super::zero::ZERO;

const BATCH: &str = "the other two batch keys and dp";
const SUMMED: &str = "gradients are summed and scaled once, in f32, by what `loss_normalization` says";
const MIXTURES: &str = "there are no experts";

pub(crate) const ROOT: &[Key] = &[
    key("$schema", Value::Text, "The JSON Schema of the file.").no_effect("it is for editors"),
    key("train_batch_size", COUNT, "Rows per optimizer step: micro batch × accumulation × dp, never × sp.").derived(BATCH),
    key("train_micro_batch_size_per_gpu", COUNT, "Rows of one forward pass of one data-parallel rank.")
        .derived(BATCH)
        .auto_derived("the other two batch keys and dp, or 8"),
    key("gradient_accumulation_steps", COUNT, "Forward passes per optimizer step.")
        .derived("the other two batch keys and dp, or 1"),
    flag("managed_gradient_accumulation", "Counts the forward passes of a step.").boolean(true).only(
        &[Literal::Boolean(true)],
        "a step always is `gradient_accumulation_steps` passes: set it to true, and that key to what you want",
    ),
    key("data_parallel_size", COUNT, "Ranks that take different rows.").derived("1, or what fills the world"),
    key("sequence_parallel_size", COUNT, "Ranks that share each row.").integer(1),
    key("mesh_param", Value::TwoCounts("two sizes, [dp, sp]"), "Both sizes at once: `[dp, sp]`.").derived("the two sizes"),
    section("optimizer", OPTIMIZER, "The optimizer; without it AdamW."),
    section("scheduler", SCHEDULER, "The learning rate; without it the optimizer's `lr` throughout."),
    key("gradient_clipping", NOT_NEGATIVE, "Largest norm of the whole gradient, over all ranks; 0 for none. (DeepSpeed 0.19's default is 1.)")
        .number(0.0)
        .auto(Literal::Number(1.0)),
    key("zero_optimization", Value::SwitchOrSection(ZERO), "What is partitioned over dp. (`true` is an old form of stage 1.)"),
    section("fp16", FP16, "Training in fp16."),
    section("bf16", BF16, "Training in bf16."),
    renamed("bfloat16", "bf16", Value::Section(BF16)),
    section("amp", AMP, "Apex AMP."),
    section("torch_autocast", TORCH_AUTOCAST, "PyTorch's autocast."),
    section("data_types", DATA_TYPES, "Number formats."),
    communication("communication_data_type", "The format of gradients in reductions over dp."),
    communication("seq_parallel_communication_data_type", "The format of gradients in reductions over sp."),
    flag("prescale_gradients", "Divides gradients before they are reduced.").no_effect(SUMMED),
    key("gradient_predivide_factor", NOT_NEGATIVE, "The part of the division that comes first.").number(1.0).no_effect(SUMMED),
    key("gradient_allreduce_op", Value::Choice(&["mean", "sum"]), "Mean or sum over dp.").text("mean").only(
        &[Literal::Text("mean")],
        "gradients are those of the mean loss: write \"mean\", and multiply the learning rate where a sum is meant",
    ),
    flag("sparse_gradients", "Sends embedding gradients as rows.").no_effect("they are sent whole: the same values, more bytes"),
    flag("disable_allgather", "An option of old versions.").no_effect("DeepSpeed does not read it either"),
    key("loss_normalization", Value::Choice(&["global", "micro_batch"]), "`global`: all token losses over all valid tokens; `micro_batch`: DeepSpeed's mean of means.")
        .text("global"),
    key("seed", INDEX, "Initial weights and order of the data.").integer(1234),
    key("steps_per_print", COUNT, "Steps between two progress lines.").integer(10).or_null(),
    flag("wall_clock_breakdown", "Prints the time of the phases of a step."),
    flag("memory_breakdown", "Logs memory.").no_effect("`train --verbose` shows the bytes of every rank when the run ends"),
    flag("dump_state", "Prints the config.").no_effect("the resolved config is written beside the metrics"),
    key("log_level", Value::Text, "How much is logged.").or_null().no_effect("set the variable RUST_LOG"),
    key("vocabulary_size", COUNT, "Warns when tensor cores dislike it.").or_null().no_effect("the model has its own"),
    flag("dataloader_drop_last", "Drops the last, incomplete batch.")
        .no_effect("there is none: a batch that reaches the end of an epoch goes on with the next"),
    flag("zero_allow_untested_optimizer", "Allows other optimizers with ZeRO.").no_effect("every optimizer here runs with ZeRO"),
    flag("zero_force_ds_cpu_optimizer", "Insists on DeepSpeed's CPU Adam with offload.")
        .boolean(true)
        .no_effect("updates are those of the ranks' device, with and without offload"),
    key("allgather_size", NOT_NEGATIVE, "Elements that are gathered at a time, in old files.")
        .integer(500_000_000)
        .no_effect("a bucket is a layer"),
    flag("disable_python_gc", "Switches Python's garbage collector off.").no_effect("there is no Python"),
    flag("graph_harvesting", "Captures CUDA graphs.").no_effect("it saves launches of small kernels"),
    flag("use_data_before_expert_parallelism", "Order of the ranks.").no_effect(MIXTURES),
    section("activation_checkpointing", ACTIVATION_CHECKPOINTING, "How checkpointed activations are kept."),
    section("comms_logger", COMMS_LOGGER, "Logs collectives."),
    section("flops_profiler", FLOPS_PROFILER, "Profiles operations."),
    section("timers", TIMERS, "Timers."),
    section("tensorboard", TENSORBOARD, "Writes metrics for TensorBoard."),
    section("csv_monitor", CSV_MONITOR, "Writes metrics as CSV."),
    section("wandb", WANDB, "Sends metrics to Weights & Biases."),
    section("comet", COMET, "Sends metrics to Comet."),
    section("checkpoint", CHECKPOINT, "How checkpoints are written."),
    section("aio", AIO, "Asynchronous reads and writes of offloaded state."),
    section("elasticity", ELASTICITY, "Chooses the batch size by the number of ranks."),
    section("autotuning", AUTOTUNING, "Searches for settings."),
    section("compression_training", COMPRESSION_TRAINING, "Quantises and prunes."),
    key("quantize_training", Value::Anything, "Quantises while training.").only_disabled("models are trained as they are: leave it out"),
    key("weight_quantization", Value::Anything, "Quantises weights for inference.").refused("weights are not quantised, they are trained in f32, `bf16` or `fp16`: leave it out"),
    key("sparse_attention", Value::Anything, "Attends to blocks only.")
        .or_null()
        .only(&[Literal::Null], "attention is causal and dense within each document: leave it out"),
    section("data_efficiency", DATA_EFFICIENCY, "Samples and drops data by difficulty."),
    section("curriculum_learning", CURRICULUM_LEARNING, "Starts with short rows."),
    section("progressive_layer_drop", PROGRESSIVE_LAYER_DROP, "Skips layers at random."),
    section("eigenvalue", EIGENVALUE, "Measures curvature."),
    section("hybrid_engine", HYBRID_ENGINE, "Generates text between steps."),
    section("pipeline", PIPELINE, "Pipeline parallelism."),
    section("tensor_parallel", TENSOR_PARALLEL, "Tensor parallelism."),
    key("expert_parallel", Value::Anything, "Expert parallelism.").only_disabled("there are no experts: leave it out"),
    section("nebula", NEBULA, "A checkpoint service."),
    key("datastates_ckpt", Value::Anything, "A checkpoint service.").only(
        &[Literal::Boolean(false)],
        "DeepSpeed's checkpoint services are not used: leave it out",
    ),
    section("compile", COMPILE, "DeepCompile."),
    section("ulysses", ULYSSES, "What DeepSpeed leaves to the training script."),
];
