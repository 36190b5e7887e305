//! Sections with a `type` and its `params`: the optimizer and the scheduler.

use super::words::{key, section};
use crate::config::vocabulary::{Key, Value, Variant, complete, join, other_names, refused_names};
use serde_json::{Map, Value as Json, json};

/// Returns the type `name` of the section at `path`, with its parameters.
pub(crate) fn variant(name: &'static str, path: &str, params: &[Key]) -> Variant {
    let params = complete(params.to_vec(), &join(path, "params"), Some(name));
    Variant { name, other_names: other_names(&join(path, "type"), name), params }
}

/// Returns the keys of such a section; `about` documents the type.
pub(crate) fn declare_variants(path: &str, about: &'static str, variants: Vec<Variant>) -> Vec<Key> {
    let refused: Vec<_> = refused_names(&join(path, "type")).collect();
    let (variants, refused): (&[_], &[_]) = (variants.leak(), refused.leak());
    vec![
        Key { value: Value::Variant { variants, refused }, about, ..section().named("type").required() },
        Key { about: "Its parameters.", ..key(Value::Params(variants)).named("params") },
    ]
}

/// Adds both keys to `object`.
pub(crate) fn write_variant(object: &mut Map<String, Json>, name: &str, params: Map<String, Json>) {
    object.extend([("type".to_owned(), json!(name)), ("params".to_owned(), Json::Object(params))]);
}

/// Defines an enum of types, each with its names in a file (the first one is written) and its parameters, which are
/// keys as in [`keys!`](super).
macro_rules! variants {
    ($(#[$meta:meta])* $vis:vis enum $enum:ident { $(
        $(#[doc = $variant_doc:literal])+
        $variant:ident: $($name:literal),+ {
            $( $(#[doc = $doc:literal])+ $field:ident: $type:ty = $key:expr, )*
        }
    )* }) => {
        $(#[$meta])*
        $vis enum $enum { $(
            $(#[doc = $variant_doc])+
            $variant { $( $(#[doc = $doc])+ $field: $type, )* },
        )* }

        impl $enum {
            /// Returns the types of the section at `path`.
            fn variants(path: &str) -> Vec<$crate::config::vocabulary::Variant> {
                let mut variants = Vec::new();
                $(
                    let mut params = Vec::new();
                    $( keys!(@declare params, path, $type, $field, [$($doc)+], $key); )*
                    for name in [$($name),+] {
                        variants.push($crate::config::define::variant(name, path, &params));
                    }
                )*
                variants
            }

            /// Reads the type `name` with these parameters.
            fn of_type(name: &str, params: &$crate::config::reader::Section<'_>) -> Self {
                match name {
                    $( $($name)|+ => Self::$variant { $( $field: keys!(@read params, $type, $field, $key), )* }, )*
                    _ => Self::default(), // the error has been reported
                }
            }

            /// Returns the name and the parameters.
            fn name_and_params(&self) -> (&'static str, serde_json::Map<String, serde_json::Value>) {
                let mut params = serde_json::Map::new();
                let name = match self { $(
                    Self::$variant { $( $field, )* } => {
                        $( keys!(@write $field, params, $type, $field, $key); )*
                        [$($name),+][0]
                    }
                )* };
                (name, params)
            }
        }
    };
}

pub(crate) use variants;
