//! Typed access to a Hugging Face `config.json`.

use crate::families::ModelError;
use serde_json::Value;
use std::cell::RefCell;
use std::collections::HashSet;

/// Values of `layer_types`: layers that see the whole document, and layers with a window.
pub(crate) const FULL: &str = "full_attention";
pub(crate) const WINDOWED: &str = "sliding_attention";

/// A Hugging Face `config.json`. It notes which fields are asked for: all others are refused, unless they are known to
/// be harmless.
pub(crate) struct HfConfig<'a> {
    /// The file, for errors.
    pub(super) origin: &'a str,
    /// Its content.
    pub(super) value: &'a Value,
    known: RefCell<HashSet<&'static str>>,
}

impl<'a> HfConfig<'a> {
    /// The content of the file `origin`.
    pub(crate) fn new(origin: &'a str, value: &'a Value) -> Self {
        Self { origin, value, known: RefCell::default() }
    }

    /// The value of a key, which may be `null`, unless absent.
    fn raw(&self, key: &'static str) -> Option<&'a Value> {
        self.known.borrow_mut().insert(key);
        self.value.get(key)
    }

    /// Accepts fields, whether or not they are asked for.
    pub(crate) fn accept(&self, keys: &[&'static str]) {
        self.known.borrow_mut().extend(keys);
    }

    pub(super) fn is_known(&self, key: &str) -> bool {
        self.known.borrow().contains(key)
    }

    /// The value of a key, unless absent or `null`.
    pub(crate) fn get(&self, key: &'static str) -> Option<&'a Value> {
        self.raw(key).filter(|value| !value.is_null())
    }

    /// Returns whether a key exists, with any value or `null`.
    pub(crate) fn has(&self, key: &'static str) -> bool {
        self.raw(key).is_some()
    }

    /// An error that names the file, the key and its value.
    pub(crate) fn error(&self, key: &'static str, expected: &str) -> ModelError {
        let got = self.value.get(key).map_or("missing".to_owned(), Value::to_string);
        ModelError::Config { origin: self.origin.to_owned(), key, got, expected: expected.to_owned() }
    }

    /// A size, unless absent or `null`.
    pub(crate) fn optional_size(&self, key: &'static str) -> Result<Option<usize>, ModelError> {
        match self.get(key) {
            None => Ok(None),
            Some(value) => match value.as_u64() {
                Some(size) => Ok(Some(size as usize)),
                None => Err(self.error(key, "it must be a positive integer")),
            },
        }
    }

    /// A size.
    pub(crate) fn size(&self, key: &'static str) -> Result<usize, ModelError> {
        self.optional_size(key)?.ok_or_else(|| self.error(key, "it must be a positive integer"))
    }

    /// A number, or its default if it is absent.
    pub(crate) fn number(&self, key: &'static str, default: f64) -> Result<f64, ModelError> {
        match self.raw(key) {
            None => Ok(default),
            Some(value) => value.as_f64().ok_or_else(|| self.error(key, "it must be a number")),
        }
    }

    /// Whether a field is set.
    pub(crate) fn flag(&self, key: &'static str) -> Result<bool, ModelError> {
        match self.get(key) {
            None => Ok(false),
            Some(value) => value.as_bool().ok_or_else(|| self.error(key, "it must be true or false")),
        }
    }
}
