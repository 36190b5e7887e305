//! A token file that is being written.
//!
//! `OUTPUT.partial` contains the file up to its tokens (`tokens`), the sections that follow (`labels`, `ends`), and
//! `progress.json`: the valid length of these, and the position in the inputs. `progress.json` is replaced atomically
//! after the other files have been synced, so it is always consistent with them.

use crate::data::source::{Document, Position};
use crate::data::storage::{HEADER_BYTES, Header, ignored_label};
use crate::data::{DataError, FileError, Tokenizer};
use crate::regular_file;
use serde::{Deserialize, Serialize};
use std::fs::{self, File, TryLockError};
use std::io::{self, BufWriter, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

const PROGRESS: &str = "progress.json";

/// The contents of `progress.json`.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Progress {
    /// Hash of inputs, tokenizer and options.
    fingerprint: String,
    position: Position,
    num_tokens: u64,
    num_documents: u64,
    has_labels: bool,
}

#[derive(Debug)]
pub(super) struct Unfinished {
    directory: PathBuf,
    progress: Progress,
    /// Bytes per token.
    width: usize,
    vocab_size: usize,
    tokenizer: [u8; 32],
    tokens: Part,
    labels: Part,
    ends: Part,
}

/// A section of the file, which only grows.
#[derive(Debug)]
struct Part {
    path: PathBuf,
    file: BufWriter<File>,
}

impl Unfinished {
    /// Creates an unfinished file or resumes one; returns the position in the inputs.
    pub(super) fn open(
        output: &Path,
        tokenizer: &Tokenizer,
        fingerprint: &str,
    ) -> Result<(Self, Position), DataError> {
        let mut name = output.as_os_str().to_owned();
        name.push(".partial");
        let directory = PathBuf::from(name);
        fs::create_dir_all(&directory).map_err(failed(&directory, "create the directory"))?;
        // Readers of the parent directory skip tagged directories (https://bford.info/cachedir).
        let tag = directory.join("CACHEDIR.TAG");
        fs::write(&tag, "Signature: 8a477f597d28d172789f06886806bc55\n")
            .map_err(failed(&tag, "create the file"))?;
        let part = |name: &str| Part::open(directory.join(name));
        let (tokens, labels, ends) = (part("tokens")?, part("labels")?, part("ends")?);
        match tokens.file.get_ref().try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(DataError::BeingPrepared { path: directory }),
            Err(TryLockError::Error(error)) => {
                return Err(failed(&tokens.path, "lock the file")(error).into());
            }
        }
        let progress = read_progress(&directory)?
            .unwrap_or_else(|| Progress { fingerprint: fingerprint.to_owned(), ..Progress::default() });
        if progress.fingerprint != fingerprint {
            return Err(DataError::OtherPreparation { path: directory });
        }
        let vocab_size = tokenizer.vocab_size();
        let width = if vocab_size <= ignored_label(2) as usize { 2 } else { 4 };
        let position = progress.position;
        let tokenizer = tokenizer.hash();
        let mut unfinished = Self { directory, progress, width, vocab_size, tokenizer, tokens, labels, ends };
        unfinished.truncate_to_progress()?;
        Ok((unfinished, position))
    }

    /// Drops everything after the recorded progress.
    fn truncate_to_progress(&mut self) -> Result<(), DataError> {
        let Progress { num_tokens, num_documents, has_labels, .. } = self.progress;
        let bytes = num_tokens * self.width as u64;
        if num_tokens == 0 {
            // Space for the header, which is written last.
            self.tokens.truncate(0)?;
            self.tokens.write(&[0; HEADER_BYTES])?;
        } else {
            self.tokens.truncate(HEADER_BYTES as u64 + bytes)?;
        }
        self.labels.truncate(if has_labels { bytes } else { 0 })?;
        Ok(self.ends.truncate(8 * num_documents)?)
    }

    /// Returns the number of tokens and documents so far.
    pub(super) fn counts(&self) -> (u64, u64) {
        (self.progress.num_tokens, self.progress.num_documents)
    }

    /// Appends a document, whose ids and labels must be in the vocabulary; an empty one is dropped.
    pub(super) fn push(&mut self, document: &Document) -> Result<(), DataError> {
        if document.tokens.is_empty() {
            return Ok(());
        }
        if document.labels.is_some() && !self.progress.has_labels {
            self.begin_labels()?;
        }
        let width = self.width;
        for token in &document.tokens {
            self.tokens.write(&token.to_le_bytes()[..width])?;
        }
        if self.progress.has_labels {
            let ignored = ignored_label(width);
            let own = document.tokens.iter().map(|&token| i64::from(token));
            let mut write = |label: i64| {
                let label = u32::try_from(label).unwrap_or(ignored);
                self.labels.write(&label.to_le_bytes()[..width])
            };
            match &document.labels {
                Some(labels) => labels.iter().copied().try_for_each(&mut write)?,
                None => own.into_iter().try_for_each(&mut write)?,
            }
        }
        self.progress.num_tokens += document.tokens.len() as u64;
        self.progress.num_documents += 1;
        Ok(self.ends.write(&self.progress.num_tokens.to_le_bytes())?)
    }

    /// Adds the labels of the previous documents, whose tokens are their own labels.
    fn begin_labels(&mut self) -> Result<(), DataError> {
        self.progress.has_labels = true;
        self.tokens.flush()?;
        let mut source = File::open(&self.tokens.path).map_err(failed(&self.tokens.path, "read the file"))?;
        Ok(self.labels.append(&mut source, HEADER_BYTES as u64)?)
    }

    /// Syncs everything that was pushed, the contents of the inputs before `position`, to disk.
    pub(super) fn save(&mut self, position: Position) -> Result<(), DataError> {
        for part in [&mut self.tokens, &mut self.labels, &mut self.ends] {
            part.sync()?;
        }
        self.progress.position = position;
        let (path, next) = (self.directory.join(PROGRESS), self.directory.join("progress.next"));
        let text =
            serde_json::to_string(&self.progress).map_err(|error| failed(&path, "write")(error.into()))?;
        let write = || {
            let mut file = regular_file::create(&next)?;
            file.write_all(text.as_bytes())?;
            file.sync_all()?;
            fs::rename(&next, &path)
        };
        Ok(write().map_err(failed(&path, "write the file"))?)
    }

    /// Concatenates the parts and renames the file to `output`.
    pub(super) fn publish(mut self, output: &Path) -> Result<(), DataError> {
        let Progress { num_tokens, num_documents, has_labels, .. } = self.progress;
        let header = Header {
            width: self.width,
            num_tokens,
            num_documents,
            has_labels,
            vocab_size: self.vocab_size as u64,
            tokenizer: self.tokenizer,
        };
        let unpadded = num_tokens * self.width as u64;
        let padding = vec![0; (unpadded.next_multiple_of(8) - unpadded) as usize];
        self.tokens.write(&padding)?;
        if has_labels {
            self.tokens.append(&mut self.labels.reopen()?, 0)?;
            self.tokens.write(&padding)?;
        }
        self.tokens.append(&mut self.ends.reopen()?, 0)?;
        self.tokens.flush()?;
        let mut file = self.tokens.file.get_ref();
        let begin = file.seek(SeekFrom::Start(0)).and_then(|_| file.write_all(&header.encode()));
        begin.and_then(|()| file.sync_all()).map_err(failed(&self.tokens.path, "write the file"))?;
        fs::rename(&self.tokens.path, output).map_err(failed(output, "create the file"))?;
        // The rename must be durable before the parts are removed.
        let parent =
            output.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        if cfg!(unix) {
            File::open(parent)
                .and_then(|parent| parent.sync_all())
                .map_err(failed(parent, "write the directory"))?;
        }
        self.discard()
    }

    /// Removes the directory of the unfinished file.
    pub(super) fn discard(self) -> Result<(), DataError> {
        Ok(fs::remove_dir_all(&self.directory).map_err(failed(&self.directory, "remove the directory"))?)
    }
}

impl Part {
    fn open(path: PathBuf) -> Result<Self, FileError> {
        let file = regular_file::open_to_write(&path);
        let file = BufWriter::with_capacity(1 << 20, file.map_err(failed(&path, "create the file"))?);
        Ok(Self { path, file })
    }

    /// Truncates the file to `bytes`; it must not be shorter.
    fn truncate(&mut self, bytes: u64) -> Result<(), FileError> {
        let file = self.file.get_mut();
        let file_bytes = file.metadata().map_err(failed(&self.path, "read the file's metadata"))?.len();
        if file_bytes < bytes {
            let path = self.path.clone();
            return Err(FileError::Truncated { path, offset: 0, needed_bytes: bytes, file_bytes });
        }
        let truncated = file.set_len(bytes).and_then(|()| file.seek(SeekFrom::Start(bytes)));
        truncated.map(drop).map_err(failed(&self.path, "truncate the file"))
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), FileError> {
        self.file.write_all(bytes).map_err(failed(&self.path, "write the file"))
    }

    /// Appends the contents of a file from `offset` on.
    fn append(&mut self, source: &mut File, offset: u64) -> Result<(), FileError> {
        let copied = source.seek(SeekFrom::Start(offset)).and_then(|_| io::copy(source, &mut self.file));
        copied.map(drop).map_err(failed(&self.path, "write the file"))
    }

    fn reopen(&mut self) -> Result<File, FileError> {
        self.flush()?;
        File::open(&self.path).map_err(failed(&self.path, "read the file"))
    }

    fn flush(&mut self) -> Result<(), FileError> {
        self.file.flush().map_err(failed(&self.path, "write the file"))
    }

    fn sync(&mut self) -> Result<(), FileError> {
        self.flush()?;
        self.file.get_ref().sync_data().map_err(failed(&self.path, "write the file"))
    }
}

fn read_progress(directory: &Path) -> Result<Option<Progress>, DataError> {
    let path = directory.join(PROGRESS);
    match regular_file::read(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(failed(&path, "read the file")(error).into()),
        Ok(text) => {
            let progress = serde_json::from_slice(&text);
            Ok(Some(progress.map_err(|error| failed(&path, "read the file")(error.into()))?))
        }
    }
}

fn failed(path: &Path, operation: &'static str) -> impl Fn(io::Error) -> FileError {
    move |source| FileError::Io { path: path.to_owned(), operation, source }
}
