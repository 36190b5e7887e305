//! [`Corpus`]: the tokens of documents, in memory or in files.

use super::source::{Encoder, Records, SourceFile, SourceKind, TextOptions, expand, start_threads};
use super::storage::{self, MemoryTokens, TokenFile, TokenFileOptions, TokenStore};
use super::{Contents, DataError, FileError, Notes, OnBadLine, Skipped, Tokenizer};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// Tokens that are read at once by a scan of the corpus.
const SCAN_TOKENS: usize = 1 << 16;

/// The tokens of documents, read by ranges.
///
/// Text is tokenized into memory; token files are read on access. The sources are concatenated. Clones share the
/// tokens.
///
/// # Examples
///
/// ```
/// use ulysses::data::Corpus;
///
/// let corpus = Corpus::from_documents([vec![1, 2, 3], vec![4, 5]])?;
/// assert_eq!((corpus.num_documents(), corpus.num_tokens()), (2, 5));
/// let mut tokens = Vec::new();
/// corpus.read_tokens(corpus.document(1)?, &mut tokens)?;
/// assert_eq!(tokens, [4, 5]);
/// # Ok::<(), ulysses::data::DataError>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct Corpus {
    parts: Vec<Part>,
    contents: Contents,
    skipped: Skipped,
    notes: Notes,
    bad_lines: Vec<Arc<DataError>>,
}

/// A token store, with its ranges of tokens and documents in the corpus.
#[derive(Debug, Clone)]
struct Part {
    tokens: Range<usize>,
    documents: Range<usize>,
    store: Arc<dyn TokenStore>,
}

/// Options for reading a corpus.
#[derive(Debug, Clone, Copy)]
pub struct SourceOptions<'a> {
    /// The tokenizer for text. A token file that names its tokenizer must name the same one.
    pub tokenizer: &'a Tokenizer,
    /// The field of a JSON line, or the column of a Parquet file, that contains the text.
    pub text_field: &'a str,
    /// Options for tokens in token files and JSON lines.
    pub token_files: TokenFileOptions,
    /// Appends the tokenizer's `eos_token` to each document of text that does not end with it.
    pub append_eod: bool,
    /// Treatment of invalid lines.
    pub on_bad_line: OnBadLine,
}

impl<'a> SourceOptions<'a> {
    /// Returns the defaults: the field `text`, token files checked against their own vocabulary, `append_eod`, and an error for
    /// an invalid line.
    pub fn new(tokenizer: &'a Tokenizer) -> Self {
        let (token_files, on_bad_line) = (TokenFileOptions::default(), OnBadLine::Error);
        Self { tokenizer, text_field: "text", token_files, append_eod: true, on_bad_line }
    }
}

impl Corpus {
    /// Maximum number of stored errors of skipped lines.
    pub const MAX_BAD_LINES: usize = 1000;

    /// Reads one path with default options; see [`open`](Self::open).
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn load(path: &Path, tokenizer: &Tokenizer) -> Result<Self, DataError> {
        Self::open(&[path], &SourceOptions::new(tokenizer))
    }

    /// Reads files, directories and patterns (`shards/*.jsonl`), in order.
    ///
    /// A document is a text file, a line of JSONL, an object of a JSON array, or a row of a table or Parquet file, each of which may
    /// be compressed with gzip or Zstandard (but not Parquet). Token files are detected by [`TokenFile::detect`], except
    /// that a headerless `.bin` must be given by name. Files of a directory are ordered by path, so the same directory gives
    /// the same corpus everywhere. Other files in it are counted in [`skipped`](Self::skipped).
    ///
    /// # Errors
    /// When a path does not exist, a file cannot be read or is damaged, the tokenizer fails, or a path has no tokens.
    pub fn open(paths: &[impl AsRef<Path>], options: &SourceOptions<'_>) -> Result<Self, DataError> {
        let mut corpus = Self::default();
        for path in paths.iter().map(AsRef::as_ref) {
            let mut skipped = Skipped::default();
            let files = expand(path, options.text_field, &mut skipped)?;
            let before = corpus.num_tokens();
            let is_tokens = |file: &SourceFile| matches!(file.kind, SourceKind::Tokens(_));
            for files in files.chunk_by(|file, next| !is_tokens(file) && !is_tokens(next)) {
                match &files[0] {
                    SourceFile { path, kind: SourceKind::Tokens(format), .. } => {
                        let file = TokenFile::open(path, *format, options.token_files)?;
                        check_tokenizer(&file, options.tokenizer)?;
                        corpus.contents.in_token_files += file.num_documents();
                        corpus.push(file)?;
                    }
                    _ => {
                        let store = corpus.tokenize(files, options, &mut skipped)?;
                        corpus.push(store)?;
                    }
                }
            }
            files.into_iter().for_each(|file| corpus.contents.add_file(file.path));
            if corpus.num_tokens() == before {
                // Where every line is bad, the first says why.
                let first = corpus.bad_lines.drain(..).next().and_then(Arc::into_inner);
                let skipped = Box::new(skipped);
                let empty = || DataError::Empty { path: path.to_owned(), skipped, notes: corpus.notes };
                return Err(first.unwrap_or_else(empty));
            }
            corpus.skipped.add(skipped);
        }
        if corpus.parts.is_empty() { Err(DataError::NoTokens) } else { Ok(corpus) }
    }

    /// Creates a corpus of tokenized documents; empty ones are dropped.
    ///
    /// # Errors
    /// When no document contains a token.
    pub fn from_documents(documents: impl IntoIterator<Item = Vec<u32>>) -> Result<Self, DataError> {
        let mut store = MemoryTokens::default();
        documents.into_iter().for_each(|document| store.push(&document, None));
        let mut corpus = Self::default();
        corpus.push(store)?;
        if corpus.parts.is_empty() { Err(DataError::NoTokens) } else { Ok(corpus) }
    }

    /// Creates a corpus of one token file.
    ///
    /// # Errors
    /// When its counts overflow.
    pub fn from_token_file(file: TokenFile) -> Result<Self, DataError> {
        let mut corpus = Self::default();
        corpus.push(file)?;
        Ok(corpus)
    }

    fn push(&mut self, store: impl TokenStore + 'static) -> Result<(), DataError> {
        if store.num_tokens() == 0 {
            return Ok(());
        }
        let after = |start: usize, count| {
            start.checked_add(count).map(|end| start..end).ok_or(DataError::TooManyTokens)
        };
        let tokens = after(self.num_tokens(), store.num_tokens())?;
        let documents = after(self.num_documents(), store.num_documents())?;
        self.parts.push(Part { tokens, documents, store: Arc::new(store) });
        Ok(())
    }

    /// Returns the number of tokens.
    pub fn num_tokens(&self) -> usize {
        self.parts.last().map_or(0, |part| part.tokens.end)
    }

    /// Returns the number of documents, none of them empty.
    pub fn num_documents(&self) -> usize {
        self.parts.last().map_or(0, |part| part.documents.end)
    }

    /// Returns the token range of a document.
    ///
    /// # Errors
    /// When the document does not exist, or its bounds cannot be read.
    pub fn document(&self, index: usize) -> Result<Range<usize>, DataError> {
        let at = self.parts.partition_point(|part| part.documents.end <= index);
        let available = self.num_documents();
        let part = self.parts.get(at).ok_or(DataError::NoDocument { index, available })?;
        let within = index - part.documents.start;
        let end = part.store.document_end(within)?;
        let start = within.checked_sub(1).map_or(Ok(0), |before| part.store.document_end(before))?;
        Ok(part.tokens.start + start..part.tokens.start + end)
    }

    /// Returns the document of a token, or the number of documents if there is none.
    ///
    /// # Errors
    /// When the document bounds cannot be read.
    pub fn document_at(&self, token: usize) -> Result<usize, DataError> {
        let Some(part) = self.parts.get(self.part_at(token)) else { return Ok(self.num_documents()) };
        let within = storage::document_at(&*part.store, token - part.tokens.start)?;
        Ok(part.documents.start + within)
    }

    /// Returns the part of a token, or the number of parts if there is none.
    fn part_at(&self, token: usize) -> usize {
        self.parts.partition_point(|part| part.tokens.end <= token)
    }

    /// Appends the tokens of a range.
    ///
    /// # Errors
    /// When the range is out of bounds, or a file cannot be read or contains an id outside the vocabulary.
    pub fn read_tokens(&self, range: Range<usize>, tokens: &mut Vec<u32>) -> Result<(), DataError> {
        self.in_parts(range, |store, range| store.read_tokens(range, tokens))
    }

    /// Appends the label of each token of a range: the token itself, the user's label, or
    /// [`IGNORED_LABEL`](super::IGNORED_LABEL) for context. Labels are not shifted: label i belongs to token i, as in
    /// Hugging Face's datasets.
    ///
    /// # Errors
    /// As [`read_tokens`](Self::read_tokens).
    pub fn read_labels(&self, range: Range<usize>, labels: &mut Vec<i64>) -> Result<(), DataError> {
        self.in_parts(range, |store, range| store.read_labels(range, labels))
    }

    /// Returns whether labels may differ from tokens.
    pub fn has_labels(&self) -> bool {
        self.parts.iter().any(|part| part.store.has_labels())
    }

    /// Returns whether labels may differ from tokens in the source of a token.
    pub(super) fn has_labels_at(&self, token: usize) -> bool {
        self.parts[self.part_at(token)].store.has_labels()
    }

    /// Returns the first token or label outside a vocabulary, as its index and id.
    ///
    /// Only parts that are not [checked on access](TokenFileOptions::vocab_size) are scanned.
    ///
    /// # Errors
    /// When a file cannot be read.
    pub fn first_outside(&self, vocab_size: usize) -> Result<Option<(usize, i64)>, DataError> {
        let is_outside = |id: i64| usize::try_from(id).is_ok_and(|id| id >= vocab_size);
        for part in self.parts.iter().filter(|part| !part.store.checks_vocab(vocab_size)) {
            let (mut tokens, mut labels) = (Vec::new(), Vec::new());
            for first in part.tokens.clone().step_by(SCAN_TOKENS) {
                let range = first..part.tokens.end.min(first + SCAN_TOKENS);
                tokens.clear();
                labels.clear();
                self.read_tokens(range.clone(), &mut tokens)?;
                self.read_labels(range, &mut labels)?;
                for (at, (&token, &label)) in tokens.iter().zip(&labels).enumerate() {
                    if let Some(id) = [token.into(), label].into_iter().find(|&id| is_outside(id)) {
                        return Ok(Some((first + at, id)));
                    }
                }
            }
        }
        Ok(None)
    }

    /// Returns what the user should know about the lines that were read.
    pub fn notes(&self) -> &Notes {
        &self.notes
    }

    /// Returns the token that ends the tokenizer's answers, if the corpus has conversations (of a token file: labels) and the
    /// tokenizer a chat template.
    pub fn end_of_turn(&self, tokenizer: &Tokenizer) -> Option<u32> {
        let has_chats =
            self.contents.conversations > 0 || (self.contents.in_token_files > 0 && self.has_labels());
        has_chats.then(|| tokenizer.end_of_turn()).flatten()
    }

    /// Returns what was found in the files.
    pub fn contents(&self) -> &Contents {
        &self.contents
    }

    /// Returns the errors of skipped lines, in order, at most [`MAX_BAD_LINES`](Self::MAX_BAD_LINES) of them.
    pub fn bad_lines(&self) -> &[Arc<DataError>] {
        &self.bad_lines
    }

    /// Returns the number of skipped entries.
    pub fn skipped(&self) -> Skipped {
        self.skipped
    }

    /// Reads and tokenizes files; reading overlaps with tokenization.
    fn tokenize(
        &mut self,
        files: &[SourceFile],
        options: &SourceOptions<'_>,
        skipped: &mut Skipped,
    ) -> Result<MemoryTokens, DataError> {
        let SourceOptions { tokenizer, text_field, append_eod, on_bad_line, .. } = *options;
        let vocab_size = options.token_files.vocab_size.unwrap_or(usize::MAX);
        let options = TextOptions { text_field, vocab_size, append_eod };
        let encoder = Encoder { tokenizer, options, on_bad_line };
        let mut records = Records::new(files, text_field, Default::default());
        let mut store = MemoryTokens::default();
        start_threads()?;
        let mut batch = records.next_batch()?;
        while let Some(current) = batch {
            let mut bad_lines = Vec::new();
            let (documents, next) =
                rayon::join(|| encoder.encode_all(current.records, &mut bad_lines), || records.next_batch());
            for document in documents? {
                skipped.empty += usize::from(document.is_empty());
                if !document.tokens.is_empty() {
                    self.contents.add(document.kind);
                }
                store.push(&document.tokens, document.labels.as_deref());
                self.notes.add(document.notes);
            }
            skipped.bad_lines += bad_lines.len();
            let room = Self::MAX_BAD_LINES - self.bad_lines.len();
            self.bad_lines.extend(bad_lines.into_iter().take(room).map(Arc::new));
            batch = next?;
        }
        skipped.add(records.skipped);
        Ok(store)
    }

    /// Calls `read` with each store and its piece of a range.
    fn in_parts(
        &self,
        range: Range<usize>,
        mut read: impl FnMut(&dyn TokenStore, Range<usize>) -> Result<(), DataError>,
    ) -> Result<(), DataError> {
        let available = self.num_tokens();
        if range.start > range.end || range.end > available {
            return Err(DataError::NoTokenRange { range, available });
        }
        let touched = self.parts[self.part_at(range.start)..].iter();
        for Part { tokens, store, .. } in touched.take_while(|part| part.tokens.start < range.end) {
            let piece = range.start.max(tokens.start)..range.end.min(tokens.end);
            read(&**store, piece.start - tokens.start..piece.end - tokens.start)?;
        }
        Ok(())
    }
}

fn check_tokenizer(file: &TokenFile, tokenizer: &Tokenizer) -> Result<(), DataError> {
    match file.made_by() {
        Some((vocab_size, hash)) if hash != tokenizer.hash() => {
            let found = blake3::Hash::from_bytes(hash).to_hex()[..16].to_owned();
            Err(FileError::OtherTokenizer { path: file.path().to_owned(), vocab_size, found }.into())
        }
        _ => Ok(()),
    }
}
