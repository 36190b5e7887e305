//! The readers of data files on hostile input: every input gives data or an error, in bounded memory.
//!
//! Each property tries 256 inputs; `PROPTEST_CASES=1000000 cargo test --release --test engine data::` tries a million of each.

use crate::support::sample::seed;
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::{Index, select};
use proptest::test_runner::{Config as Settings, RngSeed};
use std::fs;
use std::path::{Path, PathBuf};
use ulysses::data::{Corpus, DataError, PrepareOptions, SourceOptions, TokenFileOptions, Tokenizer, prepare};
use ulysses::memory::live_bytes;

/// Peak memory of a reader in addition to its input: a chunk, a block of an index, and a file buffer.
const MAX_BYTES: i64 = 1 << 22;

fn settings() -> Settings {
    // Failures are printed, not stored in the source tree.
    let rng_seed = seed().map_or(RngSeed::Random, RngSeed::Fixed);
    Settings { failure_persistence: None, max_shrink_iters: 2000, rng_seed, ..Settings::default() }
}

/// Creates a directory for files, in memory if possible, to spare the disk.
fn folder() -> tempfile::TempDir {
    let memory = Path::new("/dev/shm");
    if memory.is_dir() { tempfile::tempdir_in(memory).unwrap() } else { tempfile::tempdir().unwrap() }
}

/// Opens a path and reads all that it says there is. The outcome is free, the memory is not.
fn read(path: &Path, tokenizer: &Tokenizer, token_files: TokenFileOptions) -> Result<(), TestCaseError> {
    let before = live_bytes();
    let options = SourceOptions { token_files, ..SourceOptions::new(tokenizer) };
    match Corpus::open(&[path], &options).and_then(|corpus| read_all(&corpus).map(|()| corpus)) {
        Ok(corpus) => {
            prop_assert!(corpus.num_tokens() > 0 && corpus.num_documents() <= corpus.num_tokens());
            prop_assert!(live_bytes() - before < MAX_BYTES, "holds {} bytes", live_bytes() - before);
        }
        Err(error) => {
            let folder = path.parent().unwrap().display().to_string();
            prop_assert!(error.to_string().contains(&folder), "names no file: {error}");
        }
    }
    Ok(())
}

fn read_all(corpus: &Corpus) -> Result<(), DataError> {
    let before = live_bytes();
    let mut next = 0;
    for index in 0..corpus.num_documents() {
        let document = corpus.document(index)?;
        assert_eq!(document.start, next);
        next = document.end;
        assert_eq!(corpus.document_at(document.start)?, index);
    }
    assert_eq!(next, corpus.num_tokens());
    let (mut tokens, mut labels) = (Vec::new(), Vec::new());
    corpus.read_tokens(0..next, &mut tokens)?;
    corpus.read_labels(0..next, &mut labels)?;
    assert!(tokens.len() == next && labels.len() == next);
    assert!(live_bytes() - before < MAX_BYTES);
    Ok(())
}

#[derive(Clone, Debug)]
enum Mutation {
    Byte(Index, u8),
    /// A number over the bytes from here on.
    Number(Index, i64),
    Cut(Index),
    Append(Vec<u8>),
}

fn mutations() -> impl Strategy<Value = Vec<Mutation>> {
    let numbers = select(vec![0, 1, 2, 3, -1, i64::MAX, i64::MIN, 1 << 31, 1 << 32, 1 << 61, 7, 255]);
    let mutation = prop_oneof![
        (any::<Index>(), any::<u8>()).prop_map(|(at, byte)| Mutation::Byte(at, byte)),
        (any::<Index>(), numbers).prop_map(|(at, number)| Mutation::Number(at, number)),
        any::<Index>().prop_map(Mutation::Cut),
        vec(any::<u8>(), 0..20).prop_map(Mutation::Append),
    ];
    vec(mutation, 0..5)
}

fn mutate(mut bytes: Vec<u8>, mutations: &[Mutation]) -> Vec<u8> {
    for mutation in mutations {
        match mutation {
            Mutation::Append(more) => bytes.extend(more),
            _ if bytes.is_empty() => {}
            Mutation::Byte(at, byte) => {
                let at = at.index(bytes.len());
                bytes[at] = *byte;
            }
            Mutation::Number(at, number) => {
                let at = at.index(bytes.len());
                for (slot, byte) in bytes[at..].iter_mut().zip(number.to_le_bytes()) {
                    *slot = byte;
                }
            }
            Mutation::Cut(at) => bytes.truncate(at.index(bytes.len())),
        }
    }
    bytes
}

fn llm_c(magic: u32, version: u32, tokens: &[u8], width: usize) -> Vec<u8> {
    let mut bytes: Vec<u8> = [magic, version, (tokens.len() / width) as u32]
        .iter()
        .flat_map(|number| number.to_le_bytes())
        .collect();
    bytes.resize(1024, 0);
    bytes.extend(&tokens[..tokens.len() / width * width]);
    bytes
}

/// Megatron's pair for sequences of these lengths, each `per_document` of them a document.
fn megatron(lengths: &[u8], per_document: usize) -> (Vec<u8>, Vec<u8>) {
    let mut index = b"MMIDIDX\0\0\x01\0\0\0\0\0\0\0\x08".to_vec();
    let starts: Vec<u64> =
        (0..lengths.len() as u64).step_by(per_document).chain([lengths.len() as u64]).collect();
    index.extend((lengths.len() as u64).to_le_bytes());
    index.extend((starts.len() as u64).to_le_bytes());
    index.extend(lengths.iter().flat_map(|&length| i32::from(length).to_le_bytes()));
    let mut end = 0_u64;
    for &length in lengths {
        index.extend(end.to_le_bytes());
        end += 2 * u64::from(length);
    }
    index.extend(starts.iter().flat_map(|start| start.to_le_bytes()));
    (index, vec![1; end as usize])
}

/// A valid file of our own, with labels or without.
fn own(root: &Path, has_labels: bool) -> Vec<u8> {
    let lines =
        if has_labels { "{\"prompt\":\"ab\",\"completion\":\"c\"}\n" } else { "{\"text\":\"abc\"}\n" };
    let (inputs, output) = ([root.join("in.jsonl")], root.join(format!("{has_labels}.tokens")));
    fs::write(&inputs[0], lines.repeat(3)).unwrap();
    let tokenizer = Tokenizer::bytes();
    prepare(&PrepareOptions::new(&inputs, &output, &tokenizer), |_| {}).unwrap();
    fs::read(output).unwrap()
}

/// The header's checksum made right again, so that what it says is looked at.
fn sealed(mut bytes: Vec<u8>) -> Vec<u8> {
    if bytes.len() >= 128 {
        let checksum = blake3::hash(&bytes[..96]);
        bytes[96..128].copy_from_slice(checksum.as_bytes());
    }
    bytes
}

/// Fragments that break parsers of lines.
const FRAGMENTS: &[&str] = &[
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    "\"",
    "\\",
    "\\u0000",
    "\\ud800",
    "\n",
    "\r",
    "\u{fdd0}",
    "null",
    "true",
    "-1",
    "1e999",
    "4294967295",
    "18446744073709551616",
    "\"text\"",
    "\"input_ids\":[1,2]",
    "\"labels\":[-100,1]",
    "\"messages\":[{\"role\":\"assistant\",\"content\":\"a\"}]",
    "\"prompt\":\"a\"",
    "\"completion\":\"b\"",
    "{\"text\":\"a\"}\n",
];

fn line_soup() -> impl Strategy<Value = Vec<u8>> {
    let piece = prop_oneof![
        8 => select(FRAGMENTS).prop_map(|text| text.as_bytes().to_vec()),
        1 => vec(any::<u8>(), 0..6),
    ];
    vec(piece, 0..30).prop_map(|pieces| pieces.concat())
}

/// Settings and a folder for one property.
fn check<S: Strategy>(strategy: S, test: impl Fn(&Path, S::Value) -> Result<(), TestCaseError>) {
    let folder = folder();
    let root: PathBuf = folder.path().to_owned();
    let mut runner = proptest::test_runner::TestRunner::new(settings());
    runner.run(&strategy, |value| test(&root, value)).unwrap_or_else(|error| panic!("{error}"));
}

#[test]
fn any_bytes_as_bin_get_an_answer() {
    let tokens = || vec(any::<u8>(), 0..64);
    let bytes = prop_oneof![
        tokens(),
        tokens().prop_map(|tokens| llm_c(20_240_520, 1, &tokens, 2)),
        tokens().prop_map(|tokens| llm_c(20_240_801, 7, &tokens, 4)),
    ];
    let separator = proptest::option::of(0..3_u32);
    check((bytes, mutations(), separator), |root, (bytes, mutations, end_of_document)| {
        let path = root.join("x.bin");
        fs::write(&path, mutate(bytes, &mutations)).unwrap();
        read(
            &path,
            &Tokenizer::bytes(),
            TokenFileOptions { vocab_size: Some(60_000), end_of_document, token_dtype: None },
        )
    });
}

#[test]
fn any_bytes_as_megatron_index_get_an_answer() {
    let pair = (vec(1..9_u8, 1..12), 1..4_usize);
    check((pair, mutations(), mutations()), |root, ((lengths, per_document), index, tokens)| {
        let (sound_index, sound_tokens) = megatron(&lengths, per_document);
        fs::write(root.join("x.idx"), mutate(sound_index, &index)).unwrap();
        // Rarely the tokens too: an index of another file is refused at once.
        let tokens = if tokens.len() == 4 { tokens } else { Vec::new() };
        fs::write(root.join("x.bin"), mutate(sound_tokens, &tokens)).unwrap();
        read(&root.join("x.idx"), &Tokenizer::bytes(), TokenFileOptions::default())
    });
}

#[test]
fn any_bytes_as_a_file_of_our_own_get_an_answer() {
    let folder = folder();
    let valid = [false, true].map(|has_labels| own(folder.path(), has_labels));
    check((any::<bool>(), mutations(), any::<bool>()), |root, (has_labels, mutations, is_sealed)| {
        let bytes = mutate(valid[usize::from(has_labels)].clone(), &mutations);
        let path = root.join("x.tokens");
        fs::write(&path, if is_sealed { sealed(bytes) } else { bytes }).unwrap();
        read(&path, &Tokenizer::bytes(), TokenFileOptions::default())
    });
}

#[test]
fn any_bytes_as_jsonl_get_an_answer() {
    let valid = "{\"text\":\"one\"}\n{\"input_ids\":[5,6],\"labels\":[-100,6]}\n{\"prompt\":\"p\",\"completion\":\"c\"}\n";
    let bytes = prop_oneof![
        line_soup(),
        mutations().prop_map(move |mutations| mutate(valid.as_bytes().to_vec(), &mutations)),
    ];
    check(bytes, |root, bytes| {
        let path = root.join("x.jsonl");
        fs::write(&path, bytes).unwrap();
        read(&path, &Tokenizer::bytes(), TokenFileOptions::default())
    });
}
