//! Which tokens of a conversation are trained on.

use super::corpus::write;
use super::*;
use serde_json::{Value as Json, json};
use std::path::Path;

/// ChatML, as Qwen 2 has it, and what Llama 3 Instruct has (`tokenizer_config.json` of each).
pub(super) const CHATML: &str = "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}\
    {{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}\
    {{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}\
    {% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";
const LLAMA_3: &str = "{% set loop_messages = messages %}{% for message in loop_messages %}\
    {% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'\
    + message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}\
    {% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}\
    {% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}";

/// A tokenizer of characters, with special tokens of their own.
pub(super) fn tokenizer(root: &Path, template: Option<&str>) -> Tokenizer {
    let special = [
        "<|im_start|>",
        "<|im_end|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
        "<|bos|>",
        "</s>",
    ];
    let mut vocab: Vec<String> = (' '..='~').map(String::from).chain(["\n".into(), "<unk>".into()]).collect();
    let first = vocab.len();
    vocab.extend(special.map(String::from));
    let added: Vec<_> = (first..)
        .zip(special)
        .map(|(id, content)| {
            json!({ "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": true })
        })
        .collect();
    let ids: Json = vocab.iter().enumerate().map(|(id, token)| (token.clone(), json!(id))).collect();
    let file = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
        "pre_tokenizer": { "type": "Split", "pattern": { "Regex": "(?s)." }, "behavior": "Isolated", "invert": false },
        "post_processor": null, "decoder": null,
        "model": { "type": "WordLevel", "vocab": ids, "unk_token": "<unk>" },
    });
    write(root, "tokenizer.json", file.to_string());
    let config =
        json!({ "chat_template": template, "bos_token": "<|bos|>", "eos_token": { "content": "</s>" } });
    write(root, "tokenizer_config.json", config.to_string());
    Tokenizer::from_file(&root.join("tokenizer.json")).unwrap()
}

/// The text of all tokens, and of those that are trained on, piece by piece.
pub(super) fn texts(root: &Path, tokenizer: &Tokenizer, line: &Json) -> (String, Vec<String>) {
    write(root, "x.jsonl", line.to_string());
    let corpus = Corpus::load(&root.join("x.jsonl"), tokenizer).unwrap();
    let (mut tokens, mut labels) = (Vec::new(), Vec::new());
    corpus.read_tokens(0..corpus.num_tokens(), &mut tokens).unwrap();
    corpus.read_labels(0..corpus.num_tokens(), &mut labels).unwrap();
    let file: Json = serde_json::from_slice(&std::fs::read(root.join("tokenizer.json")).unwrap()).unwrap();
    let vocab = file["model"]["vocab"].as_object().unwrap();
    let text = |id: u32| vocab.iter().find(|(_, found)| **found == id).unwrap().0.as_str();
    let mut trained = vec![String::new()];
    for (&token, &label) in tokens.iter().zip(&labels) {
        match label {
            IGNORED_LABEL => trained.push(String::new()),
            label => {
                assert_eq!(label, i64::from(token));
                trained.last_mut().unwrap().push_str(text(token));
            }
        }
    }
    trained.retain(|piece| !piece.is_empty());
    (tokens.into_iter().map(text).collect(), trained)
}

fn chat() -> Json {
    let message = |role: &str, content: &str| json!({ "role": role, "content": content });
    json!({ "messages": [
        message("user", "1+1?"), message("assistant", "It is 2."), message("user", "It is 2."),
        message("assistant", "Yes,\nyes "),
    ] })
}

#[test]
fn chatml_learns_answers_and_the_end_of_their_turns() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    let tokenizer = tokenizer(root, Some(CHATML));
    let (text, trained) = texts(root, &tokenizer, &chat());
    assert_eq!(
        text,
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n\
         <|im_start|>assistant\nIt is 2.<|im_end|>\n<|im_start|>user\nIt is 2.<|im_end|>\n\
         <|im_start|>assistant\nYes,\nyes <|im_end|>\n"
    );
    assert_eq!(trained, ["It is 2.<|im_end|>", "Yes,\nyes <|im_end|>"]);
}

#[test]
fn llama_3_learns_answers_and_the_end_of_their_turns() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    let tokenizer = tokenizer(root, Some(LLAMA_3));
    let (text, trained) = texts(root, &tokenizer, &chat());
    let turn = |role: &str, content: &str| {
        format!("<|start_header_id|>{role}<|end_header_id|>\n\n{content}<|eot_id|>")
    };
    let turns =
        [("user", "1+1?"), ("assistant", "It is 2."), ("user", "It is 2."), ("assistant", "Yes,\nyes")];
    assert_eq!(text, format!("<|bos|>{}", turns.map(|(role, content)| turn(role, content)).concat()));
    assert_eq!(trained, ["It is 2.<|eot_id|>", "Yes,\nyes<|eot_id|>"]);
}

#[test]
fn a_template_that_marks_its_answers_is_believed() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    let template = "{%- for m in messages %}\n  {%- if m.role == 'assistant' %}\n[{% generation %}\n{{ m.content }};\
        {%- endgeneration -%} \n]{% else %}({{ m.content }}){% endif %}\n{% endfor %}";
    let (text, trained) = texts(root, &tokenizer(root, Some(template)), &chat());
    assert_eq!(
        text,
        "(1+1?)\n[It is 2.;](It is 2.)\n[Yes,\nyes ;]".replace(")\n", ")"),
        "as jinja2 cuts white space"
    );
    assert_eq!(trained, ["It is 2.;", "Yes,\nyes ;"]);
}

#[test]
fn a_template_whose_answers_cannot_be_located_is_refused() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    let refused = |template: &str, line: &Json| {
        write(root, "x.jsonl", line.to_string());
        let error = anyhow::Error::new(
            Corpus::load(&root.join("x.jsonl"), &tokenizer(root, Some(template))).unwrap_err(),
        );
        error.chain().map(ToString::to_string).collect::<Vec<_>>().join(": ")
    };
    let counting = "{{ messages | map(attribute='content') | join | length }}{% for m in messages %}{{ m.content }}{% endfor %}";
    let message = refused(counting, &chat());
    assert!(message.contains("x.jsonl, line 1: the chat template fails"), "{message}");
    assert!(message.contains("mark answers with `{% generation %}`"), "{message}");
    let strict = "{{ raise_exception('roles must alternate') }}";
    assert!(refused(strict, &chat()).contains("roles must alternate"));
    let question = json!({ "messages": [{ "role": "user", "content": "?" }] });
    assert!(refused(CHATML, &question).contains("1 conversation without an answer skipped"));
    let silent = refused("{{ messages[0].content }}", &chat());
    assert!(silent.contains("it leaves out content of messages[1]"), "{silent}");
    let unmarked = refused(
        "{% if false %}{% generation %}{% endgeneration %}{% endif %}{{ messages | map(attribute='content') | join }}",
        &chat(),
    );
    assert!(unmarked.contains("the chat template adds no text for the role `assistant`"), "{unmarked}");
    let marked = json!({ "messages": [{ "role": "assistant", "content": "\u{fdd0}" }] });
    assert!(refused(CHATML, &marked).contains("U+FDD0"));
    write(root, "tokenizer_config.json", r#"{"chat_template":"{% if %}"}"#);
    let broken = Tokenizer::from_file(&root.join("tokenizer.json")).unwrap_err();
    assert!(matches!(&broken, DataError::TokenizerSettings { .. }), "{broken:?}");
    assert!(broken.to_string().contains("tokenizer_config.json"), "{broken}");
}

#[test]
fn a_conversation_may_begin_with_the_assistant_and_its_numbers_keep_their_digits() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    let messages = json!([{ "role": "assistant", "content": "Hi" }, { "role": "user", "content": "?" }]);
    let (_, trained) = texts(root, &tokenizer(root, Some(CHATML)), &json!({ "messages": messages }));
    assert_eq!(trained, ["Hi<|im_end|>"]);
    for (number, is_exact) in [("18446744073709551615", true), ("18446744073709551616", false), ("-0", false)]
    {
        let call = format!("[{{\"role\":\"assistant\",\"content\":\"9\\\\\",\"n\":[1.5,{number}]}}]");
        write(root, "x.jsonl", format!("{{\"messages\":{call}}}\n"));
        let found = Corpus::load(&root.join("x.jsonl"), &tokenizer(root, Some(CHATML)));
        assert_eq!(found.is_ok(), is_exact, "{number}: {found:?}");
        let message = found.err().map_or_else(String::new, |error| error.to_string());
        assert!(is_exact || message.contains("x.jsonl, line 1: `messages` contains"), "{message}");
    }
}

#[test]
fn a_template_that_runs_away_is_an_error_that_names_the_line() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    let endless = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}";
    write(root, "x.jsonl", chat().to_string());
    let error = Corpus::load(&root.join("x.jsonl"), &tokenizer(root, Some(endless))).unwrap_err();
    let message = format!("{:#}", anyhow::Error::new(error));
    let expected = ["x.jsonl, line 1: the chat template fails", "it takes more than 20000000 instructions"];
    assert!(expected.iter().all(|expected| message.contains(expected)), "{message}");
}

#[test]
fn a_tokenizer_that_panics_is_an_error_that_names_the_file() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    tokenizer(root, None);
    let path = root.join("tokenizer.json");
    let mut file: Json = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    file["pre_tokenizer"] = json!({ "type": "FixedLength", "length": 0 });
    write(root, "tokenizer.json", file.to_string());
    write(root, "x.jsonl", "{\"text\":\"abc\"}\n");
    let error = Tokenizer::from_file(&path).and_then(|panics| Corpus::load(&root.join("x.jsonl"), &panics));
    let message = format!("{:#}", anyhow::Error::new(error.unwrap_err()));
    assert!(message.contains("the library panicked: ") && message.contains("x.jsonl"), "{message}");
}

#[test]
fn a_completion_is_trained_on_with_what_ends_it_and_its_prompt_is_not() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    let with_end = tokenizer(root, None);
    let line = |completion: &str| json!({ "prompt": "2+2=", "completion": completion });
    for completion in ["4.", "4.</s>"] {
        let (text, trained) = texts(root, &with_end, &line(completion));
        assert_eq!((text.as_str(), trained), ("2+2=4.</s>", vec!["4.</s>".to_owned()]));
    }
    // Bytes have no token that ends a text.
    write(root, "x.jsonl", line("4.").to_string());
    let corpus = Corpus::load(&root.join("x.jsonl"), &Tokenizer::bytes()).unwrap();
    let mut labels = Vec::new();
    corpus.read_labels(0..6, &mut labels).unwrap();
    assert_eq!(labels, [-100, -100, -100, -100, 52, 46]);
}

#[test]
fn the_users_labels_are_used_in_memory_and_in_a_file() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    let lines = "{\"text\":\"ab\"}\n{\"input_ids\":[1,2,3],\"labels\":[-100,9,3]}\n{\"input_ids\":[4],\"labels\":null}\n";
    write(root, "x.jsonl", lines);
    let (inputs, output, tokenizer) = ([root.join("x.jsonl")], root.join("x.tokens"), Tokenizer::bytes());
    let options = PrepareOptions::new(&inputs, &output, &tokenizer);
    prepare(&options, |_| {}).unwrap();
    for path in [&inputs[0], &output] {
        let corpus = Corpus::load(path, &tokenizer).unwrap();
        let (mut tokens, mut labels) = (Vec::new(), Vec::new());
        corpus.read_tokens(0..6, &mut tokens).unwrap();
        corpus.read_labels(0..6, &mut labels).unwrap();
        assert_eq!(tokens, [97, 98, 1, 2, 3, 4]);
        assert_eq!(labels, [97, 98, -100, 9, 3, 4], "{path:?}");
        assert_eq!(corpus.num_documents(), 3);
    }
}

#[test]
fn a_document_of_text_ends_with_the_end_of_text_token_once() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    let tokenizer = tokenizer(root, None);
    let lines = "{\"text\":\"ab\"}\n{\"text\":\"ab</s>\"}\n{\"text\":\"\"}\n{\"input_ids\":[1]}\n";
    write(root, "x.jsonl", lines);
    let end = tokenizer.end_of_text_id().unwrap();
    let lens = |append_eod| {
        let options = SourceOptions { append_eod, ..SourceOptions::new(&tokenizer) };
        let corpus = Corpus::open(&[root.join("x.jsonl")], &options).unwrap();
        let (mut tokens, first) = (Vec::new(), corpus.document(0).unwrap());
        corpus.read_tokens(first, &mut tokens).unwrap();
        assert_eq!(tokens.last() == Some(&end), append_eod);
        (0..corpus.num_documents()).map(|index| corpus.document(index).unwrap().len()).collect::<Vec<_>>()
    };
    assert_eq!(lens(true), [3, 3, 1]);
    assert_eq!(lens(false), [2, 3, 1]);
}

#[test]
fn the_layouts_of_share_gpt_and_alpaca_are_conversations() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    let tokenizer = tokenizer(root, Some(CHATML));
    let turn = |from: &str, value: &str| json!({ "from": from, "value": value });
    let share_gpt =
        json!({ "conversations": [turn("human", "1+1?"), turn("gpt", "2")], "system": "Be brief." });
    let expected = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n\
                    <|im_start|>assistant\n2<|im_end|>\n";
    assert_eq!(texts(root, &tokenizer, &share_gpt), (expected.to_owned(), vec!["2<|im_end|>".to_owned()]));
    let alpaca = json!({ "instruction": "Add.", "input": "1+1", "output": "2", "system": "Be brief." });
    let expected = expected.replace("1+1?", "Add.\n1+1");
    assert_eq!(texts(root, &tokenizer, &alpaca), (expected, vec!["2<|im_end|>".to_owned()]));
    let history = json!({ "instruction": "b", "input": "", "output": "B", "history": [["a", "A"]] });
    assert_eq!(texts(root, &tokenizer, &history).1, ["A<|im_end|>", "B<|im_end|>"]);
}
