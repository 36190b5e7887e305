//! Formatting of values on axes and in legends.

/// The unit of an axis.
#[derive(Clone, Copy, Default)]
pub(crate) enum Unit {
    #[default]
    Number,
    Bytes,
    Percent,
}

/// Formats a value with about three significant digits.
pub(crate) fn text(value: f64, unit: Unit) -> String {
    let scaled = |value: f64, base: f64, units: &[&str]| {
        let mut value = value;
        let mut units = units.iter();
        let mut unit = units.next().copied().unwrap_or_default();
        while value.abs() >= base {
            let Some(next) = units.next() else { break };
            (value, unit) = (value / base, next);
        }
        format!("{}{unit}", short(value))
    };
    match unit {
        Unit::Percent if value < 0.1 => format!("{} %", short((1e3 * value).round() / 10.0)),
        Unit::Percent => format!("{} %", short(100.0 * value)),
        Unit::Bytes => scaled(value, 1024.0, &[" B", " KiB", " MiB", " GiB", " TiB"]),
        Unit::Number if value != 0.0 && value.abs() < 1e-3 => format!("{value:.1e}").replace(".0e", "e"),
        Unit::Number if value.abs() >= 1e4 => scaled(value, 1000.0, &["", " k", " M", " G", " T", " P"]),
        Unit::Number => short(value),
    }
}

/// Formats about three significant digits without trailing zeros.
fn short(value: f64) -> String {
    let digits = match value.abs() {
        huge if huge >= 1e6 => return format!("{value:.1e}").replace(".0e", "e"),
        large if large >= 100.0 => 0,
        medium if medium >= 10.0 => 1,
        small if small >= 0.1 => 2,
        _ => 4,
    };
    let text = format!("{value:.digits$}");
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_formatted_briefly() {
        let numbers =
            [0.0, 3e-4, 0.25, 2.5, 12.34, 345.6, 29_852.0, 3.5e9].map(|value| text(value, Unit::Number));
        assert_eq!(numbers, ["0", "3e-4", "0.25", "2.5", "12.3", "346", "29.9 k", "3.5 G"]);
        assert_eq!(text(3.0 * 1024.0 * 1024.0, Unit::Bytes), "3 MiB");
        assert_eq!(text(1e100, Unit::Number), "1e85 P", "as long as any other");
        assert_eq!([0.125, 0.01234].map(|share| text(share, Unit::Percent)), ["12.5 %", "1.2 %"]);
    }
}
