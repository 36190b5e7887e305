//! Datasets of `ulysses.data`, for all commands that read data.

use super::{Failure, OrFail, log_line, model};
use anyhow::{Context, ensure};
use std::path::Path;
use std::sync::Arc;
use ulysses::config::{ChatDate, Config, DataSource, HeldOut, LongConversations, Packing, UlyssesConfig};
use ulysses::data::{
    Corpus, DataError, Dataset, Documents, Notes, PackedSequences, SourceOptions, TokenFileOptions, Tokenizer,
};

/// Documents before packing.
pub(super) struct Sources {
    packing: Packing,
    long_conversations: LongConversations,
    /// Training documents and their weights; either all or none have one.
    training: Vec<(Documents, Option<f64>)>,
    held_out: Vec<Documents>,
}

/// Opens the given tokenizer, else the model's own, else one of bytes. Sets `tokenizer` to the path that it opens.
pub(super) fn open_tokenizer(config: &mut UlyssesConfig) -> Result<Tokenizer, Failure> {
    let UlyssesConfig { model, tokenizer, chat_date, .. } = config;
    if tokenizer.is_none()
        && let Some(path) = model.as_deref().and_then(model::own_tokenizer)
    {
        log_line(format_args!("tokenizer: {}", path.display()));
        *tokenizer = Some(path.display().to_string());
    }
    tokenizer_file(tokenizer.as_deref().map(Path::new), *chat_date)
}

/// Opens a tokenizer file, or that of bytes.
pub(super) fn tokenizer_file(path: Option<&Path>, chat_date: ChatDate) -> Result<Tokenizer, Failure> {
    match path {
        Some(path) => Tokenizer::from_file(path).and_then(|file| file.with_chat_date(chat_date)).or_usage(),
        None => Ok(Tokenizer::bytes()),
    }
}

/// Parses `--packing`.
pub(super) fn parse_packing(name: &str) -> Result<Packing, String> {
    let found = Packing::CHOICES.iter().find(|(choice, _)| *choice == name);
    found.map(|(_, packing)| *packing).ok_or_else(|| "expected greedy, cut or concat".to_owned())
}

impl Sources {
    /// Reads the config's data and checks its token ids against the model's vocabulary.
    pub(super) fn read(config: &Config, tokenizer: &Tokenizer, vocab_size: usize) -> anyhow::Result<Self> {
        let packing = config.ulysses.packing;
        let held_out = config.ulysses.validation.as_ref().map(|validation| &validation.data);
        let long_conversations = config.ulysses.long_conversations;
        let mut sources = Self { packing, long_conversations, training: Vec::new(), held_out: Vec::new() };
        for DataSource { path, weight } in config.require_data()? {
            let corpus = read_corpus(path, config, tokenizer, vocab_size)?;
            let training = match held_out {
                Some(HeldOut::Fraction(fraction)) => {
                    let [training, held_out] =
                        Documents::split(corpus, *fraction).with_context(|| path.clone())?;
                    check(&held_out, packing, &format!("validation split of {path}"))?;
                    sources.held_out.push(held_out);
                    training
                }
                _ => corpus.into(),
            };
            check(&training, packing, path)?;
            sources.training.push((training, *weight));
        }
        if let Some(HeldOut::Path(path)) = held_out {
            let documents = read_corpus(path, config, tokenizer, vocab_size)?.into();
            check(&documents, packing, path)?;
            sources.held_out.push(documents);
        }
        sources.log_label_share()?;
        Ok(sources)
    }

    /// Prints the share of tokens with labels, unless all have one.
    fn log_label_share(&self) -> anyhow::Result<()> {
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
        log_line(format_args!(
            "data: {num_documents} documents; {share:.1} % of their {num_tokens} tokens have labels"
        ));
        Ok(())
    }

    /// Packs the training data into sequences of `seq_len` tokens.
    pub(super) fn training(&self, seq_len: usize) -> anyhow::Result<Dataset> {
        let (mut sequences, mut num_long) = (Vec::new(), 0);
        for (documents, weight) in &self.training {
            let (packed, long) = self.pack(documents, seq_len)?;
            sequences.push((packed, *weight));
            num_long += long;
        }
        if num_long > 0 {
            log_line(format_args!(
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
            tracing::warn!(
                "the data has only {num_tokens} tokens, so its only sequence, of {seq_len} tokens, is mostly padding"
            );
        }
        log_line(format_args!(
            "data: {} sequences of {seq_len} tokens, {:.2} % padding",
            dataset.num_sequences(),
            100.0 * dataset.padding_share()
        ));
        Ok(dataset)
    }

    /// Packs documents, and returns how many conversations are longer than a sequence.
    fn pack(&self, documents: &Documents, seq_len: usize) -> Result<(PackedSequences, usize), DataError> {
        let (documents, num_long) = documents.limited(seq_len, self.long_conversations)?;
        Ok((PackedSequences::with_packing(documents, seq_len, self.packing)?, num_long))
    }

    /// Packs the validation data into sequences of `seq_len` tokens.
    pub(super) fn held_out(&self, seq_len: usize) -> anyhow::Result<Option<Dataset>> {
        if self.held_out.is_empty() {
            return Ok(None);
        }
        let pack = |documents| Ok(self.pack(documents, seq_len)?.0);
        let sequences = self.held_out.iter().map(pack).collect::<Result<Vec<_>, DataError>>()?;
        Ok(Some(Dataset::concatenated(sequences)?))
    }
}

/// Prints what the user should know about lines.
pub(super) fn log_notes(notes: &Notes) {
    if !notes.is_empty() {
        log_line(format_args!("data: {notes}"));
    }
}

/// Classifies a data error as bad arguments or as a failed run.
pub(super) fn failure(error: DataError) -> Failure {
    let is_usage = matches!(
        error,
        DataError::Missing { .. }
            | DataError::Pattern { .. }
            | DataError::OutputExists { .. }
            | DataError::OtherPreparation { .. }
    );
    if is_usage { Failure::Usage(error.into()) } else { Failure::Run(error.into()) }
}

/// Checks that some token has a next one to predict.
fn check(documents: &Documents, packing: Packing, what: &str) -> anyhow::Result<()> {
    ensure!(
        documents.num_predicted_tokens(packing) > 0,
        "{what}: every document has a single token, so there is no next token to predict"
    );
    Ok(())
}

/// Reads a corpus and checks its token ids against `vocab_size`.
fn read_corpus(
    path: &str,
    config: &Config,
    tokenizer: &Tokenizer,
    vocab_size: usize,
) -> anyhow::Result<Arc<Corpus>> {
    let token_files =
        TokenFileOptions { vocab_size: Some(vocab_size), end_of_document: config.ulysses.end_of_document };
    let options = SourceOptions { tokenizer, text_field: &config.ulysses.text_field, token_files };
    let corpus = Corpus::open(&[path], &options).context("cannot read the data")?;
    if corpus.skipped().total() > 0 {
        log_line(format_args!("data: {}", corpus.skipped()));
    }
    log_notes(corpus.notes());
    let corpus = Arc::new(corpus);
    Documents::from(corpus.clone()).check_vocab(vocab_size).with_context(|| {
        let tokenizer = config.ulysses.tokenizer.as_deref().unwrap_or("(bytes)");
        let model = config.ulysses.model.as_deref().unwrap_or_default();
        format!("the tokenizer {tokenizer} does not fit the model {model}")
    })?;
    Ok(corpus)
}
