//! The filters of templates. Filters of numbers give none, shown as `–`, for anything else.

use super::chart::{Unit, text};
use super::escape;
use minijinja::value::ValueKind;
use minijinja::{Environment, Error, Value};
use ulysses::monitor::{counted, format_bytes, format_flops, format_table, grouped_bytes};

pub(super) fn add(environment: &mut Environment<'_>) {
    // About three significant digits.
    environment.add_filter("number", formatted(|value| text(value, Unit::Number)));
    environment.add_filter("percent", formatted(|value| text(value, Unit::Percent)));
    environment.add_filter("short_bytes", formatted(|value| text(value, Unit::Bytes)));
    environment.add_filter("bytes", formatted(format_bytes));
    environment.add_filter("flops", formatted(format_flops));
    environment.add_filter("seconds", formatted(seconds));
    environment.add_filter("plain_seconds", formatted(plain_seconds));
    environment.add_filter("duration", formatted(duration));
    // A coordinate of a picture.
    environment.add_filter("px", formatted(|value| format!("{value:.1}")));
    // Without the `.0` of whole numbers.
    environment.add_filter("shortest", formatted(|value| value.to_string()));
    environment.add_filter("fixed", |value: Value, digits: usize| {
        number(value).map(|value| format!("{value:.digits$}"))
    });
    environment.add_filter("grouped", |value: Value| u64::try_from(value).ok().map(grouped_bytes));
    environment.add_filter("amount", |value: Value| number(value).unwrap_or(0.0));
    environment.add_filter("parameters", parameters);
    environment.add_filter("counted", |count: usize, noun: &str| counted(count, noun));
    environment.add_filter("plain", plain);
    environment.add_filter("words", words);
    environment.add_filter("fields", fields);
    environment.add_filter("breakable", |text: &str| {
        Value::from_safe_string(escape(text).replace('_', "_<wbr>").replace('.', ".<wbr>"))
    });
    environment.add_filter("columns", columns);
    environment.add_filter("cells", cells);
}

fn number(value: Value) -> Option<f64> {
    f64::try_from(value).ok()
}

fn formatted(format: impl Fn(f64) -> String) -> impl Fn(Value) -> Option<String> {
    move |value| number(value).map(&format)
}

/// Formats a number of parameters.
fn parameters(count: usize) -> String {
    let (unit, size) = if count < 1_000_000_000 { ("M", 1e6) } else { ("B", 1e9) };
    format!("{:.2} {unit} parameters", count as f64 / size)
}

/// Formats a short duration.
fn seconds(seconds: f64) -> String {
    match seconds {
        0.0 => "0 s".to_owned(),
        short if short < 1e-3 => format!("{:.3} ms", 1e3 * short),
        short if short < 1.0 => format!("{:.2} ms", 1e3 * short),
        long => format!("{long:.3} s"),
    }
}

/// Formats a duration under a head that names the unit.
fn plain_seconds(seconds: f64) -> String {
    if seconds < 1.0 { format!("{seconds:.6}") } else { format!("{seconds:.3}") }
}

/// Formats a long duration.
fn duration(seconds: f64) -> String {
    match seconds {
        short if short < 120.0 => format!("{} s", text(short, Unit::Number)),
        medium if medium < 7200.0 => format!("{:.0} min", medium / 60.0),
        long => format!("{:.1} h", long / 3600.0),
    }
}

/// Returns a value as JSON, strings without quotes.
fn plain(value: &Value) -> Option<String> {
    match value.kind() {
        ValueKind::Undefined | ValueKind::None => None,
        ValueKind::String => Some(value.to_string()),
        _ => serde_json::to_string(value).ok(),
    }
}

/// Joins the elements of a list, none as `–`; nothing of other values.
fn words(list: &Value, separator: &str) -> Result<String, Error> {
    if list.kind() != ValueKind::Seq {
        return Ok(String::new());
    }
    let word = |word: Value| plain(&word).unwrap_or("–".to_owned());
    Ok(list.try_iter()?.map(word).collect::<Vec<_>>().join(separator))
}

/// Returns the names and values of an object; none of other values.
fn fields(object: &Value) -> Result<Vec<Vec<Value>>, Error> {
    if object.kind() != ValueKind::Map {
        return Ok(Vec::new());
    }
    let field = |name: Value| Ok(vec![name.clone(), object.get_item(&name)?]);
    object.try_iter()?.map(field).collect()
}

/// Aligns the cells of lines, which ` | ` separates: the first to the left, the others to the right. A note follows after
/// ` || `.
fn columns(lines: &str) -> String {
    let cells: Vec<_> = lines.lines().map(row).collect();
    let table = format_table(&cells, 1);
    let line = |(aligned, line): (&str, &str)| match line.split_once(" || ") {
        Some((_, note)) => format!("{aligned}  {note}\n"),
        None => format!("{aligned}\n"),
    };
    table.lines().zip(lines.lines()).map(line).collect()
}

/// Returns the cells of lines as [`columns`] has them. Notes are the last column.
fn cells(lines: &str) -> Vec<Vec<String>> {
    let has_notes = lines.contains(" || ");
    let with_note = |line: &str| {
        let note = line.split_once(" || ").map_or("", |(_, note)| note);
        row(line).into_iter().chain(has_notes.then(|| note.to_owned())).collect()
    };
    lines.lines().map(with_note).collect()
}

/// Returns the cells of a line without its note.
fn row(line: &str) -> Vec<String> {
    let cells = line.split_once(" || ").map_or(line, |(cells, _)| cells);
    cells.split(" | ").map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_readable_units() {
        let counts = [123_712, 999_999_999, 8_030_261_248].map(parameters);
        assert_eq!(counts, ["0.12 M parameters", "1000.00 M parameters", "8.03 B parameters"]);
        assert_eq!([0.0, 2.5e-6, 0.0123, 61.5].map(seconds), ["0 s", "0.003 ms", "12.30 ms", "61.500 s"]);
    }
}
