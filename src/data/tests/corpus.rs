use super::*;
use std::fs;
use std::path::Path;

pub(super) fn write(root: &Path, name: &str, content: impl AsRef<[u8]>) {
    let path = root.join(name);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, content).unwrap();
}

/// The tokens of each document.
pub(super) fn tokens_of(corpus: &Corpus) -> Vec<Vec<u32>> {
    let document = |index| {
        let mut tokens = Vec::new();
        corpus.read_tokens(corpus.document(index).unwrap(), &mut tokens).unwrap();
        tokens
    };
    (0..corpus.num_documents()).map(document).collect()
}

pub(super) fn as_texts(corpus: &Corpus) -> Vec<String> {
    let text =
        |tokens: Vec<u32>| String::from_utf8(tokens.iter().map(|&token| token as u8).collect()).unwrap();
    tokens_of(corpus).into_iter().map(text).collect()
}

/// A word-level tokenizer whose ids have a gap and whose file asks for truncation and padding.
pub(super) fn tokenizer_json(vocab: &str, post_processor: &str) -> String {
    format!(
        r#"{{"version":"1.0",
        "truncation":{{"direction":"Right","max_length":2,"strategy":"LongestFirst","stride":0}},
        "padding":{{"strategy":{{"Fixed":8}},"direction":"Right","pad_to_multiple_of":null,"pad_id":0,
                    "pad_type_id":0,"pad_token":"<unk>"}},
        "added_tokens":[],"normalizer":null,"pre_tokenizer":{{"type":"WhitespaceSplit"}},
        "post_processor":{post_processor},"decoder":null,
        "model":{{"type":"WordLevel","vocab":{vocab},"unk_token":"<unk>"}}}}"#
    )
}

#[test]
fn a_directory_is_one_document_per_text_file_in_path_order() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    write(root, "b.txt", "second");
    write(root, "a/z.txt", "first, in a directory");
    write(root, "c/d/e.rs", "third: größer");
    write(root, "target.txt", "fifth: a file's name may start with target");
    write(root, "b.bin", [0xff, 0xfe, 0x00]);
    write(root, "empty", "");
    write(root, ".hidden", "no");
    write(root, ".git/config", "no");
    write(root, "c/target/CACHEDIR.TAG", "Signature: 8a477f597d28d172789f06886806bc55");
    write(root, "c/target/debug/out", "no");
    write(root, "target/translation.txt", "fourth: a directory may be called target");
    let corpus = Corpus::load(root, &Tokenizer::bytes()).unwrap();
    let expected = [
        "first, in a directory",
        "second",
        "third: größer",
        "fourth: a directory may be called target",
        "fifth: a file's name may start with target",
    ];
    assert_eq!(as_texts(&corpus), expected);
    assert_eq!(
        corpus.skipped(),
        Skipped { hidden: 2, outputs: 1, other_formats: 1, empty: 1, ..Skipped::default() }
    );
    assert_eq!(corpus.skipped().total(), 5);

    let single = Corpus::load(&root.join("b.txt"), &Tokenizer::bytes()).unwrap();
    assert_eq!(as_texts(&single), ["second"]);
}

#[test]
fn output_of_training_runs_is_skipped() {
    let root = tempfile::tempdir().unwrap();
    write(root.path(), "a.txt", "text");
    write(root.path(), "runs/tiny-1/metrics.jsonl", "{}");
    write(root.path(), "runs/tiny-1/config.json", "{}");
    write(root.path(), "runs/tiny-1/metrics.1.jsonl", "{}");
    write(root.path(), "runs/tiny-1/notes.txt", "notes");
    write(root.path(), "runs/exported/config.json", "{}");
    write(root.path(), "runs/exported/model.safetensors", "weights");
    let corpus = Corpus::load(root.path(), &Tokenizer::bytes()).unwrap();
    assert_eq!(as_texts(&corpus), ["text", "notes"]);
    assert_eq!(corpus.skipped().outputs, 4);
    // Also where the data itself is the output directory.
    let own = Corpus::load(&root.path().join("runs/tiny-1"), &Tokenizer::bytes()).unwrap();
    assert_eq!(as_texts(&own), ["notes"]);
    // A run that starts has renamed the metrics of the one before, and holds the lock.
    std::fs::remove_file(root.path().join("runs/tiny-1/metrics.jsonl")).unwrap();
    write(root.path(), "runs/tiny-1/.lock", "");
    let own = Corpus::load(&root.path().join("runs/tiny-1"), &Tokenizer::bytes()).unwrap();
    assert_eq!(as_texts(&own), ["notes"]);
}

#[cfg(unix)]
#[test]
fn links_to_files_are_read_and_links_to_directories_are_not_entered() {
    use std::os::unix::fs::symlink;
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    write(root, "one", "one");
    symlink(root.join("one"), root.join("two")).unwrap();
    symlink(root, root.join("circle")).unwrap();
    symlink(root.join("nothing"), root.join("dangling")).unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(root.join("socket")).unwrap();
    let corpus = Corpus::load(root, &Tokenizer::bytes()).unwrap();
    assert_eq!(as_texts(&corpus), ["one", "one"]);
    assert_eq!(corpus.skipped(), Skipped { special: 3, ..Skipped::default() });
    let error = Corpus::load(&root.join("socket"), &Tokenizer::bytes()).unwrap_err();
    assert!(matches!(&error, DataError::NotAFile { path } if path.ends_with("socket")), "{error:?}");
}

#[test]
fn unusable_paths_are_errors_that_name_them() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    write(root, "binary", [0xff]);
    write(root, "empty/nothing", "");
    write(root, "empty/.hidden", "x");
    let load = |name: &str| Corpus::load(&root.join(name), &Tokenizer::bytes()).unwrap_err();
    let missing = load("nowhere");
    assert!(matches!(&missing, DataError::Missing { path } if path.ends_with("nowhere")), "{missing:?}");
    assert!(missing.to_string().contains("nowhere"));
    let binary = load("binary");
    assert!(matches!(&binary, DataError::NotText { path, .. } if path.ends_with("binary")), "{binary:?}");
    // Its 5 GiB are not read.
    write(root, "hole.txt", "text, then");
    std::fs::File::options().write(true).open(root.join("hole.txt")).unwrap().set_len(5 << 30).unwrap();
    let hole = load("hole.txt");
    assert!(matches!(&hole, DataError::NotText { path, .. } if path.ends_with("hole.txt")), "{hole:?}");
    let empty = load("empty");
    let expected = Skipped { hidden: 1, empty: 1, ..Skipped::default() };
    assert!(matches!(&empty, DataError::Empty { skipped, .. } if **skipped == expected), "{empty:?}");
    assert!(empty.to_string().contains("skipped: 1 hidden, 1 empty"), "{empty}");
    let unreadable = load("nul\0byte");
    assert!(matches!(unreadable, DataError::Read { .. }), "{unreadable:?}");
    let through_a_file = load("binary/below");
    assert!(matches!(through_a_file, DataError::Read { .. }), "{through_a_file:?}");
    assert!(matches!(Corpus::from_documents([vec![], vec![]]), Err(DataError::NoTokens)));
}

#[test]
fn a_tokenizer_file_loses_no_token_and_adds_special_ones_per_document() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    let leading_bos = r#"{"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"<s>","type_id":0}},
        {"Sequence":{"id":"A","type_id":0}}],"pair":[{"Sequence":{"id":"A","type_id":0}},
        {"Sequence":{"id":"B","type_id":0}}],"special_tokens":{"<s>":{"id":"<s>","ids":[9],"tokens":["<s>"]}}}"#;
    let vocab = r#"{"<unk>":0,"a":1,"b":2,"c":7,"<s>":9}"#;
    write(root, "tokenizer.json", tokenizer_json(vocab, leading_bos));
    write(root, "text/1", "a b c a");
    write(root, "text/2", "c other");
    let tokenizer = Tokenizer::from_file(&root.join("tokenizer.json")).unwrap();
    assert_eq!(tokenizer.vocab_size(), 10, "one past the largest id, though there are five");
    let corpus = Corpus::load(&root.join("text"), &tokenizer).unwrap();
    assert_eq!(tokens_of(&corpus), [vec![9, 1, 2, 7, 1], vec![9, 7, 0]]);
}

#[test]
fn tokenizer_failures_name_the_file() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    write(root, "broken.json", "{}");
    write(root, "no_unknown.json", tokenizer_json(r#"{"a":0}"#, "null"));
    write(root, "text/1", "a a");
    write(root, "text/2", "a b");
    write(root, "text/3", "b");
    let missing = Tokenizer::from_file(&root.join("nowhere.json")).unwrap_err();
    assert!(matches!(missing, DataError::TokenizerLoad { .. }), "{missing:?}");
    assert!(missing.to_string().contains("nowhere.json"));
    let broken = Tokenizer::from_file(&root.join("broken.json")).unwrap_err();
    assert!(matches!(broken, DataError::TokenizerLoad { .. }), "{broken:?}");
    assert!(broken.to_string().contains("broken.json"));
    let tokenizer = Tokenizer::from_file(&root.join("no_unknown.json")).unwrap();
    let refused = Corpus::load(&root.join("text"), &tokenizer).unwrap_err();
    assert!(matches!(&refused, DataError::Tokenize { path, .. } if path.ends_with("text/2")), "{refused:?}");
}

#[test]
fn unigram_entropy_is_that_of_the_frequencies() {
    let entropy =
        |tokens: Vec<u32>| unigram_entropy_nats(&Corpus::from_documents([tokens]).unwrap()).unwrap();
    assert_eq!(entropy(vec![7, 7, 7]), 0.0);
    // Longer than what is read at once.
    let uniform: Vec<u32> = (0..256).cycle().take(256 * 1000).collect();
    assert!((entropy(uniform) - 256_f64.ln()).abs() < 1e-12);
    // 1/2, 1/4, 1/4: 1.5 bits.
    assert!((entropy(vec![1, 2, 1, u32::MAX]) - 1.5 * 2_f64.ln()).abs() < 1e-12);
}
