//! `ulysses.chat_date`: the date that chat templates print.

use crate::config_file::define::KeyValue;
use crate::config_file::reader::Section;
use serde_json::Value as Json;
use std::fmt;
use std::str::FromStr;

/// A day, for `strftime_now` of chat templates: data must not depend on the day on which it is read.
///
/// # Examples
///
/// ```
/// use ulysses::config::ChatDate;
///
/// let date: ChatDate = "2026-02-28".parse()?;
/// assert_eq!((date.year, date.month, date.day), (2026, 2, 28));
/// assert!("2026-02-29".parse::<ChatDate>().is_err());
/// # Ok::<(), String>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChatDate {
    /// 1000 to 9999.
    pub year: u32,
    /// From 1.
    pub month: u32,
    /// From 1.
    pub day: u32,
}

/// The date that Llama 3.1 to 3.3 print where `strftime_now` is not defined.
impl Default for ChatDate {
    fn default() -> Self {
        Self { year: 2024, month: 7, day: 26 }
    }
}

impl ChatDate {
    /// Returns the days of each month of the year.
    pub(crate) fn month_lens(self) -> [u32; 12] {
        let Self { year, .. } = self;
        let is_leap = year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
        [31, 28 + u32::from(is_leap), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31]
    }
}

impl FromStr for ChatDate {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let error = || "a date as `YYYY-MM-DD`, from year 1000 on".to_owned();
        let is_date = text.len() == 10
            && text.bytes().enumerate().all(|(at, byte)| match at {
                4 | 7 => byte == b'-',
                _ => byte.is_ascii_digit(),
            });
        let number = |part: Option<&str>| part.and_then(|part| part.parse().ok()).unwrap_or(0);
        let mut parts = text.split('-');
        let mut next = || number(parts.next());
        let date = Self { year: next(), month: next(), day: next() };
        let len = date.month_lens().get((date.month as usize).wrapping_sub(1)).copied().unwrap_or(0);
        let is_valid = is_date && date.year >= 1000 && (1..=len).contains(&date.day);
        is_valid.then_some(date).ok_or_else(error)
    }
}

impl fmt::Display for ChatDate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{:02}-{:02}", self.year, self.month, self.day)
    }
}

impl KeyValue for ChatDate {
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
