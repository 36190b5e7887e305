//! Renders conversations with the tokenizer's chat template, and locates the answers in the text.
//!
//! The text equals that of `apply_chat_template` in `transformers`: `minijinja` runs the template, and `python` implements
//! the operators, methods and filters of Python and Jinja. Anything that would differ is an error. `limits` bounds the
//! cost of a template.

mod answers;
mod arguments;
mod environment;
mod filters;
mod limits;
mod predicates;
mod program;
mod python;

use answers::{with_marks, without_marks};
use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, Error, ErrorKind, Value, context};
use program::Program;
use serde::Deserialize;
use serde_json::{Map, Value as Json};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::ops::Range;

pub(super) use answers::ANSWER_MARKS;

/// The field names of a message's reasoning, the standard one first.
const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// A Jinja template in the dialect of Hugging Face's `chat_template`.
#[derive(Debug, Clone)]
pub(super) struct ChatTemplate {
    source: String,
    syntax: SyntaxConfig,
    environment: Environment<'static>,
    /// `bos_token`, `eos_token` and so on.
    special_tokens: BTreeMap<String, String>,
    marks_answers: bool,
}

/// A rendered conversation.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct RenderedChat {
    pub(super) text: String,
    /// The byte ranges of the text to train on, in order.
    pub(super) answers: Vec<Range<usize>>,
}

impl ChatTemplate {
    pub(super) fn new(source: &str, special_tokens: BTreeMap<String, String>) -> Result<Self, Error> {
        // As Jinja does.
        let (source, marks_answers) = with_marks(&source.replace("\r\n", "\n").replace('\r', "\n"))?;
        let syntax = environment::syntax()?;
        Program::new(&source, &syntax)?;
        Ok(Self { source, syntax, environment: environment::environment(), special_tokens, marks_answers })
    }

    /// Renders a conversation and locates the assistant's answers.
    ///
    /// `{% generation %}` in a template marks the answers. Otherwise, an answer is the text that a message adds to the
    /// rendering of the previous messages with the generation prompt: its content and the token that ends the turn.
    /// White space after that has no labels. If the text before an answer changes without the answer, the answer is
    /// located by replacing the message.
    pub(super) fn render(&self, messages: &[Json], tools: Option<&Json>) -> Result<RenderedChat, Error> {
        let conversation = Conversation {
            template: self,
            program: Program::new(&self.source, &self.syntax)?,
            messages: messages.iter().map(message).collect::<Result<_, _>>()?,
            tools: value(tools.unwrap_or(&Json::Null))?,
            instructions_left: Cell::new(limits::MAX_TOTAL_INSTRUCTIONS),
        };
        let full = conversation.text(&conversation.messages, false)?;
        if self.marks_answers {
            return Ok(without_marks(&full));
        }
        let is_answer = |index: &usize| messages[*index]["role"] == "assistant";
        let answers = conversation.answers(&full, (0..messages.len()).filter(is_answer))?;
        Ok(RenderedChat { text: full, answers })
    }
}

#[cfg(test)]
impl ChatTemplate {
    /// Renders a template with other values than a conversation.
    pub(super) fn evaluate(&self, values: &Map<String, Json>) -> Result<String, Error> {
        limits::start();
        let root = value(&Json::Object(values.clone()))?;
        Program::new(&self.source, &self.syntax)?.run(&self.environment, root).map(|(text, _)| text)
    }
}

/// A conversation, rendered as a whole and in parts.
struct Conversation<'a> {
    template: &'a ChatTemplate,
    program: Program<'a>,
    messages: Vec<Value>,
    tools: Value,
    instructions_left: Cell<u64>,
}

impl Conversation<'_> {
    fn text(&self, messages: &[Value], prompt: bool) -> Result<String, Error> {
        let special_tokens = Value::from_pairs(self.template.special_tokens.clone());
        let conversation = context! {
            messages => messages,
            tools => self.tools.clone(),
            documents => (),
            add_generation_prompt => prompt,
        };
        limits::start();
        let root = context! { ..conversation, ..special_tokens };
        let result = self.program.run(&self.template.environment, root);
        // The cost of a failed rendering is unknown.
        let num_instructions = result.as_ref().map_or(limits::MAX_INSTRUCTIONS, |(_, used)| *used);
        let left = self.instructions_left.get().checked_sub(num_instructions);
        self.instructions_left.set(left.ok_or_else(|| out_of_fuel(limits::MAX_TOTAL_INSTRUCTIONS))?);
        let (text, _) = result.map_err(|error| match error.kind() {
            ErrorKind::OutOfFuel if error.detail().is_none() => out_of_fuel(limits::MAX_INSTRUCTIONS),
            _ => error,
        })?;
        Ok(text)
    }
}

fn out_of_fuel(instructions: u64) -> Error {
    Error::new(ErrorKind::OutOfFuel, format!("it takes more than {instructions} instructions"))
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
