//! The faults and remarks of one file, collected while its sections are read.

use super::diagnostic::{Diagnostic, Excerpt, Position, Problem};
use super::document::{abbreviated, position_at};
use super::note::Note;
use crate::config::error::ConfigError;
use crate::config::vocabulary::{Effect, Key, entries_of, join, nearest, synonym_of};
use jsonc_parser::common::Range;
use std::cell::RefCell;

/// How many faults of one file are listed.
const MAX_LISTED: usize = 100;

/// Collects the faults of one file.
pub(crate) struct Report<'t> {
    text: &'t str,
    /// The keys at the top of the file.
    pub(super) root: &'static [Key],
    /// Flags that give values, by the offsets from which on these lie: behind the text.
    flags: Vec<(usize, String)>,
    state: RefCell<State>,
}

#[derive(Default)]
struct State {
    diagnostics: Vec<Diagnostic>,
    omitted: usize,
    remarks: Remarks,
}

/// What a faultless file leaves to be said.
#[derive(Clone, Debug, Default)]
pub(crate) struct Remarks {
    pub(crate) notes: Vec<Note>,
    pub(crate) autos: Vec<Auto>,
}

/// A key that is given as `"auto"`.
#[derive(Clone, Debug)]
pub(crate) struct Auto {
    pub(crate) path: String,
    pub(crate) key: &'static Key,
}

impl<'t> Report<'t> {
    pub(crate) fn new(text: &'t str, root: &'static [Key]) -> Self {
        Self { text, root, flags: Vec::new(), state: RefCell::default() }
    }

    /// The same of a file with values that flags give, by the offsets from which on these lie.
    pub(crate) fn with_flags(self, flags: Vec<(usize, String)>) -> Self {
        Self { flags, ..self }
    }

    fn flag_at(&self, offset: usize) -> Option<&str> {
        self.flags.iter().rev().find(|(start, _)| *start <= offset).map(|(_, flag)| flag.as_str())
    }

    /// The remarks, or the faults in the order of the file, if there are any.
    pub(crate) fn finish(self, file: &str) -> Result<Remarks, ConfigError> {
        let State { mut diagnostics, omitted, remarks } = self.state.into_inner();
        if diagnostics.is_empty() {
            return Ok(remarks);
        }
        diagnostics.sort_by_key(|diagnostic| diagnostic.position);
        Err(ConfigError::Invalid { file: file.to_owned(), diagnostics, omitted })
    }

    pub(crate) fn position(&self, offset: usize) -> Position {
        match self.flag_at(offset) {
            Some(_) => Position::FLAG,
            None => position_at(self.text, offset),
        }
    }

    /// Where a range begins, with the line around it.
    pub(crate) fn place(&self, range: Range) -> (Position, Excerpt) {
        let position = self.position(range.start);
        if let Some(flag) = self.flag_at(range.start) {
            return (position, Excerpt::of_flag(flag));
        }
        (position, Excerpt::new(self.text, position.line, range.start..range.end))
    }

    /// Adds a fault; beyond the limit it is only counted, so `problem` may be costly.
    pub(crate) fn add(&self, range: Range, key: String, problem: impl FnOnce() -> Problem) {
        if self.state.borrow().diagnostics.len() == MAX_LISTED {
            self.state.borrow_mut().omitted += 1;
            return;
        }
        let (position, excerpt) = self.place(range);
        let diagnostic = Diagnostic { position, key, problem: problem(), excerpt };
        self.state.borrow_mut().diagnostics.push(diagnostic);
    }

    /// Adds a key that its section, whose keys are `keys`, does not have.
    pub(crate) fn add_unknown_key(&self, range: Range, section: &str, name: &str, keys: &'static [Key]) {
        let path = join(section, &abbreviated(name));
        self.add(range, path, || {
            // `steps` at the top is `ulysses.steps` rather than a part of `steps_per_print`.
            let known = || keys.iter().map(|key| key.name);
            let suggestion = called_here(name, self.root)
                .or_else(|| home_of(name, self.root))
                .or_else(|| nearest(name, known()).map(|known| join(section, known)));
            Problem::UnknownKey { suggestion, known: known().collect() }
        });
    }

    /// Adds a text at `path` that is none of the names that are `known` there.
    pub(crate) fn add_unknown_name(
        &self,
        range: Range,
        path: String,
        name: &str,
        known: &'static [&'static str],
    ) {
        self.add(range, path, || Problem::UnknownName {
            name: abbreviated(name),
            suggestion: nearest(name, known.iter().copied()),
            known,
        });
    }

    /// Adds something the user should know.
    pub(crate) fn note(&self, note: Note) {
        self.state.borrow_mut().remarks.notes.push(note);
    }

    pub(crate) fn add_auto(&self, auto: Auto) {
        self.state.borrow_mut().remarks.autos.push(auto);
    }
}

/// The key of the file that other programs call `name`.
fn called_here(name: &str, root: &'static [Key]) -> Option<String> {
    let key = synonym_of(name)?.key;
    entries_of(root).into_iter().map(|entry| entry.path).find(|path| path == key)
}

/// The only place in the file where a key called `name` does something.
fn home_of(name: &str, root: &'static [Key]) -> Option<String> {
    let mut homes: Vec<_> = entries_of(root).into_iter().filter(|entry| entry.key.name == name).collect();
    if homes.len() > 1 {
        homes.retain(|entry| matches!(entry.key.effect, Effect::Supported));
        homes.dedup_by(|a, b| a.path == b.path); // the variants of a `params` section
    }
    match homes.as_slice() {
        [home] => Some(home.path.clone()),
        _ => None,
    }
}
