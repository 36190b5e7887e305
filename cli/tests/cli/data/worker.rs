//! The process that tokenizes: the same tokens as in this process, and limits that hold for any file.

use crate::support::cli::{Outcome, Workplace};
use crate::train::word_tokenizer;
use serde_json::{Value, json};
use ulysses::config::OnBadLine;
use ulysses::data::{PrepareOptions, Tokenizer, prepare};

const CHAT: &str =
    r#"{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}"#;

fn vocab() -> Value {
    json!({ "[UNK]": 0, "a": 1, "b": 2, "end": 3 })
}

/// Tokenizes `chat.jsonl` with a template and a `tokenizer.json`.
fn prepared(place: &Workplace, template: &str, tokenizer: &str) -> Outcome {
    place.write("chat.jsonl", CHAT);
    place.write("chat_template.jinja", template);
    place.write("tokenizer.json", tokenizer);
    let _ = std::fs::remove_file(place.path("chat.tokens"));
    place.run(&["data", "prepare", "chat.jsonl", "--output", "chat.tokens", "--tokenizer", "tokenizer.json"])
}

#[test]
fn a_worker_gives_the_bytes_of_this_process() {
    let place = Workplace::new();
    place.write("tok/tokenizer.json", word_tokenizer(vocab()));
    place.write("tok/tokenizer_config.json", json!({ "eos_token": "end" }).to_string());
    place.write(
        "tok/chat_template.jinja",
        "{% for m in messages %}{{ m.role }} {{ m.content }} end {% endfor %}",
    );
    let lines = [
        CHAT,
        r#"{"text": "a b a"}"#,
        "not JSON",
        r#"{"input_ids": [1, 2], "labels": [-100, 2]}"#,
        r#"{"prompt": "a", "completion": " b"}"#,
    ];
    place.write("lines/1.jsonl", lines.join("\n"));
    place.write("lines/2.jsonl", lines.repeat(500).join("\n"));
    place
        .run(&[
            "data",
            "prepare",
            "lines",
            "--output",
            "worker.tokens",
            "--tokenizer",
            "tok/tokenizer.json",
            "--on-bad-line",
            "skip",
        ])
        .assert_done();
    let tokenizer = Tokenizer::from_file(&place.path("tok/tokenizer.json")).unwrap();
    let options = PrepareOptions {
        inputs: &[place.path("lines")],
        output: &place.path("here.tokens"),
        tokenizer: &tokenizer,
        text_field: "text",
        append_eod: true,
        on_bad_line: OnBadLine::Skip,
    };
    let here = prepare(&options, |_| {}).unwrap();
    assert_eq!((here.progress.num_documents, here.skipped.bad_lines), (4 * 501, 501));
    let read = |name| std::fs::read(place.path(name)).unwrap();
    assert_eq!(read("worker.tokens"), read("here.tokens"));
}

#[test]
fn a_template_or_tokenizer_that_takes_too_much_is_an_error() {
    let place = Workplace::new();
    let words = word_tokenizer(vocab());
    let on_the_line = "chat.jsonl, line 1: the tokenizer or its chat template takes more than ";
    let refused = |template: &str, tokenizer: &str, code, expected: &[&str]| {
        let outcome = prepared(&place, template, tokenizer);
        outcome.assert_refused(code, expected);
        assert!(outcome.stderr.len() < 2000 && !outcome.stderr.contains("panicked"), "{outcome:?}");
    };
    let slow = "{% set s = 'a' * 10000000 %}{% set d = {1: 2, 3: 4} %}{% for i in range(100000) %}{% if (s,) in d %}{% endif %}\
                {% endfor %}";
    refused(slow, &words, 1, &[on_the_line, "s of processor time"]);
    let lines = "{% set s = '\n' * 120000000 %}{{ s.splitlines() | length }}";
    refused(lines, &words, 1, &[on_the_line, "MiB of memory"]);
    let wide =
        "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}";
    refused(wide, &words, 1, &[on_the_line, "MiB of memory"]);
    let constants = "{{ 'a' * 520000 }}".repeat(2000);
    refused(&constants, &words, 2, &["cannot load the tokenizer tokenizer.json", "MiB of memory"]);
    let branches = format!("{{% if a %}}{}{{% endif %}}", "{% elif b %}".repeat(20_000));
    refused(&branches, &words, 2, &["cannot load the tokenizer tokenizer.json", "overflows the stack"]);
    let mut grows: Value = serde_json::from_str(&words).unwrap();
    // Few matches that grow much, so that memory ends long before processor time.
    let replace = json!({ "type": "Replace", "pattern": { "String": "a" }, "content": "a".repeat(10_000) });
    grows["normalizer"] = json!({ "type": "Sequence", "normalizers": vec![replace; 3] });
    let plain = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}";
    refused(plain, &grows.to_string(), 1, &[on_the_line]);
    prepared(&place, plain, &words).assert_done();
    // Of several errors the first one is reported.
    place.write("chat_template.jinja", lines);
    place.write("lines.jsonl", format!("{}\nnot JSON\n{CHAT}\n", r#"{"text": "a"}"#));
    let arguments =
        ["data", "prepare", "lines.jsonl", "--output", "l.tokens", "--tokenizer", "tokenizer.json"];
    place.run(&arguments).assert_refused(1, &["lines.jsonl, line 2"]);
}
