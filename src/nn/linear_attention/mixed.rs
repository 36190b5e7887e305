//! The tensors of linear attention that are exchanged, and their projections.

/// One item for each tensor that is exchanged.
#[derive(Debug)]
pub(super) struct Mixed<T> {
    /// Queries, keys and values; in Mamba 2 these are C, B and x.
    pub(super) qkv: [T; 3],
    /// The projection for the rate; `None` in Mamba 2.
    pub(super) b: Option<T>,
    /// The projection for the decay, or for those of a head; in Mamba 2 for the time step.
    pub(super) a: T,
}

impl<T> Mixed<T> {
    pub(super) fn iter(&self) -> impl Iterator<Item = &T> {
        self.qkv.iter().chain(&self.b).chain([&self.a])
    }

    pub(super) fn map<U>(self, mut f: impl FnMut(T) -> U) -> Mixed<U> {
        Mixed { qkv: self.qkv.map(&mut f), b: self.b.map(&mut f), a: f(self.a) }
    }

    /// The inverse of the conversion to a list.
    pub(super) fn from_list(mut items: Vec<T>) -> Option<Self> {
        let a = items.pop()?;
        let b = if items.len() > 3 { items.pop() } else { None };
        Some(Self { qkv: items.try_into().ok()?, b, a })
    }
}

impl<T> From<Mixed<T>> for Vec<T> {
    fn from(Mixed { qkv, b, a }: Mixed<T>) -> Self {
        qkv.into_iter().chain(b).chain([a]).collect()
    }
}
