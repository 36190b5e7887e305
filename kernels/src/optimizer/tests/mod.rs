//! Each rule against its reference, on every target.

mod adagrad;
mod adamw;
mod lion;
mod sgd;
