//! Documentation generated from the vocabulary: explanations, the reference and the JSON Schema.

mod explain;
mod reference;
mod schema;

pub use explain::{UnknownKey, explain};
pub use reference::reference_markdown;
pub use schema::json_schema;
