//! Locates the answers in the text of a conversation.

use super::python::{failed, is_space};
use super::{Conversation, RenderedChat};
use minijinja::{Error, ErrorKind, Value, context};
use regex::Regex;
use std::ops::Range;

/// Mark an answer in a rendered text. Unicode reserves these noncharacters for internal use; a conversation that
/// contains them is refused.
pub(in crate::data) const ANSWER_MARKS: [char; 2] = ['\u{FDD0}', '\u{FDD1}'];

/// Bytes that are compared at once at the ends of two texts.
const END_BYTES: usize = 24;

impl Conversation<'_> {
    /// Returns the answers of the messages with these indices.
    pub(super) fn answers(
        &self,
        full: &str,
        messages: impl Iterator<Item = usize>,
    ) -> Result<Vec<Range<usize>>, Error> {
        let mut answers: Vec<Range<usize>> = Vec::new();
        for index in messages {
            // The rendering of no messages may lack the start of the template.
            let found = match index {
                0 => self
                    .by_exchange(full, index)?
                    .map_or_else(|| self.by_prefix(full, index), |found| Ok(Some(found))),
                _ => self
                    .by_prefix(full, index)?
                    .map_or_else(|| self.by_exchange(full, index), |found| Ok(Some(found))),
            }?;
            let end = answers.last().map_or(0, |answer| answer.end);
            let found = found.filter(|answer| answer.start >= end).ok_or_else(|| {
                failed(format!(
                    "cannot locate the answer of message {index}: the chat template renders it differently as later \
                     messages are added; mark answers with `{{% generation %}}` in the template"
                ))
            })?;
            answers.push(found);
        }
        Ok(answers)
    }

    /// Returns the range that the message adds to the previous text, if that is a prefix.
    fn by_prefix(&self, full: &str, index: usize) -> Result<Option<Range<usize>>, Error> {
        let before = self.try_text(&self.messages[..index], true)?;
        let through = self.try_text(&self.messages[..=index], false)?;
        Ok(match (before, through) {
            (Some(before), Some(through)) if through.starts_with(&before) && full.starts_with(&through) => {
                Some(before.len()..through.trim_end().len().max(before.len()))
            }
            _ => None,
        })
    }

    /// Returns the range that changes when another message replaces this one, if nothing else changes, and the end of
    /// its turn.
    fn by_exchange(&self, full: &str, index: usize) -> Result<Option<Range<usize>>, Error> {
        let mark = ANSWER_MARKS[0];
        let mut exchanged = self.messages.clone();
        exchanged[index] = context! { role => "assistant", content => mark.to_string() };
        let Some(other) = self.try_text(&exchanged, false)? else { return Ok(None) };
        let start = common_prefix(full, &other);
        let tail = common_suffix(&full[start..], &other[start..]);
        let place = other[start..other.len() - tail].trim_matches(is_space);
        let Some(alone) = self.try_text(&exchanged[..=index], false)? else { return Ok(None) };
        let Some((_, end_of_turn)) = alone.rsplit_once(mark).filter(|_| place == mark.to_string()) else {
            return Ok(None);
        };
        let end = full.len() - tail;
        let common = &full[end..end + common_prefix(&full[end..], end_of_turn.trim_end())];
        // A partial token that the next turn starts with too does not end the turn.
        let common = match common.len() == end_of_turn.trim_end().len() {
            true => common,
            false => &common[..common.rfind(['>', ']', '\n']).map_or(0, |at| at + 1)],
        };
        let prompt = self.try_text(&self.messages[..index], true)?;
        let start = prompt.and_then(|prompt| behind_prompt(full, start, &prompt)).unwrap_or(start);
        Ok(Some(start..end + common.trim_end().len()))
    }

    /// Returns the rendering, if the template accepts these messages.
    fn try_text(&self, messages: &[Value], prompt: bool) -> Result<Option<String>, Error> {
        match self.text(messages, prompt) {
            Ok(text) => Ok(Some(text)),
            Err(error) if error.kind() == ErrorKind::OutOfFuel => Err(error),
            Err(_) => Ok(None),
        }
    }
}

/// Returns the start of the answer, which includes preceding white space that is not the end of the prompt.
fn behind_prompt(full: &str, start: usize, prompt: &str) -> Option<usize> {
    let (head, prompt_head) = (full[..start].trim_end(), prompt.trim_end());
    let mut from = head.len().saturating_sub(END_BYTES);
    while !head.is_char_boundary(from) {
        from += 1;
    }
    let space = &prompt[prompt_head.len()..];
    let is_prompt =
        !head.is_empty() && prompt_head.ends_with(&head[from..]) && full[head.len()..].starts_with(space);
    is_prompt.then_some(head.len() + space.len()).filter(|at| *at <= start)
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
