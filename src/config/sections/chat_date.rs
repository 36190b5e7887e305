//! `ulysses.chat_date`: the date that chat templates print.

use crate::config_file::define::FieldValue;
use crate::config_file::reader::Section;
use serde_json::Value as Json;
use ulysses_chat::ChatDate;

impl FieldValue for ChatDate {
    fn read(section: &Section<'_>, name: &str) -> Self {
        section.parse(name, |text| text.parse())
    }

    fn written(&self) -> Option<Json> {
        Some(self.to_string().into())
    }
}
