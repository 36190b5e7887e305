//! The effect of the fields of a line, and of the files of a tokenizer, on a conversation.

use super::corpus::write;
use super::tuning::{CHATML, texts, tokenizer};
use super::*;
use crate::config::ChatDate;
use serde_json::{Value as Json, json};
use std::path::Path;

/// Prints everything that a line can set.
const ALL: &str = "{{ tools | tojson }}{{ documents | tojson }}{{ mode }}|{% for m in messages %}\
    <|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name }}({{ c.function.arguments | tojson }})\
    {% endfor %}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

fn say(role: &str, content: &str) -> Json {
    json!({ "role": role, "content": content })
}

/// Two turns, with a field of the first answer.
fn with_field(name: &str, value: Json) -> Json {
    let mut messages =
        json!([say("user", "a"), say("assistant", "b"), say("user", "c"), say("assistant", "d")]);
    messages[1][name] = value;
    json!({ "messages": messages })
}

fn load(root: &Path, tokenizer: &Tokenizer, line: &Json) -> Result<Corpus, String> {
    write(root, "x.jsonl", line.to_string());
    Corpus::load(&root.join("x.jsonl"), tokenizer).map_err(|error| format!("{:#}", anyhow::Error::new(error)))
}

#[test]
fn every_field_of_a_line_is_honored_or_refused() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    let tokenizer = tokenizer(root, Some(ALL));
    let turn = [say("user", "a"), say("assistant", "b")];
    let with = |name: &str, value: Json| json!({ "messages": turn, name: value });
    let tool = json!([{ "type": "function", "function": { "name": "f" } }]);
    let start = |line: &Json| texts(root, &tokenizer, line).0.split_once('|').unwrap().0.to_owned();
    let (nothing, with_tool) =
        ("nullnull", format!("{}null", r#"[{"type": "function", "function": {"name": "f"}}]"#));
    for (name, value, expected) in [
        ("tools", tool.clone(), with_tool.as_str()),
        ("tools", tool.to_string().into(), &with_tool),
        ("tools", Json::Null, nothing),
        ("tools", "null".into(), nothing),
        ("documents", json!([{ "title": "t" }]), r#"null[{"title": "t"}]"#),
        ("chat_template_kwargs", json!({ "mode": "fast" }), "nullnullfast"),
        ("chat_template_kwargs", r#"{"mode": "fast"}"#.into(), "nullnullfast"),
    ] {
        assert_eq!(start(&with(name, value)), expected, "{name}");
    }
    let (text, trained) = texts(root, &tokenizer, &with("system", "s".into()));
    assert!(text.contains("|<|im_start|>system\ns<|im_end|><|im_start|>user\na"), "{text}");
    assert_eq!(trained, ["b<|im_end|>"]);
    let conversational =
        json!({ "prompt": [turn[0], turn[1], turn[0]], "completion": [say("assistant", "z")] });
    assert_eq!(texts(root, &tokenizer, &conversational).1, ["z<|im_end|>"]);
    for (name, value, problem) in [
        ("tools", json!("[1]"), "`tools`: expected a list of objects"),
        ("tools", json!({}), "`tools`: expected a list of objects"),
        ("tools", json!("{"), "`tools`: expected a list of objects, or its JSON as a string"),
        (
            "tools",
            json!("[{\"n\": 18446744073709551616}]"),
            "`tools`: 18446744073709551616: integers must fit 64 bits",
        ),
        ("documents", json!(["text"]), "`documents`: expected a list of objects"),
        ("chat_template_kwargs", json!({ "messages": [] }), "`messages` cannot be set here"),
        ("chat_template_kwargs", json!([]), "expected an object"),
        ("functions", json!([]), "write `tools`"),
        ("label", json!(false), "preferences are not supported"),
        ("rejected", json!("x"), "preferences are not supported"),
        ("weight", json!(2), "weights belong to messages"),
    ] {
        let error = load(root, &tokenizer, &with(name, value)).unwrap_err();
        assert!(error.contains("x.jsonl, line 1") && error.contains(problem), "{name}: {error}");
    }
    let both = json!({ "system": "s", "messages": [say("system", "s"), turn[0], turn[1]] });
    assert!(load(root, &tokenizer, &both).unwrap_err().contains("`system` beside a message"));
    let mixed = json!({ "prompt": "a", "completion": [turn[1]] });
    assert!(load(root, &tokenizer, &mixed).unwrap_err().contains("or give `messages`"));
}

#[test]
fn a_message_without_weight_is_context() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    let marking = "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}</s>{% endgeneration %}\
        {% else %}{{ m.content }}{% endif %}{% endfor %}";
    for (template, end) in [(CHATML, "<|im_end|>"), (marking, "</s>")] {
        let tokenizer = tokenizer(root, Some(template));
        for name in ["weight", "train", "loss", "loss_mask", "loss_weight"] {
            for (value, answers) in [
                (json!(0), &["d"][..]),
                (json!(0.0), &["d"]),
                (json!(false), &["d"]),
                (json!(1), &["b", "d"]),
                (json!(true), &["b", "d"]),
                (Json::Null, &["b", "d"]),
            ] {
                let expected: Vec<String> = answers.iter().map(|answer| format!("{answer}{end}")).collect();
                assert_eq!(
                    texts(root, &tokenizer, &with_field(name, value.clone())).1,
                    expected,
                    "{name} {value}"
                );
            }
        }
    }
    let tokenizer = tokenizer(root, Some(CHATML));
    let refused = |line: &Json| load(root, &tokenizer, line).unwrap_err();
    assert!(
        refused(&with_field("weight", json!(0.5))).contains("messages[1]: `weight` is 0.5; valid are 0, 1")
    );
    assert!(refused(&with_field("function_call", json!({}))).contains("write `tool_calls`"));
    let mut line = with_field("train", json!(true));
    line["messages"][1]["loss"] = json!(false);
    assert!(refused(&line).contains("`train` and `loss` contradict each other"));
    line["messages"][0]["train"] = json!(1);
    assert!(refused(&line).contains("only messages with the role `assistant` can be trained on"));
}

#[test]
fn arguments_as_a_string_are_decoded_unless_the_template_adds_them_to_text() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    let line = |arguments: &str| {
        let call = json!({ "function": { "name": "f", "arguments": arguments } });
        json!({ "messages": [say("user", "a"), { "role": "assistant", "content": "", "tool_calls": [call] }] })
    };
    let decodes = tokenizer(root, Some(ALL));
    for (arguments, expected) in [(r#"{"x":1, "y":"é"}"#, r#"f({"x": 1, "y": "é"})"#), ("", "f({})")] {
        assert_eq!(
            texts(root, &decodes, &line(arguments)).1,
            [format!("{expected}<|im_end|>").replace('é', "<unk>")]
        );
    }
    let notes = load(root, &decodes, &line("{}")).unwrap().notes().to_string();
    assert_eq!(notes, "1 conversation with `arguments` as JSON strings, which are decoded");
    for arguments in ["{", "[1]", "5", r#"{"n": 18446744073709551616}"#] {
        let error = load(root, &decodes, &line(arguments)).unwrap_err();
        assert!(error.contains("`messages[1].tool_calls[0].arguments`"), "{error}");
    }
    let adds =
        tokenizer(root, Some(&ALL.replace("c.function.arguments | tojson", "'' + c.function.arguments")));
    assert_eq!(texts(root, &adds, &line(r#"{"x":1}"#)).1, [r#"f({"x":1})<|im_end|>"#]);
}

#[test]
fn text_that_the_template_leaves_out_is_an_error_or_a_note() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    let strings = CHATML
        .replace("+ message['content'] +", "+ (message.content if message.content is string else '') +");
    let calls = json!([{ "function": { "name": "f", "arguments": {} } }]);
    let answer = |content: Json, calls: &Json| json!({ "messages": [say("user", "a"), { "role": "assistant", "content": content, "tool_calls": calls }] });
    for (template, line, problem) in [
        (
            &strings,
            answer(json!([{ "type": "text", "value": "b" }]), &Json::Null),
            "it leaves out content.0.value of messages[1]",
        ),
        (&CHATML.to_owned(), answer("b".into(), &calls), "it leaves out the tool calls of messages[1]"),
        (
            &CHATML.replace("+ message['content'] +", "~ message.content ~"),
            answer(Json::Null, &json!([])),
            "prints the null `content` of messages[1] as None",
        ),
    ] {
        let error = load(root, &tokenizer(root, Some(template)), &line).unwrap_err();
        assert!(
            error.contains("x.jsonl, line 1: the chat template fails") && error.contains(problem),
            "{error}"
        );
    }
    let mut line = answer("b".into(), &json!([]));
    line["messages"][1]["reasoning_content"] = "r".into();
    let notes = load(root, &tokenizer(root, Some(CHATML)), &line).unwrap().notes().to_string();
    assert_eq!(notes, "1 conversation whose last reasoning the chat template leaves out");
    let endless = tokenizer(root, Some("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"));
    assert!(
        load(root, &endless, &line)
            .unwrap()
            .notes()
            .to_string()
            .contains("does not end answers with a token")
    );
}

#[test]
fn a_conversation_without_an_answer_is_skipped_and_counted_and_so_are_unused_fields() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    let tokenizer = tokenizer(root, Some(CHATML));
    let lines = [
        json!({ "messages": [say("user", "a")], "id": 1 }),
        json!({ "messages": [say("user", "a"), say("assistant", "b")], "id": 2, "meta": null }),
        json!({ "input_ids": [1, 2, 3], "labels": [1, 2, 3], "loss_mask": [0, 1, 1], "assistant_masks": [1, 1, 0], "length": 3 }),
    ];
    write(root, "y.jsonl", lines.map(|line| line.to_string()).join("\n"));
    let corpus = Corpus::load(&root.join("y.jsonl"), &tokenizer).unwrap();
    assert_eq!((corpus.num_documents(), corpus.skipped().total()), (2, 0));
    let expected =
        "1 conversation without an answer skipped; fields without effect: `id` (2 lines), `length` (1 line)";
    assert_eq!(corpus.notes().to_string(), expected);
    let (inputs, output) = ([root.join("y.jsonl")], root.join("y.tokens"));
    let options = PrepareOptions {
        inputs: &inputs,
        output: &output,
        tokenizer: &tokenizer,
        text_field: "text",
        append_eod: true,
        on_bad_line: OnBadLine::Error,
    };
    assert_eq!(prepare(&options, |_| {}).unwrap().notes, *corpus.notes());
    let mut labels = Vec::new();
    corpus.read_labels(corpus.document(1).unwrap(), &mut labels).unwrap();
    assert_eq!(labels, [IGNORED_LABEL, 2, IGNORED_LABEL]);
    for (mask, problem) in [
        (json!({ "input_ids": [1, 2], "attention_mask": [1, 0] }), "remove the padding"),
        (json!({ "input_ids": [1, 2], "loss_mask": [1] }), "`loss_mask` needs one 0 or 1"),
        (json!({ "input_ids": [1, 2], "loss_mask": [1, 2] }), "`loss_mask` needs one 0 or 1"),
    ] {
        assert!(load(root, &tokenizer, &mask).unwrap_err().contains(problem));
    }
}

#[test]
fn a_tokenizers_directory_has_named_templates_and_special_tokens() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    let named = |name: &str| CHATML.replace("<|im_start|>' +", &format!("<|im_start|>{name}' +"));
    let open = || Tokenizer::from_file(&root.join("tokenizer.json")).unwrap();
    let text = |tools: bool| {
        let turn = [say("user", "a"), say("assistant", "b")];
        let tools = if tools { json!([{ "name": "f" }]) } else { Json::Null };
        texts(root, &open(), &json!({ "messages": turn, "tools": tools })).0
    };
    let _ = tokenizer(root, None);
    let list = [("default", "D"), ("tool_use", "T"), ("rag", "R")]
        .map(|(name, mark)| json!({ "name": name, "template": named(mark) }));
    write(root, "tokenizer_config.json", json!({ "chat_template": list }).to_string());
    assert!(text(true).contains("<|im_start|>Tuser") && text(false).contains("<|im_start|>Duser"));
    write(root, "tokenizer_config.json", json!({ "chat_template": [list[1], list[2]] }).to_string());
    let error = load(root, &open(), &json!({ "messages": [say("assistant", "b")] })).unwrap_err();
    assert!(
        error.contains("no chat template has the name `default`; the names are rag, tool_use"),
        "{error}"
    );
    // Files replace what tokenizer_config.json has.
    write(root, "chat_template.jinja", named("F"));
    std::fs::create_dir(root.join("additional_chat_templates")).unwrap();
    write(root, "additional_chat_templates/tool_use.jinja", named("A"));
    assert!(text(true).contains("<|im_start|>Auser") && text(false).contains("<|im_start|>Fuser"));
    // As in transformers, the older file counts unless tokenizer_config.json lists the added tokens.
    let bos = CHATML.replacen("{% for", "{{ bos_token }}{% for", 1);
    write(root, "chat_template.jinja", bos);
    write(root, "special_tokens_map.json", r#"{"bos_token": {"content": "<|bos|>"}}"#);
    assert!(text(false).starts_with("<|bos|><|im_start|>"));
    write(root, "tokenizer_config.json", r#"{"added_tokens_decoder": {}}"#);
    assert!(text(false).starts_with("<|im_start|>"));
}

#[test]
fn the_date_of_a_template_is_fixed_and_in_the_fingerprint() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    let template =
        CHATML.replacen("{% for", "{{ strftime_now('%A %-d %B %Y, %a %d %b %y, %Y-%m-%d %j %%') }}{% for", 1);
    let date = |text: &str| text.parse::<ChatDate>();
    let line = json!({ "messages": [say("user", "a"), say("assistant", "b")] });
    let default = tokenizer(root, Some(&template));
    let start =
        |tokenizer: &Tokenizer| texts(root, tokenizer, &line).0.split_once("<|im").unwrap().0.to_owned();
    assert_eq!(start(&default), "Friday 26 July 2024, Fri 26 Jul 24, 2024-07-26 208 %");
    let path = root.join("tokenizer.json");
    let other = Tokenizer::from_file_with_date(&path, date("2100-03-01").unwrap()).unwrap();
    assert_eq!(start(&other), "Monday 1 March 2100, Mon 01 Mar 00, 2100-03-01 060 %");
    assert_ne!(default.fingerprint(), other.fingerprint());
    assert!(load(root, &default, &line).unwrap().notes().to_string().contains("that of `chat_date`"));
    let unknown = tokenizer(root, Some("{{ strftime_now('%Q') }}"));
    assert!(load(root, &unknown, &line).unwrap_err().contains("`strftime_now` with `%Q` is not supported"));
    for wrong in
        ["2024-02-30", "2023-02-29", "2024-13-01", "24-01-01", "2024-1-01", "0999-01-01", "", "2024-01-01x"]
    {
        assert!(date(wrong).is_err(), "{wrong}");
    }
}

#[test]
fn a_tokenizer_that_adds_its_end_of_text_adds_it_once_to_a_completion() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    let _ = tokenizer(root, None);
    let path = root.join("tokenizer.json");
    let mut file: Json = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let token = |name: &str| json!({ "SpecialToken": { "id": name, "type_id": 0 } });
    let id = |name: &str| file["model"]["vocab"][name].clone();
    let special = |name: &str| json!({ "id": name, "ids": [id(name)], "tokens": [name] });
    file["post_processor"] = json!({
        "type": "TemplateProcessing",
        "single": [token("<|bos|>"), { "Sequence": { "id": "A", "type_id": 0 } }, token("</s>")],
        "pair": [{ "Sequence": { "id": "A", "type_id": 0 } }, { "Sequence": { "id": "B", "type_id": 1 } }],
        "special_tokens": { "</s>": special("</s>"), "<|bos|>": special("<|bos|>") },
    });
    write(root, "tokenizer.json", file.to_string());
    let tokenizer = Tokenizer::from_file(&path).unwrap();
    for completion in ["4.", "4.</s>"] {
        let line = json!({ "prompt": "2+2=", "completion": completion });
        let (text, trained) = texts(root, &tokenizer, &line);
        assert_eq!((text.as_str(), trained), ("<|bos|>2+2=4.</s>", vec!["4.</s>".to_owned()]));
    }
}

#[test]
fn conversations_longer_than_a_sequence_follow_the_rule() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    let tokens: Vec<u32> = (1..=9).collect();
    let lines = [&tokens[..5], &tokens, &tokens[..6]]
        .map(|ids| json!({ "input_ids": ids, "labels": ids }).to_string());
    write(root, "x.jsonl", lines.join("\n"));
    let documents = Documents::from(Corpus::load(&root.join("x.jsonl"), &Tokenizer::bytes()).unwrap());
    let lens = |documents: &Documents| -> Vec<usize> {
        (0..documents.num_documents()).map(|index| documents.document(index).unwrap().len()).collect()
    };
    for (rule, expected) in [
        (LongConversations::Truncate, vec![5, 6, 6]),
        (LongConversations::Drop, vec![5, 6]),
        (LongConversations::Split, vec![5, 9, 6]),
    ] {
        let (limited, num_long) = documents.limited(6, rule).unwrap();
        assert_eq!((lens(&limited), num_long), (expected, 1), "{rule:?}");
    }
    let (truncated, _) = documents.limited(6, LongConversations::Truncate).unwrap();
    let sequence = PackedSequences::with_packing(truncated, 6, Packing::Greedy).unwrap().sequence(0).unwrap();
    assert_eq!(sequence.shift_labels[4..], [6, IGNORED_LABEL], "no label is behind the cut");
    let error = documents.limited(6, LongConversations::Error).unwrap_err().to_string();
    assert!(error.contains("1 conversations have more than seq_len 6 tokens"), "{error}");
    assert!(documents.limited(4, LongConversations::Drop).is_err(), "nothing is left");
    // Text continues in the next sequence.
    let text = Documents::from(Corpus::from_documents([tokens]).unwrap());
    assert_eq!(text.limited(6, LongConversations::Error).unwrap().1, 0);
}
