//! `ulysses data`.

mod datasets;
mod worker;

use crate::support::cli::Workplace;
use crate::train::word_tokenizer;
use serde_json::json;
use std::fs;
use std::process::Stdio;

#[test]
fn the_files_of_this_repository_are_training_data() {
    let place = Workplace::new();
    place.write_config("c.json", json!({ "ulysses": { "steps": 1 } }));
    // What the README's first run trains on.
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
    place.run(&["train", "c.json", "--data", root, "--output", "out"]).assert_done();
}

#[test]
fn prepared_tokens_give_the_same_losses_as_text() {
    let place = Workplace::new();
    let vocab = json!({ "[UNK]": 0, "the": 1, "quick": 2, "brown": 3, "fox": 4 });
    place.write("tok/tokenizer.json", word_tokenizer(vocab));
    let tokenizer = ["--tokenizer", "tok/tokenizer.json"];
    let prepare = [&["data", "prepare", "text.txt", "--output", "text.tokens"], &tokenizer[..]].concat();
    let outcome = place.run(&prepare);
    // Nine words and a full stop, a hundred times.
    assert!(
        outcome.assert_done().stdout.contains("text.tokens: 1000 tokens in 1 documents; "),
        "{outcome:?}"
    );
    place.write_config("c.json", json!({ "ulysses": { "seq_len": 16 } }));
    let train = |data: &str, output: &str| {
        let arguments = ["train", "c.json", "--data", data, "--output", output];
        place.run(&[&arguments[..], &tokenizer].concat()).assert_done();
        place.losses(&format!("{output}/metrics.jsonl"))
    };
    assert_eq!(train("text.txt", "of_text"), train("text.tokens", "of_tokens"));
    // Token ids are meaningless without their tokenizer.
    let outcome = place.run(&["train", "c.json", "--data", "text.tokens", "--output", "bytes"]);
    outcome.assert_refused(
        1,
        &["text.tokens: the file was prepared with another tokenizer (vocabulary size 5,"],
    );
    place.run(&prepare).assert_refused(2, &["text.tokens exists and is not overwritten"]);
}

#[test]
fn inspect_describes_a_token_file_and_refuses_a_damaged_one() {
    let place = Workplace::new();
    place.write("a.jsonl", "{\"prompt\":\"ab\",\"completion\":\"cde\"}\n{\"text\":\"xyz~\"}\n");
    place.run(&["data", "prepare", "a.jsonl", "--output", "a.tokens"]).assert_done();
    let outcome = place.run(&["data", "inspect", "a.tokens"]);
    let expected = [
        "format      ulysses .tokens, 16 bits per token",
        "tokens      9",
        "documents   2 of 4 to 5 tokens",
        "largest id  126",
        "labels      7 tokens (77.8 %)",
        "tokenizer   bytes, vocabulary size 256",
    ];
    for expected in expected {
        assert!(outcome.assert_done().stdout.contains(expected), "no {expected:?} in {outcome:?}");
    }
    place.write("n.bin", [1, 0, 2, 1]);
    let outcome = place.run(&["data", "inspect", "n.bin"]);
    assert!(outcome.assert_done().stdout.contains("nanoGPT .bin, 16 bits"), "{outcome:?}");
    place.write("n.bin", [1, 0, 2]);
    place.run(&["data", "inspect", "n.bin"]).assert_refused(1, &["n.bin: 3 bytes are not a multiple"]);
    let outcome = place.run(&["data", "inspect", "a.jsonl", "--seq-len", "5"]);
    assert!(
        outcome.assert_done().stdout.contains("document 1: 5 tokens, 3 with labels\nab\u{27e6}cde\u{27e7}"),
        "{outcome:?}"
    );
    place.write("a.jsonl", "{\"text\":\"a\"}\n{]\n");
    let prepare = ["data", "prepare", "a.jsonl", "--output", "b.tokens"];
    place.run(&prepare).assert_refused(1, &["a.jsonl, line 2"]);
}

#[test]
fn inspect_marks_labels_in_conversations_and_a_run_prints_their_share() {
    let place = Workplace::new();
    let vocab = json!({ "[UNK]": 0, "the": 1, "quick": 2, "brown": 3, "fox": 4 });
    place.write("tok/tokenizer.json", word_tokenizer(vocab));
    let template = "{% for m in messages %}{{ m.content + ' ' }}{% endfor %}";
    place.write("tok/chat_template.jinja", template);
    let message = |role: &str, content: &str| json!({ "role": role, "content": content });
    let messages = [message("user", "the quick"), message("assistant", "brown fox fox")];
    place.write("chat.jsonl", format!("{}\n", json!({ "messages": messages })).repeat(9));
    let inspect = ["data", "inspect", "chat.jsonl", "--tokenizer", "tok/tokenizer.json"];
    let outcome = place.run(&[&inspect[..], &["--seq-len", "16", "--samples", "1"]].concat());
    let expected = [
        "document 1: 5 tokens, 3 with labels",
        "the quick\u{27e6}brown fox fox\u{27e7}",
        "        4 to 7                 9  ####",
        "documents   9",
        "tokens      45",
        "labels      27 tokens (60.0 %)",
        "unlabeled   0 documents have no labels",
        "sequences   3 of 16 tokens, 6.25 % padding",
        "too long    0 documents exceed 16 tokens",
    ];
    for expected in expected {
        assert!(outcome.assert_done().stdout.contains(expected), "no {expected:?} in {outcome:?}");
    }
    place.run(&[&inspect[..], &["--seq-len", "0"]].concat()).assert_refused(2, &["0"]);
    place.write_config("c.json", json!({ "ulysses": { "seq_len": 16, "data": "chat.jsonl" } }));
    let outcome = place.run(&["train", "c.json", "--tokenizer", "tok/tokenizer.json"]);
    let line = "data: 9 documents; 60.0 % of their 45 tokens have labels";
    outcome.assert_done();
    assert!(outcome.stderr.contains(line), "{outcome:?}");
    place.write("tok/chat_template.jinja", "{{ '%1000000000000d' | format(1) }}");
    place.run(&inspect).assert_refused(
        1,
        &["chat.jsonl, line 1: the tokenizer or its chat template takes more than", "MiB"],
    );
}

#[test]
fn a_killed_preparation_continues_when_repeated() {
    let place = Workplace::new();
    let line = format!("{{\"text\":\"{}\"}}\n", "the quick brown fox ".repeat(50));
    place.write("big.jsonl", line.repeat(100_000));
    let prepare = |output| ["data", "prepare", "big.jsonl", "--output", output];
    place.run(&prepare("whole.tokens")).assert_done();
    let mut command = place.command(&prepare("killed.tokens"));
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let recorded = place.path("killed.tokens.partial/progress.json");
    while !recorded.exists() && child.try_wait().unwrap().is_none() {
        std::thread::yield_now();
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(recorded.exists(), "it was killed on the way");
    assert!(!place.path("killed.tokens").exists());
    let tag = place.path("killed.tokens.partial/CACHEDIR.TAG");
    assert!(tag.exists(), "data read from the directory above leaves it out");
    let outcome = place.run(&prepare("killed.tokens"));
    assert!(outcome.assert_done().stderr.contains("continued an interrupted call"), "{outcome:?}");
    let [whole, killed] = ["whole.tokens", "killed.tokens"].map(|name| fs::read(place.path(name)).unwrap());
    assert!(whole == killed);
}
