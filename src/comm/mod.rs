//! Collective communication between ranks.
