//! Phi: the first models, and Phi-3 and 4, which are relatives of Llama.

#[expect(clippy::module_inception, reason = "the first models have the name of the family")]
mod phi;
mod phi3;

pub(super) use phi::PHI;
pub(super) use phi3::PHI3;
