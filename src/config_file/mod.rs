//! Files in JSON whose keys are defined once, with every error of a file reported at its place.
//!
//! - `define` turns the fields of a struct into definitions of keys, and into the code that reads and writes them;
//! - `vocabulary` has the definition of a key, and the table of DeepSpeed's other keys;
//! - `reader` parses strict JSON into a tree with positions, checks it against the definitions, and reads sections.
//!
//! The files themselves are [`config`](crate::config) and, for the parameters of optimizers, [`optim`](crate::optim).

pub(crate) mod define;
mod error;
pub(crate) mod reader;
pub(crate) mod vocabulary;

pub use error::ConfigFileError;
