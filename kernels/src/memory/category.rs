//! Categories of memory.

use serde::{Deserialize, Serialize};
use std::cell::Cell;

/// The use of a block of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Category {
    /// Parameters, including gathered ones.
    Parameters,
    /// Gradients, including whole ones before they are reduced.
    Gradients,
    /// Optimizer state and master copy.
    Optimizer,
    /// Activations and their gradients.
    Activations,
    /// Buffers that receive exchanges: q, k, v and their gradients with all tokens of some heads.
    Exchange,
    /// Scratch of single operations, tokens, tables and plans.
    Other,
}

impl Category {
    /// All categories, in the order of the enum.
    pub const ALL: [Self; 6] =
        [Self::Parameters, Self::Gradients, Self::Optimizer, Self::Activations, Self::Exchange, Self::Other];

    /// Name in tables and JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Parameters => "parameters",
            Self::Gradients => "gradients",
            Self::Optimizer => "optimizer",
            Self::Activations => "activations",
            Self::Exchange => "exchange",
            Self::Other => "other",
        }
    }
}

/// Bytes by category.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct ByCategory {
    /// [`Category::Parameters`].
    pub parameters: u64,
    /// [`Category::Gradients`].
    pub gradients: u64,
    /// [`Category::Optimizer`].
    pub optimizer: u64,
    /// [`Category::Activations`].
    pub activations: u64,
    /// [`Category::Exchange`].
    pub exchange: u64,
    /// [`Category::Other`].
    pub other: u64,
}

impl ByCategory {
    /// Sum over all categories.
    pub fn total(&self) -> u64 {
        self.values().into_iter().sum()
    }

    /// The values in the order of [`Category::ALL`].
    pub fn values(&self) -> [u64; Category::ALL.len()] {
        let Self { parameters, gradients, optimizer, activations, exchange, other } = *self;
        [parameters, gradients, optimizer, activations, exchange, other]
    }

    /// Returns the same bytes with [`Category::Other`] for the rest of `total`.
    #[must_use]
    pub fn with_rest_of(self, total: u64) -> Self {
        Self { other: self.other + total.saturating_sub(self.total()), ..self }
    }

    /// From bytes in the order of [`Category::ALL`]. Negative counts, from freeing another thread's memory,
    /// become zero.
    pub(super) fn from_counts(counts: [i64; Category::ALL.len()]) -> Self {
        let [parameters, gradients, optimizer, activations, exchange, other] =
            counts.map(|count| u64::try_from(count).unwrap_or(0));
        Self { parameters, gradients, optimizer, activations, exchange, other }
    }
}

thread_local! {
    /// Category of the thread's current allocations.
    static CURRENT: Cell<Category> = const { Cell::new(Category::Other) };
}

/// The category of this thread's current allocations.
pub fn current() -> Category {
    CURRENT.get()
}

/// Restores the previous category.
struct Scope(Category);

impl Drop for Scope {
    fn drop(&mut self) {
        CURRENT.set(self.0);
    }
}

/// Runs `work` with this thread's allocations counted as `category`, wherever they are freed.
pub fn with_category<T>(category: Category, work: impl FnOnce() -> T) -> T {
    let _scope = Scope(CURRENT.replace(category));
    work()
}

/// The same, unless the caller has already set a category other than [`Category::Other`].
pub fn with_default_category<T>(category: Category, work: impl FnOnce() -> T) -> T {
    match CURRENT.get() {
        Category::Other => with_category(category, work),
        _ => work(),
    }
}
