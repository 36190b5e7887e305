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
    write(root, "array.json", "\n[\n{\"text\":\n\"one\"}\n,{\"text\":\"two\"}\n]\n");
    assert_eq!(as_texts(&load(root, "array.json").unwrap()), ["one", "two"]);
    for (name, text, expected) in [
        ("object.json", "{\n\"text\": 1\n}", "a JSON value over several lines; write one object per line"),
        ("numbers.json", "[1, 2]", "a JSON value over several lines"),
        ("mixed.json", "[\n{\"text\":\"a\"},\n 5]", "line 3: expected an array of objects"),
        ("short.json", "[{\"text\":\"a\"},\n{\"text\"", "line 2: not valid JSON"),
        ("typed.json", "[{\"text\":\n\"a\"},\n{\"text\":7}]", "line 3, `text`"),
        (
            "shares.json",
            r#"{"conversations":[{"from":"bing","value":""}]}"#,
            "a turn of \"bing\"; known are human",
        ),
        ("alpaca.json", r#"{"instruction":"","output":""}"#, "`messages` need a chat template"),
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
    assert_eq!((corpus.skipped().other_formats, corpus.contents().num_files), (1, 3));
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
            "line 3: no field `text`, `input_ids`, `messages`, `prompt` with `completion`, `conversations`, or `instruction` with \
             `output`; the fields are: id, txt",
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

/// A directory of everything that people keep beside data.
#[test]
fn in_a_directory_only_documents_are_read_and_the_rest_is_counted() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    write(root, "README.md", "---\nlicense: mit\n---\n# Card");
    write(root, "LICENSE", "no samples beside it");
    write(root, "data/load.py", "import datasets");
    write(root, "data/notes.txt", "read");
    write(root, "data/train.json", "{\"text\":\"line\"}\n{\"text\":\"more\"}\n");
    write(root, "data/alpaca.json", "[\n {\"text\": \"element\"}\n]");
    write(root, "data/rows.csv", "id,text\n1,\"a, \"\"b\"\"\nc\"\n");
    write(root, "data/README.md", "columns");
    write(root, "meta/dataset_info.json", "{\"splits\": {}}");
    write(root, "meta/tests.json", "{\"conversations\": {}, \"text\": 1}");
    write(root, "meta/state.json", "{\n\"_format\": null\n}");
    write(root, "meta/scores.csv", "id,score\n1,2\n");
    write(root, "meta/conf.yaml", "a: 1");
    write(root, "meta/data-0.arrow", "ARROW1");
    write(root, "meta/tokens.bin", [1, 0, 2, 0]);
    let corpus = load(root, "").unwrap();
    assert_eq!(as_texts(&corpus), ["no samples beside it", "element", "read", "a, \"b\"\nc", "line", "more"]);
    let skipped = corpus.skipped();
    assert_eq!((skipped.other_formats, skipped.beside_samples, skipped.not_text), (8, 2, 0));
    let error = load(root, "meta").unwrap_err().to_string();
    assert!(error.contains("contains no text (skipped: 7 of formats without documents)"), "{error}");
    let code = root.join("code");
    write(&code, "main.rs", "fn main() {}");
    write(&code, "guide.md", "text");
    assert_eq!(as_texts(&Corpus::load(&code, &Tokenizer::bytes()).unwrap()), ["text", "fn main() {}"]);
}

#[test]
fn a_named_file_that_is_no_data_is_refused_with_the_way_out() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    for (name, bytes, expected) in [
        ("x.arrow", &b"ARROW1"[..], "datasets.load_from_disk"),
        ("x.NPY", b"\x93NUMPY", "array.astype"),
        ("x.tar.gz", b"\x1f\x8b", "an archive"),
        ("x.xz", b"\xfd7zXZ\0", "use gzip or Zstandard"),
        ("x.pt", b"PK", "weights or tensors"),
        ("x.pdf", b"%PDF", "extract its text"),
        ("x.txt", b"PK\x03\x04\xff", "it is a ZIP archive"),
        ("x.md", b"\xff\xfea\0", "iconv -f UTF-16"),
        ("x.csv", b"id,body\n1,a\n", "line 2: no field `text`"),
        ("y.csv", b"id,text\n1,a\n2\n", "line 3: not a row of the table"),
    ] {
        write(root, name, bytes);
        let error = load(root, name).unwrap_err().to_string();
        assert!(error.contains(name) && error.contains(expected), "{error}");
    }
}

#[test]
fn files_of_gzip_and_zstandard_are_read_as_their_contents_in_all_their_parts() {
    use flate2::{Compression, write::GzEncoder};
    use std::io::Write as _;
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    let gzip = |text: &str| {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
        encoder.write_all(text.as_bytes()).unwrap();
        encoder.finish().unwrap()
    };
    let zstd = |text: &str| {
        ruzstd::encoding::compress_to_vec(text.as_bytes(), ruzstd::encoding::CompressionLevel::Uncompressed)
    };
    let (a, b) = ("{\"text\":\"a\"}\n", "{\"text\":\"b\"}\n");
    // A frame to skip: magic number, length, contents.
    let skipped = [&[0x50, 0x2a, 0x4d, 0x18, 2, 0, 0, 0][..], b"xx"].concat();
    write(root, "d/1.jsonl.gz", [gzip(a), gzip(b)].concat());
    write(root, "d/2.json.zst", [skipped, zstd(a), zstd(b)].concat());
    write(root, "d/3.csv.gz", gzip("text\nc\n"));
    write(root, "d/4.txt.zst", zstd("d"));
    write(root, "d/5.jsonl", gzip(a));
    assert_eq!(as_texts(&load(root, "d").unwrap()), ["a", "b", "a", "b", "c", "d", "a"]);
    let whole = gzip(&a.repeat(1000));
    write(root, "cut.jsonl.gz", &whole[..whole.len() / 2]);
    write(root, "cut.jsonl.zst", &zstd(&a.repeat(1000))[..3000]);
    for name in ["cut.jsonl.gz", "cut.jsonl.zst"] {
        let error = load(root, name).unwrap_err();
        assert!(matches!(&error, DataError::Read { .. }) && error.to_string().contains(name), "{error}");
    }
}

#[test]
fn bad_lines_are_skipped_and_counted_if_the_options_say_so() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    write(root, "x.jsonl", b"{\"text\":\"a\"}\n{\n{\"text\":\"\xff\"}\n{\"text\":\"b\"}\n{\"t\":1}\n");
    write(root, "y.csv", "text,id\nc,1\nd\ne,2\n");
    let tokenizer = Tokenizer::bytes();
    let options = SourceOptions { on_bad_line: OnBadLine::Skip, ..SourceOptions::new(&tokenizer) };
    let corpus = Corpus::open(&[root], &options).unwrap();
    assert_eq!(as_texts(&corpus), ["a", "b", "c", "e"]);
    assert_eq!(corpus.skipped().bad_lines, 4);
    let lines: Vec<String> = corpus.bad_lines().iter().map(ToString::to_string).collect();
    for (line, place) in
        lines.iter().zip(["x.jsonl, line 2", "x.jsonl, line 3", "x.jsonl, line 5", "y.csv, line 3"])
    {
        assert!(line.contains(place), "{line}");
    }
    write(root, "z.jsonl", "{\"t\":1}\n{\"t\":2}\n");
    let all_bad = Corpus::open(&[root.join("z.jsonl")], &options).unwrap_err().to_string();
    assert!(all_bad.contains("z.jsonl, line 1: no field"), "{all_bad}");
    std::fs::remove_file(root.join("z.jsonl")).unwrap();
    let (inputs, output) = ([root.to_owned()], root.join("out.tokens"));
    let options =
        PrepareOptions { on_bad_line: OnBadLine::Skip, ..PrepareOptions::new(&inputs, &output, &tokenizer) };
    assert_eq!(prepare(&options, |_| {}).unwrap().skipped.bad_lines, 4);
    assert_eq!(as_texts(&load(root, "out.tokens").unwrap()), ["a", "b", "c", "e"]);
}

#[test]
fn contents_count_documents_by_kind() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    write(root, "a.txt", "one");
    write(
        root,
        "b.jsonl",
        "{\"input_ids\":[1]}\n{\"prompt\":\"a\",\"completion\":\"b\"}\n{\"text\":\"t\"}\n",
    );
    let contents = load(root, "").unwrap().contents().to_string();
    let expected = "1 prompt with completions, 2 documents of text, 1 line of `input_ids` in 2 files from ";
    assert!(contents.starts_with(expected) && contents.ends_with("a.txt on"), "{contents}");
}

/// A file in `/proc` has size 0, but its contents may never end.
#[cfg(target_os = "linux")]
#[test]
fn files_are_read_up_to_their_size() {
    let root = tempfile::tempdir().unwrap();
    write(root.path(), "a.txt", "text");
    std::os::unix::fs::symlink("/proc/self/pagemap", root.path().join("endless.txt")).unwrap();
    let corpus = load(root.path(), "").unwrap();
    assert_eq!((corpus.num_documents(), corpus.skipped().empty), (1, 1));
}
