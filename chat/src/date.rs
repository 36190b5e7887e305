//! The date of a template, and its `strftime_now`.

use super::failed;
use minijinja::Error;
use std::fmt;
use std::str::FromStr;

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const WEEKDAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

/// A day, for `strftime_now` of chat templates: data must not depend on the day on which it is read.
///
/// # Examples
///
/// ```
/// use ulysses_chat::ChatDate;
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
    fn month_lens(self) -> [u32; 12] {
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

/// `date.strftime(format)` at midnight, in English.
pub(super) fn strftime(date: ChatDate, format: &str) -> Result<String, Error> {
    let ChatDate { year, month, day } = date;
    let day_of_year = date.month_lens()[..month as usize - 1].iter().sum::<u32>() + day;
    // January 1st of the year 1 was a Monday.
    let years = year - 1;
    let weekday = WEEKDAYS[((years + years / 4 - years / 100 + years / 400 + day_of_year) % 7) as usize];
    let month_name = MONTHS[month as usize - 1];
    let (mut text, mut characters) = (String::new(), format.chars());
    while let Some(character) = characters.next() {
        if character != '%' {
            text.push(character);
            continue;
        }
        let directive: String = match characters.next() {
            Some('-') => ['-'].into_iter().chain(characters.next()).collect(),
            other => other.into_iter().collect(),
        };
        text += &match directive.as_str() {
            "Y" => year.to_string(),
            "y" => format!("{:02}", year % 100),
            "m" => format!("{month:02}"),
            "-m" => month.to_string(),
            "d" => format!("{day:02}"),
            "-d" => day.to_string(),
            "e" => format!("{day:2}"),
            "j" => format!("{day_of_year:03}"),
            "B" => month_name.to_owned(),
            "b" | "h" => month_name[..3].to_owned(),
            "A" => weekday.to_owned(),
            "a" => weekday[..3].to_owned(),
            "F" => date.to_string(),
            "H" | "M" | "S" => "00".to_owned(),
            "-H" | "-M" | "-S" => "0".to_owned(),
            "I" => "12".to_owned(),
            "p" => "AM".to_owned(),
            "T" => "00:00:00".to_owned(),
            "%" => "%".to_owned(),
            other => return Err(failed(format!("`strftime_now` with `%{other}` is not supported"))),
        };
    }
    Ok(text)
}
