//! Quotes of `ulysses plan` match its output. Plans of GPUs are the same on any machine.

use super::documented::Documented;
use super::root;
use std::fs;

/// Returns whether a quote matches a printed line; `…` matches any words.
fn is_quoted_by(printed: &[&str], quoted: &[&str]) -> bool {
    match (quoted, printed) {
        (["…", rest @ ..], _) => (0..=printed.len()).any(|from| is_quoted_by(&printed[from..], rest)),
        ([], []) => true,
        ([expected, quoted @ ..], [found, printed @ ..]) => {
            found == expected && is_quoted_by(printed, quoted)
        }
        _ => false,
    }
}

fn words(line: &str) -> Vec<&str> {
    line.split_whitespace().collect()
}

/// Returns the lines of the first `text` block after a line of a document, unless a command comes first.
fn quoted_behind(text: &str, line: usize) -> Option<Vec<&str>> {
    let mut lines = text.lines().skip(line).skip_while(|line| *line != "```").skip(1);
    let opened = lines.find(|line| line.starts_with("```"))?;
    (opened == "```text").then(|| lines.take_while(|line| *line != "```").collect())
}

/// Compares what a plan printed with the quote behind its command, if there is one, and returns the number of quoted lines.
pub(super) fn compare(text: &str, plan: &Documented, printed: &str) -> usize {
    let Some(quoted) = quoted_behind(text, plan.line) else { return 0 };
    let mut printed_lines = printed.lines().map(words);
    let stated: Vec<&str> = quoted.into_iter().filter(|line| line.trim() != "…").collect();
    for line in &stated {
        // In order.
        let found = printed_lines.any(|printed| is_quoted_by(&printed, &words(line)));
        assert!(found, "{}:{}: no {line:?} in\n{printed}", plan.file, plan.line);
    }
    stated.len()
}

#[test]
fn ellipses_in_quotes_match_any_words_only() {
    let quotes = |quoted: &str, printed: &str| is_quoted_by(&words(printed), &words(quoted));
    assert!(quotes("mesh … 53.19 GiB", "mesh dp  4 × sp 8 53.19 GiB"));
    assert!(quotes("…", "") && quotes("a …", "a"));
    assert!(!quotes("mesh … 53.2 GiB", "mesh dp 4 53.19 GiB"));
    assert!(!quotes("mesh dp", "mesh dp 4") && !quotes("mesh dp 4", "mesh dp"));
}

/// The quoted time is compared with the output of its command, in [`super::commands`]. The signal is handled
/// after the step in which it comes.
#[test]
fn slurms_signal_leaves_time_for_two_steps_of_the_planned_run_and_a_save() {
    const SAVE_SECONDS: f64 = 180.0;
    let read = |file: &str| fs::read_to_string(root().join(file)).unwrap();
    let (planning, batch_file) = (read("docs/planning.md"), read("configs/clusters/slurm.sbatch"));
    let row = planning.lines().find(|line| line.trim_start().starts_with("as configured")).unwrap();
    let step_seconds = row.split_whitespace().find_map(|word| word.parse::<f64>().ok()).unwrap();
    let (_, signal) = batch_file.split_once("--signal=USR1@").unwrap();
    let signal_seconds: f64 = signal.lines().next().unwrap().parse().unwrap();
    assert!(
        signal_seconds >= 2.0 * step_seconds + SAVE_SECONDS,
        "{signal_seconds} s, steps of {step_seconds} s"
    );
}

/// The quoted length is compared with the output of its command, in [`super::commands`].
#[test]
fn the_table_of_published_lengths_has_the_planned_length_that_is_quoted() {
    let text = fs::read_to_string(root().join("docs/planning.md")).unwrap();
    let (_, section) = text.split_once("## Tokens that fit: published and planned").unwrap();
    let (_, quoted) = section.split_once("longest sequence that fits: ").unwrap();
    let tokens: usize = quoted.split_whitespace().next().unwrap().parse().unwrap();
    let row = section.lines().find(|line| line.contains("| 8 | ALST 3,800,000")).unwrap();
    let planned: String = row.split('|').nth(4).unwrap().chars().filter(char::is_ascii_digit).collect();
    assert_eq!(planned, tokens.to_string(), "{row}");
    assert!(tokens >= 6_000_000, "{tokens}");
}
