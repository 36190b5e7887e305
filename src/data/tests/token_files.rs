//! Valid and damaged token files.

use super::corpus::{tokens_of, write};
use super::*;
use std::fs::{self, OpenOptions};
use std::path::{Path, PathBuf};
use tempfile::TempDir;

fn u16s(ids: &[u16]) -> Vec<u8> {
    ids.iter().flat_map(|id| id.to_le_bytes()).collect()
}

fn llm_c(header: [i32; 3], tokens: &[u8]) -> Vec<u8> {
    let mut numbers = [0; 256];
    numbers[..3].copy_from_slice(&header);
    [numbers.iter().flat_map(|number| number.to_le_bytes()).collect(), tokens.to_vec()].concat()
}

/// An index as `indexed_dataset.py` writes it.
fn index(code: u8, lengths: &[i32], pointers: &[i64], starts: &[i64]) -> Vec<u8> {
    let mut bytes = b"MMIDIDX\0\0".to_vec();
    bytes.extend(1_u64.to_le_bytes());
    bytes.push(code);
    bytes.extend((lengths.len() as u64).to_le_bytes());
    bytes.extend((starts.len() as u64).to_le_bytes());
    bytes.extend(lengths.iter().flat_map(|length| length.to_le_bytes()));
    bytes.extend(pointers.iter().chain(starts).flat_map(|number| number.to_le_bytes()));
    bytes
}

struct Folder(TempDir);

impl Folder {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn write(&self, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
        write(self.0.path(), name, bytes);
        self.0.path().join(name)
    }

    fn load(&self, name: &str) -> Result<Corpus, DataError> {
        Corpus::load(&self.0.path().join(name), &Tokenizer::bytes())
    }

    /// A file of our own with two documents, and where it lies.
    fn prepared(&self) -> PathBuf {
        self.write("two.jsonl", "{\"text\":\"abc\"}\n{\"text\":\"de\"}\n");
        let output = self.0.path().join("two.tokens");
        prepare_file(&[self.0.path().join("two.jsonl")], &output, &Tokenizer::bytes());
        output
    }
}

fn prepare_file(inputs: &[PathBuf], output: &Path, tokenizer: &Tokenizer) {
    prepare(&PrepareOptions::new(inputs, output, tokenizer), |_| {}).unwrap();
}

fn file_error<T: std::fmt::Debug>(result: Result<T, DataError>) -> FileError {
    match result {
        Err(DataError::File(error)) => error,
        other => panic!("{other:?}"),
    }
}

#[test]
fn nanogpt_and_llm_c_files_are_one_document_of_their_tokens() {
    let folder = Folder::new();
    folder.write("nano.bin", u16s(&[1, 65534, 7]));
    assert_eq!(tokens_of(&folder.load("nano.bin").unwrap()), [[1, 65534, 7]]);
    folder.write("gpt2.bin", llm_c([20_240_520, 1, 2], &u16s(&[50256, 3])));
    assert_eq!(tokens_of(&folder.load("gpt2.bin").unwrap()), [[50256, 3]]);
    let wide: Vec<u8> = [128_000_u32, 5].iter().flat_map(|id| id.to_le_bytes()).collect();
    folder.write("llama.bin", llm_c([20_240_801, 7, 2], &wide));
    let corpus = folder.load("llama.bin").unwrap();
    assert_eq!(tokens_of(&corpus), [[128_000, 5]]);
    let mut labels = Vec::new();
    corpus.read_labels(0..2, &mut labels).unwrap();
    assert_eq!(labels, [128_000, 5]);
}

#[test]
fn an_end_of_document_token_cuts_after_it_and_in_llm_c_files_before() {
    let folder = Folder::new();
    let tokenizer = Tokenizer::bytes();
    let token_files = TokenFileOptions { end_of_document: Some(9), ..TokenFileOptions::default() };
    let options = SourceOptions { token_files, ..SourceOptions::new(&tokenizer) };
    let nano = folder.write("nano.bin", u16s(&[1, 2, 9, 3, 9, 4]));
    let corpus = Corpus::open(&[nano], &options).unwrap();
    assert_eq!(tokens_of(&corpus), [vec![1, 2, 9], vec![3, 9], vec![4]]);
    assert_eq!([0, 2, 3, 5, 6].map(|token| corpus.document_at(token).unwrap()), [0, 0, 1, 2, 3]);
    let gpt2 = folder.write("gpt2.bin", llm_c([20_240_520, 1, 5], &u16s(&[9, 1, 9, 2, 3])));
    assert_eq!(tokens_of(&Corpus::open(&[gpt2], &options).unwrap()), [vec![9, 1], vec![9, 2, 3]]);
}

#[test]
fn megatron_documents_are_the_sequences_that_the_index_joins() {
    let folder = Folder::new();
    folder.write("d.bin", u16s(&[1, 2, 3, 4, 5, 6]));
    folder.write("d.idx", index(8, &[2, 1, 3], &[0, 4, 6], &[0, 2, 3]));
    // Megatron names the prefix.
    for name in ["d.bin", "d.idx", "d"] {
        let corpus = folder.load(name).unwrap();
        assert_eq!(tokens_of(&corpus), [[1, 2, 3], [4, 5, 6]]);
        assert_eq!([0, 2, 3, 6].map(|token| corpus.document_at(token).unwrap()), [0, 0, 1, 2]);
    }
    // Some writers leave the documents out.
    folder.write("d.idx", index(8, &[2, 1, 3], &[0, 4, 6], &[0]));
    assert_eq!(tokens_of(&folder.load("d.bin").unwrap()), [vec![1, 2], vec![3], vec![4, 5, 6]]);
    let wide: Vec<u8> = [70_000_i32, 1].iter().flat_map(|id| id.to_le_bytes()).collect();
    folder.write("e.bin", wide);
    folder.write("e.idx", index(4, &[2], &[0], &[0, 1]));
    assert_eq!(tokens_of(&folder.load("e.idx").unwrap()), [[70_000, 1]]);
}

#[test]
fn many_documents_are_found_across_blocks_of_the_index() {
    let folder = Folder::new();
    let count = 5000_i64;
    folder.write("d.bin", u16s(&(0..3 * count as u16).collect::<Vec<_>>()));
    let pointers: Vec<_> = (0..count).map(|at| 6 * at).collect();
    folder.write("d.idx", index(8, &vec![3; count as usize], &pointers, &(0..=count).collect::<Vec<_>>()));
    let corpus = folder.load("d.idx").unwrap();
    for document in [0, 1023, 1024, 4999, 17] {
        assert_eq!(corpus.document(document).unwrap(), 3 * document..3 * document + 3);
        assert_eq!(corpus.document_at(3 * document + 2).unwrap(), document);
    }
}

#[test]
fn parts_of_all_kinds_follow_each_other() {
    let folder = Folder::new();
    let prepared = folder.prepared();
    folder.write("a.txt", "xy");
    folder.write("n.bin", u16s(&[7, 8, 9]));
    let paths = [folder.0.path().join("a.txt"), folder.0.path().join("n.bin"), prepared];
    let corpus = Corpus::open(&paths, &SourceOptions::new(&Tokenizer::bytes())).unwrap();
    assert_eq!((corpus.num_tokens(), corpus.num_documents()), (10, 4));
    let documents: Vec<_> = (0..4).map(|index| corpus.document(index).unwrap()).collect();
    assert_eq!(documents, [0..2, 2..5, 5..8, 8..10]);
    for (index, document) in documents.into_iter().enumerate() {
        assert!(document.into_iter().all(|token| corpus.document_at(token).unwrap() == index));
    }
    let mut tokens = Vec::new();
    corpus.read_tokens(1..9, &mut tokens).unwrap();
    assert_eq!(tokens, [121, 7, 8, 9, 97, 98, 99, 100]);
    assert!(matches!(corpus.read_tokens(9..11, &mut tokens), Err(DataError::NoTokenRange { .. })));
    #[expect(clippy::reversed_empty_ranges)]
    let reversed = corpus.read_tokens(3..2, &mut tokens);
    assert!(matches!(reversed, Err(DataError::NoTokenRange { .. })));
    assert!(matches!(corpus.document(4), Err(DataError::NoDocument { index: 4, available: 4 })));
}

#[test]
fn no_id_outside_the_vocabulary_gets_out_of_a_file() {
    let folder = Folder::new();
    let path = folder.write("n.bin", u16s(&[3, 300, 4]));
    let tokenizer = Tokenizer::bytes();
    let held = |vocab_size| {
        let token_files = TokenFileOptions { vocab_size: Some(vocab_size), ..TokenFileOptions::default() };
        Corpus::open(&[&path], &SourceOptions { token_files, ..SourceOptions::new(&tokenizer) }).unwrap()
    };
    let corpus = held(300);
    let mut tokens = Vec::new();
    let error = file_error(corpus.read_tokens(0..3, &mut tokens));
    assert!(
        matches!(error, FileError::TokenOutOfVocab { offset: 2, id: 300, vocab_size: 300, .. }),
        "{error}"
    );
    assert!(error.to_string().contains("n.bin: byte 2: token id 300"), "{error}");
    file_error(corpus.read_labels(1..2, &mut Vec::new()));
    corpus.read_tokens(2..3, &mut tokens).unwrap();
    // Not scanned, because reads check against a smaller vocabulary; a file with a larger one is scanned.
    assert_eq!(corpus.first_outside(300).unwrap(), None);
    assert_eq!(held(301).first_outside(300).unwrap(), Some((1, 300)));
    assert_eq!(held(301).first_outside(301).unwrap(), None);
    folder.write("d.bin", (-1_i32).to_le_bytes());
    folder.write("d.idx", index(4, &[1], &[0], &[0, 1]));
    let error = file_error(folder.load("d.idx").unwrap().read_tokens(0..1, &mut tokens));
    assert!(matches!(error, FileError::TokenOutOfVocab { offset: 0, id: -1, .. }), "{error}");
}

#[test]
fn a_file_that_shrinks_while_it_is_open_is_an_error() {
    let folder = Folder::new();
    folder.write("n.bin", u16s(&[1; 100_000]));
    // More documents than a block of the index has: one block stays in memory.
    folder.write("d.bin", u16s(&[1; 3000]));
    let pointers: Vec<_> = (0..3000).map(|at| 2 * at).collect();
    folder.write("d.idx", index(8, &[1; 3000], &pointers, &(0..=3000).collect::<Vec<_>>()));
    let (tokens, indexed, own) =
        (folder.load("n.bin").unwrap(), folder.load("d.idx").unwrap(), folder.prepared());
    let own = Corpus::load(&own, &Tokenizer::bytes()).unwrap();
    let shrink = |name: &str, bytes| {
        OpenOptions::new().write(true).open(folder.0.path().join(name)).unwrap().set_len(bytes).unwrap();
    };
    shrink("n.bin", 1000);
    let error = file_error(tokens.read_tokens(0..100_000, &mut Vec::new()));
    assert!(matches!(error, FileError::Truncated { file_bytes: 1000, .. }), "{error}");
    assert!(error.to_string().contains("shrank"), "{error}");
    tokens.read_tokens(0..500, &mut Vec::new()).unwrap();
    shrink("two.tokens", 130);
    // The end of the last document was read when the file was opened, and a block of ends is kept.
    file_error(own.read_tokens(0..5, &mut Vec::new()));
    shrink("d.idx", 40);
    assert!(matches!(file_error(indexed.document(2)), FileError::Truncated { .. }));
    assert!(matches!(file_error(indexed.document_at(2)), FileError::Truncated { .. }));
}

#[test]
fn broken_token_files_are_refused_with_file_and_place() {
    let folder = Folder::new();
    let gpt2 = |header, tokens: &[u16]| llm_c(header, &u16s(tokens));
    let (magic, ok) = (20_240_520, index(8, &[2, 1], &[0, 4], &[0, 1, 2]));
    let wrong = |at: usize, bytes: &[u8]| {
        let mut index = ok.clone();
        index[at..at + bytes.len()].copy_from_slice(bytes);
        index
    };
    folder.write("d.bin", u16s(&[1, 2, 3]));
    folder.write("d.idx", &ok);
    assert_eq!(folder.load("d.idx").unwrap().num_documents(), 2);
    let huge = u64::MAX.to_le_bytes();
    let cases: &[(&str, Vec<u8>, &str)] = &[
        ("odd.bin", vec![1, 2, 3], "odd.bin: 3 bytes are not a multiple of the token size"),
        ("empty.bin", vec![], "empty.bin: contains no tokens"),
        ("c.bin", gpt2([magic, 1, 0], &[]), "c.bin: contains no tokens"),
        ("c.bin", gpt2([magic, 2, 1], &[1]), "byte 4: the version is 2; valid is 1"),
        ("c.bin", gpt2([magic, 1, 2], &[1]), "bytes 1024 to 1028 are needed, but the file has 1026"),
        ("c.bin", gpt2([magic, 1, -1], &[1]), "are needed, but the file has 1026"),
        ("c.bin", gpt2([magic, 1, 1], &[1, 2]), "byte 8: the number of tokens is 1; valid is 2"),
        (
            "c.bin",
            gpt2([magic, 1, 1], &[])[..100].to_vec(),
            "bytes 0 to 1024 are needed, but the file has 100",
        ),
        ("d.idx", vec![], "d.idx: truncated: bytes 0 to 9 are needed, but the file has 0"),
        ("d.idx", b"TNTIDX\0\0\0".to_vec(), "d.idx: byte 0: expected Megatron's magic"),
        ("d.idx", wrong(9, &[2]), "byte 9: the version is 2"),
        ("d.idx", wrong(17, &[6]), "byte 17: the type code is 6"),
        ("d.idx", wrong(18, &[0; 8]), "byte 18: the number of sequences is 0"),
        (
            "d.idx",
            wrong(18, &huge),
            "byte 18: the number of sequences is 18446744073709551615; valid is at most 4",
        ),
        ("d.idx", wrong(26, &huge), "byte 26: the number of document indices"),
        ("d.idx", wrong(38, &[2]), "the last sequence's pointer is 4"),
        ("d.idx", wrong(42, &[2]), "byte 42: the first sequence's pointer is 2; valid is 0"),
        ("d.idx", wrong(58, &[1]), "byte 58: the first document index is 1; valid is 0"),
        ("d.idx", wrong(74, &[3]), "byte 74: the last document index is 3; valid is 2"),
        ("other.tokens", b"ulyteken".repeat(20), "other.tokens: byte 0: expected the magic `ulytoken`"),
    ];
    for (name, bytes, expected) in cases {
        folder.write(name, bytes);
        let message = file_error(folder.load(name)).to_string();
        assert!(message.contains(expected), "{name}: {message}");
    }
    // What opening does not look at is refused when it is asked for.
    folder.write("d.idx", wrong(66, &[0]));
    let error = file_error(folder.load("d.idx").unwrap().document(0));
    assert!(matches!(error, FileError::EmptyDocument { index: 0, start: 0, end: 0, .. }), "{error}");
    let error = file_error(folder.load("d.idx").unwrap().document_at(0));
    assert!(matches!(error, FileError::EmptyDocument { index: 0, .. }), "{error}");
    // The last document's bounds are looked at.
    folder.write("d.idx", wrong(66, &[9]));
    let message = file_error(folder.load("d.idx")).to_string();
    assert!(message.contains("byte 66: a document index is 9; valid is 0 to 2"), "{message}");
    folder.write("d.idx", &ok);
    folder.write("d.bin", u16s(&[1, 2, 3, 4]));
    assert!(file_error(folder.load("d.idx")).to_string().contains("end at byte 8, the end of the .bin"));
}

#[test]
fn a_damaged_header_of_our_own_is_refused_wherever_it_is_damaged() {
    let folder = Folder::new();
    let path = folder.prepared();
    let valid = fs::read(&path).unwrap();
    assert_eq!(valid.len(), 128 + 16 + 16);
    assert_eq!(
        tokens_of(&Corpus::load(&path, &Tokenizer::bytes()).unwrap()),
        [vec![97, 98, 99], vec![100, 101]]
    );
    for at in 0..128 {
        let mut bytes = valid.clone();
        bytes[at] ^= 1;
        fs::write(&path, bytes).unwrap();
        let error = file_error(Corpus::load(&path, &Tokenizer::bytes()));
        let expected = match at {
            0..8 => matches!(error, FileError::WrongMagic { .. }),
            8..12 => matches!(error, FileError::Field { offset: 8, .. }),
            _ => matches!(error, FileError::HeaderChecksum { .. }),
        };
        assert!(expected, "{at}: {error}");
    }
    for (bytes, expected) in
        [(&valid[..159], "bytes 0 to 160 are needed"), (&[&valid[..], &[0]].concat(), "160 bytes, not 161")]
    {
        fs::write(&path, bytes).unwrap();
        let message = file_error(Corpus::load(&path, &Tokenizer::bytes())).to_string();
        assert!(message.contains(expected), "{message}");
    }
}

#[test]
fn tokens_of_another_tokenizer_are_refused() {
    let folder = Folder::new();
    let path = folder.prepared();
    let json = corpus::tokenizer_json(r#"{"<unk>":0,"a":1}"#, "null");
    let other = Tokenizer::from_file(&folder.write("tokenizer.json", json)).unwrap();
    let error = file_error(Corpus::load(&path, &other));
    assert!(matches!(error, FileError::OtherTokenizer { vocab_size: 256, .. }), "{error}");
}

#[test]
fn a_sparse_file_of_two_gigabytes_opens_without_being_read() {
    let folder = Folder::new();
    let path = folder.write("big.bin", u16s(&[5]));
    OpenOptions::new().write(true).open(&path).unwrap().set_len(2 << 30).unwrap();
    let corpus = folder.load("big.bin").unwrap();
    assert_eq!((corpus.num_tokens(), corpus.document(0).unwrap()), (1 << 30, 0..1 << 30));
    let mut tokens = Vec::new();
    corpus.read_tokens((1 << 30) - 3..1 << 30, &mut tokens).unwrap();
    corpus.read_tokens(0..1, &mut tokens).unwrap();
    assert_eq!(tokens, [0, 0, 0, 5]);
}

#[test]
fn the_width_of_tokens_without_header_is_stated_where_it_is_not_clear() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("x.bin");
    let open = |vocab_size, token_dtype| {
        let options = TokenFileOptions { vocab_size, token_dtype, ..TokenFileOptions::default() };
        let file = TokenFile::open(&path, FileFormat::NanoGpt, options);
        file.map(|file| file.token_bytes()).map_err(|error| error.to_string())
    };
    let wide: Vec<u8> = (0..100_u32).flat_map(|id| (1_400 * id).to_le_bytes()).collect();
    std::fs::write(&path, &wide).unwrap();
    for vocab_size in [None, Some(50_000), Some(150_000)] {
        let error = open(vocab_size, None).unwrap_err();
        assert!(error.contains("set `ulysses.token_dtype` to \"uint16\" or \"uint32\""), "{error}");
        assert_eq!(open(vocab_size, Some(TokenDtype::Uint32)), Ok(4));
        assert_eq!(open(vocab_size, Some(TokenDtype::Uint16)), Ok(2));
    }
    let narrow: Vec<u8> = (0..200_u16).flat_map(|id| (300 * id).to_le_bytes()).collect();
    std::fs::write(&path, &narrow).unwrap();
    assert_eq!(open(Some(65_536), None), Ok(2));
    assert!(open(Some(65_537), None).unwrap_err().contains("the vocabulary has 65537 ids"));
}
