//! Values that Python computes lazily during iteration.

use super::failed;
use minijinja::value::{Enumerator, Object, ObjectRepr};
use minijinja::{Error, Value};
use parking_lot::Mutex;
use std::sync::Arc;

/// A generator, which can be iterated once and is true even if empty, or a view, which behaves like a list but prints
/// differently.
#[derive(Debug)]
pub(crate) struct Lazy {
    elements: Mutex<Vec<Value>>,
    is_generator: bool,
}

impl PartialEq for Lazy {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self, other)
    }
}

impl Lazy {
    pub(crate) fn generator(elements: Vec<Value>) -> Value {
        Value::from_object(Self { elements: Mutex::new(elements), is_generator: true })
    }

    pub(crate) fn view(elements: Vec<Value>) -> Value {
        Value::from_object(Self { elements: Mutex::new(elements), is_generator: false })
    }

    /// Returns the remaining values.
    pub(super) fn take(&self) -> Vec<Value> {
        let mut elements = self.elements.lock();
        if self.is_generator { std::mem::take(&mut elements) } else { elements.clone() }
    }

    /// Returns the first remaining value.
    pub(crate) fn take_first(&self) -> Option<Value> {
        let mut elements = self.elements.lock();
        match self.is_generator && !elements.is_empty() {
            true => Some(elements.remove(0)),
            false => elements.first().cloned(),
        }
    }

    /// `len(view)`.
    pub(crate) fn len(&self) -> Result<usize, Error> {
        match self.is_generator {
            true => Err(failed("a generator has no length; `| list` makes a list of it")),
            false => Ok(self.elements.lock().len()),
        }
    }

    pub(super) fn peek(&self) -> Vec<Value> {
        self.elements.lock().clone()
    }
}

impl Object for Lazy {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Iterable
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Values(self.take())
    }

    /// The size is not asked by iterating.
    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        self.len().ok()
    }

    fn is_true(self: &Arc<Self>) -> bool {
        self.is_generator || !self.elements.lock().is_empty()
    }
}
