//! Tokenised documents, from text files or from memory.

use super::{DataError, Tokenizer};
use rayon::prelude::*;
use std::fmt;
use std::fs;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// The tokens of all documents, in order, and where each document ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Corpus {
    tokens: Vec<u32>,
    /// One past the last token of each document; documents are never empty.
    document_ends: Vec<usize>,
    skipped: Skipped,
}

/// What a directory holds that is not training text.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Skipped {
    /// Files and directories whose name starts with a dot.
    pub hidden: usize,
    /// What programs have written: directories tagged as caches (`CACHEDIR.TAG`, as cargo's
    /// `target` is), and the metrics, configs and checkpoints of earlier training runs.
    pub outputs: usize,
    /// Files that are not valid UTF-8.
    pub not_text: usize,
    /// Files without a token.
    pub empty: usize,
    /// Pipes, sockets, and links to anything but a file.
    pub special: usize,
}

impl Skipped {
    /// Number of entries skipped; a directory counts as one.
    pub fn total(&self) -> usize {
        self.hidden + self.outputs + self.not_text + self.empty + self.special
    }
}

impl fmt::Display for Skipped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { hidden, outputs, not_text, empty, special } = self;
        write!(
            f,
            "skipped: {hidden} hidden, {outputs} outputs, {not_text} not UTF-8, {empty} empty, {special} special files"
        )
    }
}

impl Corpus {
    /// Reads a text file, or every text file below a directory, each as one document.
    ///
    /// Files are ordered by path, so the same directory gives the same corpus everywhere. Links to files are
    /// followed, links to directories are not: they may form a circle. What a directory holds besides text is
    /// counted in [`skipped`](Self::skipped).
    ///
    /// # Errors
    /// When the path is missing, something cannot be read, the tokenizer fails, or there is no token. A file
    /// given by name must be text.
    pub fn load(path: &Path, tokenizer: &Tokenizer) -> Result<Self, DataError> {
        let metadata = fs::metadata(path).map_err(|source| read_error(path, source))?;
        let mut skipped = Skipped::default();
        let texts = if metadata.is_dir() {
            read_directory(path, &mut skipped)?
        } else if metadata.is_file() {
            let text = read_text(path)?.ok_or_else(|| DataError::NotText { path: path.to_owned() })?;
            vec![(path.to_owned(), text)]
        } else {
            return Err(DataError::NotAFile { path: path.to_owned() });
        };
        // Collected before errors are looked at: the error reported is that of the first file, not of the fastest.
        let documents: Vec<_> = texts.par_iter().map(|(path, text)| tokenizer.encode(text, path)).collect();
        let documents = documents.into_iter().collect::<Result<Vec<_>, _>>()?;
        skipped.empty += documents.iter().filter(|document| document.is_empty()).count();
        match Self::from_documents(documents) {
            Ok(corpus) => Ok(Self { skipped, ..corpus }),
            Err(_) => Err(DataError::Empty { path: path.to_owned(), skipped }),
        }
    }

    /// Takes documents that are tokenised already; empty ones vanish.
    ///
    /// # Errors
    /// When no document holds a token.
    pub fn from_documents(documents: impl IntoIterator<Item = Vec<u32>>) -> Result<Self, DataError> {
        let mut tokens = Vec::new();
        let mut document_ends = Vec::new();
        for document in documents.into_iter().filter(|document| !document.is_empty()) {
            tokens.extend(document);
            document_ends.push(tokens.len());
        }
        if tokens.is_empty() {
            return Err(DataError::NoTokens);
        }
        Ok(Self { tokens, document_ends, skipped: Skipped::default() })
    }

    /// Tokens of all documents.
    pub fn num_tokens(&self) -> usize {
        self.tokens.len()
    }

    /// Number of documents, none of them empty.
    pub fn num_documents(&self) -> usize {
        self.document_ends.len()
    }

    /// The tokens of a document, counted over all of them.
    ///
    /// # Errors
    /// When there is no such document.
    pub fn document(&self, index: usize) -> Result<Range<usize>, DataError> {
        let out_of_range = || DataError::NoDocument { index, available: self.num_documents() };
        let end = *self.document_ends.get(index).ok_or_else(out_of_range)?;
        let start = index.checked_sub(1).map_or(0, |before| self.document_ends[before]);
        Ok(start..end)
    }

    /// The document that holds a token; one past the last where no document does.
    pub fn document_at(&self, token: usize) -> usize {
        self.document_ends.partition_point(|&end| end <= token)
    }

    /// Appends the tokens of a range.
    ///
    /// # Errors
    /// When the range ends beyond the last token.
    pub fn read_tokens(&self, range: Range<usize>, tokens: &mut Vec<u32>) -> Result<(), DataError> {
        let available = self.num_tokens();
        let found = self.tokens.get(range.clone()).ok_or(DataError::NoTokenRange { range, available })?;
        tokens.extend(found);
        Ok(())
    }

    /// Appends what each token of a range counts for as a target: itself, or [`IGNORED_LABEL`](super::IGNORED_LABEL) where the token
    /// is context only. Not shifted: the label of token i is token i's, as in Hugging Face's datasets.
    ///
    /// # Errors
    /// As [`read_tokens`](Self::read_tokens).
    pub fn read_labels(&self, range: Range<usize>, labels: &mut Vec<i64>) -> Result<(), DataError> {
        let mut tokens = Vec::with_capacity(range.len());
        self.read_tokens(range, &mut tokens)?;
        labels.extend(tokens.into_iter().map(i64::from));
        Ok(())
    }

    /// The tokens of all documents, one after the other.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// One past the last token of each document, ascending.
    pub fn document_ends(&self) -> &[usize] {
        &self.document_ends
    }

    /// What was found beside the text.
    pub fn skipped(&self) -> Skipped {
        self.skipped
    }
}

/// The text files below `root` with their contents, ordered by path.
fn read_directory(root: &Path, skipped: &mut Skipped) -> Result<Vec<(PathBuf, String)>, DataError> {
    let mut files = Vec::new();
    let mut directories = vec![root.to_owned()];
    while let Some(directory) = directories.pop() {
        let holds_a_run = directory.join("metrics.jsonl").exists();
        let entries = fs::read_dir(&directory).map_err(|source| read_error(&directory, source))?;
        for entry in entries {
            let entry = entry.map_err(|source| read_error(&directory, source))?;
            let path = entry.path();
            let file_type = entry.file_type().map_err(|source| read_error(&path, source))?;
            let name = entry.file_name();
            let is_cache = file_type.is_dir() && path.join("CACHEDIR.TAG").exists();
            // A run that read what an earlier one wrote would train on other data each time.
            let is_of_a_run = holds_a_run && is_written_by_a_run(&name.to_string_lossy());
            if name.to_string_lossy().starts_with('.') {
                skipped.hidden += 1;
            } else if is_cache || is_of_a_run {
                skipped.outputs += 1;
            } else if file_type.is_dir() {
                directories.push(path);
            } else if file_type.is_file() || (file_type.is_symlink() && path.is_file()) {
                files.push(path);
            } else {
                skipped.special += 1;
            }
        }
    }
    files.sort_unstable();
    let mut texts = Vec::with_capacity(files.len());
    for path in files {
        match read_text(&path)? {
            Some(text) => texts.push((path, text)),
            None => skipped.not_text += 1,
        }
    }
    Ok(texts)
}

/// `metrics.jsonl`, `config.json`, and those of earlier runs in the same place (`metrics.1.jsonl`);
/// the run's checkpoints and what names the newest of them.
fn is_written_by_a_run(name: &str) -> bool {
    if name == "latest" || name.starts_with("step_") {
        return true;
    }
    let (stem, extension) = name.split_once('.').unwrap_or((name, ""));
    match stem {
        "metrics" => extension.ends_with("jsonl"),
        "config" => extension.ends_with("json"),
        _ => false,
    }
}

/// The file's text, or `None` when it is not valid UTF-8.
fn read_text(path: &Path) -> Result<Option<String>, DataError> {
    let bytes = fs::read(path).map_err(|source| read_error(path, source))?;
    Ok(String::from_utf8(bytes).ok())
}

fn read_error(path: &Path, source: io::Error) -> DataError {
    let path = path.to_owned();
    match source.kind() {
        io::ErrorKind::NotFound => DataError::Missing { path },
        _ => DataError::Read { path, source },
    }
}
