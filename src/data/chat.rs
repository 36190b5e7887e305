//! Conversations as text, by the template that comes with a tokenizer, and where in the text the answers are.

use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, Error, ErrorKind, Value, context};
use regex::Regex;
use serde::Deserialize;
use serde_json::Value as Json;
use std::collections::BTreeMap;
use std::ops::Range;

/// Stand around an answer in a rendered text. Unicode keeps these characters for such inner use; a conversation
/// that holds them is refused.
pub(super) const ANSWER_MARKS: [char; 2] = ['\u{FDD0}', '\u{FDD1}'];

const TEMPLATE: &str = "chat_template";

/// A Jinja template in the dialect of Hugging Face's `chat_template`.
///
/// `strftime_now` is not defined: data must not depend on the day. Templates that use it have a date of their own
/// for that case.
#[derive(Debug, Clone)]
pub(super) struct ChatTemplate {
    environment: Environment<'static>,
    /// `bos_token`, `eos_token` and so on.
    special_tokens: BTreeMap<String, String>,
    marks_answers: bool,
}

/// A conversation as text.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct RenderedChat {
    pub(super) text: String,
    /// Bytes of the text that the model is to learn, in order.
    pub(super) answers: Vec<Range<usize>>,
}

impl ChatTemplate {
    pub(super) fn new(source: &str, special_tokens: BTreeMap<String, String>) -> Result<Self, Error> {
        let (source, marks_answers) = with_marks(source);
        let mut environment = Environment::new();
        // As `transformers` sets Jinja up.
        environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message))
        });
        environment.add_template_owned(TEMPLATE, source)?;
        Ok(Self { environment, special_tokens, marks_answers })
    }

    /// The conversation, and where assistants answer in it.
    ///
    /// A template that says where, by `{% generation %}`, is believed. For any other, an answer is what a message
    /// adds to the text of those before it and the prompt to answer them: its content and the token that ends the
    /// turn. White space after that is not learnt.
    pub(super) fn render(&self, messages: &[Json], tools: Option<&Json>) -> Result<RenderedChat, Error> {
        let full = self.text(messages, tools, false)?;
        if self.marks_answers {
            return Ok(without_marks(&full));
        }
        let mut answers = Vec::new();
        for (index, _) in messages.iter().enumerate().filter(|(_, message)| message["role"] == "assistant") {
            let before = self.text(&messages[..index], tools, true)?;
            let through = self.text(&messages[..=index], tools, false)?;
            if !through.starts_with(&before) || !full.starts_with(&through) {
                let message = format!(
                    "the text up to message {index} is not how the whole text begins, so the template does not \
                     tell what its answer is; `{{% generation %}}` around answers in the template would"
                );
                return Err(Error::new(ErrorKind::InvalidOperation, message));
            }
            answers.push(before.len()..through.trim_end().len().max(before.len()));
        }
        Ok(RenderedChat { text: full, answers })
    }

    fn text(&self, messages: &[Json], tools: Option<&Json>, prompt: bool) -> Result<String, Error> {
        let messages = messages.iter().map(Value::deserialize).collect::<Result<Vec<_>, _>>();
        let tools = tools.map(Value::deserialize).transpose();
        let unusable = |error: serde_json::Error| Error::new(ErrorKind::CannotDeserialize, error.to_string());
        let conversation = context! {
            messages => messages.map_err(unusable)?,
            tools => tools.map_err(unusable)?,
            documents => (),
            add_generation_prompt => prompt,
        };
        let template = self.environment.get_template(TEMPLATE)?;
        let special_tokens = Value::from_pairs(self.special_tokens.clone());
        template.render(context! { ..conversation, ..special_tokens })
    }
}

/// The template with `{% generation %}` and its end, which only `transformers` knows, as text around an answer.
/// Blocks stay in their places, so that white space is cut where it was.
fn with_marks(source: &str) -> (String, bool) {
    let tag = |name: &str| Regex::new(&format!(r"\{{%([-+]?)\s*{name}\s*([-+]?)%\}}"));
    let (Ok(start), Ok(end)) = (tag("generation"), tag("endgeneration")) else {
        return (source.to_owned(), false);
    };
    let [before, after] = ANSWER_MARKS;
    let marked = start.replace_all(source, |tag: &regex::Captures<'_>| {
        format!("{{%{} if true %}}{{{{ '{before}' }}}}{{% if true {}%}}", &tag[1], &tag[2])
    });
    let marks_answers = marked != source;
    let marked = end.replace_all(&marked, |tag: &regex::Captures<'_>| {
        format!("{{%{} endif %}}{{{{ '{after}' }}}}{{% endif {}%}}", &tag[1], &tag[2])
    });
    (marked.into_owned(), marks_answers)
}

fn without_marks(marked: &str) -> RenderedChat {
    let mut rendered = RenderedChat { text: String::with_capacity(marked.len()), answers: Vec::new() };
    let mut start = 0;
    for character in marked.chars() {
        match ANSWER_MARKS.iter().position(|&mark| mark == character) {
            Some(0) => start = rendered.text.len(),
            Some(_) => rendered.answers.push(start..rendered.text.len()),
            None => rendered.text.push(character),
        }
    }
    rendered
}
