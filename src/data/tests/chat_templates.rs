//! Chat templates against what `transformers` makes of them.

use crate::config::ChatDate;
use crate::data::chat::{Chat, ChatTemplate};
use serde::Deserialize;
use serde_json::{Map, Value as Json, json};
use std::collections::BTreeMap;

/// Written by `tests/fixtures/chat_templates.py`.
const FIXTURE: &str = include_str!("../../../tests/fixtures/chat_templates.json");

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

/// The cost of a template is bounded, and an error says so.
#[test]
fn a_template_cannot_exhaust_the_machine() {
    let loops = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}";
    let grows =
        "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x OP ns.x %}{% endfor %}";
    let deep = "{% set ns = namespace(x=[]) %}{% for i in range(90000) %}{% set ns.x = [ns.x] %}{% endfor %}";
    let wide = "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}";
    let long = format!("{{{{ {} }}}}", vec!["a"; 30_000].join(" + "));
    let nested = format!("{{{{ {}1{} }}}}", "(".repeat(30_000), ")".repeat(30_000));
    let blocks = format!("{}x{}", "{% if 1 %}".repeat(20_000), "{% endif %}".repeat(20_000));
    let raw = format!("{{% for i in range(99999) %}}{}{{% endfor %}}", "text ".repeat(20_000));
    let cases = [
        loops.to_owned(),
        grows.replace("OP", "+"),
        grows.replace("OP", "~"),
        "{{ 'a' * 4000000000 }}".to_owned(),
        "{% set n = 4000000000 %}{{ 'a' * n }}{{ [1] * n }}".to_owned(),
        "{{ 'aaaaaaaaaaaaaaaaaaaa' * 50000 * 50000 }}".to_owned(),
        "{{ 10 ** 10 ** 10 }}".to_owned(),
        "{{ '%1000000000000d' | format(1) }}".to_owned(),
        "{{ '%.1000000000f' | format(1.0) }}{{ '%1000000000s' | format(1) }}".to_owned(),
        "{{ 'a\nb' | indent(4000000000) }}".to_owned(),
        "{{ [1] | batch(10000000000, 0) | list }}".to_owned(),
        "{{ [1] | slice(10000000000) | list }}".to_owned(),
        "{{ [1] | tojson(indent=4000000000) }}".to_owned(),
        "{{ 'a'.ljust(4000000000) }}".to_owned(),
        "{% set s = 'a' * 100000 %}{{ s | replace('a', s) }}".to_owned(),
        "{% set s = 'a' * 100000 %}{{ s | list | join(s) }}".to_owned(),
        "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}".to_owned(),
        "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}".to_owned(),
        "{% for x in [1] %}{{ loop.cycle() }}{% endfor %}".to_owned(),
        "{% set ns = namespace() %}{% set ns.a = ns %}{{ ns.a }}".to_owned(),
        deep.to_owned(),
        wide.to_owned(),
        wide.replace("{{ ns.x }}", "{{ ns.x == ns.x }}{{ ns.x | tojson }}"),
        long,
        nested,
        blocks,
        raw,
    ];
    for source in cases {
        let found = ChatTemplate::new(&source, BTreeMap::new(), ChatDate::default())
            .and_then(|template| template.evaluate(&Map::new()));
        let start: String = source.chars().take(80).collect();
        let error = found.map(|text| text.len()).expect_err(&start);
        assert!(!error.to_string().is_empty());
    }
}
