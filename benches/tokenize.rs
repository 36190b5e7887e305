//! Throughput of `data prepare` from JSONL to a token file, compared with the `tokenizers` crate on the
//! same texts in memory, in the same run: `cargo bench --bench tokenize [-- MEGABYTES]`.

use anyhow::{Context, Result};
use std::fs;
use std::io::Write;
use std::path::Path;
use std::time::Instant;
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{PostProcessorWrapper, TokenizerImpl};
use ulysses::data::{PrepareOptions, Tokenizer, prepare};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const ROUNDS: usize = 3;

fn main() -> Result<()> {
    let megabytes =
        std::env::args().filter_map(|argument| argument.parse::<usize>().ok()).next().unwrap_or(32);
    let folder = tempfile::tempdir()?;
    let texts = texts(megabytes * 1_000_000)?;
    let tokenizer = train(folder.path(), &texts)?;
    let input = folder.path().join("in.jsonl");
    let mut lines = fs::File::create(&input)?;
    for text in &texts {
        writeln!(lines, "{}", serde_json::json!({ "text": text }))?;
    }
    let ours = Tokenizer::from_file(&tokenizer)?;
    let alone = tokenizers::Tokenizer::from_file(&tokenizer).map_err(anyhow::Error::from_boxed)?;
    let bytes: usize = texts.iter().map(String::len).sum();
    println!("{:.1} MB in {} documents", bytes as f64 / 1e6, texts.len());
    for round in 0..ROUNDS {
        let rate = |start: Instant| bytes as f64 / 1e6 / start.elapsed().as_secs_f64();
        let inputs = texts.clone();
        let start = Instant::now();
        let encodings = alone.encode_batch_fast(inputs, true).map_err(anyhow::Error::from_boxed)?;
        let alone = rate(start);
        let num_tokens: usize = encodings.iter().map(|encoding| encoding.len()).sum();
        drop(encodings);
        let output = folder.path().join(format!("{round}.tokens"));
        let options = PrepareOptions::new(std::slice::from_ref(&input), &output, &ours);
        let start = Instant::now();
        let prepared = prepare(&options, |_| {})?;
        let whole = rate(start);
        anyhow::ensure!(prepared.progress.num_tokens == num_tokens as u64, "both make the same tokens");
        println!(
            "data prepare {whole:6.2} MB/s   tokenizers alone {alone:6.2} MB/s   share {:.2}",
            whole / alone
        );
    }
    Ok(())
}

/// Texts of about 2 kB, from this repository's sources: every repetition starts elsewhere.
fn texts(bytes: usize) -> Result<Vec<String>> {
    let mut source = String::new();
    let mut folders = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("src")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder)? {
            let path = entry?.path();
            if path.is_dir() {
                folders.push(path);
            } else {
                source.push_str(&fs::read_to_string(path)?);
            }
        }
    }
    let characters: Vec<char> = source.chars().collect();
    let lens = (1500..2500).cycle();
    let mut texts = Vec::new();
    let (mut at, mut total) = (0, 0);
    for len in lens {
        let text: String = characters.iter().cycle().skip(at % characters.len()).take(len).collect();
        (at, total) = (at + len + 1, total + text.len());
        texts.push(text);
        if total >= bytes {
            break;
        }
    }
    Ok(texts)
}

/// A byte-level BPE of 8192 tokens.
fn train(folder: &Path, texts: &[String]) -> Result<std::path::PathBuf> {
    let mut trainer = BpeTrainer::builder()
        .vocab_size(8192)
        .show_progress(false)
        .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
        .build();
    let mut tokenizer: TokenizerImpl<
        BPE,
        tokenizers::NormalizerWrapper,
        ByteLevel,
        PostProcessorWrapper,
        ByteLevel,
    > = TokenizerImpl::new(BPE::default());
    tokenizer.with_pre_tokenizer(Some(ByteLevel::default())).with_decoder(Some(ByteLevel::default()));
    let sample = texts.iter().take(1000).cloned();
    tokenizer.train(&mut trainer, sample).map_err(anyhow::Error::from_boxed)?;
    let path = folder.join("tokenizer.json");
    tokenizer.save(&path, false).map_err(anyhow::Error::from_boxed).context("cannot write the tokenizer")?;
    Ok(path)
}
