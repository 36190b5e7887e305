//! Schedules of a pipeline, as data: what each rank does, in which order.
//!
//! A schedule is generated, checked, drawn and run as lists of [`Action`]s. [`Schedule::check`] simulates it: it finds an action
//! that is missing, double or out of order, a deadlock, and the memory and the idle time of every rank.

use std::collections::{HashMap, VecDeque};
use std::fmt;

/// A pass over the layers of one chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Pass {
    /// Hidden states from those of the previous layers.
    Forward,
    /// Gradients of the hidden states and of the weights.
    Backward,
    /// Gradients of the hidden states only, which the previous layers wait for.
    InputBackward,
    /// Gradients of the weights only, after [`InputBackward`](Self::InputBackward).
    WeightBackward,
}

/// A letter.
impl fmt::Display for Pass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Forward => "F",
            Self::Backward => "B",
            Self::InputBackward => "I",
            Self::WeightBackward => "W",
        })
    }
}

/// One pass of one micro batch on one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Action {
    /// The pass.
    pub pass: Pass,
    /// The micro batch, from 0.
    pub micro_batch: usize,
    /// Which of the rank's chunks of layers: chunk `c` of rank `r` is stage `c · ranks + r` of the model.
    pub chunk: usize,
}

impl Action {
    /// A pass of the first chunk.
    pub fn new(pass: Pass, micro_batch: usize) -> Self {
        Self { pass, micro_batch, chunk: 0 }
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.pass, self.micro_batch)?;
        if self.chunk > 0 { write!(f, " of chunk {}", self.chunk) } else { Ok(()) }
    }
}

/// The order of a pipeline's passes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScheduleKind {
    /// All forward passes, then all backward passes (arXiv 1811.06965). Every micro batch is in memory at once.
    GPipe,
    /// Backward passes as early as possible (arXiv 1806.03377, 2104.04473): as many micro batches in memory as there are stages.
    OneForwardOneBackward,
    /// As 1F1B with several chunks of layers per rank (arXiv 2104.04473): less idle time, more messages.
    Interleaved {
        /// Chunks of layers per rank.
        num_chunks: usize,
    },
    /// As 1F1B with the gradients of weights computed where a rank would be idle (ZB-H1, arXiv 2401.10241).
    ZeroBubble,
}

impl ScheduleKind {
    /// The actions of every rank.
    ///
    /// # Errors
    /// No ranks or micro batches, or with [`Interleaved`](Self::Interleaved) micro batches that are no multiple of the ranks.
    pub fn schedule(self, ranks: usize, micro_batches: usize) -> Result<Schedule, ScheduleError> {
        if ranks == 0 || micro_batches == 0 {
            return Err(ScheduleError::Empty { ranks, micro_batches });
        }
        let num_chunks = if let Self::Interleaved { num_chunks } = self { num_chunks.max(1) } else { 1 };
        if num_chunks > 1 && !micro_batches.is_multiple_of(ranks) {
            return Err(ScheduleError::Indivisible { ranks, micro_batches });
        }
        let of_rank = |rank: usize| match self {
            Self::GPipe => one_by_one(micro_batches, micro_batches),
            Self::OneForwardOneBackward => one_by_one(ranks - rank, micro_batches),
            Self::Interleaved { .. } => interleaved(Place { rank, ranks }, num_chunks, micro_batches),
            Self::ZeroBubble => zero_bubble(Place { rank, ranks }, micro_batches),
        };
        Ok(Schedule { ranks: (0..ranks).map(of_rank).collect(), num_chunks, micro_batches })
    }
}

struct Place {
    rank: usize,
    ranks: usize,
}

/// Forward passes until `in_flight` micro batches are in memory, then a backward pass before each further one.
fn one_by_one(in_flight: usize, micro_batches: usize) -> Vec<Action> {
    let first = in_flight.min(micro_batches);
    let warm_up = (0..first).map(|index| Action::new(Pass::Forward, index));
    let steady = (first..micro_batches)
        .flat_map(|index| [Action::new(Pass::Backward, index - first), Action::new(Pass::Forward, index)]);
    let cool_down = (micro_batches - first..micro_batches).map(|index| Action::new(Pass::Backward, index));
    warm_up.chain(steady).chain(cool_down).collect()
}

/// Groups of as many micro batches as ranks pass through chunk after chunk.
fn interleaved(Place { rank, ranks }: Place, num_chunks: usize, micro_batches: usize) -> Vec<Action> {
    let total = micro_batches * num_chunks;
    let action = |pass, index: usize| {
        let (group, within) = (index / (ranks * num_chunks), index % (ranks * num_chunks));
        let chunk = within / ranks;
        let chunk = if pass == Pass::Forward { chunk } else { num_chunks - 1 - chunk };
        Action { pass, micro_batch: group * ranks + within % ranks, chunk }
    };
    // The last rank waits for the first micro batch's last chunk only.
    let warm_up = (2 * (ranks - 1 - rank) + (num_chunks - 1) * ranks + 1).min(total);
    let first = (0..warm_up).map(|index| action(Pass::Forward, index));
    let steady = (warm_up..total)
        .flat_map(|index| [action(Pass::Backward, index - warm_up), action(Pass::Forward, index)]);
    let cool_down = (total - warm_up..total).map(|index| action(Pass::Backward, index));
    first.chain(steady).chain(cool_down).collect()
}

/// Rank `r` owes up to `r` gradients of weights, and has as many micro batches in memory as with 1F1B on the first rank, for which
/// no other rank waits.
fn zero_bubble(Place { rank, ranks }: Place, micro_batches: usize) -> Vec<Action> {
    if rank == 0 {
        return one_by_one(ranks, micro_batches);
    }
    let mut actions = Vec::new();
    let mut weights = 0;
    for Action { pass, micro_batch, .. } in one_by_one(ranks - rank, micro_batches) {
        if pass == Pass::Forward {
            actions.push(Action::new(pass, micro_batch));
            continue;
        }
        actions.push(Action::new(Pass::InputBackward, micro_batch));
        if micro_batch >= rank {
            actions.push(Action::new(Pass::WeightBackward, weights));
            weights += 1;
        }
    }
    actions.extend((weights..micro_batches).map(|index| Action::new(Pass::WeightBackward, index)));
    actions
}

/// What every rank of a pipeline does in a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Schedule {
    /// The actions of each rank, in order.
    pub ranks: Vec<Vec<Action>>,
    /// Chunks of layers per rank.
    pub num_chunks: usize,
    /// Micro batches of a step.
    pub micro_batches: usize,
}

/// The time of each pass of a chunk, in any unit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PassTimes {
    /// Of a forward pass.
    pub forward: f64,
    /// Of the gradients of hidden states.
    pub input_backward: f64,
    /// Of the gradients of weights.
    pub weight_backward: f64,
}

impl Default for PassTimes {
    /// The three have equally many matrix products.
    fn default() -> Self {
        Self { forward: 1.0, input_backward: 1.0, weight_backward: 1.0 }
    }
}

impl PassTimes {
    /// The time of a pass.
    pub fn seconds(self, pass: Pass) -> f64 {
        match pass {
            Pass::Forward => self.forward,
            Pass::Backward => self.input_backward + self.weight_backward,
            Pass::InputBackward => self.input_backward,
            Pass::WeightBackward => self.weight_backward,
        }
    }
}

/// An action with its time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TimedAction {
    /// The action.
    pub action: Action,
    /// Its start, from that of the step.
    pub start: f64,
    /// Its end.
    pub end: f64,
}

/// The result of a simulation.
#[derive(Debug, Clone, PartialEq)]
pub struct Timeline {
    /// The actions of each rank, in order.
    pub ranks: Vec<Vec<TimedAction>>,
    /// For each rank, the most micro batches (of one chunk each) that are in memory at once.
    pub most_in_flight: Vec<usize>,
    /// The time of the step.
    pub seconds: f64,
    /// The part of the ranks' time in which they are idle: the bubble.
    pub idle: f64,
}

/// A schedule that cannot be run.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ScheduleError {
    /// Nothing to schedule.
    #[error(
        "a pipeline of {ranks} ranks with {micro_batches} micro batches has nothing to do; both must be at least 1"
    )]
    Empty {
        /// Number of ranks.
        ranks: usize,
        /// Number of micro batches.
        micro_batches: usize,
    },
    /// An interleaved schedule with a remainder of micro batches.
    #[error(
        "the interleaved schedule needs micro batches in groups of pp = {ranks}; {micro_batches} \
         (gradient_accumulation_steps) is no multiple"
    )]
    Indivisible {
        /// Number of ranks.
        ranks: usize,
        /// Number of micro batches.
        micro_batches: usize,
    },
    /// A pass that is missing, or there twice, or too early on its own rank, or that receives another pass's message.
    #[error("pipeline schedule: {action} of rank {rank} is {fault}")]
    Order {
        /// The rank.
        rank: usize,
        /// The pass.
        action: Action,
        /// What is wrong with it.
        fault: &'static str,
    },
    /// Ranks that wait for each other.
    #[error("pipeline schedule: a deadlock: {}", waiting.join(", "))]
    Deadlock {
        /// What each rank waits for.
        waiting: Vec<String>,
    },
}

impl Schedule {
    /// Checks the schedule, and simulates it with equal ranks and [`PassTimes::default`].
    ///
    /// # Errors
    /// As [`simulate`](Self::simulate).
    pub fn check(&self) -> Result<Timeline, ScheduleError> {
        self.simulate(|_, action| PassTimes::default().seconds(action.pass))
    }

    /// Checks that every pass runs once and in order, and simulates it: receives wait for the pass that sends, sends do not wait.
    /// `seconds` gets the rank and the action.
    ///
    /// # Errors
    /// A pass that is missing, double or out of order, or ranks that wait for each other.
    pub fn simulate(&self, seconds: impl Fn(usize, Action) -> f64) -> Result<Timeline, ScheduleError> {
        (0..self.ranks.len()).try_for_each(|rank| self.check_rank(rank))?;
        let mut ends: HashMap<(usize, Action), f64> = HashMap::new();
        let mut ranks: Vec<Vec<TimedAction>> = vec![Vec::new(); self.ranks.len()];
        loop {
            let mut has_progressed = false;
            for (rank, done) in ranks.iter_mut().enumerate() {
                while let Some(&action) = self.ranks[rank].get(done.len()) {
                    let received = match self.sender(rank, action) {
                        None => 0.0,
                        Some(sender) => match Self::time_of(&ends, sender) {
                            Some(end) => end,
                            None => break,
                        },
                    };
                    let start = done.last().map_or(0.0, |last| last.end).max(received);
                    let end = start + seconds(rank, action);
                    ends.insert((rank, action), end);
                    done.push(TimedAction { action, start, end });
                    has_progressed = true;
                }
            }
            if !has_progressed {
                break;
            }
        }
        self.check_ended(&ranks)?;
        self.check_messages()?;
        let seconds = ranks.iter().filter_map(|done| done.last()).fold(0.0, |most, last| last.end.max(most));
        let busy: f64 = ranks.iter().flatten().map(|timed| timed.end - timed.start).sum();
        let idle = 1.0 - busy / (seconds * ranks.len() as f64);
        let most_in_flight = self.ranks.iter().map(|actions| most_in_flight(actions)).collect();
        Ok(Timeline { ranks, most_in_flight, seconds, idle })
    }

    /// Checks that the passes of a rank are complete, and those of each micro batch and chunk in order.
    fn check_rank(&self, rank: usize) -> Result<(), ScheduleError> {
        let refuse = |action, fault| Err(ScheduleError::Order { rank, action, fault });
        let mut last: HashMap<(usize, usize), Pass> = HashMap::new();
        for &action in &self.ranks[rank] {
            let Action { pass, micro_batch, chunk } = action;
            if micro_batch >= self.micro_batches || chunk >= self.num_chunks {
                return refuse(action, "of a micro batch or chunk that does not exist");
            }
            let previous = last.insert((micro_batch, chunk), pass);
            let expected = match pass {
                Pass::Forward => None,
                Pass::Backward | Pass::InputBackward => Some(Pass::Forward),
                Pass::WeightBackward => Some(Pass::InputBackward),
            };
            if previous != expected {
                return refuse(action, "out of order or there twice");
            }
        }
        for (micro_batch, chunk) in (0..self.micro_batches)
            .flat_map(|micro_batch| (0..self.num_chunks).map(move |c| (micro_batch, c)))
        {
            let missing = match last.get(&(micro_batch, chunk)) {
                None => Pass::Forward,
                Some(Pass::Forward) => Pass::Backward,
                Some(Pass::InputBackward) => Pass::WeightBackward,
                Some(Pass::Backward | Pass::WeightBackward) => continue,
            };
            return refuse(Action { pass: missing, micro_batch, chunk }, "missing");
        }
        Ok(())
    }

    /// Whose pass sends what an action receives; `None` if it receives nothing.
    pub(super) fn sender(
        &self,
        rank: usize,
        Action { pass, micro_batch, chunk }: Action,
    ) -> Option<(usize, Action)> {
        let (ranks, stage) = (self.ranks.len(), chunk * self.ranks.len() + rank);
        let from = match pass {
            Pass::Forward => stage.checked_sub(1)?,
            Pass::Backward | Pass::InputBackward => {
                Some(stage + 1).filter(|next| *next < ranks * self.num_chunks)?
            }
            Pass::WeightBackward => return None,
        };
        Some((from % ranks, Action { pass, micro_batch, chunk: from / ranks }))
    }

    /// Checks that messages between two ranks are received in the order in which they are sent: they have no other names.
    fn check_messages(&self) -> Result<(), ScheduleError> {
        let mut sent: HashMap<(usize, usize), VecDeque<Action>> = HashMap::new();
        for (rank, actions) in self.ranks.iter().enumerate() {
            for &action in actions {
                if let Some((to, received)) = self.receiver(rank, action) {
                    sent.entry((rank, to)).or_default().push_back(received);
                }
            }
        }
        for (rank, actions) in self.ranks.iter().enumerate() {
            for &action in actions {
                let Some((from, _)) = self.sender(rank, action) else { continue };
                let next = sent.get_mut(&(from, rank)).and_then(VecDeque::pop_front);
                // Either kind of backward pass receives the same message.
                let is_same = |next: Action| {
                    (next.micro_batch, next.chunk) == (action.micro_batch, action.chunk)
                        && (next.pass == Pass::Forward) == (action.pass == Pass::Forward)
                };
                if !next.is_some_and(is_same) {
                    return Err(ScheduleError::Order { rank, action, fault: "not what is sent to it next" });
                }
            }
        }
        Ok(())
    }

    /// The rank and the action that receive what an action sends; `None` if it sends nothing.
    pub(super) fn receiver(
        &self,
        rank: usize,
        Action { pass, micro_batch, chunk }: Action,
    ) -> Option<(usize, Action)> {
        let (ranks, stage) = (self.ranks.len(), chunk * self.ranks.len() + rank);
        let to = match pass {
            Pass::Forward => Some(stage + 1).filter(|next| *next < ranks * self.num_chunks)?,
            Pass::Backward | Pass::InputBackward => stage.checked_sub(1)?,
            Pass::WeightBackward => return None,
        };
        Some((to % ranks, Action { pass, micro_batch, chunk: to / ranks }))
    }

    /// The time of the pass that sends or receives the message of another rank.
    pub(super) fn time_of(
        times: &HashMap<(usize, Action), f64>,
        (rank, action): (usize, Action),
    ) -> Option<f64> {
        let passes: &[Pass] = match action.pass {
            Pass::Forward => &[Pass::Forward],
            // Each rank may split its backward passes or not.
            _ => &[Pass::Backward, Pass::InputBackward],
        };
        passes.iter().find_map(|&pass| times.get(&(rank, Action { pass, ..action })).copied())
    }

    fn check_ended(&self, ranks: &[Vec<TimedAction>]) -> Result<(), ScheduleError> {
        let waits = ranks.iter().enumerate().filter_map(|(rank, done)| {
            let action = *self.ranks[rank].get(done.len())?;
            let (from, awaited) = self.sender(rank, action)?;
            Some(format!("rank {rank} waits in {action} for {awaited} of rank {from}"))
        });
        let waiting: Vec<_> = waits.collect();
        if waiting.is_empty() { Ok(()) } else { Err(ScheduleError::Deadlock { waiting }) }
    }
}

/// The most micro batches whose forward pass was run and whose last backward pass was not.
fn most_in_flight(actions: &[Action]) -> usize {
    let (mut now, mut most) = (0_usize, 0);
    for action in actions {
        match action.pass {
            Pass::Forward => now += 1,
            Pass::Backward | Pass::WeightBackward => now = now.saturating_sub(1),
            Pass::InputBackward => {}
        }
        most = most.max(now);
    }
    most
}
