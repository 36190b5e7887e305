//! The definition of a section of the file: a struct whose fields are its keys.
//!
//! ```text
//! keys! {
//!     /// When and how checkpoints are saved.
//!     #[derive(Clone, Debug, PartialEq)]
//!     pub struct CheckpointConfig {
//!         /// Number of checkpoints to keep; 0 keeps all.
//!         pub keep_last: usize = index().integer(10),
//!     }
//! }
//! ```
//!
//! The definition generates the struct, the entries of the [vocabulary](crate::config_file::vocabulary) that check and
//! document a file, the reader, and the writer of the resolved config. A field without a definition is a group of keys
//! in the same object.

mod variants;
pub(crate) mod words;

pub(crate) use variants::{declare_variants, variant, variants, write_variant};

use crate::config_file::reader::Section;
use crate::config_file::vocabulary::{Array, DefaultValue, Key, Value, complete, join};
use serde_json::{Map, Value as Json};
use std::num::NonZero;

/// A type that represents a JSON object, or some keys of one.
pub(crate) trait Keys: Sized {
    /// Returns the keys of the type, in the section at `path`.
    fn declare(path: &str) -> Vec<Key>;

    /// Reads the values of a checked file, or the defaults. An invalid value reads as a placeholder, which is
    /// never used because the error has been reported.
    fn from_section(section: &Section<'_>) -> Self;

    /// Adds the keys and values to `object`; reading them back gives an equal value.
    fn write_into(&self, object: &mut Map<String, Json>);
}

/// A type that represents the value of a key.
pub(crate) trait FieldValue: Sized {
    /// Completes the key with what the type determines: the names of a choice, the keys of a section.
    fn complete(key: Key, _path: &str) -> Key {
        key
    }

    /// Adds the key to those of the section at `path`.
    fn declare_into(keys: &mut Vec<Key>, key: Key, path: &str) {
        keys.push(Self::complete(key, &join(path, key.name)));
    }

    /// Returns the value in the file, or the default; a placeholder for an invalid value.
    fn read(section: &Section<'_>, name: &str) -> Self;

    /// Like [`read`](Self::read); `None` if there is neither, or the value is invalid.
    fn find(section: &Section<'_>, name: &str) -> Option<Self> {
        let has_value = section.json(name).is_some() && !section.is_invalid(name);
        has_value.then(|| Self::read(section, name))
    }

    /// Returns the value as JSON; `None` if the key is omitted.
    fn written(&self) -> Option<Json>;
}

impl<T: Keys> FieldValue for T {
    fn complete(key: Key, path: &str) -> Key {
        let mut keys = T::declare(path);
        for of_section in &mut keys {
            if let Some((_, default)) = key.changed_default.filter(|(name, _)| *name == of_section.name) {
                *of_section = of_section.text(default);
            }
        }
        let keys = complete(keys, path, None);
        let value = match key.value {
            Value::SwitchOrSection(_) => Value::SwitchOrSection(keys),
            _ => Value::Section(keys),
        };
        Key { value, ..key }
    }

    fn declare_into(keys: &mut Vec<Key>, key: Key, path: &str) {
        match key.is_group() {
            true => keys.extend(T::declare(path)),
            false => keys.push(Self::complete(key, &join(path, key.name))),
        }
    }

    fn read(section: &Section<'_>, name: &str) -> Self {
        T::from_section(&section.section(name))
    }

    fn written(&self) -> Option<Json> {
        let mut object = Map::new();
        self.write_into(&mut object);
        Some(object.into())
    }
}

/// Adds a key, or the keys of a group, to a section that is written, unless it is omitted, or is itself a section without keys
/// that may be absent.
pub(crate) fn write_key(section: &mut Map<String, Json>, key: Key, value: Option<Json>) {
    let is_required = matches!(key.default, DefaultValue::Required);
    let is_needed = |value: &Json| is_required || value.as_object().is_none_or(|keys| !keys.is_empty());
    match value.filter(is_needed) {
        Some(Json::Object(group)) if key.is_group() => section.extend(group),
        value => section.extend(value.map(|value| (key.name.to_owned(), value))),
    }
}

/// Returns the keys of the section `T` at `path`: ours, then DeepSpeed's.
pub(crate) fn section_keys<T: Keys>(path: &str) -> &'static [Key] {
    complete(T::declare(path), path, None)
}

impl<T: FieldValue> FieldValue for Option<T> {
    fn complete(key: Key, path: &str) -> Key {
        T::complete(key, path)
    }

    fn read(section: &Section<'_>, name: &str) -> Self {
        T::find(section, name)
    }

    fn written(&self) -> Option<Json> {
        self.as_ref().and_then(FieldValue::written)
    }
}

/// A section of which a key has an array.
pub(crate) trait Listed: Keys {
    /// Maximum number of sections; bounds the time and memory that a hostile file can take.
    const MAX_LEN: usize;

    /// The sections, as messages call them.
    const NAME: &'static str;
}

impl<T: Listed> FieldValue for Vec<T> {
    fn complete(key: Key, path: &str) -> Key {
        let section = Box::leak(Box::new(Value::Section(section_keys::<T>(path))));
        Key { value: Value::Array(Array::new(section, "objects")), ..key }
    }

    fn read(section: &Section<'_>, name: &str) -> Self {
        let sections = section.sections(name);
        if sections.len() > T::MAX_LEN {
            section.contradiction(name, &format!("at most {} {}", T::MAX_LEN, T::NAME));
            return Vec::new();
        }
        sections.iter().map(T::from_section).collect()
    }

    fn written(&self) -> Option<Json> {
        (!self.is_empty()).then(|| self.iter().filter_map(FieldValue::written).collect())
    }
}

/// Implements [`FieldValue`] for types that `serde` reads and writes, each with its placeholder.
macro_rules! plain {
    ($($type:ty = $stand_in:expr;)*) => { $(
        impl FieldValue for $type {
            fn read(section: &Section<'_>, name: &str) -> Self {
                Self::find(section, name).unwrap_or($stand_in)
            }

            fn find(section: &Section<'_>, name: &str) -> Option<Self> {
                section.get(name)
            }

            fn written(&self) -> Option<Json> {
                serde_json::to_value(self).ok()
            }
        }
    )* };
}

plain! {
    bool = false;
    u64 = 1;
    u32 = 1;
    usize = 1;
    Vec<usize> = Vec::new();
    NonZero<usize> = NonZero::<usize>::MIN;
    f64 = 0.0;
    [f64; 2] = [0.0; 2];
    String = String::new();
}

/// Defines a section; see the module documentation.
macro_rules! keys {
    (
        $(#[$meta:meta])*
        $vis:vis struct $struct:ident {
            $( $(#[doc = $doc:literal])+ $field_vis:vis $field:ident: $type:ty $(= $key:expr)?, )*
        }
        $( without keys { $( $(#[doc = $rest_doc:literal])+ $rest_vis:vis $rest:ident: $rest_type:ty, )* } )?
    ) => {
        $(#[$meta])*
        $vis struct $struct {
            $( $(#[doc = $doc])+ $field_vis $field: $type, )*
            $( $( $(#[doc = $rest_doc])+ $rest_vis $rest: $rest_type, )* )?
        }

        impl $crate::config_file::define::Keys for $struct {
            fn declare(path: &str) -> Vec<$crate::config_file::vocabulary::Key> {
                let mut keys = Vec::new();
                $( <$type as $crate::config_file::define::FieldValue>::declare_into(
                    &mut keys,
                    keys!(@key $field [$($doc)+] $($key)?),
                    path,
                ); )*
                keys
            }

            fn from_section(section: &$crate::config_file::reader::Section<'_>) -> Self {
                Self {
                    $( $field: <$type as $crate::config_file::define::FieldValue>::read(
                        section,
                        keys!(@key $field [""] $($key)?).name,
                    ), )*
                    $( $( $rest: Default::default(), )* )?
                }
            }

            fn write_into(&self, object: &mut serde_json::Map<String, serde_json::Value>) {
                $( $crate::config_file::define::write_key(
                    object,
                    keys!(@key $field [""] $($key)?),
                    <$type as $crate::config_file::define::FieldValue>::written(&self.$field),
                ); )*
            }
        }
    };
    (@key $field:ident [$($doc:literal)+]) => {
        $crate::config_file::vocabulary::Key::GROUP
    };
    (@key $field:ident [$($doc:literal)+] $key:expr) => {
        const { ($key).of_field(stringify!($field), concat!($($doc),+)) }
    };
}

/// Defines an enum whose variants are the names of a choice (case-insensitive).
macro_rules! choices {
    ($(#[$meta:meta])* $vis:vis enum $enum:ident {
        $( $(#[$variant_meta:meta])* $variant:ident = $name:literal, )*
    }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        $vis enum $enum { $( $(#[$variant_meta])* $variant, )* }

        impl $enum {
            /// The names of the choices with their values.
            $vis const CHOICES: &'static [(&'static str, Self)] = &[$( ($name, Self::$variant), )*];

            /// Returns the name in a config file.
            $vis fn name(self) -> &'static str {
                match self { $( Self::$variant => $name, )* }
            }
        }

        impl $crate::config_file::define::FieldValue for $enum {
            fn complete(
                key: $crate::config_file::vocabulary::Key,
                _path: &str,
            ) -> $crate::config_file::vocabulary::Key {
                let value = $crate::config_file::vocabulary::Value::Choice(&[$( $name, )*]);
                $crate::config_file::vocabulary::Key { value, ..key }
            }

            fn read(section: &$crate::config_file::reader::Section<'_>, name: &str) -> Self {
                let given: Option<String> = section.get(name);
                let is_given = |name: &str| given.as_ref().is_some_and(|given| given.eq_ignore_ascii_case(name));
                let chosen = Self::CHOICES.iter().find(|(name, _)| is_given(name));
                chosen.map_or_else(Self::default, |(_, choice)| *choice)
            }

            fn written(&self) -> Option<serde_json::Value> {
                Some(self.name().into())
            }
        }

        impl serde::Serialize for $enum {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(self.name())
            }
        }
    };
}

pub(crate) use {choices, keys};
