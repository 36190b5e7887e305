//! Operations in progress.

use super::CommError;
use std::fmt;

/// Completes an operation.
type Completion = Box<dyn FnOnce() -> Result<(), CommError> + Send>;
type Poll = Box<dyn Fn() -> bool + Send>;
type Poison = Box<dyn FnOnce(&CommError) + Send>;

/// An operation that was issued and not yet waited for.
///
/// It keeps the operation's buffers alive. Dropping it completes the operation,
/// because the peers depend on this rank. If completion then fails, the group is
/// poisoned, since no other rank could report the error. (While the thread unwinds
/// from a panic, dropping does neither: the backend reports the panic itself.)
#[must_use = "an operation's data is valid only after `wait`"]
pub struct Pending {
    poll: Option<Poll>,
    completion: Option<Completion>,
    poison: Option<Poison>,
}

impl Pending {
    /// An operation that has already completed.
    pub fn ready() -> Self {
        Self { poll: None, completion: None, poison: None }
    }

    /// Creates an operation that `completion` completes. `poll` makes progress without waiting and returns whether
    /// `completion` would return without waiting. `poison` fails the group; it is
    /// called only when an operation is dropped without [`wait`](Self::wait) and fails.
    pub fn new(
        poll: impl Fn() -> bool + Send + 'static,
        completion: impl FnOnce() -> Result<(), CommError> + Send + 'static,
        poison: impl FnOnce(&CommError) + Send + 'static,
    ) -> Self {
        let (poll, completion) = (Some(Box::new(poll) as Poll), Some(Box::new(completion) as Completion));
        Self { poll, completion, poison: Some(Box::new(poison)) }
    }

    /// Combines operations of a group into one, which completes when all have.
    pub fn all(operations: Vec<Self>) -> Self {
        let (mut polls, mut completions, mut poisons) = (Vec::new(), Vec::new(), Vec::new());
        for mut operation in operations {
            polls.extend(operation.poll.take());
            completions.extend(operation.completion.take());
            poisons.extend(operation.poison.take());
        }
        let complete = || {
            // Peers depend on the others even if one fails.
            let outcomes: Vec<_> = completions.into_iter().map(|complete| complete()).collect();
            outcomes.into_iter().collect()
        };
        Self::new(
            move || polls.iter().all(|poll| poll()),
            complete,
            |error| poisons.into_iter().for_each(|poison| poison(error)),
        )
    }

    /// Blocks until the data is valid and the peers have read this rank's inputs.
    ///
    /// # Errors
    /// When any rank of the group failed, made a different call or timed out.
    pub fn wait(mut self) -> Result<(), CommError> {
        self.complete()
    }

    /// Makes progress, in all operations of this rank that need its help, and returns whether [`wait`](Self::wait) would
    /// return without waiting: the operation is complete, or its group has failed. Never waits for a peer. The data is
    /// valid only after `wait`. On a GPU "complete" refers to the GPU, so it may be later than `wait` returns.
    ///
    /// A loop over it has no time limit, unlike `wait`.
    pub fn is_completed(&self) -> bool {
        self.poll.as_ref().is_none_or(|poll| poll())
    }

    /// Chains `work` to run right after the operation completes.
    pub fn then(self, work: impl FnOnce() -> Result<(), CommError> + Send + 'static) -> Self {
        self.around(move |complete| {
            complete()?;
            work()
        })
    }

    /// Replaces what [`wait`](Self::wait) runs by `run`, which calls the original: for wrappers of groups.
    pub fn around(mut self, run: impl FnOnce(Completion) -> Result<(), CommError> + Send + 'static) -> Self {
        let completion = self.completion.take().unwrap_or_else(|| Box::new(|| Ok(())));
        Self {
            poll: self.poll.take(),
            completion: Some(Box::new(|| run(completion))),
            poison: self.poison.take(),
        }
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
            || false,
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

    #[test]
    fn several_operations_complete_together_even_if_one_fails() {
        let log = Arc::new(Mutex::new(Vec::new()));
        let failing = logging(&log, Err(CommError::Tensor("x".into())));
        let both = Pending::all(vec![failing, logging(&log, Ok(())), Pending::ready()]);
        assert!(!both.is_completed() && log.lock().is_empty());
        assert_eq!(both.wait(), Err(CommError::Tensor("x".into())));
        assert_eq!(*log.lock(), ["complete", "complete"]);
        drop(Pending::all(vec![logging(&log, Err(CommError::Tensor("x".into())))]));
        assert_eq!(log.lock()[2..], ["complete", "poison"]);
        assert!(Pending::all(Vec::new()).is_completed());
    }

    #[test]
    fn chained_work_leaves_polling_to_the_operation() {
        let log = Arc::new(Mutex::new(Vec::new()));
        assert!(!logging(&log, Ok(())).then(|| Ok(())).is_completed());
        assert!(Pending::ready().then(|| Ok(())).is_completed());
    }
}
