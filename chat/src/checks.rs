//! Checks that the text of a conversation contains what its messages say.

use super::answers::{string, strings, unmarked};
use super::{ANSWER_MARKS, Conversation, Note, REASONING, RenderedChat, failed, message};
use minijinja::Error;

impl Conversation<'_> {
    /// Checks that content and tool calls of the answers are in the text. What a template may leave out is noted:
    /// content beside calls, and the reasoning of the last answer.
    pub(super) fn check(
        &self,
        full: &str,
        rendered: &RenderedChat,
        answers: &[usize],
    ) -> Result<Vec<Note>, Error> {
        self.check_none(full, answers)?;
        let mut notes = Vec::new();
        for &index in answers {
            let is_in = |pointer: &str| self.is_rendered(full, rendered, index, pointer);
            let (strings, message) = (strings(&self.given[index]), &self.given[index]);
            let calls = message["tool_calls"].as_array().map_or(0, Vec::len);
            for call in 0..calls {
                let names = [format!("/tool_calls/{call}/function/name"), format!("/tool_calls/{call}/name")];
                let Some(name) = names.iter().find(|name| message.pointer(name).is_some()) else { continue };
                if !is_in(name)? {
                    return Err(failed(format!(
                        "it leaves out the tool calls of messages[{index}]; use a template that supports tools"
                    )));
                }
            }
            let content = strings.iter().filter(|pointer| pointer.starts_with("/content"));
            for pointer in content {
                if is_in(pointer)? {
                    continue;
                }
                if calls == 0 || message["content"].is_array() {
                    return Err(failed(format!(
                        "it leaves out {} of messages[{index}]; give `content` as one string, or use another template",
                        pointer[1..].replace('/', ".")
                    )));
                }
                notes.push(Note::ContentLeftOut);
            }
        }
        let content = answers.first().map_or("", |index| string(&self.given[*index], "/content").trim());
        let first = rendered.answers.first().map_or("", |answer| &rendered.text[answer.clone()]);
        if !content.is_empty() && first.ends_with(content) {
            notes.push(Note::NoEnd);
        }
        if let Some(&last) = answers.last()
            && let Some(name) = REASONING.iter().find(|name| self.given[last][**name].is_string())
            && !self.is_rendered(full, rendered, last, &format!("/{name}"))?
        {
            notes.push(Note::ReasoningLeftOut);
        }
        Ok(notes)
    }

    /// Returns whether a string is in an answer, or whether a change of it changes the text.
    fn is_rendered(
        &self,
        full: &str,
        rendered: &RenderedChat,
        index: usize,
        pointer: &str,
    ) -> Result<bool, Error> {
        let string = string(&self.given[index], pointer).trim();
        if rendered.answers.iter().any(|answer| rendered.text[answer.clone()].contains(string)) {
            return Ok(true);
        }
        let mut messages = self.messages.clone();
        for marks in [[None, Some(ANSWER_MARKS[1])], [Some(ANSWER_MARKS[0]), None]] {
            messages[index] = self.with_marks(index, pointer, marks)?;
            let Some(text) = self.try_text(&messages, false)? else { return Ok(true) };
            let at =
                text.find(ANSWER_MARKS).filter(|_| !self.template.marks_answers && unmarked(&text) == full);
            let is_in_answer = match at {
                Some(at) if !rendered.answers.is_empty() => {
                    rendered.answers.iter().any(|answer| answer.start <= at && at <= answer.end)
                }
                _ => text != full,
            };
            if is_in_answer {
                return Ok(true);
            }
        }
        Ok(string.is_empty())
    }

    /// Checks that no answer without content is printed as `None`, as Python prints null.
    fn check_none(&self, full: &str, answers: &[usize]) -> Result<(), Error> {
        for &index in answers.iter().filter(|index| self.given[**index]["content"].is_null()) {
            let mut empty = self.given[index].clone();
            if !full.contains("None") || empty.get("content").is_none() {
                continue;
            }
            empty["content"] = "".into();
            let mut messages = self.messages.clone();
            messages[index] = message(&empty)?;
            let num_nones = |text: &str| text.matches("None").count();
            let text = self.try_text(&messages, false)?;
            if text.is_some_and(|text| num_nones(&text) < num_nones(full)) {
                return Err(failed(format!(
                    "it prints the null `content` of messages[{index}] as None; give `\"content\": \"\"`"
                )));
            }
        }
        Ok(())
    }
}
