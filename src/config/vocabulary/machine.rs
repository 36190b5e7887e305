//! The keys of a machine profile, which is a file of its own.

use super::build::{COUNT, NOT_NEGATIVE, POSITIVE, key, section};
use super::key::{Key, Value};

/// What the only version of the format is called.
const VERSION: Value = Value::Integer { min: 1, max: 1 };

pub(crate) const MACHINE: &[Key] = &[
    key("version", VERSION, "The version of this format.").required(),
    key("name", Value::Text, "What the machine is called.").required(),
    key("origin", Value::Text, "Where the numbers come from: how they were measured, or assumed.").required(),
    key("ranks_per_node", COUNT, "Ranks that share a node, and were at work at once.").required(),
    section("rates", RATES, "What a rank computes while all of its node do, by the format of the numbers.")
        .required(),
    rate("update_bytes_per_second", "Bytes that the optimizer's update reads and writes, f32."),
    key("file_bytes_per_second", POSITIVE, "Bytes to and from the files of offloaded tensors.").or_null(),
    key("host_bytes_per_second", POSITIVE, "Bytes from a GPU to the host's memory and back.").or_null(),
    key("overlaps_communication", Value::Boolean, "Whether collectives go on while the rank computes.")
        .required(),
    section("links", LINKS, "What a rank sends.").required(),
];

const RATES: &[Key] = &[
    section("f32", OF_FORMAT, "Training in f32.").or_null(),
    section("bf16", OF_FORMAT, "Training in bf16.").or_null(),
    section("fp16", OF_FORMAT, "Training in fp16.").or_null(),
];

const OF_FORMAT: &[Key] = &[
    rate("peak_flops_per_second", "What a share of the peak (MFU) is a share of."),
    rate("product_flops_per_second", "Matrix products of a model's sizes, forward and backward."),
    rate("attention_forward_flops_per_second", "Attention, visible pairs only: 4 per pair and head element."),
    rate(
        "attention_backward_flops_per_second",
        "Its backward, at 8 per pair and head element, whatever is computed again.",
    ),
    rate("elementwise_bytes_per_second", "Bytes that norms, SwiGLU and their like read and write."),
];

const LINKS: &[Key] = &[
    section("intra_node", LINK, "To ranks of the same node.").or_null(),
    section("inter_node", LINK, "To ranks of other nodes.").or_null(),
];

const LINK: &[Key] = &[
    key("latency_seconds", NOT_NEGATIVE, "Time of a collective that moves next to nothing.").required(),
    rate("all_to_all_bytes_per_second", "Bus bandwidth of an all-to-all, as nccl-tests defines it."),
    rate("all_reduce_bytes_per_second", "That of an all-reduce."),
    rate("reduce_scatter_bytes_per_second", "That of a reduce-scatter."),
    rate("all_gather_bytes_per_second", "That of an all-gather."),
];

const fn rate(name: &'static str, about: &'static str) -> Key {
    key(name, POSITIVE, about).required()
}
