//! Preparing, interrupting and going on.

use super::corpus::{tokens_of, write};
use super::*;
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

const MIB: usize = 1 << 20;

/// Text of several batches: a file, lines of which some have labels, and another file.
fn inputs(root: &Path) -> Vec<PathBuf> {
    write(root, "in/1.txt", "first. ".repeat(9 * MIB / 7));
    let mut lines = String::new();
    for number in 0..20 * MIB / 1024 {
        lines.push_str(&match number % 7 {
            3 if number > 10_000 => {
                format!("{{\"prompt\":\"{number}\",\"completion\":\"{}\"}}\n", "c".repeat(1000))
            }
            _ => format!("{{\"text\":\"{number}{}\"}}\n", "t".repeat(1000)),
        });
    }
    write(root, "in/2.jsonl", lines);
    write(root, "in/3.txt", "last");
    vec![root.join("in/1.txt"), root.join("in/*.jsonl"), root.join("in/3.txt")]
}

fn run(
    inputs: &[PathBuf],
    output: &Path,
    report: impl FnMut(&PrepareProgress),
) -> Result<Prepared, DataError> {
    let tokenizer = Tokenizer::bytes();
    prepare(&PrepareOptions::new(inputs, output, &tokenizer), report)
}

#[test]
fn an_interrupted_preparation_resumes_and_writes_the_same_bytes() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    let (inputs, whole, resumed) = (inputs(root), root.join("whole.tokens"), root.join("resumed.tokens"));
    let mut batches = 0;
    let prepared = run(&inputs, &whole, |_| batches += 1).unwrap();
    assert!(batches >= 4 && !prepared.is_resumed, "{batches}");
    let expected = tokens_of(&Corpus::open(&inputs, &SourceOptions::new(&Tokenizer::bytes())).unwrap());
    assert_eq!(tokens_of(&Corpus::load(&whole, &Tokenizer::bytes()).unwrap()), expected);

    let mut text_bytes = 0;
    for stop in 1..=batches {
        let mut last = PrepareProgress::default();
        // One batch further than the call before, and then the process dies, having begun the next one.
        let died = catch_unwind(AssertUnwindSafe(|| {
            run(&inputs, &resumed, |progress| {
                last = *progress;
                panic!("killed");
            })
        }));
        assert!(died.is_err(), "{stop}");
        text_bytes += last.text_bytes;
        assert!(!resumed.exists());
        let tokens = resumed.with_file_name("resumed.tokens.partial/tokens");
        let unrecorded = [fs::read(&tokens).unwrap(), b"half a batch".to_vec()].concat();
        fs::write(&tokens, unrecorded).unwrap();
    }
    let finished = run(&inputs, &resumed, |_| panic!("all was done")).unwrap();
    assert!(finished.is_resumed);
    assert_eq!(text_bytes, prepared.progress.text_bytes, "nothing is tokenized twice");
    assert_eq!(finished.progress.num_tokens, prepared.progress.num_tokens);
    assert!(fs::read(&whole).unwrap() == fs::read(&resumed).unwrap());
    assert!(!root.join("resumed.tokens.partial").exists());
}

#[test]
fn invalid_inputs_are_refused_and_nothing_is_overwritten() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    write(root, "a.txt", "text");
    write(root, "empty.txt", "");
    let output = root.join("a.tokens");
    let prepare = |name: &str| run(&[root.join(name)], &output, |_| {});
    assert!(matches!(prepare("empty.txt"), Err(DataError::Empty { .. })));
    assert!(matches!(prepare("none.txt"), Err(DataError::Missing { .. })));
    write(root, "ids.jsonl", "{\"input_ids\":[255]}\n{\"input_ids\":[256]}");
    let error = prepare("ids.jsonl").unwrap_err();
    assert!(
        error.to_string().contains("ids.jsonl, line 2: `input_ids`[0] is 256; the vocabulary is 0..256"),
        "{error}"
    );
    let begin = AssertUnwindSafe(|| run(&[root.join("a.txt")], &output, |_| panic!("killed")));
    assert!(catch_unwind(begin).is_err());
    write(root, "b.txt", "other text");
    // What was begun is of other inputs.
    assert!(matches!(prepare("b.txt"), Err(DataError::OtherPreparation { .. })));
    prepare("a.txt").unwrap();
    let valid = fs::read(&output).unwrap();
    assert!(matches!(prepare("a.txt"), Err(DataError::OutputExists { .. })));
    assert_eq!(fs::read(&output).unwrap(), valid);
    let again = run(std::slice::from_ref(&output), &root.join("b.tokens"), |_| {}).unwrap_err();
    assert!(matches!(again, DataError::File(FileError::AlreadyTokens { .. })), "{again:?}");
}

#[test]
fn two_processes_do_not_prepare_one_file() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    write(root, "a.txt", "text");
    let (inputs, output) = ([root.join("a.txt")], root.join("a.tokens"));
    let mut second = None;
    run(&inputs, &output, |_| second = Some(run(&inputs, &output, |_| {}))).unwrap();
    assert!(matches!(second, Some(Err(DataError::BeingPrepared { .. }))), "{second:?}");
}

#[test]
fn a_large_vocabulary_takes_four_bytes_and_names_its_tokenizer() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    for (largest, width) in [(65_534, 2), (65_535, 4)] {
        let json = corpus::tokenizer_json(&format!(r#"{{"<unk>":0,"a":{largest}}}"#), "null");
        write(root, "tokenizer.json", json);
        write(root, "a.txt", "a b a");
        let tokenizer = Tokenizer::from_file(&root.join("tokenizer.json")).unwrap();
        let (inputs, output) = ([root.join("a.txt")], root.join(format!("{width}.tokens")));
        let options = PrepareOptions::new(&inputs, &output, &tokenizer);
        prepare(&options, |_| {}).unwrap();
        let file = TokenFile::open(&output, FileFormat::Own, TokenFileOptions::default()).unwrap();
        assert_eq!((file.token_bytes(), file.has_labels()), (width, false));
        assert_eq!(file.made_by(), Some((largest + 1, tokenizer.hash())));
        assert_eq!(
            tokens_of(&Corpus::load(&output, &tokenizer).unwrap()),
            [[largest as u32, 0, largest as u32]]
        );
    }
}
