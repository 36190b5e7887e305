//! Locates the answers in the text of a conversation.

use super::{Conversation, RenderedChat, failed};
use minijinja::{Error, ErrorKind, Value};
use regex::Regex;
use serde_json::Value as Json;
use std::ops::Range;

/// Mark an answer in a rendered text. Unicode reserves these noncharacters for internal use; a conversation that
/// contains them is refused.
pub const ANSWER_MARKS: [char; 2] = ['\u{FDD0}', '\u{FDD1}'];

/// Strings of a message that are tried as its mark, each in three ways.
const MAX_MARKED_STRINGS: usize = 16;

/// Bytes at the end of the prompt that are compared.
const MAX_PROMPT_END: usize = 256;

/// A shorter end of the prompt may occur in an answer by chance.
const MIN_PROMPT_END: usize = 6;

/// A shorter message of another role may occur in an answer by chance.
const MIN_PROMPT: usize = 8;

/// Where a marked string of a message lies in the whole text.
struct Marked {
    message: Value,
    /// Unknown if the template drops the start of the string.
    start: Option<usize>,
    end: usize,
}

impl Conversation<'_> {
    /// Returns the answers of the messages with these indices.
    pub(super) fn answers(
        &self,
        full: &str,
        messages: impl Iterator<Item = usize>,
    ) -> Result<Vec<Range<usize>>, Error> {
        let mut answers: Vec<Range<usize>> = Vec::new();
        for index in messages {
            let from = answers.last().map_or(0, |answer| answer.end);
            let is_next =
                |answer: &Range<usize>| answer.start >= from && !self.has_prompt(&full[answer.clone()]);
            let ways = [Self::by_prefix, Self::by_mark];
            // The rendering of no messages may lack the start of the template.
            let ways = if index == 0 { [ways[1], ways[0]] } else { ways };
            let found = match ways[0](self, full, index, from)?.filter(is_next) {
                Some(found) => Some(found),
                None => ways[1](self, full, index, from)?.filter(is_next),
            };
            let Some(found) = found else {
                if !has_text(&self.given[index]) {
                    continue;
                }
                self.check(full, &RenderedChat::default(), &[index])?;
                return Err(failed(format!(
                    "cannot locate the answer of messages[{index}]: the chat template renders it differently as later \
                     messages are added; mark answers with `{{% generation %}}` in the template"
                )));
            };
            answers.push(found);
        }
        Ok(answers)
    }

    /// Returns whether a text has what another role says, unless an answer quotes it.
    fn has_prompt(&self, text: &str) -> bool {
        let (answers, others): (Vec<_>, Vec<_>) =
            self.given.iter().partition(|message| message["role"] == "assistant");
        let quotes = |answer: &Json, content: &str| {
            strings(answer).iter().any(|pointer| string(answer, pointer).contains(content))
        };
        let contents = others.iter().map(|message| string(message, "/content").trim());
        let mut long = contents.filter(|content| content.len() >= MIN_PROMPT);
        long.any(|content| text.contains(content) && !answers.iter().any(|answer| quotes(answer, content)))
    }

    /// Returns the range that the message adds to the previous text, if that is a prefix.
    fn by_prefix(&self, full: &str, index: usize, _: usize) -> Result<Option<Range<usize>>, Error> {
        let before = self.try_text(&self.messages[..index], true)?;
        let through = self.try_text(&self.messages[..=index], false)?;
        Ok(match (before, through) {
            (Some(before), Some(through)) if through.starts_with(&before) && full.starts_with(&through) => {
                Some(before.len()..through.trim_end().len().max(before.len()))
            }
            _ => None,
        })
    }

    /// Returns the range around one string of the message, from the end of the prompt to the end of the turn.
    ///
    /// Only one string changes, so that the template takes the same branches and may rewrite other messages.
    fn by_mark(&self, full: &str, index: usize, from: usize) -> Result<Option<Range<usize>>, Error> {
        let Some(marked) = self.marked(full, index)? else { return Ok(None) };
        let prompt = self.prompt(index)?;
        let before = &full[from..marked.start.unwrap_or(marked.end)];
        let start = prompt.as_ref().and_then(|prompt| prompt.end_in(before)).map(|at| from + at);
        let Some(start) = start.or(marked.start) else { return Ok(None) };
        let header = prompt.as_ref().map_or("", |prompt| &prompt.text[prompt.header..]);
        let end = marked.end + self.end_of_turn(&full[marked.end..], &marked, index, header)?;
        Ok(Some(start..end.max(start)))
    }

    /// Marks a string of the message whose marks are the only change of the text.
    fn marked(&self, full: &str, index: usize) -> Result<Option<Marked>, Error> {
        let [before, after] = ANSWER_MARKS.map(Some);
        let mut pointers = strings(&self.given[index]);
        pointers.sort_by_key(|pointer| string(&self.given[index], pointer).trim().is_empty());
        for pointer in pointers.iter().take(MAX_MARKED_STRINGS) {
            for marks in [[before, after], [None, after], [before, None]] {
                let message = self.with_marks(index, pointer, marks)?;
                let mut messages = self.messages.clone();
                messages[index] = message.clone();
                let Some(text) = self.try_text(&messages, false)? else { continue };
                let Some((inside, _)) = split_at_mark(&text).filter(|_| unmarked(&text) == full) else {
                    continue;
                };
                return Ok(Some(Marked {
                    message,
                    start: text.find(ANSWER_MARKS[0]),
                    end: unmarked(inside).len(),
                }));
            }
        }
        Ok(None)
    }

    /// Returns the text before the answer, if the template renders it.
    fn prompt(&self, index: usize) -> Result<Option<Prompt>, Error> {
        let Some(text) = self.try_text(&self.messages[..index], true)? else { return Ok(None) };
        // Without messages, a template may leave out its generation prompt too.
        let header = match self.try_text(&self.messages[..index], false)? {
            Some(before) if text.starts_with(&before) => before.len(),
            Some(before) => whole_tokens(&text[..common_prefix(&text, &before)]).len(),
            None => text.len(),
        };
        Ok(Some(Prompt { text, header }).filter(|prompt| index > 0 || prompt.header < prompt.text.len()))
    }

    /// Returns the length of the text that ends the turn, behind the marks. A template may render the last message in
    /// another way than the others, so the message is also tried before a prompt and before another turn.
    fn end_of_turn(&self, behind: &str, marked: &Marked, index: usize, header: &str) -> Result<usize, Error> {
        let mut messages = self.messages[..=index].to_vec();
        messages[index] = marked.message.clone();
        let is_user =
            |message: &&Value| message.get_attr("role").is_ok_and(|role| role.as_str() == Some("user"));
        let is_before_user = self.messages.get(index + 1).is_some_and(|message| is_user(&message));
        let user = self.messages.iter().find(is_user).filter(|_| !is_before_user);
        let mut longest = 0;
        for (next, prompt) in [(None, false), (None, true), (user, false)] {
            let next = messages.iter().chain(next).cloned().collect::<Vec<_>>();
            let Some(text) = self.try_text(&next, prompt)? else { continue };
            let Some((_, end)) = split_at_mark(&text) else { continue };
            let end = unmarked(if prompt { end.strip_suffix(header).unwrap_or(end) } else { end });
            let common = common_prefix(behind, end.trim_end());
            if common > 0 && common == end.trim_end().len() {
                return Ok(common);
            }
            // A partial token that the next turn starts with too does not end the turn, nor does a whole one.
            let common = whole_tokens(&behind[..common]);
            let starts = (1..=header.len()).rev().filter(|len| header.is_char_boundary(*len));
            let start = starts.map(|len| &header[..len]).find(|start| common.ends_with(start));
            longest = longest.max(common[..common.len() - start.map_or(0, str::len)].trim_end().len());
        }
        Ok(longest)
    }

    /// Returns the rendering, if the template accepts these messages.
    pub(super) fn try_text(&self, messages: &[Value], prompt: bool) -> Result<Option<String>, Error> {
        match self.text(messages, prompt) {
            Ok(text) => Ok(Some(text)),
            Err(error) if error.kind() == ErrorKind::OutOfFuel => Err(error),
            Err(_) => Ok(None),
        }
    }

    /// Returns a message with marks at the ends of one of its strings, inside of the white space there.
    pub(super) fn with_marks(
        &self,
        index: usize,
        pointer: &str,
        [before, after]: [Option<char>; 2],
    ) -> Result<Value, Error> {
        let mut marked = self.given[index].clone();
        if let Some(Json::String(text)) = marked.pointer_mut(pointer) {
            let start = text.len() - text.trim_start().len();
            // Of white space alone, the start is its end.
            let end = text.trim_end().len().max(start);
            let mark = |mark: Option<char>| mark.map_or_else(String::new, String::from);
            *text = [&text[..start], &mark(before), &text[start..end], &mark(after), &text[end..]].concat();
        }
        super::message(&marked)
    }
}

/// The text before an answer.
struct Prompt {
    text: String,
    /// Where the generation prompt starts, such as `<|im_start|>assistant\n`.
    header: usize,
}

impl Prompt {
    /// Returns where the prompt ends in the text between two answers. The template may write less of the generation
    /// prompt into a conversation than into a prompt (such as `<think>`), and other text before the last message.
    fn end_in(&self, text: &str) -> Option<usize> {
        let (head, header) = self.text.split_at(self.header);
        if head.is_empty() {
            let header = header.trim_start();
            return text.rfind(header).filter(|_| !header.is_empty()).map(|at| at + header.len());
        }
        let at = end_in(head, text)?;
        let common = common_prefix(&text[at..], header);
        let common = if common == header.len() { common } else { whole_tokens(&header[..common]).len() };
        let is_absent = common == 0 && !header.is_empty();
        let end = if is_absent { end_in(&self.text, &text[at..]) } else { Some(common) };
        Some(at + end.unwrap_or(0))
    }
}

/// Returns the place in a text with the longest text before it that ends `head`, the last of equal ones.
fn end_in(head: &str, text: &str) -> Option<usize> {
    let from = (head.len().saturating_sub(MAX_PROMPT_END)..).find(|at| head.is_char_boundary(*at));
    let head = &head[from.unwrap_or(0)..];
    let boundaries = (0..=text.len()).filter(|at| text.is_char_boundary(*at));
    let (len, at) = boundaries.map(|at| (common_suffix(&text[..at], head), at)).max()?;
    Some(at).filter(|_| len >= MIN_PROMPT_END.min(head.len()))
}

/// Returns JSON pointers to the strings of a message that its text may contain, the content first.
pub(super) fn strings(message: &Json) -> Vec<String> {
    let mut pointers = Vec::new();
    let fields = message.as_object().into_iter().flatten();
    let (content, others): (Vec<_>, Vec<_>) = fields.partition(|(name, _)| *name == "content");
    for (name, value) in content.into_iter().chain(others) {
        if !["role", "name", "tool_call_id"].contains(&name.as_str()) {
            add_strings(value, format!("/{}", escaped(name)), &mut pointers);
        }
    }
    pointers
}

/// Adds the strings of a value, except those whose form a template may check.
fn add_strings(value: &Json, pointer: String, pointers: &mut Vec<String>) {
    match value {
        Json::String(_) => pointers.push(pointer),
        Json::Array(values) => {
            for (index, value) in values.iter().enumerate() {
                add_strings(value, format!("{pointer}/{index}"), pointers);
            }
        }
        Json::Object(fields) => {
            for (name, value) in fields.iter().filter(|(name, _)| !["type", "id"].contains(&name.as_str())) {
                add_strings(value, format!("{pointer}/{}", escaped(name)), pointers);
            }
        }
        _ => {}
    }
}

/// Returns whether a message has content or tool calls.
fn has_text(message: &Json) -> bool {
    let is_given = |value: &Json| match value {
        Json::String(text) => !text.trim().is_empty(),
        Json::Array(values) => !values.is_empty(),
        _ => false,
    };
    is_given(&message["content"]) || is_given(&message["tool_calls"])
}

/// Divides a text at the first mark behind a string, or the one before it if there is none behind it.
fn split_at_mark(text: &str) -> Option<(&str, &str)> {
    let at = text.find(ANSWER_MARKS[1]).or_else(|| text.find(ANSWER_MARKS[0]))?;
    Some((&text[..at], &text[at..]))
}

pub(super) fn string<'a>(message: &'a Json, pointer: &str) -> &'a str {
    message.pointer(pointer).and_then(Json::as_str).unwrap_or_default()
}

pub(super) fn unmarked(text: &str) -> String {
    text.replace(ANSWER_MARKS, "")
}

fn escaped(name: &str) -> String {
    name.replace('~', "~0").replace('/', "~1")
}

/// Returns the start of a text up to its last whole token, as far as its characters tell.
fn whole_tokens(text: &str) -> &str {
    &text[..text.rfind(['>', ']', '\n']).map_or(0, |at| at + 1)]
}

/// Returns the length of the common prefix of two texts.
fn common_prefix(left: &str, right: &str) -> usize {
    let pairs = left.chars().zip(right.chars());
    pairs.take_while(|(left, right)| left == right).map(|(left, _)| left.len_utf8()).sum()
}

/// Returns the length of the common suffix of two texts.
fn common_suffix(left: &str, right: &str) -> usize {
    let pairs = left.chars().rev().zip(right.chars().rev());
    pairs.take_while(|(left, right)| left == right).map(|(left, _)| left.len_utf8()).sum()
}

/// Replaces `{% generation %}` and its end, an extension of `transformers`, by marks around an answer. The blocks
/// themselves remain, so that white space control and scoping do not change.
pub(super) fn with_marks(source: &str) -> Result<(String, bool), Error> {
    let tag = |name: &str| {
        Regex::new(&format!(r"\{{%([-+]?)\s*{name}\s*([-+]?)%\}}")).map_err(|error| failed(error.to_string()))
    };
    let [before, after] = ANSWER_MARKS;
    let marked = tag("generation")?.replace_all(source, |tag: &regex::Captures<'_>| {
        format!("{{%{} if true %}}{{{{ '{before}' }}}}{{% with {}%}}", &tag[1], &tag[2])
    });
    let marks_answers = marked != source;
    let marked = tag("endgeneration")?.replace_all(&marked, |tag: &regex::Captures<'_>| {
        format!("{{%{} endwith %}}{{{{ '{after}' }}}}{{% endif {}%}}", &tag[1], &tag[2])
    });
    Ok((marked.into_owned(), marks_answers))
}

pub(super) fn without_marks(marked: &str) -> RenderedChat {
    let mut rendered = RenderedChat::default();
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
