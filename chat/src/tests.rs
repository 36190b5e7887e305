//! Chat templates against what `transformers` makes of them.

use super::{Chat, ChatDate, ChatTemplate};
use serde::Deserialize;
use serde_json::{Map, Value as Json, json};
use std::collections::BTreeMap;

/// Written by `tests/transformers.py`.
const FIXTURE: &str = include_str!("../tests/transformers.json");

/// Expressions that are an error here and none in Python.
const REFUSED: [&str; 1] = ["{% macro m(a, b=a) %}{{ a }}{{ b }}{% endmacro %}{{ m(1) }}"];

#[derive(Deserialize)]
struct Fixture {
    special_tokens: BTreeMap<String, String>,
    templates: BTreeMap<String, String>,
    conversations: BTreeMap<String, Conversation>,
    expected: Vec<Expected>,
    values: Map<String, Json>,
    expressions: Vec<(String, Option<String>)>,
}

#[derive(Clone, Deserialize)]
struct Conversation {
    messages: Vec<Json>,
    #[serde(flatten)]
    variables: Map<String, Json>,
}

impl From<Conversation> for Chat {
    fn from(Conversation { messages, variables }: Conversation) -> Self {
        let answers = (0..messages.len()).filter(|index| messages[*index]["role"] == "assistant").collect();
        Self { messages, variables, answers, with_strings: None }
    }
}

/// Template, conversation, text, and the bytes of each answer.
#[derive(Deserialize)]
struct Expected(String, String, Option<String>, Option<Vec<(usize, usize)>>);

fn fixture() -> Fixture {
    serde_json::from_str(FIXTURE).unwrap()
}

#[test]
fn published_templates_give_the_text_and_the_answers_of_transformers() {
    let Fixture { special_tokens, templates, conversations, expected, .. } = fixture();
    assert!(templates.len() >= 20 && expected.len() == templates.len() * conversations.len());
    let mut wrong = Vec::new();
    for Expected(template, chat, text, answers) in expected {
        let label = format!("{template}, {chat}");
        let conversation = &conversations[&chat];
        let date = ChatDate::default();
        let parsed = ChatTemplate::new(&templates[&template], special_tokens.clone(), date).unwrap();
        let rendered = parsed.render(&conversation.clone().into());
        match (rendered, text, answers) {
            (Err(_), None, _) | (Err(_), Some(_), None) => {}
            (Ok(found), Some(text), answers) => {
                if found.text != text {
                    wrong.push(format!("{label}: {:?}\nfor {text:?}", found.text));
                }
                let found: Vec<_> = found.answers.iter().map(|answer| (answer.start, answer.end)).collect();
                if Some(&found) != answers.as_ref() {
                    wrong.push(format!("{label}: answers {found:?} for {answers:?}"));
                }
            }
            (Ok(found), None, _) => wrong.push(format!("{label}: transformers refuses it, not {found:?}")),
            (Err(error), Some(_), Some(_)) => wrong.push(format!("{label}: {error:#}")),
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The end of the prompt occurs in this template's first line alone, because the question changes as messages are added.
#[test]
fn an_answer_that_would_have_the_question_in_it_is_refused() {
    let template = "Always (think first)\n\
        {% for m in messages %}{{ m.role }}: {{ m.content }}\
        {% if loop.last and m.role == 'user' %} (think first){% endif %}\n{% endfor %}\
        {% if add_generation_prompt %}assistant (thinking):{% endif %}";
    let parsed = ChatTemplate::new(template, BTreeMap::new(), ChatDate::default()).unwrap();
    let chat = |answer: &str| {
        let say = |role: &str, content: &str| json!({ "role": role, "content": content });
        let messages = vec![
            say("user", "What is the weather?"),
            say("assistant", answer),
            say("user", "Thank you so much"),
        ];
        Chat::from(Conversation { messages, variables: Map::new() })
    };
    let error = format!("{:#}", parsed.render(&chat("Sunny")).unwrap_err());
    assert!(error.contains("cannot locate the answer of messages[1]"), "{error}");
    // Who quotes the question has it in the answer.
    let quoted = parsed.render(&chat("You ask: What is the weather?")).unwrap();
    assert!(quoted.text[quoted.answers[0].clone()].contains("You ask"));
}

#[test]
fn expressions_give_the_text_that_python_gives_or_an_error() {
    let Fixture { values, expressions, .. } = fixture();
    let mut wrong = Vec::new();
    for (source, expected) in expressions {
        let found = ChatTemplate::new(&source, BTreeMap::new(), ChatDate::default())
            .and_then(|template| template.evaluate(&values));
        match (found, expected) {
            (Ok(found), Some(expected)) if found == expected => {}
            (Err(_), None) => {}
            (Err(_), Some(_)) if REFUSED.contains(&source.as_str()) => {}
            (found, expected) => {
                wrong.push(format!("{source}\n  found    {found:?}\n  expected {expected:?}"))
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn ascii_json_has_no_control_characters_and_names_of_the_engine_are_refused() {
    let values = json!({ "x": "\u{7f}é~" });
    let evaluated = |source: &str| {
        let template = ChatTemplate::new(source, BTreeMap::new(), ChatDate::default());
        template.and_then(|template| template.evaluate(values.as_object().unwrap()))
    };
    assert_eq!(evaluated("{{ x | tojson(ensure_ascii=True) }}").unwrap(), r#""\u007f\u00e9~""#);
    for name in ["self", "lipsum"] {
        let error = evaluated(&format!("{{{{ {name} }}}}")).unwrap_err();
        assert!(format!("{error:#}").contains("not supported"), "{error:#}");
    }
}

/// The time and the stack of a template are bounded in every process. `cli/tests/cli/data/worker.rs` has the other limits.
#[test]
fn a_template_ends_with_an_error() {
    let cases = [
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "{{ 10 ** 10 ** 10 }}",
        "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}",
        "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
        "{% for x in [1] %}{{ loop.cycle() }}{% endfor %}",
        "{% set ns = namespace() %}{% set ns.a = ns %}{{ ns.a }}",
        "{% set ns = namespace(x=[]) %}{% for i in range(90000) %}{% set ns.x = [ns.x] %}{% endfor %}",
    ];
    for source in cases {
        let found = ChatTemplate::new(source, BTreeMap::new(), ChatDate::default())
            .and_then(|template| template.evaluate(&Map::new()));
        let error = found.map(|text| text.len()).expect_err(source);
        assert!(!error.to_string().is_empty());
    }
}
