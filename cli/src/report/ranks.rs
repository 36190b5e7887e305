//! Per-rank tables of bytes stored, at the peak and sent, next to the formulas.

use super::run::RunFiles;
use crate::html::chart::{Unit, text};
use crate::html::{plain, table};
use serde_json::Value;
use std::collections::BTreeSet;
use ulysses::memory::Category;
use ulysses::monitor::grouped_bytes;

const STORED: [&str; 3] = ["parameters", "gradients", "optimizer"];

/// Renders the tables of the last finished part, if any.
pub(super) fn tables(run: &RunFiles) -> String {
    let ranks: Vec<&Value> = run.ranks().into_iter().flatten().collect();
    if ranks.is_empty() {
        return String::new();
    }
    let mut html = waiting(run);
    for (title, rows) in [
        (
            "Bytes stored per rank between steps: allocated (with bookkeeping) and by ZeRO formula",
            stored(&ranks),
        ),
        ("Bytes per rank at the peak, by category", peaks(&ranks)),
        (
            "Bytes sent per rank, by axis and operation, with the formula of the Ulysses exchange",
            sent(&ranks),
        ),
    ] {
        let Some((head, rows)) = rows.split_first() else { continue };
        let head: Vec<&str> = head.iter().map(String::as_str).collect();
        html.push_str(&format!("<p></p><p class=\"faint\">{title}.</p>\n"));
        html.push_str(&table(&head, rows.iter().cloned()));
    }
    html
}

/// Renders the share of time that rank 0 waited for data, and the share of padding.
fn waiting(run: &RunFiles) -> String {
    let waited = run.sum("data_seconds") / run.sum("step_seconds");
    let padding = run.last("padding_share");
    let share = |share: f64| text(share, Unit::Percent);
    let waited = Some(waited).filter(|waited| waited.is_finite());
    let facts = [
        waited.map(|waited| format!("Waiting for data: {} of the training time of rank 0.", share(waited))),
        padding.map(|padding| format!("Padding: {} of the tokens.", share(padding))),
    ];
    let facts: Vec<String> = facts.into_iter().flatten().collect();
    if facts.is_empty() { String::new() } else { format!("<p>{}</p>\n", facts.join(" ")) }
}

fn stored(ranks: &[&Value]) -> Vec<Vec<String>> {
    let columns = STORED.iter().flat_map(|what| [(*what).to_owned(), "formula".to_owned()]);
    let head = std::iter::once("rank".to_owned()).chain(columns).collect();
    with_ranks(head, ranks, |rank| {
        let pair = |what: &&str| {
            let (held, formula) = (rank["held_bytes"][*what].as_u64(), rank["formula_bytes"][*what].as_u64());
            // Without a counting allocator, 0 means unknown.
            let held = held.filter(|held| *held > 0 || formula == Some(0));
            [bytes(held), bytes(formula)]
        };
        STORED.iter().flat_map(pair).collect()
    })
}

fn peaks(ranks: &[&Value]) -> Vec<Vec<String>> {
    let names = Category::ALL.map(|category| category.name().to_owned());
    let head = std::iter::once("rank".to_owned()).chain(names).chain(["total".to_owned()]).collect();
    with_ranks(head, ranks, |rank| {
        let total = rank["peak_bytes"].as_u64().filter(|total| *total > 0);
        let of = |category: Category| {
            rank["peak_by_category"][category.name()].as_u64().filter(|_| total.is_some())
        };
        Category::ALL.into_iter().map(of).chain([total]).map(bytes).collect()
    })
}

/// Returns a column for every operation that sent bytes on any rank; empty for records of earlier versions.
fn sent(ranks: &[&Value]) -> Vec<Vec<String>> {
    let keys =
        |rank: &&Value| rank["sent_bytes"].as_object().map(|sent| sent.keys().cloned().collect::<Vec<_>>());
    let columns: BTreeSet<String> = ranks.iter().filter_map(keys).flatten().collect();
    if columns.is_empty() {
        return Vec::new();
    }
    let is_exchange = |column: &str| column.contains("all_to_all");
    let head = std::iter::once("rank".to_owned()).chain(columns.iter().flat_map(|column| {
        let formula = is_exchange(column).then(|| "formula".to_owned());
        std::iter::once(column.clone()).chain(formula)
    }));
    with_ranks(head.collect(), ranks, |rank| {
        let cells = columns.iter().flat_map(|column| {
            let formula = is_exchange(column).then(|| bytes(rank["formula_bytes"]["exchange"].as_u64()));
            std::iter::once(bytes(rank["sent_bytes"][column].as_u64().or(Some(0)))).chain(formula)
        });
        cells.collect()
    })
}

fn with_ranks(
    head: Vec<String>,
    ranks: &[&Value],
    cells: impl Fn(&Value) -> Vec<String>,
) -> Vec<Vec<String>> {
    let row = |rank: &&Value| std::iter::once(plain(&rank["rank"])).chain(cells(rank)).collect();
    std::iter::once(head).chain(ranks.iter().map(row)).collect()
}

fn bytes(bytes: Option<u64>) -> String {
    bytes.map_or("–".to_owned(), grouped_bytes)
}
