//! The datasets of a job: the documents of `ulysses.data` and `ulysses.validation`, packed into sequences.

use super::model_source::{own_tokenizer, unread_tokenizer};
use super::options::{JobError, OpenTokenizer, OrJobError};
use crate::comm::with_causes;
use crate::config::{Config, DataSource, HeldOut, LongConversations, Packing, UlyssesConfig};
use crate::data::{
    Corpus, DataError, Dataset, Documents, PackedSequences, SourceOptions, TokenFileOptions, Tokenizer,
};
use std::path::Path;
use std::sync::Arc;

/// Documents before packing.
pub struct Sources {
    packing: Packing,
    long_conversations: LongConversations,
    /// Training documents and their weights; either all or none have one.
    training: Vec<(Documents, Option<f64>)>,
    held_out: Vec<Documents>,
    log: fn(&str),
}

/// Documents in sequences.
struct Packed {
    sequences: PackedSequences,
    /// Conversations that are longer than a sequence.
    num_long: usize,
}

/// Reads the data of a config for a model with `vocab_size` token ids.
struct Reader<'a> {
    config: &'a Config,
    tokenizer: &'a Tokenizer,
    vocab_size: usize,
    log: fn(&str),
}

/// Opens the given tokenizer, else the model's own, else one of bytes. Sets `tokenizer` to the path that it opens.
///
/// # Errors
/// A file that cannot be read.
pub fn open_tokenizer(
    config: &mut UlyssesConfig,
    open: OpenTokenizer,
    log: fn(&str),
) -> Result<Tokenizer, JobError> {
    let UlyssesConfig { model, tokenizer, chat_date, .. } = config;
    if tokenizer.is_none()
        && let Some(path) = model.as_deref().and_then(own_tokenizer)
    {
        log(&format!("tokenizer: {}", path.display()));
        *tokenizer = Some(path.display().to_string());
    }
    open(tokenizer.as_deref().map(Path::new), *chat_date)
}

impl Sources {
    /// Reads the config's data and checks its token ids against the model's vocabulary. `log` receives what was found.
    ///
    /// # Errors
    /// Data that cannot be read, or does not fit the model.
    pub fn read(
        config: &Config,
        tokenizer: &Tokenizer,
        vocab_size: usize,
        log: fn(&str),
    ) -> Result<Self, JobError> {
        let reader = Reader { config, tokenizer, vocab_size, log };
        let UlyssesConfig { packing, long_conversations, ref validation, .. } = config.ulysses;
        let held_out = validation.as_ref().map(|validation| &validation.data);
        let mut sources =
            Self { packing, long_conversations, training: Vec::new(), held_out: Vec::new(), log };
        // Paths without weights are one corpus.
        for group in config.require_data().or_usage()?.chunk_by(|source, _| source.weight.is_none()) {
            let paths: Vec<&str> = group.iter().map(|DataSource { path, .. }| path.as_str()).collect();
            let name = paths.join(", ");
            let corpus = reader.read(&paths)?;
            let training = match held_out {
                Some(HeldOut::Fraction(fraction)) => {
                    let [training, held_out] = Documents::split(corpus, *fraction).map_err(within(&name))?;
                    check(&held_out, packing, &format!("validation split of {name}"))?;
                    sources.held_out.push(held_out);
                    training
                }
                _ => corpus.into(),
            };
            check(&training, packing, &name)?;
            sources.training.push((training, group[0].weight));
        }
        if let Some(HeldOut::Path(path)) = held_out {
            let documents = reader.read(&[path])?.into();
            check(&documents, packing, path)?;
            sources.held_out.push(documents);
        }
        sources.log_label_share()?;
        Ok(sources)
    }

    /// Logs the share of tokens with labels, unless all have one.
    fn log_label_share(&self) -> Result<(), JobError> {
        let documents = || self.training.iter().map(|(documents, _)| documents);
        if documents().all(|documents| !documents.corpus().has_labels()) {
            return Ok(());
        }
        let (mut num_documents, mut num_tokens, mut num_labeled) = (0, 0, 0.0);
        for documents in documents() {
            num_documents += documents.num_documents();
            num_tokens += documents.num_tokens();
            num_labeled += documents.labeled_share()? * documents.num_tokens() as f64;
        }
        let share = 100.0 * num_labeled / num_tokens as f64;
        (self.log)(&format!(
            "data: {num_documents} documents; {share:.1} % of their {num_tokens} tokens have labels"
        ));
        Ok(())
    }

    /// Returns the token that ends an answer of the training data, if it has conversations.
    pub fn end_of_turn(&self, tokenizer: &Tokenizer) -> Option<u32> {
        self.training.iter().find_map(|(documents, _)| documents.corpus().end_of_turn(tokenizer))
    }

    /// Packs the training data into sequences of `seq_len` tokens.
    ///
    /// # Errors
    /// Data that cannot be read or packed.
    pub fn training(&self, seq_len: usize) -> Result<Dataset, JobError> {
        let (mut sequences, mut num_long) = (Vec::new(), 0);
        for (documents, weight) in &self.training {
            let packed = self.pack(documents, seq_len)?;
            sequences.push((packed.sequences, *weight));
            num_long += packed.num_long;
        }
        if num_long > 0 {
            (self.log)(&format!(
                "data: {num_long} conversations are longer than {seq_len} tokens: {} (`ulysses.long_conversations`)",
                match self.long_conversations {
                    LongConversations::Truncate => "cut there",
                    LongConversations::Drop => "left out",
                    _ => "split, so that the rest does not see its prompt",
                }
            ));
        }
        let weights: Option<Vec<f64>> = sequences.iter().map(|(_, weight)| *weight).collect();
        let sequences = sequences.into_iter().map(|(sequences, _)| sequences);
        let dataset = match weights {
            Some(weights) => Dataset::mixture(sequences.zip(weights)),
            None => Dataset::concatenated(sequences),
        };
        let dataset = dataset?;
        let num_tokens: usize =
            dataset.sources().iter().map(|sequences| sequences.documents().num_tokens()).sum();
        if num_tokens < seq_len {
            (self.log)(&format!(
                "warning: the data has only {num_tokens} tokens, so its only sequence, of {seq_len} tokens, is mostly padding"
            ));
        }
        (self.log)(&format!(
            "data: {} sequences of {seq_len} tokens, {:.2} % padding",
            dataset.num_sequences(),
            100.0 * dataset.padding_share()
        ));
        Ok(dataset)
    }

    fn pack(&self, documents: &Documents, seq_len: usize) -> Result<Packed, DataError> {
        let (documents, num_long) = documents.limited(seq_len, self.long_conversations)?;
        let sequences = PackedSequences::with_packing(documents, seq_len, self.packing)?;
        Ok(Packed { sequences, num_long })
    }

    /// Packs the validation data into sequences of `seq_len` tokens.
    ///
    /// # Errors
    /// Data that cannot be read or packed.
    pub fn held_out(&self, seq_len: usize) -> Result<Option<Dataset>, JobError> {
        if self.held_out.is_empty() {
            return Ok(None);
        }
        let pack = |documents| Ok(self.pack(documents, seq_len)?.sequences);
        let sequences = self.held_out.iter().map(pack).collect::<Result<Vec<_>, DataError>>()?;
        Ok(Some(Dataset::concatenated(sequences)?))
    }
}

impl Reader<'_> {
    /// Reads a corpus and checks its token ids.
    fn read(&self, paths: &[&str]) -> Result<Arc<Corpus>, JobError> {
        let Self { config, tokenizer, vocab_size, .. } = *self;
        let UlyssesConfig { end_of_document, token_dtype, text_field, append_eod, on_bad_line, .. } =
            &config.ulysses;
        let token_files = TokenFileOptions {
            vocab_size: Some(vocab_size),
            end_of_document: *end_of_document,
            token_dtype: *token_dtype,
        };
        let (append_eod, on_bad_line) = (*append_eod, *on_bad_line);
        let options = SourceOptions { tokenizer, text_field, token_files, append_eod, on_bad_line };
        let corpus = Corpus::open(paths, &options).map_err(within("cannot read the data"))?;
        self.describe(&corpus)?;
        let corpus = Arc::new(corpus);
        Documents::from(corpus.clone()).check_vocab(vocab_size).map_err(|error| {
            let tokenizer = config.ulysses.tokenizer.as_deref().unwrap_or("(bytes)");
            let model = config.ulysses.model.as_deref().unwrap_or_default();
            within(&format!("the tokenizer {tokenizer} does not fit the model {model}"))(error)
        })?;
        Ok(corpus)
    }

    /// Logs what was found in the files, and refuses text without a tokenizer that the model's files would need.
    fn describe(&self, corpus: &Corpus) -> Result<(), JobError> {
        let Self { config, tokenizer, vocab_size, log } = *self;
        let (contents, skipped) = (corpus.contents(), corpus.skipped());
        log(&format!("data: {contents}; the first begins {}", beginning(corpus, tokenizer)?));
        if skipped.total() > 0 {
            log(&format!("data: {skipped}"));
        }
        if let Some(first) = corpus.bad_lines().first() {
            log(&format!("warning: the first bad line is {first}"));
        }
        if contents.has_text() && config.ulysses.tokenizer.is_none() {
            if let Some(unread) = config.ulysses.model.as_deref().and_then(unread_tokenizer) {
                return Err(JobError::run(unread));
            }
            if vocab_size > tokenizer.vocab_size() {
                log(&format!(
                    "warning: the model has {vocab_size} ids, but without a tokenizer each byte of the text is a token: give the \
                     model's tokenizer.json with `ulysses.tokenizer`"
                ));
            }
        }
        if contents.texts > 0 {
            log(&match (tokenizer.end_of_text(), config.ulysses.append_eod) {
                (Some(end), true) => {
                    format!("data: each document of text ends with {end} (`ulysses.append_eod`)")
                }
                (Some(end), false) => {
                    format!("data: no {end} is added to documents of text (`ulysses.append_eod` is false)")
                }
                (None, _) => {
                    "data: documents of text end without a token of their own: the tokenizer has no `eos_token`"
                        .to_owned()
                }
            });
        }
        Ok(())
    }
}

/// Returns the error of an operation, which names it and all causes.
fn within(operation: &str) -> impl Fn(DataError) -> JobError {
    move |error| JobError::run(format!("{operation}: {}", with_causes(&error)))
}

/// Returns the first line of the first document, in quotes.
fn beginning(corpus: &Corpus, tokenizer: &Tokenizer) -> Result<String, DataError> {
    const TOKENS: usize = 64;
    const CHARS: usize = 80;
    let (mut tokens, document) = (Vec::new(), corpus.document(0)?);
    corpus.read_tokens(document.start..document.end.min(document.start + TOKENS), &mut tokens)?;
    let text = tokenizer.decode(&tokens, Path::new("the first document"))?;
    let line = text.lines().find(|line| !line.trim().is_empty()).unwrap_or_default();
    Ok(format!("{:?}", line.chars().take(CHARS).collect::<String>()))
}

/// Checks that some token has a next one to predict.
fn check(documents: &Documents, packing: Packing, what: &str) -> Result<(), JobError> {
    match documents.num_predicted_tokens(packing) {
        0 => Err(JobError::run(format!(
            "{what}: every document has a single token, so there is no next token to predict"
        ))),
        _ => Ok(()),
    }
}
