//! [`Skipped`]: what is not read.

use std::fmt;

/// The entries of directories that are not training text, by reason.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Skipped {
    /// Files and directories whose name starts with a dot.
    pub hidden: usize,
    /// Program output: directories tagged as caches (`CACHEDIR.TAG`, such as cargo's `target`), directories of models, and
    /// the metrics, configs and checkpoints of training runs.
    pub outputs: usize,
    /// Files that are not valid UTF-8.
    pub not_text: usize,
    /// Files, lines and rows without a token.
    pub empty: usize,
    /// Pipes, sockets, and links to anything but a file.
    pub special: usize,
    /// Files of formats that hold no documents: settings, metadata, tables and JSON without samples, archives.
    pub other_formats: usize,
    /// Text other than `.txt` in a directory with files of samples: cards, licenses, scripts.
    pub beside_samples: usize,
    /// Lines, rows and elements that are not valid, with [`OnBadLine::Skip`](crate::config::OnBadLine::Skip).
    pub bad_lines: usize,
}

impl Skipped {
    /// Returns the number of skipped entries; a directory counts as one.
    pub fn total(&self) -> usize {
        let Self { hidden, outputs, not_text, empty, special, .. } = *self;
        let Self { other_formats, beside_samples, bad_lines, .. } = *self;
        hidden + outputs + not_text + empty + special + other_formats + beside_samples + bad_lines
    }

    pub(in crate::data) fn add(&mut self, other: Self) {
        self.hidden += other.hidden;
        self.outputs += other.outputs;
        self.not_text += other.not_text;
        self.empty += other.empty;
        self.special += other.special;
        self.other_formats += other.other_formats;
        self.beside_samples += other.beside_samples;
        self.bad_lines += other.bad_lines;
    }
}

impl fmt::Display for Skipped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { hidden, outputs, not_text, empty, special, other_formats, beside_samples, bad_lines } =
            *self;
        let kinds = [
            (hidden, "hidden"),
            (outputs, "written by runs or other programs"),
            (not_text, "not UTF-8"),
            (empty, "empty"),
            (special, "not regular files"),
            (other_formats, "of formats without documents"),
            (beside_samples, "beside files of samples"),
            (bad_lines, "bad lines"),
        ];
        let kinds = kinds.into_iter().filter(|(count, _)| *count > 0);
        let kinds: Vec<String> = kinds.map(|(count, kind)| format!("{count} {kind}")).collect();
        if kinds.is_empty() {
            f.write_str("no files skipped")
        } else {
            write!(f, "skipped: {}", kinds.join(", "))
        }
    }
}
