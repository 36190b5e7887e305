//! The faults of one file, collected while its sections are read.

use super::diagnostic::{Diagnostic, Position, Problem};
use super::document::{abbreviated, position_at};
use super::error::ConfigError;
use std::cell::RefCell;

/// How many faults of one file are listed.
const MAX_LISTED: usize = 100;

/// Collects the faults of one file.
pub(super) struct Report<'t> {
    text: &'t str,
    state: RefCell<State>,
}

#[derive(Default)]
struct State {
    diagnostics: Vec<Diagnostic>,
    omitted: usize,
    /// Unknown keys wait for the whole vocabulary, to find keys in the wrong section.
    unknown: Vec<UnknownKey>,
    /// Every key that was asked for, with the path of its section.
    vocabulary: Vec<(String, &'static str)>,
}

struct UnknownKey {
    offset: usize,
    section: String,
    key: String,
}

impl<'t> Report<'t> {
    pub(super) fn new(text: &'t str) -> Self {
        Self { text, state: RefCell::default() }
    }

    /// The faults, in the order of the file, if there are any.
    pub(super) fn finish(self, file: &str) -> Result<(), ConfigError> {
        let unknown = std::mem::take(&mut self.state.borrow_mut().unknown);
        for UnknownKey { offset, section, key } in unknown {
            self.add(offset, join(&section, &abbreviated(&key)), || self.explain_unknown(&section, &key));
        }
        let State { mut diagnostics, omitted, .. } = self.state.into_inner();
        if diagnostics.is_empty() {
            return Ok(());
        }
        diagnostics.sort_by_key(|diagnostic| diagnostic.position);
        Err(ConfigError::Invalid { file: file.to_owned(), diagnostics, omitted })
    }

    pub(super) fn position(&self, offset: usize) -> Position {
        position_at(self.text, offset)
    }

    /// Adds a fault; beyond the limit it is only counted, so `problem` may be costly.
    pub(super) fn add(&self, offset: usize, key: String, problem: impl FnOnce() -> Problem) {
        if self.state.borrow().diagnostics.len() == MAX_LISTED {
            self.state.borrow_mut().omitted += 1;
            return;
        }
        let diagnostic = Diagnostic { position: self.position(offset), key, problem: problem() };
        self.state.borrow_mut().diagnostics.push(diagnostic);
    }

    /// Adds a key that its section does not know.
    pub(super) fn add_unknown_key(&self, offset: usize, section: &str, key: &str) {
        let unknown = UnknownKey { offset, section: section.to_owned(), key: key.to_owned() };
        self.state.borrow_mut().unknown.push(unknown);
    }

    /// Notes the keys that a section knows.
    pub(super) fn learn(&self, section: &str, keys: &[&'static str]) {
        self.state.borrow_mut().vocabulary.extend(keys.iter().map(|key| (section.to_owned(), *key)));
    }

    fn explain_unknown(&self, section: &str, key: &str) -> Problem {
        let state = self.state.borrow();
        let known: Vec<_> =
            state.vocabulary.iter().filter(|(path, _)| path == section).map(|(_, k)| *k).collect();
        let elsewhere = || {
            let mut homes = state.vocabulary.iter().filter(|(_, known)| *known == key);
            homes.next().map(|(path, known)| join(path, known))
        };
        // `steps` at the top is `ulysses.steps` rather than a part of `steps_per_print`.
        let suggestion = elsewhere().or_else(|| nearest(key, &known).map(|known| join(section, known)));
        Problem::UnknownKey { suggestion, known }
    }
}

/// The known key that `key` most likely meant.
fn nearest(key: &str, known: &[&'static str]) -> Option<&'static str> {
    const MAX_KEY_BYTES: usize = 100; // edit distance is quadratic
    const MIN_SIMILARITY: f64 = 0.6;
    if key.len() > MAX_KEY_BYTES {
        return None;
    }
    let key = key.to_ascii_lowercase();
    let similarity = |known: &str| match key.len() >= 5 && known.contains(&key) {
        true => 1.0, // `micro_batch_size` for `train_micro_batch_size_per_gpu`
        false => strsim::normalized_damerau_levenshtein(&key, known),
    };
    let scored = known.iter().map(|&known| (similarity(known), known));
    let best = scored.max_by(|a, b| a.0.total_cmp(&b.0))?;
    (best.0 >= MIN_SIMILARITY).then_some(best.1)
}

/// The path of a key.
pub(super) fn join(section: &str, key: &str) -> String {
    if section.is_empty() { key.to_owned() } else { format!("{section}.{key}") }
}
