//! Operations in progress.

use super::CommError;
use std::fmt;

type Completion = Box<dyn FnOnce() -> Result<(), CommError> + Send>;
type Poison = Box<dyn FnOnce(&CommError) + Send>;

/// An operation that was issued and not yet waited for.
///
/// It keeps the operation's buffers alive. Dropping it completes the operation,
/// because the peers depend on this rank. If completion then fails, the group is
/// poisoned, since no other rank could report the error. (While the thread unwinds
/// from a panic, dropping does neither: the backend reports the panic itself.)
#[must_use = "an operation's data is valid only after `wait`"]
pub struct Pending {
    completion: Option<Completion>,
    poison: Option<Poison>,
}

impl Pending {
    /// An operation that has already completed.
    pub fn ready() -> Self {
        Self { completion: None, poison: None }
    }

    /// Creates an operation that `completion` completes. `poison` fails the group; it is
    /// called only when an operation is dropped without [`wait`](Self::wait) and fails.
    pub fn new(
        completion: impl FnOnce() -> Result<(), CommError> + Send + 'static,
        poison: impl FnOnce(&CommError) + Send + 'static,
    ) -> Self {
        Self { completion: Some(Box::new(completion)), poison: Some(Box::new(poison)) }
    }

    /// Blocks until the data is valid and the peers have read this rank's inputs.
    ///
    /// # Errors
    /// When any rank of the group failed, made a different call or timed out.
    pub fn wait(mut self) -> Result<(), CommError> {
        self.complete()
    }

    /// Chains `work` to run right after the operation completes.
    pub fn then(mut self, work: impl FnOnce() -> Result<(), CommError> + Send + 'static) -> Self {
        let completion = self.completion.take();
        let poison = self.poison.take();
        let chained = move || {
            if let Some(completion) = completion {
                completion()?;
            }
            work()
        };
        Self { completion: Some(Box::new(chained)), poison }
    }

    fn complete(&mut self) -> Result<(), CommError> {
        self.completion.take().map_or(Ok(()), |completion| completion())
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        if let Err(error) = self.complete()
            && let Some(poison) = self.poison.take()
        {
            poison(&error);
        }
    }
}

impl fmt::Debug for Pending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pending").field("ready", &self.completion.is_none()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use parking_lot::Mutex;
    use std::sync::Arc;

    fn logging(log: &Arc<Mutex<Vec<&'static str>>>, result: Result<(), CommError>) -> Pending {
        let (completed, poisoned) = (log.clone(), log.clone());
        Pending::new(
            move || {
                completed.lock().push("complete");
                result
            },
            move |_| poisoned.lock().push("poison"),
        )
    }

    #[test]
    fn wait_runs_the_completion_then_the_chained_work() {
        let log = Arc::new(Mutex::new(Vec::new()));
        let after = log.clone();
        let pending = logging(&log, Ok(())).then(move || {
            after.lock().push("then");
            Ok(())
        });
        assert!(log.lock().is_empty());
        pending.wait().unwrap();
        assert_eq!(*log.lock(), ["complete", "then"]);
    }

    #[test]
    fn dropping_completes_and_does_not_poison() {
        let log = Arc::new(Mutex::new(Vec::new()));
        drop(logging(&log, Ok(())));
        assert_eq!(*log.lock(), ["complete"]);
    }

    #[test]
    fn dropping_an_operation_whose_chained_work_fails_poisons() {
        let log = Arc::new(Mutex::new(Vec::new()));
        drop(logging(&log, Ok(())).then(|| Err(CommError::Tensor("unpack".into()))));
        assert_eq!(*log.lock(), ["complete", "poison"]);
    }

    #[test]
    fn wait_returns_the_error_and_leaves_poisoning_to_the_caller() {
        let log = Arc::new(Mutex::new(Vec::new()));
        let error = logging(&log, Err(CommError::Tensor("x".into()))).wait().unwrap_err();
        assert_eq!(error, CommError::Tensor("x".into()));
        assert_eq!(*log.lock(), ["complete"]);
    }

    #[test]
    fn work_chained_to_a_ready_operation_runs() {
        let pending = Pending::ready().then(|| Err(CommError::Tensor("ran".into())));
        assert!(pending.wait().is_err());
    }
}
