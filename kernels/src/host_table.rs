//! Values of a micro batch in the host's memory, one per token.

use crate::device::dry::Allocation;
use std::ops::Deref;
use std::sync::Arc;

/// Values on the host, one per token. Cloning copies pointers only.
#[derive(Debug, Clone)]
pub struct HostTable<T> {
    values: Arc<[T]>,
    len: usize,
    /// Their memory in a dry run.
    _dry: Arc<Option<Allocation>>,
}

impl<T> Deref for HostTable<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.values
    }
}

impl<T> HostTable<T> {
    pub(crate) fn new(values: impl Into<Arc<[T]>>) -> Self {
        let values = values.into();
        Self { len: values.len(), values, _dry: Arc::default() }
    }

    /// The table of a [dry run](crate::device::dry): only its length.
    pub(crate) fn dry(len: usize) -> Self {
        let _dry = Arc::new(Allocation::on_host(len * size_of::<T>()));
        Self { values: Arc::new([]), len, _dry }
    }

    /// Number of values.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether there are no values.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}
