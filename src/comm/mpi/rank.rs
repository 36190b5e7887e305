//! One rank of a job: its operations in progress, its failure, and its waits.
//!
//! While a rank waits for *any* operation it advances *all* of its operations, in every group,
//! since MPI moves messages only while it is called.

use super::backoff::{Backoff, CpuContention};
use super::control::{ControlMessages, Received};
use super::library::Communicator;
use crate::comm::diagnostics::{CallReport, ControlMessage, FlightRecorder, HangReport, Wait, lines};
use crate::comm::ordered_channel::OrderedChannel;
use crate::comm::progress_engine::{Operation, OperationId, ProgressEngine, deadline};
use crate::comm::{CallSignature, CommError, LaunchOptions};
use parking_lot::{Mutex, MutexGuard};
use std::sync::OnceLock;
use std::thread::Thread;
use std::time::{Duration, Instant};

/// Time in which messages of a rank may still arrive after its `Ended` message, since they
/// use other communicators.
const GRACE: Duration = Duration::from_millis(100);
/// Time limit for ranks to report what they wait for. A waiting rank answers at its next poll; a computing rank does not.
const REPORT_TIMEOUT: Duration = Duration::from_secs(2);
/// Time limit for a failed world's wait for ranks that have not received the failure.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(10);

/// The state of one rank, shared by all its groups. All MPI calls are made under its lock.
#[derive(Debug)]
pub(super) struct MpiRank {
    /// Rank in the world.
    pub(super) rank: usize,
    /// Whether to compare calls before data moves.
    pub(super) check: bool,
    timeout: Duration,
    contention: CpuContention,
    /// The thread that calls MPI while the rank computes, if asked for.
    progress: OnceLock<Thread>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    failure: Option<CommError>,
    /// No operation may start any more.
    is_closed: bool,
    engine: ProgressEngine,
    /// The operations that were in flight when the world failed.
    abandoned: Vec<OperationId>,
    recorder: FlightRecorder,
    report: HangReport,
    /// Time at which this rank reported its calls to the others.
    reported: Option<Instant>,
    control: ControlMessages,
    /// Time at which each rank's `Ended` arrived; `None` for this rank.
    ended: Vec<Option<Instant>>,
    communicators: Vec<Communicator>,
}

impl MpiRank {
    /// Creates the state of the rank, with `communicator` as the world.
    pub(super) fn new(
        communicator: Communicator,
        rank: usize,
        ranks: usize,
        options: &LaunchOptions,
    ) -> Self {
        let state = State {
            failure: None,
            is_closed: false,
            engine: ProgressEngine::default(),
            abandoned: Vec::new(),
            recorder: FlightRecorder::default(),
            report: HangReport::default(),
            reported: None,
            control: ControlMessages::new(communicator, rank, ranks),
            ended: vec![None; ranks],
            communicators: vec![communicator],
        };
        let (check, timeout, contention) = (options.check, options.timeout, CpuContention::default());
        let progress = OnceLock::new();
        Self { rank, check, timeout, contention, progress, state: Mutex::new(state) }
    }

    /// Returns the first error of the world, if there is one.
    pub(super) fn check(&self) -> Result<(), CommError> {
        self.state.lock().check()
    }

    /// Starts an operation.
    pub(super) fn issue(
        &self,
        channel: OrderedChannel,
        call: CallSignature,
        operation: Box<dyn Operation>,
    ) -> Result<OperationId, CommError> {
        let mut state = self.state.lock();
        state.check()?;
        let number = state.recorder.record(operation.label().clone(), call);
        let id = OperationId { number, channel };
        state.engine.push(id, operation);
        // Advances all of them, since this poll may complete earlier ones.
        state.advance().map_err(|error| self.fail_with(&mut state, error))?;
        drop(state);
        self.wake_progress();
        Ok(id)
    }

    /// Sets the thread that moves messages while the rank computes, if there is none yet.
    pub(super) fn set_progress(
        &self,
        start: impl FnOnce() -> std::io::Result<Thread>,
    ) -> std::io::Result<()> {
        if self.progress.get().is_none() {
            // Only the rank's thread sets it.
            let _ = self.progress.set(start()?);
        }
        Ok(())
    }

    fn wake_progress(&self) {
        self.progress.get().into_iter().for_each(Thread::unpark);
    }

    /// Lets MPI move the messages of operations in progress. Returns whether there are any; `None` once the rank has
    /// returned, after which MPI may be finalized.
    pub(super) fn move_messages(&self) -> Option<bool> {
        let state = self.state.lock();
        if state.is_closed {
            return None;
        }
        let is_in_flight = !state.engine.is_empty();
        if is_in_flight {
            state.control.call_mpi();
        }
        Some(is_in_flight)
    }

    /// Blocks until operation `id`, and those before it in its channel, are complete.
    ///
    /// # Errors
    /// The failure of the world, which this call may be the first to notice.
    pub(super) fn complete(&self, id: OperationId) -> Result<(), CommError> {
        let started = Instant::now();
        let deadline = deadline(started, self.timeout);
        let mut backoff = Backoff::new(&self.contention);
        // A report that arrives before the first poll was sent before this rank waited.
        let mut has_polled = false;
        loop {
            // Read before the poll: a peer that joins at the last moment is no longer missing.
            let late = Instant::now() >= deadline;
            let mut state = self.state.lock();
            let Some(wait) = self.poll(&mut state, id, has_polled)? else { return Ok(()) };
            if late {
                return Err(self.time_out(&mut state, wait, started.elapsed()));
            }
            has_polled = true;
            drop(state);
            backoff.wait();
        }
    }

    /// Advances all operations without waiting. Returns whether operation `id` is complete, or the world has failed.
    pub(super) fn is_complete(&self, id: OperationId) -> bool {
        !matches!(self.poll(&mut self.state.lock(), id, true), Ok(Some(_)))
    }

    /// Advances all operations. Returns what operation `id` waits for; `None` when it is complete. Reports that wait to
    /// ranks that ask, if `is_waiting`.
    fn poll(
        &self,
        state: &mut MutexGuard<'_, State>,
        id: OperationId,
        is_waiting: bool,
    ) -> Result<Option<Wait>, CommError> {
        if state.engine.head(id).is_none() && !state.abandoned.contains(&id) {
            return Ok(None);
        }
        state.check()?;
        state.advance().map_err(|error| self.fail_with(state, error))?;
        let Some(wait) = state.engine.head(id).map(Operation::wait) else { return Ok(None) };
        self.listen(state, is_waiting.then_some(&wait));
        state.check()?;
        match wait.missing.iter().copied().find(|&rank| state.has_long_ended(rank)) {
            Some(rank) => Err(self.fail_with(state, wait.left_by(rank))),
            None => Ok(Some(wait)),
        }
    }

    /// Determines which ranks block the others, and fails the world. Data that arrives meanwhile is too late: this rank
    /// advances none of its operations.
    fn time_out(&self, state: &mut MutexGuard<'_, State>, wait: Wait, waited: Duration) -> CommError {
        let reported = self.report_calls(state, Some(&wait));
        let mut backoff = Backoff::new(&self.contention);
        while !state.all_have_reported() && reported.elapsed() < REPORT_TIMEOUT {
            MutexGuard::unlocked(state, || backoff.wait());
            self.listen(state, Some(&wait));
            if let Some(failure) = &state.failure {
                return failure.clone();
            }
        }
        let timeout = state.report.root_blocker(wait).timed_out(waited);
        self.fail_with(state, timeout)
    }

    /// Reports this rank's calls and its wait to the others, once. Returns the time of the report.
    fn report_calls(&self, state: &mut State, wait: Option<&Wait>) -> Instant {
        if let Some(reported) = state.reported {
            return reported;
        }
        let report = CallReport { calls: state.recorder.report(), wait: wait.cloned() };
        if let Err(reason) = state.control.send(&ControlMessage::CallReport(report.clone())) {
            tracing::error!("rank {} cannot report its calls to the others: {reason}", self.rank);
        }
        state.report.note(self.rank, report);
        *state.reported.insert(Instant::now())
    }

    /// Fails the world, unless it has failed before. Returns the first error.
    pub(super) fn fail(&self, error: CommError) -> CommError {
        self.fail_with(&mut self.state.lock(), error)
    }

    /// Fails the world because this rank has failed.
    pub(super) fn abort(&self, reason: String) {
        self.fail(CommError::PeerFailed { rank: self.rank, reason });
    }

    fn fail_with(&self, state: &mut State, error: CommError) -> CommError {
        if let Some(failure) = &state.failure {
            return failure.clone();
        }
        let error = error.on_rank(self.rank);
        if let Err(reason) = state.control.send(&ControlMessage::failed(self.rank, &error)) {
            tracing::error!("rank {} cannot report its failure to the others: {reason}", self.rank);
        }
        self.close_with(state, error.clone());
        error
    }

    /// Makes every later call return `error`.
    fn close_with(&self, state: &mut State, error: CommError) {
        if let CommError::Timeout { .. } = error {
            self.report_calls(state, None);
            let own = lines(&state.recorder.report());
            tracing::error!("{error}; last operations of rank {}:{own}", self.rank);
        }
        state.abandoned = state.engine.abandon();
        state.failure = Some(error);
    }

    /// Receives control messages. If another rank has timed out, this one reports its calls too, and what it
    /// waits for.
    fn listen(&self, state: &mut State, wait: Option<&Wait>) {
        let messages = state.control.poll().unwrap_or_else(|reason| {
            let rank = self.rank;
            self.fail_with(state, CommError::PeerFailed { rank, reason: format!("MPI: {reason}") });
            Vec::new()
        });
        for Received { from: rank, message } in messages {
            match message {
                ControlMessage::Ended => state.ended[rank] = Some(Instant::now()),
                ControlMessage::CallReport(report) => {
                    state.report.note(rank, report);
                    self.report_calls(state, wait);
                }
                ControlMessage::Failed(error) if state.failure.is_none() => self.close_with(state, error),
                ControlMessage::Failed(_) => {}
            }
        }
    }

    /// Logs the first divergence of the reported calls after a timeout.
    fn log_divergence(&self, state: &mut State) {
        let Some(CommError::Timeout { missing, .. }) = &state.failure else { return };
        if let Some(first_divergence) = state.report.first_divergence(self.rank, missing) {
            tracing::error!("first divergence of the ranks:{first_divergence}");
        }
    }

    /// Calls MPI outside of any operation.
    pub(super) fn call<R>(&self, call: impl FnOnce() -> R) -> R {
        let _state = self.state.lock();
        call()
    }

    /// Takes ownership of a group's communicator.
    pub(super) fn adopt(&self, communicator: Communicator) {
        self.state.lock().communicators.push(communicator);
    }

    /// Announces that this rank issues no more operations, and waits until all ranks have done so. Returns `false`
    /// if some never did after a failure: MPI cannot be finalized then.
    pub(super) fn leave(&self) -> bool {
        let mut backoff = Backoff::new(&self.contention);
        let mut state = self.state.lock();
        state.is_closed = true;
        self.wake_progress();
        let reported = state.control.send(&ControlMessage::Ended).is_ok();
        let mut deadline = None;
        loop {
            self.listen(&mut state, None);
            let has_failed = state.failure.is_some();
            let all = (0..state.ended.len()).all(|rank| rank == self.rank || state.ended[rank].is_some());
            if all && state.control.are_sent() {
                self.log_divergence(&mut state);
                if !has_failed {
                    state.free();
                }
                return reported;
            }
            let now = Instant::now();
            if has_failed && now > *deadline.get_or_insert(now + SHUTDOWN_TIMEOUT) {
                self.log_divergence(&mut state);
                return false;
            }
            MutexGuard::unlocked(&mut state, || backoff.wait());
        }
    }
}

impl State {
    fn check(&self) -> Result<(), CommError> {
        match &self.failure {
            Some(failure) => Err(failure.clone()),
            None if self.is_closed => {
                Err(CommError::Tensor("the rank has returned, so its groups are closed".to_owned()))
            }
            None => Ok(()),
        }
    }

    /// Advances every operation and removes the complete ones.
    fn advance(&mut self) -> Result<(), CommError> {
        let Self { engine, recorder, .. } = self;
        engine.advance(|number| recorder.complete(number))
    }

    /// Returns whether all ranks that can still report have reported their calls.
    fn all_have_reported(&self) -> bool {
        (0..self.ended.len()).all(|rank| self.ended[rank].is_some() || self.report.has(rank))
    }

    fn has_long_ended(&self, rank: usize) -> bool {
        self.ended.get(rank).copied().flatten().is_some_and(|ended| ended.elapsed() > GRACE)
    }

    /// Frees the communicators after all ranks have ended without failure.
    fn free(&mut self) {
        for communicator in self.communicators.drain(..) {
            if let Err(reason) = communicator.free() {
                tracing::warn!("cannot free a communicator: {reason}");
            }
        }
    }
}
