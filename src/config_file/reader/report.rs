//! Collects the errors and notes of a file while its sections are read.

use super::diagnostic::{Diagnostic, Excerpt, Place, Position, Problem};
use super::document::{abbreviated, position_at};
use super::note::Note;
use crate::config_file::ConfigFileError;
use crate::config_file::vocabulary::{Effect, Key, entries_of, join, nearest, synonym_of};
use jsonc_parser::common::Range;
use std::cell::RefCell;

/// Maximum number of errors that are listed.
const MAX_LISTED: usize = 100;

/// Collects the errors and notes of a file.
pub(crate) struct Report<'t> {
    text: &'t str,
    /// The keys at the top of the file.
    pub(super) root: &'static [Key],
    /// In the order of their offsets.
    flags: Vec<FlagOrigin>,
    state: RefCell<State>,
}

/// A flag that gives values of the file.
#[derive(Clone)]
pub(crate) struct FlagOrigin {
    /// The first offset of the values, after the end of the text.
    pub(crate) start: usize,
    /// The flag as messages show it.
    pub(crate) flag: String,
}

#[derive(Default)]
struct State {
    diagnostics: Vec<Diagnostic>,
    omitted: usize,
    remarks: Remarks,
}

/// The notes and `"auto"` keys of a valid file.
#[derive(Clone, Debug, Default)]
pub(crate) struct Remarks {
    pub(crate) notes: Vec<Note>,
    pub(crate) autos: Vec<Auto>,
}

/// A key whose value is `"auto"`.
#[derive(Clone, Debug)]
pub(crate) struct Auto {
    pub(crate) path: String,
    pub(crate) key: &'static Key,
}

impl<'t> Report<'t> {
    pub(crate) fn new(text: &'t str, root: &'static [Key]) -> Self {
        Self { text, root, flags: Vec::new(), state: RefCell::default() }
    }

    /// Adds the flags, in the order of their offsets.
    pub(crate) fn with_flags(self, flags: Vec<FlagOrigin>) -> Self {
        Self { flags, ..self }
    }

    fn flag_at(&self, offset: usize) -> Option<&str> {
        self.flags.iter().rev().find(|flag| flag.start <= offset).map(|flag| flag.flag.as_str())
    }

    /// Returns whether a flag gives the value at `offset`.
    pub(crate) fn is_of_flag(&self, offset: usize) -> bool {
        self.flag_at(offset).is_some()
    }

    /// Returns whether the key at `path` has an error.
    pub(super) fn has_error_at(&self, path: &str) -> bool {
        self.state.borrow().diagnostics.iter().any(|diagnostic| diagnostic.key == path)
    }

    /// Returns the notes, or the errors in the order of the file.
    pub(crate) fn finish(self, file: &str) -> Result<Remarks, ConfigFileError> {
        let State { mut diagnostics, omitted, remarks } = self.state.into_inner();
        if diagnostics.is_empty() {
            return Ok(remarks);
        }
        diagnostics.sort_by_key(|diagnostic| diagnostic.position);
        Err(ConfigFileError::Invalid { file: file.to_owned(), diagnostics, omitted })
    }

    pub(crate) fn position(&self, offset: usize) -> Position {
        match self.flag_at(offset) {
            Some(_) => Position::FLAG,
            None => position_at(self.text, offset),
        }
    }

    /// Returns the start of a range, with its line.
    pub(crate) fn place(&self, range: Range) -> Place {
        let position = self.position(range.start);
        let excerpt = match self.flag_at(range.start) {
            Some(flag) => Excerpt::of_flag(flag),
            None => Excerpt::new(self.text, position.line, range.start..range.end),
        };
        Place { position, excerpt }
    }

    /// Adds an error. Beyond the limit, errors are only counted and `problem` is not called.
    pub(crate) fn add(&self, range: Range, key: String, problem: impl FnOnce() -> Problem) {
        if self.state.borrow().diagnostics.len() == MAX_LISTED {
            self.state.borrow_mut().omitted += 1;
            return;
        }
        let Place { position, excerpt } = self.place(range);
        let diagnostic = Diagnostic { position, key, problem: problem(), excerpt };
        self.state.borrow_mut().diagnostics.push(diagnostic);
    }

    /// Adds an unknown key of a section whose keys are `keys`.
    pub(crate) fn add_unknown_key(&self, range: Range, section: &str, name: &str, keys: &'static [Key]) {
        let path = join(section, &abbreviated(name));
        self.add(range, path.clone(), || {
            // `steps` at the top level means `ulysses.steps`, not `steps_per_print`.
            let known = || keys.iter().map(|key| key.name);
            let suggestion = called_here(name, self.root)
                .or_else(|| home_of(name, self.root))
                .filter(|suggestion| *suggestion != path)
                .or_else(|| nearest(name, known()).map(|known| join(section, known)));
            Problem::UnknownKey {
                suggestion,
                variant: variant_with(keys, self.root),
                known: known().collect(),
            }
        });
    }

    /// Adds a note.
    pub(crate) fn note(&self, note: Note) {
        self.state.borrow_mut().remarks.notes.push(note);
    }

    pub(crate) fn add_auto(&self, auto: Auto) {
        self.state.borrow_mut().remarks.autos.push(auto);
    }
}

/// Returns the optimizer or scheduler type whose parameters are `keys`.
fn variant_with(keys: &'static [Key], root: &'static [Key]) -> Option<&'static str> {
    let first = keys.first()?;
    entries_of(root).into_iter().find(|entry| std::ptr::eq(entry.key, first))?.variant
}

/// Returns the key that other programs call `name`.
fn called_here(name: &str, root: &'static [Key]) -> Option<String> {
    let key = synonym_of(name)?.key;
    entries_of(root).into_iter().map(|entry| entry.path).find(|path| path == key)
}

/// Returns the path of the key `name`, if only one section supports it.
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
