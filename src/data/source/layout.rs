//! The layouts of other programs as conversations: ShareGPT's `conversations` and Alpaca's `instruction`.

use serde_json::{Value as Json, json};

/// Names of ShareGPT's speakers, and their roles.
const ROLES: [(&str, &str); 8] = [
    ("human", "user"),
    ("user", "user"),
    ("gpt", "assistant"),
    ("assistant", "assistant"),
    ("chatgpt", "assistant"),
    ("system", "system"),
    ("tool", "tool"),
    ("observation", "tool"),
];

/// A line of Alpaca's.
#[derive(Debug, Default)]
pub(super) struct Alpaca {
    pub(super) instruction: String,
    pub(super) input: Option<String>,
    pub(super) output: String,
    /// Earlier turns, as LLaMA-Factory has them.
    pub(super) history: Option<Vec<[String; 2]>>,
}

/// Returns whether a line with these fields is a sample.
pub(super) fn is_sample(has: impl Fn(&str) -> bool, text_field: &str) -> bool {
    has(text_field)
        || ["input_ids", "messages", "conversations"].into_iter().any(&has)
        || (has("prompt") && has("completion"))
        || (has("instruction") && has("output"))
}

/// Returns the names of the speakers, for errors.
pub(super) fn speakers() -> String {
    ROLES.map(|(name, _)| name).join(", ")
}

/// Returns ShareGPT's turns (`from`, `value`) as messages (`role`, `content`), or the speaker that has no role. Other fields
/// of a turn, and turns that are messages already, stay as they are.
pub(super) fn from_share_gpt(mut turns: Vec<Json>) -> Result<Vec<Json>, String> {
    for turn in turns.iter_mut().filter_map(Json::as_object_mut) {
        let Some(from) = turn.get("from").and_then(Json::as_str).filter(|_| !turn.contains_key("role"))
        else {
            continue;
        };
        let role = ROLES.iter().find(|(name, _)| *name == from).ok_or_else(|| from.to_owned())?.1;
        turn.insert("role".to_owned(), role.into());
        turn.remove("from");
        if let Some(content) = turn.remove("value") {
            turn.insert("content".to_owned(), content);
        }
    }
    Ok(turns)
}

/// Returns Alpaca's fields as messages, as LLaMA-Factory does: the input follows the instruction on a line of its own.
pub(super) fn from_alpaca(line: Alpaca) -> Vec<Json> {
    let question = match line.input.filter(|input| !input.is_empty()) {
        Some(input) => format!("{}\n{input}", line.instruction),
        None => line.instruction,
    };
    let turns = line.history.unwrap_or_default().into_iter().chain([[question, line.output]]);
    let messages = turns.flat_map(|[question, answer]| {
        [json!({ "role": "user", "content": question }), json!({ "role": "assistant", "content": answer })]
    });
    messages.collect()
}
