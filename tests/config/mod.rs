//! Config files: hostile input, DeepSpeed's users' files, and the generated reference.

mod deepspeed;
mod files;
mod properties;
mod recipes;
mod reference;
