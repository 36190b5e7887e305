//! Limits of a template, for processes that have no other: of time, and of the stack. A process of its own has those of memory.

/// Maximum instructions per rendering: seconds, far more than a conversation of thousands of messages needs.
pub(super) const MAX_INSTRUCTIONS: u64 = 20_000_000;

/// Maximum nesting of values. Messages have at most 128 levels, the limit of their JSON.
pub(super) const MAX_DEPTH: usize = 200;

/// Maximum nesting of macro calls and blocks, each of which takes stack.
pub(super) const MAX_RECURSION: usize = 120;
