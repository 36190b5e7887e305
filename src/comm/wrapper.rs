//! Process groups that wrap other groups: for timing, checking, recording, or faults in tests.

use super::{Call, CommError, GroupStats, Membership, Pending, ProcessGroup};
use candle_core::Device;
use std::fmt::Debug;
use std::sync::Arc;

/// A [`ProcessGroup`] around an inner group. Methods that it does not override are forwarded
/// to the inner group.
pub trait GroupWrapper: Send + Sync + Debug {
    /// The wrapped group.
    fn inner(&self) -> &Arc<dyn ProcessGroup>;

    /// [`ProcessGroup::start`], which every `start_*` method calls.
    ///
    /// # Errors
    /// Those of the inner group.
    fn start(&self, call: Call<'_>) -> Result<Pending, CommError> {
        self.inner().start(call)
    }

    /// [`ProcessGroup::split`]. The new group is not wrapped unless this is overridden.
    ///
    /// # Errors
    /// Those of the inner group.
    fn split(
        &self,
        name: &str,
        color: Option<usize>,
        key: usize,
    ) -> Result<Option<Arc<dyn ProcessGroup>>, CommError> {
        self.inner().split(name, color, key)
    }

    /// [`ProcessGroup::flush_messages`].
    ///
    /// # Errors
    /// Those of the inner group.
    fn flush_messages(&self) -> Result<(), CommError> {
        self.inner().flush_messages()
    }

    /// [`ProcessGroup::has_one_stream`].
    fn has_one_stream(&self) -> bool {
        self.inner().has_one_stream()
    }

    /// [`ProcessGroup::stats`].
    fn stats(&self) -> GroupStats {
        self.inner().stats()
    }
}

impl<W: GroupWrapper> ProcessGroup for W {
    fn membership(&self) -> &Membership {
        self.inner().membership()
    }

    fn value_device(&self) -> Device {
        self.inner().value_device()
    }

    fn check(&self) -> Result<(), CommError> {
        self.inner().check()
    }

    fn progress_in_background(&self) {
        self.inner().progress_in_background();
    }

    fn has_one_stream(&self) -> bool {
        GroupWrapper::has_one_stream(self)
    }

    fn flush_messages(&self) -> Result<(), CommError> {
        GroupWrapper::flush_messages(self)
    }

    fn start(&self, call: Call<'_>) -> Result<Pending, CommError> {
        GroupWrapper::start(self, call)
    }

    fn split(
        &self,
        name: &str,
        color: Option<usize>,
        key: usize,
    ) -> Result<Option<Arc<dyn ProcessGroup>>, CommError> {
        GroupWrapper::split(self, name, color, key)
    }

    fn stats(&self) -> GroupStats {
        GroupWrapper::stats(self)
    }

    fn sent_to(&self) -> Vec<u64> {
        self.inner().sent_to()
    }

    fn abort(&self, reason: &str) {
        self.inner().abort(reason);
    }
}
