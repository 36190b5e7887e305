//! What DeepSpeed leaves to the training script.

use super::build::{COUNT, INSIDE_0_1, NOT_NEGATIVE, POSITIVE, flag, key, section};
use super::key::{Key, Value};

pub(super) const ULYSSES: &[Key] = &[
    key("model", Value::Text, "A preset, or a directory in Hugging Face's layout."),
    key(
        "data",
        Value::TextOrSections(DATA),
        "A file of text, JSONL or tokens, a directory, or a pattern; or several of them, one after the other or, as \
         objects with weights, mixed.",
    ),
    key("text_field", Value::Text, "The field of a JSON line, or column of a Parquet file, that holds the text.")
        .text("text"),
    key(
        "end_of_document",
        Value::Integer { min: 0, max: u32::MAX as u64 - 1 },
        "The token between documents in token files that do not say where these end (nanoGPT's and llm.c's); without \
         it such a file is one document.",
    ),
    key("tokenizer", Value::Text, "A Hugging Face `tokenizer.json`.")
        .derived("the one in the model's directory, or bytes"),
    key("output", Value::Text, "The directory for metrics and the resolved config.").derived("`runs/NAME-N`"),
    key("seq_len", COUNT, "Tokens per row, over all sequence-parallel ranks."),
    key("steps", COUNT, "Optimizer steps to train."),
    key("epochs", COUNT, "Times that the data is gone through, instead of `steps`; what the last step lacks is masked."),
    key(
        "seq_len_schedule",
        Value::Pairs("two integers ≥ 1, [step, seq_len]"),
        "Tokens per row later on: `[[step, seq_len], …]`, each from the step after the given one; the data is packed \
         anew.",
    ),
    key("packing", Value::Choice(&["greedy", "cut", "concat"]), "Documents in rows. `greedy`: those that fit are not cut; `cut`: end to end, cut at row ends; `concat`: the same, attending across documents.")
        .text("greedy"),
    section("validation", VALIDATION, "Held-out data, whose loss is computed as training goes on."),
    key("threads_per_rank", COUNT, "CPU threads of one rank.").derived("a fair share of the cores"),
    key("backend", Value::Choice(&["thread", "nccl", "mpi"]), "What carries the communication.")
        .derived("what connects the processes that a launcher has started, else `thread`"),
    key(
        "mesh_rules",
        Value::Rules,
        "Meshes by machine, `[[pattern, mesh], …]`: the first pattern that matches all of `--mesh-selector`, or without \
         it of `HOST/cpu` or `HOST/` and the GPU's name, gives the mesh, in the place of the sizes above; null leaves it \
         to the number of ranks. `--mesh` comes before any rule.",
    ),
    section("comm", COMM, "How ranks watch over their communication."),
    flag("activation_checkpointing", "Recomputes activations in the backward pass."),
    key(
        "activation_checkpointing_interval",
        COUNT,
        "Of so many layers one is recomputed, the others keep their state.",
    )
    .integer(1),
    key("tile_tokens", COUNT, "Tokens that norms, projections and the MLP work on at a time.").derived("all"),
    key(
        "head_chunks",
        COUNT,
        "Parts in which the heads pass through attention and its exchange; at most the KV heads.",
    )
    .integer(1),
    key("offload_path", Value::Text, "The directory of files for what is offloaded.")
        .derived("the system's for temporary files"),
    key("loss_tile_tokens", COUNT, "Tokens whose logits exist at a time.").integer(1024),
    key(
        "parameter_groups",
        Value::Sections(PARAMETER_GROUP),
        "Parameters with settings of their own; each is in the first group that it matches.",
    ),
];

const DATA: &[Key] = &[
    key("path", Value::Text, "A file of text, JSONL or tokens, a directory, or a pattern.").required(),
    key(
        "weight",
        POSITIVE,
        "Its share of the samples, relative to the other weights. All sources have one, or none.",
    ),
];

const VALIDATION: &[Key] = &[
    key("data", Value::Text, "A file of text, JSONL or tokens, a directory, or a pattern."),
    key("fraction", INSIDE_0_1, "Instead of `data`: the share of each source's documents that is held out."),
    key("eval_interval", COUNT, "Steps between two evaluations.").derived("the last step only"),
    key("eval_batches", COUNT, "Batches of `train_batch_size` rows that are evaluated.").derived("all rows"),
    flag("eval_on_start", "Evaluates before the first step too."),
    key(
        "early_stopping_patience",
        COUNT,
        "Ends the run after so many evaluations in a row without improvement of the loss.",
    )
    .derived("never"),
    key(
        "early_stopping_threshold",
        NOT_NEGATIVE,
        "What an improvement on the lowest loss must exceed to count for `early_stopping_patience`, in nats per token.",
    )
    .number(0.0),
];
const COMM: &[Key] = &[
    key(
        "check",
        Value::Choice(&["off", "on"]),
        "Compares the calls of all ranks before data moves, and names the one that differs. Threads always do; between \
         processes it costs a message per pair of ranks.",
    )
    .text("off"),
    key("timeout_seconds", COUNT, "How long a rank waits for the others in an operation before the run fails.")
        .integer(300),
];

const PARAMETER_GROUP: &[Key] = &[
    key("match", Value::Text, "A regular expression, looked for anywhere in a parameter's full name.")
        .required(),
    key("lr_scale", NOT_NEGATIVE, "Multiplies the learning rate.").number(1.0),
    key("lr", NOT_NEGATIVE, "Replaces the optimizer's `lr`; a schedule scales both in proportion.")
        .derived("the optimizer's"),
    key("weight_decay", NOT_NEGATIVE, "Replaces the optimizer's.").derived("the optimizer's"),
    flag("frozen", "Leaves the parameters as they are: no gradient, no optimizer state."),
];
