//! `ulysses data`: token files.

mod inspect;

use super::sources::{failure, log_notes, parse_choice, tokenizer_file};
use crate::failure::{Failure, OrFail};
use crate::output::{log_line, print};
use clap::Subcommand;
use indicatif::{HumanBytes, HumanCount, ProgressBar, ProgressStyle};
use inspect::{InspectArgs, inspect_text};
use std::fmt::Write;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use ulysses::config::ChatDate;
use ulysses::data::{
    Corpus, DataError, FileFormat, IGNORED_LABEL, OnBadLine, PrepareOptions, PrepareProgress, TokenFile,
    TokenFileOptions, Tokenizer, prepare,
};

/// Number of tokens to read at once.
const PIECE: usize = 1 << 16;

/// Interval of progress lines without a terminal.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

#[derive(Subcommand)]
pub(super) enum DataCommand {
    /// Tokenize text, JSONL or Parquet into one token file.
    ///
    /// Runs open the file without reading it through. An interrupted call continues when repeated.
    Prepare(PrepareArgs),
    /// Print statistics of a token file, or of text and conversations.
    Inspect(InspectArgs),
}

#[derive(clap::Args)]
pub(super) struct PrepareArgs {
    /// Files, directories, and glob patterns such as 'shards/*.jsonl'.
    #[arg(required = true)]
    inputs: Vec<PathBuf>,
    /// Output file, such as train.tokens; must not exist.
    #[arg(long)]
    output: PathBuf,
    /// tokenizer.json [default: each byte is a token].
    #[arg(long)]
    tokenizer: Option<PathBuf>,
    /// JSONL field or Parquet column of the text.
    #[arg(long, default_value = "text")]
    text_field: String,
    /// The date that a chat template prints with `strftime_now`.
    #[arg(long, value_name = "YYYY-MM-DD", default_value_t)]
    chat_date: ChatDate,
    /// Append the tokenizer's eos_token to each document of text that does not end with it.
    #[arg(long, value_name = "true|false", default_value_t = true, action = clap::ArgAction::Set)]
    append_eod: bool,
    /// An invalid line: `error` or `skip`.
    #[arg(long, default_value = "error", value_parser = |name: &str| parse_choice(OnBadLine::CHOICES, name))]
    on_bad_line: OnBadLine,
}

pub(super) fn run(command: DataCommand) -> Result<(), Failure> {
    match command {
        DataCommand::Prepare(args) => run_prepare(&args),
        DataCommand::Inspect(args) => {
            // A path that does not exist may be a pattern, or the prefix of a `.bin` and `.idx` pair.
            let is_text = args.tokenizer.is_some() || !args.file.is_file();
            let format = if is_text { None } else { TokenFile::detect(&args.file).map_err(failure)? };
            match format {
                Some(format) => inspect(&args, format),
                None => inspect_text(&args),
            }
        }
    }
}

fn run_prepare(args: &PrepareArgs) -> Result<(), Failure> {
    let PrepareArgs { inputs, output, tokenizer, text_field, chat_date, append_eod, on_bad_line } = args;
    let tokenizer = tokenizer_file(tokenizer.as_deref(), *chat_date)?;
    let (append_eod, on_bad_line) = (*append_eod, *on_bad_line);
    let options =
        PrepareOptions { inputs, output, tokenizer: &tokenizer, text_field, append_eod, on_bad_line };
    if let Some(end) = tokenizer.end_of_text() {
        let verb = if append_eod { "ends" } else { "does not end" };
        log_line(format_args!("data: each document of text {verb} with {end} (--append-eod {append_eod})"));
    }
    let mut display = Display::new();
    let prepared = prepare(&options, |progress| display.show(progress));
    display.bar.finish_and_clear();
    let prepared = prepared.map_err(failure)?;
    log_line(format_args!("note: this call read {}", prepared.contents));
    if prepared.skipped.total() > 0 {
        log_line(format_args!("data: {}", prepared.skipped));
    }
    log_notes(&prepared.notes);
    if prepared.is_resumed {
        log_line("continued an interrupted call");
    }
    let PrepareProgress { num_tokens, num_documents, .. } = prepared.progress;
    print(format_args!(
        "{}: {num_tokens} tokens in {num_documents} documents; {}\n",
        output.display(),
        display.rate(&prepared.progress),
    ))
}

/// Shows a progress bar on a terminal, else a line every [`LOG_INTERVAL`].
struct Display {
    bar: ProgressBar,
    start: Instant,
    last_line: Instant,
}

impl Display {
    fn new() -> Self {
        let bar = ProgressBar::new(0);
        if let Ok(style) = ProgressStyle::with_template("{wide_bar} {percent:>3} %  {msg}  {eta} left") {
            bar.set_style(style);
        }
        Self { bar, start: Instant::now(), last_line: Instant::now() }
    }

    fn show(&mut self, progress: &PrepareProgress) {
        let line = format!("{} tokens, {}", HumanCount(progress.num_tokens), self.rate(progress));
        let PrepareProgress { done_bytes, total_bytes, .. } = *progress;
        if self.bar.is_hidden() {
            if self.last_line.elapsed() >= LOG_INTERVAL {
                log_line(format_args!("{} of {}: {line}", HumanBytes(done_bytes), HumanBytes(total_bytes)));
                self.last_line = Instant::now();
            }
            return;
        }
        self.bar.set_length(total_bytes);
        self.bar.set_position(done_bytes);
        self.bar.set_message(line);
    }

    fn rate(&self, progress: &PrepareProgress) -> String {
        format!("{:.1} MB/s of text", progress.text_bytes as f64 / 1e6 / self.start.elapsed().as_secs_f64())
    }
}

/// Prints statistics of a token file. Reads every token and document boundary, so that it also validates the file.
fn inspect(args: &InspectArgs, format: FileFormat) -> Result<(), Failure> {
    let options = TokenFileOptions { token_dtype: args.token_dtype, ..TokenFileOptions::default() };
    let file = TokenFile::open(&args.file, format, options).map_err(failure)?;
    let (token_bytes, has_labels, made_by) = (file.token_bytes(), file.has_labels(), file.made_by());
    let corpus = Corpus::from_token_file(file).or_run()?;
    let contents = Contents::read(&corpus).or_run()?;
    let mut facts = vec![
        ("format", format!("{format}, {} bits per token", 8 * token_bytes)),
        ("tokens", corpus.num_tokens().to_string()),
        (
            "documents",
            format!("{} of {} to {} tokens", corpus.num_documents(), contents.shortest, contents.longest),
        ),
        ("largest id", contents.largest.to_string()),
    ];
    if has_labels {
        let share = 100.0 * contents.num_labels as f64 / corpus.num_tokens() as f64;
        facts.push(("labels", format!("{} tokens ({share:.1} %)", contents.num_labels)));
    }
    if let Some((vocab_size, hash)) = made_by {
        let is_bytes = hash == Tokenizer::bytes().hash();
        let hash: String = hash.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
        let tokenizer = if is_bytes { "bytes".to_owned() } else { format!("BLAKE3 {hash}…") };
        facts.push(("tokenizer", format!("{tokenizer}, vocabulary size {vocab_size}")));
    }
    let mut text = String::new();
    for (name, value) in facts {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{name:<11} {value}");
    }
    print(text)
}

/// Statistics that require reading the whole file.
#[derive(Default)]
struct Contents {
    shortest: usize,
    longest: usize,
    largest: u32,
    num_labels: usize,
}

impl Contents {
    fn read(corpus: &Corpus) -> Result<Self, DataError> {
        let mut contents = Self { shortest: usize::MAX, ..Self::default() };
        for index in 0..corpus.num_documents() {
            let len = corpus.document(index)?.len();
            contents.shortest = contents.shortest.min(len);
            contents.longest = contents.longest.max(len);
        }
        let (mut tokens, mut labels) = (Vec::new(), Vec::new());
        for start in (0..corpus.num_tokens()).step_by(PIECE) {
            let range = start..corpus.num_tokens().min(start + PIECE);
            tokens.clear();
            labels.clear();
            corpus.read_tokens(range.clone(), &mut tokens)?;
            corpus.read_labels(range, &mut labels)?;
            contents.largest = tokens.iter().copied().fold(contents.largest, u32::max);
            contents.num_labels += labels.iter().filter(|&&label| label != IGNORED_LABEL).count();
        }
        Ok(contents)
    }
}
