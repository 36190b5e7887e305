//! `ulysses data inspect` for text and conversations: rendered text, and which tokens have labels.

use crate::failure::{Failure, OrFail};
use crate::output::{log_line, print};
use crate::sources::{failure, log_notes, parse_choice, tokenizer_file};
use anyhow::anyhow;
use std::fmt::Write;
use std::ops::Range;
use std::path::{Path, PathBuf};
use ulysses::config::{ChatDate, Packing};
use ulysses::data::{
    Corpus, DataError, Documents, IGNORED_LABEL, OnBadLine, PackedSequences, SourceOptions, TokenDtype,
    TokenFileOptions, Tokenizer,
};

/// Brackets around tokens with labels.
const MARKS: [char; 2] = ['\u{27e6}', '\u{27e7}'];

/// Width of the histogram's longest bar.
const BAR_WIDTH: usize = 40;

#[derive(clap::Args)]
pub(crate) struct InspectArgs {
    /// Text, .jsonl, or a token file (nanoGPT or llm.c .bin, Megatron .idx or .bin, output of `data prepare`).
    pub(super) file: PathBuf,
    /// tokenizer.json of the text [default: each byte is a token]; a chat template is read from the same directory, if
    /// present.
    #[arg(long)]
    pub(super) tokenizer: Option<PathBuf>,
    /// JSONL field or Parquet column of the text.
    #[arg(long, default_value = "text")]
    text_field: String,
    /// The date that a chat template prints with `strftime_now`.
    #[arg(long, value_name = "YYYY-MM-DD", default_value_t)]
    chat_date: ChatDate,
    /// Number of documents to print.
    #[arg(long, default_value_t = 3)]
    samples: usize,
    /// Tokens per sequence.
    #[arg(long, default_value_t = 2048)]
    seq_len: usize,
    /// Packing of documents into sequences: `greedy`, `cut` or `concat`.
    #[arg(long, default_value = "greedy", value_parser = |name: &str| parse_choice(Packing::CHOICES, name))]
    packing: Packing,
    /// Type of the tokens in a `.bin` without header: `uint16` or `uint32`.
    #[arg(long, value_parser = |name: &str| parse_choice(TokenDtype::CHOICES, name))]
    pub(super) token_dtype: Option<TokenDtype>,
}

pub(super) fn inspect_text(args: &InspectArgs) -> Result<(), Failure> {
    let tokenizer = tokenizer_file(args.tokenizer.as_deref(), args.chat_date)?;
    let token_files = TokenFileOptions { token_dtype: args.token_dtype, ..TokenFileOptions::default() };
    let options = SourceOptions {
        text_field: &args.text_field,
        token_files,
        on_bad_line: OnBadLine::Skip,
        ..SourceOptions::new(&tokenizer)
    };
    let corpus = Corpus::open(&[&args.file], &options).map_err(failure)?;
    let bad_lines = list_bad_lines(&corpus);
    log_line(format_args!("data: {}", corpus.contents()));
    if corpus.skipped().total() > 0 {
        log_line(format_args!("data: {}", corpus.skipped()));
    }
    log_notes(corpus.notes());
    let documents = Documents::from(corpus);
    let sequences =
        PackedSequences::with_packing(documents.clone(), args.seq_len, args.packing).or_usage()?;
    let lens = Lens::read(&documents).or_run()?;
    let mut text = String::new();
    for index in 0..documents.num_documents().min(args.samples) {
        text += &sample(&documents, index, &tokenizer, &args.file).or_run()?;
    }
    text += &lens.histogram();
    text += &summary(&documents, &lens, &sequences);
    print(text)?;
    bad_lines
}

/// Prints every bad line; returns the failure if there is one.
fn list_bad_lines(corpus: &Corpus) -> Result<(), Failure> {
    let (listed, count) = (corpus.bad_lines(), corpus.skipped().bad_lines);
    listed.iter().for_each(|error| log_line(format_args!("bad line: {:#}", anyhow!(error.clone()))));
    match count {
        0 => Ok(()),
        count => Err(Failure::Run(anyhow!(
            "{count} bad lines, {} of them above; `ulysses.on_bad_line` \"skip\" trains without them",
            listed.len()
        ))),
    }
}

/// Number of tokens and labels of each document.
struct Lens {
    tokens: Vec<usize>,
    labels: Vec<usize>,
}

impl Lens {
    fn read(documents: &Documents) -> Result<Self, DataError> {
        let mut lens = Self { tokens: Vec::new(), labels: Vec::new() };
        let mut labels = Vec::new();
        for index in 0..documents.num_documents() {
            let range = documents.document(index)?;
            lens.tokens.push(range.len());
            labels.clear();
            documents.read_labels(range, &mut labels)?;
            lens.labels.push(labels.iter().filter(|&&label| label != IGNORED_LABEL).count());
        }
        Ok(lens)
    }

    /// Prints a histogram of document lengths in powers of two.
    fn histogram(&self) -> String {
        let power = |len: &usize| len.max(&1).ilog2();
        let powers = self.tokens.iter().map(power);
        let (first, last) = (powers.clone().min().unwrap_or(0), powers.max().unwrap_or(0));
        let count = |bin: u32| self.tokens.iter().filter(|len| power(len) == bin).count();
        let largest = (first..=last).map(count).max().unwrap_or(0).max(1);
        let mut text = "tokens per document\n".to_owned();
        for bin in first..=last {
            let Range { start, end } = 1_usize << bin..1_usize << (bin + 1);
            let bar = "#".repeat((count(bin) * BAR_WIDTH).div_ceil(largest));
            // Writing to a string cannot fail.
            let _ = writeln!(text, "{:>9} to {:<9} {:>9}  {bar}", start, end - 1, count(bin));
        }
        text
    }
}

/// Renders a document with [`MARKS`] around tokens with labels.
fn sample(
    documents: &Documents,
    index: usize,
    tokenizer: &Tokenizer,
    path: &Path,
) -> Result<String, DataError> {
    let range = documents.document(index)?;
    let (mut tokens, mut labels) = (Vec::new(), Vec::new());
    documents.read_tokens(range.clone(), &mut tokens)?;
    documents.read_labels(range, &mut labels)?;
    let tokens: Vec<(u32, bool)> =
        tokens.into_iter().zip(labels).map(|(token, label)| (token, label != IGNORED_LABEL)).collect();
    let num_labels = tokens.iter().filter(|(_, has_label)| *has_label).count();
    let mut text = format!("document {}: {} tokens, {num_labels} with labels\n", index + 1, tokens.len());
    for piece in tokens.chunk_by(|(_, left), (_, right)| left == right) {
        let ids: Vec<u32> = piece.iter().map(|(token, _)| *token).collect();
        let decoded = tokenizer.decode(&ids, path)?;
        match piece[0].1 {
            true => text.extend([MARKS[0].to_string(), decoded, MARKS[1].to_string()]),
            false => text += &decoded,
        }
    }
    Ok(text + "\n\n")
}

/// Summarizes the effect of label masking and packing.
fn summary(documents: &Documents, lens: &Lens, sequences: &PackedSequences) -> String {
    let (num_documents, num_tokens) = (documents.num_documents(), documents.num_tokens());
    let num_labels: usize = lens.labels.iter().sum();
    let seq_len = sequences.seq_len();
    let count = |lens: &[usize], is: &dyn Fn(usize) -> bool| lens.iter().filter(|len| is(**len)).count();
    let facts = [
        ("documents", num_documents.to_string()),
        ("tokens", num_tokens.to_string()),
        ("labels", format!("{num_labels} tokens ({:.1} %)", 100.0 * num_labels as f64 / num_tokens as f64)),
        ("unlabeled", format!("{} documents have no labels", count(&lens.labels, &|len| len == 0))),
        (
            "sequences",
            format!(
                "{} of {seq_len} tokens, {:.2} % padding",
                sequences.num_sequences(),
                100.0 * sequences.padding_share()
            ),
        ),
        (
            "too long",
            format!("{} documents exceed {seq_len} tokens", count(&lens.tokens, &|len| len > seq_len)),
        ),
    ];
    let mut text = "\n".to_owned();
    for (name, value) in facts {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{name:<11} {value}");
    }
    text
}
