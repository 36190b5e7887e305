//! The restarts of a run by `ulysses launch`.

use crate::html::{plain, table};
use serde_json::Value;

/// Renders a row per restart; empty if there was none.
pub(super) fn table_of(restarts: &[Value]) -> String {
    if restarts.is_empty() {
        return String::new();
    }
    let rows = restarts.iter().map(|restart| {
        let mesh = |dp: &str, sp: &str| format!("{} × {}", text(&restart[dp]), text(&restart[sp]));
        vec![
            text(&restart["reason"]),
            text(&restart["step"]),
            text(&restart["resumed_from"]),
            mesh("dp_size_before", "sp_size_before"),
            mesh("dp_size", "sp_size"),
        ]
    });
    table(&["restart", "from step", "from", "dp × sp before", "dp × sp"], rows)
}

fn text(value: &Value) -> String {
    if value.is_null() { "–".to_owned() } else { plain(value) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_restart_shows_its_reason_and_both_meshes() {
        let restart = json!({
            "step": 40, "restart": 1, "reason": "cannot reach host <n2>", "resumed_from": "memory",
            "dp_size_before": 3, "sp_size_before": 2, "dp_size": 2, "sp_size": 2,
        });
        let table = table_of(&[restart, json!({ "step": 0, "restart": 2 })]);
        for expected in ["&lt;n2&gt;", "memory", "3 × 2", "2 × 2", "– × –"] {
            assert!(table.contains(expected), "{expected}: {table}");
        }
        assert_eq!(table_of(&[]), "");
    }
}
