//! [`prepare`]: tokenizes text into a token file once, for runs to open.

mod unfinished;

use super::source::{Encoder, Position, Records, SourceFile, SourceKind, TextOptions, expand, start_threads};
use super::storage::ignored_label;
use super::{Contents, DataError, FileError, Notes, OnBadLine, Skipped, Tokenizer};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;
use unfinished::Unfinished;

/// Options of [`prepare`].
#[derive(Debug, Clone, Copy)]
pub struct PrepareOptions<'a> {
    /// Text files, directories and patterns, as for [`Corpus::open`](super::Corpus::open).
    pub inputs: &'a [PathBuf],
    /// The file to write, which must not exist.
    pub output: &'a Path,
    /// The tokenizer, whose hash the file contains.
    pub tokenizer: &'a Tokenizer,
    /// The field of a JSON line, or the column of a Parquet file, that contains the text.
    pub text_field: &'a str,
    /// Appends the tokenizer's `eos_token` to each document of text that does not end with it.
    pub append_eod: bool,
    /// Treatment of invalid lines.
    pub on_bad_line: OnBadLine,
}

impl<'a> PrepareOptions<'a> {
    /// Returns the defaults: the field `text`, `append_eod`, and an error for an invalid line.
    pub fn new(inputs: &'a [PathBuf], output: &'a Path, tokenizer: &'a Tokenizer) -> Self {
        let (append_eod, on_bad_line) = (true, OnBadLine::Error);
        Self { inputs, output, tokenizer, text_field: "text", append_eod, on_bad_line }
    }
}

/// The progress of a preparation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PrepareProgress {
    /// Processed bytes of the input files.
    pub done_bytes: u64,
    /// Total bytes of the input files.
    pub total_bytes: u64,
    /// Bytes of text or lines that this call has tokenized.
    pub text_bytes: u64,
    /// Tokens so far.
    pub num_tokens: u64,
    /// Documents so far.
    pub num_documents: u64,
}

/// The result of a preparation.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Prepared {
    /// The final counts.
    pub progress: PrepareProgress,
    /// Whether it resumed an interrupted preparation.
    pub is_resumed: bool,
    /// Files and documents that this call read.
    pub contents: Contents,
    /// The entries that this call skipped.
    pub skipped: Skipped,
    /// What the user should know about the lines that this call read.
    pub notes: Notes,
}

/// Tokenizes text into a file of our own format.
///
/// The unfinished file grows in the directory `OUTPUT.partial`; `report` is called whenever data has been synced to
/// disk. After an interruption, the same call resumes, and the resulting file has the same bytes. The finished file
/// appears under its name atomically.
///
/// # Errors
/// When an input is missing, damaged or a token file, no document contains a token, the output exists or cannot be
/// written, or the unfinished file has other inputs or is in use by another process.
pub fn prepare(
    options: &PrepareOptions<'_>,
    mut report: impl FnMut(&PrepareProgress),
) -> Result<Prepared, DataError> {
    let PrepareOptions { inputs, output, tokenizer, text_field, append_eod, on_bad_line } = *options;
    if output.exists() {
        return Err(DataError::OutputExists { path: output.to_owned() });
    }
    let vocab_size = tokenizer.vocab_size();
    if vocab_size > ignored_label(4) as usize {
        return Err(DataError::VocabTooLarge { vocab_size });
    }
    let (mut skipped, mut notes) = (Skipped::default(), Notes::default());
    let inputs = Inputs::find(inputs, text_field, &mut skipped)?;
    let (mut unfinished, position) = Unfinished::open(output, tokenizer, &inputs.fingerprint(options))?;
    let is_resumed = position != Position::default();
    let mut progress = PrepareProgress {
        total_bytes: inputs.bytes_before(Position::end(&inputs.files)),
        ..Default::default()
    };

    let encoder =
        Encoder { tokenizer, options: TextOptions { text_field, vocab_size, append_eod }, on_bad_line };
    let (mut bad_lines, mut contents) = (Vec::new(), Contents::default());
    let mut records = Records::new(&inputs.files, text_field, position);
    start_threads()?;
    let mut batch = records.next_batch()?;
    while let Some(current) = batch {
        let (documents, next) =
            rayon::join(|| encoder.encode_all(current.records, &mut bad_lines), || records.next_batch());
        for document in documents? {
            skipped.empty += usize::from(document.is_empty());
            if !document.tokens.is_empty() {
                contents.add(document.kind);
            }
            unfinished.push(&document)?;
            notes.add(document.notes);
        }
        if let Some(first) = bad_lines.first().filter(|_| skipped.bad_lines == 0) {
            tracing::warn!("skipped: {first}");
        }
        skipped.bad_lines += bad_lines.len();
        bad_lines.clear();
        unfinished.save(current.next)?;
        progress.text_bytes += current.bytes as u64;
        progress.done_bytes = inputs.bytes_before(current.next);
        (progress.num_tokens, progress.num_documents) = unfinished.counts();
        report(&progress);
        batch = next?;
    }
    skipped.add(records.skipped);
    (progress.num_tokens, progress.num_documents) = unfinished.counts();
    progress.done_bytes = progress.total_bytes;
    if progress.num_tokens == 0 {
        let path = options.inputs.first().cloned().unwrap_or_default();
        unfinished.discard()?;
        return Err(DataError::Empty { path, skipped: Box::new(skipped), notes });
    }
    unfinished.publish(output)?;
    inputs.files.into_iter().for_each(|file| contents.add_file(file.path));
    Ok(Prepared { progress, is_resumed, contents, skipped, notes })
}

/// The input files.
struct Inputs {
    files: Vec<SourceFile>,
    states: Vec<FileState>,
}

/// Size and time of modification of a file, by which a change is noticed.
struct FileState {
    bytes: u64,
    /// Time of modification, in nanoseconds.
    modified: u128,
}

impl Inputs {
    fn find(paths: &[PathBuf], text_field: &str, skipped: &mut Skipped) -> Result<Self, DataError> {
        let mut files = Vec::new();
        for path in paths {
            files.extend(expand(path, text_field, skipped)?);
        }
        if let Some(file) = files.iter().find(|file| matches!(file.kind, SourceKind::Tokens(_))) {
            return Err(FileError::AlreadyTokens { path: file.path.clone() }.into());
        }
        let states = files.iter().map(|file| FileState::read(&file.path)).collect::<Result<Vec<_>, _>>()?;
        Ok(Self { files, states })
    }

    /// Returns a hash of everything that affects the tokens.
    fn fingerprint(&self, options: &PrepareOptions<'_>) -> String {
        let mut hash = blake3::Hasher::new();
        hash.update(&options.tokenizer.fingerprint());
        let mut add = |bytes: &[u8]| {
            hash.update(&(bytes.len() as u64).to_le_bytes());
            hash.update(bytes);
        };
        add(options.text_field.as_bytes());
        add(&[u8::from(options.append_eod), options.on_bad_line as u8]);
        for (file, FileState { bytes, modified }) in self.files.iter().zip(&self.states) {
            add(file.path.as_os_str().as_encoded_bytes());
            add(&bytes.to_le_bytes());
            add(&modified.to_le_bytes());
        }
        hash.finalize().to_hex().to_string()
    }

    fn bytes_before(&self, position: Position) -> u64 {
        // The offset in a compressed file counts its contents.
        let within = self.states.get(position.file).map_or(0, |state| position.offset.min(state.bytes));
        self.states[..position.file].iter().map(|state| state.bytes).sum::<u64>() + within
    }
}

impl FileState {
    fn read(path: &Path) -> Result<Self, FileError> {
        let failed =
            |source| FileError::Io { path: path.to_owned(), operation: "read the file's metadata", source };
        let metadata = fs::metadata(path).map_err(failed)?;
        let modified = metadata.modified().map_err(failed)?.duration_since(UNIX_EPOCH).unwrap_or_default();
        Ok(Self { bytes: metadata.len(), modified: modified.as_nanos() })
    }
}
