//! The page, from the template `report.html`.

use super::run::RunFiles;
use super::{charts, communication, plan, settings};
use crate::template::render;
use anyhow::Result;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use ulysses::memory::Category;

/// Renders the page.
pub(super) fn page(runs: &[RunFiles]) -> Result<String> {
    let names = runs.iter().map(|run| run.name.as_str()).collect::<Vec<_>>().join(", ");
    let data = json!({
        "title": names,
        "charts": charts::curves(runs),
        "has_evaluations": runs.iter().any(|run| !run.lines.evaluations.is_empty()),
        "runs": runs.iter().map(data).collect::<Vec<_>>(),
    });
    render("report.html", data)
}

/// Returns what the page shows of a run.
fn data(run: &RunFiles) -> Value {
    let (record, steps, parts) = (&run.record, &run.lines.steps, run.parts());
    let ranks = parts.iter().flat_map(|part| part["ranks"].as_array().into_iter().flatten());
    let peak = ranks.filter_map(|rank| rank["peak_bytes"].as_f64()).fold(0.0, f64::max);
    let seconds = run.sum("step_seconds");
    let data_share = run.sum("data_seconds") / seconds;
    json!({
        "name": run.name,
        "dir": run.dir.display().to_string(),
        "record": record,
        "parts": parts,
        "ranks": run.ranks().map_or(&[][..], Vec::as_slice),
        "restarts": run.lines.restarts,
        "steps": steps.last().map_or(0, |line| line["step"].as_u64().unwrap_or(0)),
        "skipped": steps.iter().filter(|line| line["skipped"] == true).count(),
        "last_loss": run.last("loss"),
        "eval_loss": run.evaluation_curve("eval_loss").last().map(|point| point.y),
        "tokens_per_second": run.rate("tokens"),
        "label_tokens_per_second": run.rate("label_tokens"),
        "mfu": run.last("gemm_share"),
        "padding": run.last("padding_share"),
        "seconds": seconds,
        // Of the training time of rank 0.
        "data_share": Some(data_share).filter(|share| share.is_finite()),
        "peak_bytes": Some(peak).filter(|peak| *peak > 0.0),
        "stage": run.config["zero_optimization"]["stage"],
        "spans_sp": record["mesh"]["zero_partition_axes"].as_array().is_some_and(|axes| axes.len() == 2),
        "zero_note": run.parsed_config().and_then(|config| config.zero_partition_note()),
        "categories": Category::ALL.map(Category::name),
        "sent": sent(run),
        "time_shares": charts::time_shares(run),
        "plan": plan::charts(run),
        "communication": communication::totals(&parts),
        "settings": settings::rows(run),
    })
}

/// Returns every operation that sent bytes on any rank.
fn sent(run: &RunFiles) -> BTreeSet<&String> {
    let ranks = run.ranks().into_iter().flatten();
    ranks.filter_map(|rank| rank["sent_bytes"].as_object()).flat_map(|sent| sent.keys()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Renders the page of a run with these data.
    fn page(name: &str, data: &Value) -> String {
        render("report.html", json!({ "runs": [{ "parts": [], "ranks": [], name: data }] })).unwrap()
    }

    #[test]
    fn a_part_shows_its_steps_or_that_it_did_not_finish() {
        let finished = json!({ "first_step": 6, "totals": { "steps": 7 } });
        let killed = json!({ "first_step": 6, "totals": null });
        let earlier_version = json!({ "totals": { "steps": 7 } });
        let page = page("parts", &json!([finished, killed, earlier_version, {}]));
        for steps in ["6 to 12", "from 6, not finished", "7", "not finished"] {
            assert!(page.contains(&format!("<td class=\"n\">{steps}</td>")), "{steps}: {page}");
        }
    }

    #[test]
    fn a_restart_shows_its_reason_and_both_meshes() {
        let restart = json!({
            "step": 40, "restart": 1, "reason": "cannot reach host <n2>", "resumed_from": "memory",
            "dp_size_before": 3, "sp_size_before": 2, "dp_size": 2, "sp_size": 2,
        });
        let shown = page("restarts", &json!([restart, { "step": 0, "restart": 2 }]));
        for expected in ["&lt;n2&gt;", "memory", "3 × 2", "2 × 2", "– × –"] {
            assert!(shown.contains(expected), "{expected}: {shown}");
        }
        assert!(!page("restarts", &json!([])).contains("Restarts"));
    }

    #[test]
    fn values_of_other_types_are_left_out() {
        let fields =
            ["command", "mesh", "environment", "totals", "model", "peak_bytes", "held_bytes", "rank"];
        for value in [json!(7), json!("x"), json!([1]), json!({ "shape": 7 }), json!({ "shape": [1, "x"] })] {
            let record: Value = fields.iter().map(|name| ((*name).to_owned(), value.clone())).collect();
            for of in [&value, &record] {
                let run = json!({ "categories": [], "record": of, "parts": [of, of], "ranks": [of, of], "restarts": [of] });
                render("report.html", json!({ "runs": [run] })).unwrap();
            }
        }
    }
}
