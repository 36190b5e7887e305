//! The sections of the file that do something, each a struct whose fields are its keys.

pub(crate) mod activation_checkpointing;
pub(crate) mod chat_date;
pub(crate) mod checkpoint;
pub(crate) mod data;
pub(crate) mod mesh;
pub(crate) mod mesh_rules;
pub(crate) mod mesh_spec;
pub(crate) mod monitoring;
pub(crate) mod parameter_groups;
pub(crate) mod pipeline;
pub(crate) mod precision;
pub(crate) mod scheduler;
pub(crate) mod tensor_parallel;
pub(crate) mod ulysses;
pub(crate) mod zero;
