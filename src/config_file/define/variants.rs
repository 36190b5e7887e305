//! Sections with a `type` and its `params`: the optimizer and the scheduler.

use super::words::{key, section};
use crate::config_file::vocabulary::{
    Key, Refused, Value, Variant, complete, join, other_names, refused_names,
};
use serde_json::{Map, Value as Json, json};

/// Returns the type `name` of the section at `path`, with its parameters.
pub(crate) fn variant(name: &'static str, path: &str, params: &[Key]) -> Variant {
    let params = complete(params.to_vec(), &join(path, "params"), Some(name));
    Variant { name, other_names: other_names(&join(path, "type"), name), params }
}

/// Returns the keys of such a section; `about` documents the type.
pub(crate) fn declare_variants(path: &str, about: &'static str, variants: Vec<Variant>) -> Vec<Key> {
    let refused = refused_variants(&join(path, "type"), &variants);
    let (variants, refused): (&[_], &[_]) = (variants.leak(), refused.leak());
    vec![
        Key { value: Value::Variant { variants, refused }, about, ..section().named("type").required() },
        Key { about: "Its parameters.", ..key(Value::Params(variants)).named("params") },
    ]
}

/// Returns the names of DeepSpeed's and PyTorch's other types, with the reasons, in which `{types}` are those of `variants`.
fn refused_variants(path: &str, variants: &[Variant]) -> Vec<Refused> {
    let names: Vec<_> = variants.iter().map(|variant| variant.name).collect();
    let others = refused_names(path).filter(|refused| !names.contains(&refused.name));
    let [first @ .., last] = &names[..] else { return others.collect() };
    let types = format!("{} and {last}", first.join(", "));
    let reason = |reason: &'static str| match reason.contains("{types}") {
        true => reason.replace("{types}", &types).leak(),
        false => reason,
    };
    others.map(|Refused { name, reason: why }| Refused { name, reason: reason(why) }).collect()
}

/// Adds both keys to `object`.
pub(crate) fn write_variant(object: &mut Map<String, Json>, name: &str, params: Map<String, Json>) {
    object.extend([("type".to_owned(), json!(name)), ("params".to_owned(), Json::Object(params))]);
}

/// Defines an enum of types, each with its parameters, a section by [`keys!`](super), and its names in a file, of which
/// the first one is written. The parameters of all may have a trait in common.
macro_rules! variants {
    ($(#[$meta:meta])* $vis:vis enum $enum:ident $(: $trait:path)? { $(
        $(#[doc = $doc:literal])+
        $variant:ident($params:ty) = $($name:literal)|+,
    )* }) => {
        $(#[$meta])*
        $vis enum $enum { $( $(#[doc = $doc])+ $variant($params), )* }

        impl $enum {
            /// Returns the types of the section at `path`.
            fn variants(path: &str) -> Vec<$crate::config_file::vocabulary::Variant> {
                let mut variants = Vec::new();
                $( for name in [$($name),+] {
                    let params = <$params as $crate::config_file::define::Keys>::declare(path);
                    variants.push($crate::config_file::define::variant(name, path, &params));
                } )*
                variants
            }

            /// Reads the type `name` with these parameters; `None` if there is no such type.
            fn of_type(name: &str, params: &$crate::config_file::reader::Section<'_>) -> Option<Self> {
                match name {
                    $( $($name)|+ => {
                        Some(Self::$variant(<$params as $crate::config_file::define::Keys>::from_section(params)))
                    } )*
                    _ => None,
                }
            }

            /// Returns the name and the parameters.
            fn name_and_params(&self) -> (&'static str, serde_json::Map<String, serde_json::Value>) {
                let mut object = serde_json::Map::new();
                let name = match self { $(
                    Self::$variant(params) => {
                        $crate::config_file::define::Keys::write_into(params, &mut object);
                        [$($name),+][0]
                    }
                )* };
                (name, object)
            }
        }

        variants!(@params [$($trait)?] $enum $($variant)*);
    };
    (@params [] $enum:ident $($variant:ident)*) => {};
    (@params [$trait:path] $enum:ident $($variant:ident)*) => {
        impl $enum {
            /// Returns the parameters.
            pub(crate) fn params(&self) -> &dyn $trait {
                match self { $( Self::$variant(params) => params, )* }
            }

            fn params_mut(&mut self) -> &mut dyn $trait {
                match self { $( Self::$variant(params) => params, )* }
            }
        }
    };
}

pub(crate) use variants;
