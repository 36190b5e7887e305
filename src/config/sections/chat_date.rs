//! `ulysses.chat_date`: the date that chat templates print.

use crate::config_file::define::FieldValue;
use crate::config_file::reader::Section;
use serde_json::Value as Json;
use ulysses_chat::ChatDate;

impl FieldValue for ChatDate {
    fn find(section: &Section<'_>, name: &'static str) -> Option<Self> {
        match section.text(name)?.parse() {
            Ok(date) => Some(date),
            Err(expected) => {
                section.contradiction(name, &expected);
                None
            }
        }
    }

    fn read(section: &Section<'_>, name: &'static str) -> Self {
        Self::find(section, name).unwrap_or_default()
    }

    fn written(&self) -> Option<Json> {
        Some(self.to_string().into())
    }
}
