//! What DeepSpeed leaves to the training script.

use super::build::{COUNT, NOT_NEGATIVE, flag, key, section};
use super::key::{Key, Value};

pub(super) const ULYSSES: &[Key] = &[
    key("model", Value::Text, "A preset, or a directory in Hugging Face's layout."),
    key("data", Value::Text, "A text file, or a directory whose text files are read."),
    key("tokenizer", Value::Text, "A Hugging Face `tokenizer.json`.")
        .derived("the one in the model's directory, or bytes"),
    key("output", Value::Text, "The directory for metrics and the resolved config.").derived("`runs/NAME-N`"),
    key("seq_len", COUNT, "Tokens per row, over all sequence-parallel ranks."),
    key("steps", COUNT, "Optimizer steps to train."),
    key("threads_per_rank", COUNT, "CPU threads of one rank.").derived("a fair share of the cores"),
    key("backend", Value::Choice(&["thread", "nccl", "mpi"]), "What carries the communication.")
        .text("thread"),
    section("comm", COMM, "How ranks watch over their communication."),
    flag("activation_checkpointing", "Recomputes activations in the backward pass."),
    key("loss_tile_tokens", COUNT, "Tokens whose logits exist at a time.").integer(1024),
    key(
        "parameter_groups",
        Value::Sections(PARAMETER_GROUP),
        "Parameters with settings of their own; each is in the first group that it matches.",
    ),
];

const COMM: &[Key] = &[key(
    "check",
    Value::Choice(&["off", "on"]),
    "Compares the calls of all ranks before data moves, and names the one that differs. Threads always do; between \
     processes it costs a message per pair of ranks.",
)
.text("off")];

const PARAMETER_GROUP: &[Key] = &[
    key("match", Value::Text, "A regular expression, looked for anywhere in a parameter's full name.")
        .required(),
    key("lr_scale", NOT_NEGATIVE, "Multiplies the learning rate.").number(1.0),
    key("weight_decay", NOT_NEGATIVE, "Replaces the optimizer's.").derived("the optimizer's"),
];
