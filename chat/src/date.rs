//! `strftime_now` of a fixed date.

use super::failed;
use crate::config::ChatDate;
use minijinja::Error;

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
