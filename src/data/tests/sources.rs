//! Which files a path means, and what lines are.

use super::corpus::{as_texts, tokens_of, write};
use super::*;
use std::path::Path;

fn load(root: &Path, name: &str) -> Result<Corpus, DataError> {
    Corpus::load(&root.join(name), &Tokenizer::bytes())
}

#[test]
fn a_line_of_jsonl_is_a_document_and_blank_lines_are_none() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    write(
        root,
        "a.jsonl",
        "{\"text\":\"one\",\"n\":[1,{}]}\r\n\n  \n{\"text\": \"zw\u{f6}lf\\n\"}\n{\"text\":\"\"}\n{\"text\":\"end\"}",
    );
    let corpus = load(root, "a.jsonl").unwrap();
    assert_eq!(as_texts(&corpus), ["one", "zwölf\n", "end"]);
    assert_eq!(corpus.skipped().empty, 1);
    write(root, "b.ndjson", r#"{"text":1,"content":"inside"}"#);
    let tokenizer = Tokenizer::bytes();
    let options = SourceOptions { text_field: "content", ..SourceOptions::new(&tokenizer) };
    assert_eq!(as_texts(&Corpus::open(&[root.join("b.ndjson")], &options).unwrap()), ["inside"]);
}

#[test]
fn a_json_file_that_is_named_may_have_lines() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    write(root, "lines.json", "\u{feff}{\"text\":\"one\"}\n{\"text\":\"two\"}");
    assert_eq!(as_texts(&load(root, "lines.json").unwrap()), ["one", "two"]);
    write(root, "object.json", "{\n\"text\": 1\n}");
    assert_eq!(as_texts(&load(root, "object.json").unwrap()), ["{\n\"text\": 1\n}"]);
    for (name, text, expected) in [
        ("array.json", "[\n{\"text\":\"one\"}]", "line 1: a JSON array; write one object per line"),
        ("shares.json", r#"{"conversations":[]}"#, "convert ShareGPT's `conversations` to `messages`"),
        ("alpaca.json", r#"{"instruction":"","output":""}"#, "to `prompt` and `completion`"),
    ] {
        write(root, name, text);
        let error = load(root, name).unwrap_err().to_string();
        assert!(error.contains(name) && error.contains(expected), "{error}");
    }
}

#[test]
fn patterns_and_lists_are_read_in_order() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    write(root, "s/2.txt", "two");
    write(root, "s/1.jsonl", r#"{"text":"one"}"#);
    write(root, "s/3.md", "three");
    write(root, "d/in/4.txt", "four");
    assert_eq!(as_texts(&load(root, "s/[12].*").unwrap()), ["one", "two"]);
    assert_eq!(as_texts(&load(root, "**/*.txt").unwrap()), ["four", "two"]);
    let tokenizer = Tokenizer::bytes();
    let paths = [root.join("s/3.md"), root.join("d"), root.join("s/1*")];
    let corpus = Corpus::open(&paths, &SourceOptions::new(&tokenizer)).unwrap();
    assert_eq!(as_texts(&corpus), ["three", "four", "one"]);
    for (pattern, expected) in [("s/*.bin", "nothing matches"), ("s/[", "invalid range")] {
        let error = load(root, pattern).unwrap_err();
        assert!(
            matches!(&error, DataError::Pattern { message, .. } if message.contains(expected)),
            "{error:?}"
        );
    }
    // A file may be called like a pattern.
    write(root, "what?.txt", "this");
    write(root, "whatx.txt", "not this");
    assert_eq!(as_texts(&load(root, "what?.txt").unwrap()), ["this"]);
    let none: [&Path; 0] = [];
    assert!(matches!(Corpus::open(&none, &SourceOptions::new(&tokenizer)), Err(DataError::NoTokens)));
}

#[test]
fn a_directory_takes_token_files_that_say_what_they_are() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    let mut header = vec![0; 1024];
    header[..4].copy_from_slice(&20_240_520_u32.to_le_bytes());
    header[4] = 1;
    header[8] = 1;
    write(root, "b_shard.bin", [&header[..], &[5, 0]].concat());
    write(root, "a.txt", "a");
    write(root, "c.bin", [0xff, 0xfe]);
    write(root, "d.jsonl", r#"{"text":"d"}"#);
    let corpus = load(root, "").unwrap();
    assert_eq!(tokens_of(&corpus), [[97], [5], [100]]);
    assert_eq!(corpus.skipped().not_text, 1);
    assert_eq!(
        tokens_of(&load(root, "*.bin").unwrap()),
        [[5], [0xfeff]],
        "named by a pattern, a .bin is nanoGPT's"
    );
}

#[test]
fn broken_lines_are_refused_with_file_and_line() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    let cases: &[(&[u8], &str)] = &[
        (b"{\"text\":\"a\xff\"}", "x.jsonl, line 3: not valid UTF-8 (byte 10 of the line)"),
        (b"{\"text\":\"a\"", "x.jsonl, line 3"),
        (b"[1]", "x.jsonl, line 3"),
        (b"{\"text\":5}", "x.jsonl, line 3, `text`"),
        (
            b"{\"txt\":\"a\",\"id\":1}",
            "line 3: no field `text`, `input_ids`, `messages`, or `prompt` with `completion`; the fields are: id, txt",
        ),
        (b"{\"text\":\"a \\ud83d b\"}", "x.jsonl, line 3, `text`: an unpaired surrogate"),
        (b"{\"text\":\"a \\ud83d\\u0041\"}", "x.jsonl, line 3, `text`: an unpaired surrogate"),
        (b"{\"input_ids\":[1,-2]}", "x.jsonl, line 3, `input_ids`"),
        (b"{\"input_ids\":[1,4294967295]}", "`input_ids`[1] is 4294967295; the vocabulary is 0..4294967295"),
        (b"{\"input_ids\":[1,2],\"labels\":[1]}", "line 3: 1 `labels` for 2 `input_ids`"),
        (b"{\"input_ids\":[1],\"labels\":[-1]}", "`labels`[0] is -1; valid are 0..4294967295 and -100"),
        (
            b"{\"prompt\":\"a\",\"completion\":[]}",
            "line 3: expected `prompt` and `completion` as two strings, or",
        ),
        (b"{\"messages\":[{\"role\":\"user\"}]}", "line 3: `messages` need a chat template"),
    ];
    for (line, expected) in cases {
        write(root, "x.jsonl", [b"{\"text\":\"a\"}\n\n", *line, b"\n{\"also\":\"wrong\"}\n"].concat());
        let error = load(root, "x.jsonl").unwrap_err();
        assert!(matches!(error, DataError::File(_)), "{error:?}");
        assert!(error.to_string().contains(expected), "{error}");
    }
    let nested = format!("{{\"text\":{}", "[".repeat(100_000));
    write(root, "x.jsonl", nested);
    load(root, "x.jsonl").unwrap_err();
}

#[cfg(not(feature = "parquet"))]
#[test]
fn without_the_feature_parquet_is_refused_by_its_name() {
    let root = tempfile::tempdir().unwrap();
    write(root.path(), "x.parquet", "PAR1");
    let error = load(root.path(), "x.parquet").unwrap_err();
    assert!(matches!(error, DataError::File(FileError::NotBuilt { feature: "parquet", .. })), "{error:?}");
}
