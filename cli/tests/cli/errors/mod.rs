//! Invalid input, and limits of the system: the command names the cause and ends.

mod arguments;
mod batches;
#[cfg(unix)]
mod disk;
mod files;
#[cfg(unix)]
mod limits;
mod models;
