//! Renders conversations with chat templates of Hugging Face, and locates the answers in the text.
//!
//! The text equals that of `apply_chat_template` in `transformers`: `minijinja` runs the template, and `python` implements
//! the operators, methods and filters of Python and Jinja. Anything that would differ is an error. `limits` bounds the
//! time of a template; a process of its own can bound everything.
//!
//! # Examples
//!
//! ```
//! use serde_json::json;
//! use std::collections::BTreeMap;
//! use ulysses_chat::{Chat, ChatDate, ChatTemplate};
//!
//! let source = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</s>{% endfor %}\
//!               {% if add_generation_prompt %}<assistant>{% endif %}";
//! let template = ChatTemplate::new(source, BTreeMap::new(), ChatDate::default())?;
//! let messages = vec![
//!     json!({ "role": "user", "content": "2 + 2?" }),
//!     json!({ "role": "assistant", "content": "4" }),
//! ];
//! let rendered = template.render(&Chat { messages, answers: vec![1], ..Chat::default() })?;
//! assert_eq!(rendered.text, "<user>2 + 2?</s><assistant>4</s>");
//! assert_eq!(&rendered.text[rendered.answers[0].clone()], "4</s>");
//! # Ok::<(), ulysses_chat::Error>(())
//! ```

mod answers;
mod arguments;
mod catch_panic;
mod checks;
mod date;
mod environment;
mod filters;
mod limits;
mod predicates;
mod program;
mod python;
#[cfg(test)]
mod tests;

use answers::{with_marks, without_marks};
use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, ErrorKind, Value, context};
use program::Program;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value as Json};
use std::collections::BTreeMap;
use std::ops::Range;

pub use answers::ANSWER_MARKS;
pub use catch_panic::catch_panic;
pub use date::ChatDate;
pub use minijinja::Error;

/// The field names of a message's reasoning, the standard one first.
const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// The name of the function that gives the date.
const STRFTIME_NOW: &str = "strftime_now";

/// A conversation, and what a template sees beside its messages.
#[derive(Debug, Default)]
pub struct Chat {
    /// The messages, each an object with a `role`.
    pub messages: Vec<Json>,
    /// The messages with `arguments` as JSON strings, where `messages` has them decoded.
    pub with_strings: Option<Vec<Json>>,
    /// The indices of the messages to train on.
    pub answers: Vec<usize>,
    /// `tools`, `documents` and variables of the conversation.
    pub variables: Map<String, Json>,
}

/// A Jinja template in the dialect of Hugging Face's `chat_template`.
#[derive(Debug, Clone)]
pub struct ChatTemplate {
    source: String,
    syntax: SyntaxConfig,
    environment: Environment<'static>,
    /// `bos_token`, `eos_token` and so on.
    special_tokens: BTreeMap<String, String>,
    marks_answers: bool,
}

/// A rendered conversation.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct RenderedChat {
    /// The text.
    pub text: String,
    /// The byte ranges of the text to train on, in order.
    pub answers: Vec<Range<usize>>,
    /// Properties of this rendering that the user should hear about.
    pub notes: Vec<Note>,
}

/// A property of a rendered conversation, for a message to the user.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Note {
    /// `arguments` of tool calls are JSON strings, which are decoded.
    DecodedArguments,
    /// The template leaves out content beside tool calls.
    ContentLeftOut,
    /// The template leaves out the reasoning of the last answer.
    ReasoningLeftOut,
    /// The template ends answers without a token.
    NoEnd,
    /// The template prints the date.
    Date,
}

impl ChatTemplate {
    /// Compiles a template. `date` is what its `strftime_now` prints.
    ///
    /// # Errors
    /// A syntax error, or a construct whose text would differ from that of `transformers`.
    pub fn new(
        source: &str,
        special_tokens: BTreeMap<String, String>,
        date: ChatDate,
    ) -> Result<Self, Error> {
        // As Jinja does.
        let (source, marks_answers) = with_marks(&source.replace("\r\n", "\n").replace('\r', "\n"))?;
        let syntax = environment::syntax()?;
        Program::new(&source, &syntax)?;
        let environment = environment::environment(date);
        Ok(Self { source, syntax, environment, special_tokens, marks_answers })
    }

    /// Renders a conversation and locates the assistant's answers.
    ///
    /// `{% generation %}` in a template marks the answers. Otherwise, an answer is the text that a message adds to the
    /// rendering of the previous messages with the generation prompt: its content and the token that ends the turn.
    /// White space after that has no labels. If the text before an answer changes without the answer, the answer is
    /// located by marks in one of its strings.
    ///
    /// # Errors
    /// An error of the template, a text that lacks what a message says, or an answer that cannot be located.
    pub fn render(&self, chat: &Chat) -> Result<RenderedChat, Error> {
        let rendered = self.render_messages(chat, &chat.messages);
        let mut rendered = match (rendered, &chat.with_strings) {
            // The template adds the string to a text.
            (Err(error), Some(messages)) => self.render_messages(chat, messages).map_err(|_| error)?,
            (rendered, None) => rendered?,
            (rendered, Some(_)) => {
                let mut rendered = rendered?;
                rendered.notes.push(Note::DecodedArguments);
                rendered
            }
        };
        if self.uses_date() {
            rendered.notes.push(Note::Date);
        }
        Ok(rendered)
    }

    /// Returns whether the template may print the date.
    pub fn uses_date(&self) -> bool {
        self.source.contains(STRFTIME_NOW)
    }

    fn render_messages(&self, chat: &Chat, messages: &[Json]) -> Result<RenderedChat, Error> {
        let conversation = Conversation {
            template: self,
            program: Program::new(&self.source, &self.syntax)?,
            given: messages,
            messages: messages.iter().map(message).collect::<Result<_, _>>()?,
            variables: value(&Json::Object(chat.variables.clone()))?,
        };
        let full = conversation.text(&conversation.messages, false)?;
        let mut rendered = match self.marks_answers {
            true => {
                let mut rendered = without_marks(&full);
                rendered.answers = marked_answers(rendered.answers, chat, messages)?;
                rendered
            }
            false => {
                let answers = conversation.answers(&full, chat.answers.iter().copied())?;
                RenderedChat { text: full.clone(), answers, notes: Vec::new() }
            }
        };
        rendered.notes = conversation.check(&full, &rendered, &chat.answers)?;
        Ok(rendered)
    }
}

/// Returns the answers to train on of those that a template marks.
fn marked_answers(
    marked: Vec<Range<usize>>,
    chat: &Chat,
    messages: &[Json],
) -> Result<Vec<Range<usize>>, Error> {
    let assistant = (0..messages.len()).filter(|index| messages[*index]["role"] == "assistant");
    let assistant: Vec<_> = assistant.collect();
    if assistant == chat.answers {
        return Ok(marked);
    }
    if assistant.len() != marked.len() {
        return Err(failed(format!(
            "the template marks {} answers of {} messages, so it is unknown which ones belong to those without labels",
            marked.len(),
            assistant.len()
        )));
    }
    let pairs = assistant.into_iter().zip(marked);
    Ok(pairs.filter(|(index, _)| chat.answers.contains(index)).map(|(_, range)| range).collect())
}

#[cfg(test)]
impl ChatTemplate {
    /// Renders a template with other values than a conversation.
    fn evaluate(&self, values: &Map<String, Json>) -> Result<String, Error> {
        let root = value(&Json::Object(values.clone()))?;
        Program::new(&self.source, &self.syntax)?.run(&self.environment, root)
    }
}

/// A conversation, rendered as a whole and in parts.
struct Conversation<'a> {
    template: &'a ChatTemplate,
    program: Program<'a>,
    given: &'a [Json],
    /// As templates see them.
    messages: Vec<Value>,
    variables: Value,
}

impl Conversation<'_> {
    fn text(&self, messages: &[Value], prompt: bool) -> Result<String, Error> {
        let special_tokens = Value::from_pairs(self.template.special_tokens.clone());
        let conversation = context! {
            messages => messages,
            add_generation_prompt => prompt,
        };
        let absent = context! { tools => (), documents => () };
        // The first one that has a name determines its value.
        let root = context! { ..conversation, ..self.variables.clone(), ..absent, ..special_tokens };
        self.program.run(&self.template.environment, root).map_err(|error| match error.kind() {
            ErrorKind::OutOfFuel => {
                let message = format!("it takes more than {} instructions", limits::MAX_INSTRUCTIONS);
                Error::new(ErrorKind::OutOfFuel, message)
            }
            _ => error,
        })
    }
}

/// Returns a message as templates see it: its reasoning under all names that templates read.
fn message(message: &Json) -> Result<Value, Error> {
    let Json::Object(fields) = message else { return Err(failed("a message is no object with a `role`")) };
    let found = REASONING.iter().find_map(|name| fields.get(*name).filter(|value| !value.is_null()));
    let Some(reasoning) = found else { return value(message) };
    let mut named = Map::new();
    named.insert("thinking".to_owned(), reasoning.clone());
    named.extend(fields.clone());
    named.insert("reasoning_content".to_owned(), reasoning.clone());
    value(&Json::Object(named))
}

fn value(json: &Json) -> Result<Value, Error> {
    Value::deserialize(json).map_err(|error| Error::new(ErrorKind::CannotDeserialize, error.to_string()))
}

/// Returns an error of a template.
fn failed(message: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message)
}
