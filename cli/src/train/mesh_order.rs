//! The order of the ranks on the mesh, for the log: where it differs from row-major, and its cost.

use crate::output::log_line;
use ulysses::config::Config;
use ulysses::device::DeviceKind;
use ulysses::estimate::Workload;
use ulysses::mesh::{DeviceMesh, MeshSpec, RankHosts, SpGroups};
use ulysses::model::ModelConfig;
use ulysses::monitor::{counted, format_bytes};
use ulysses::trainer::job::PreparedJob;

/// Logs how ranks are ordered, if not row-major, and what sp groups that span more nodes than they must cost.
pub(super) fn log(PreparedJob { config, model, mesh, hosts, sp_groups, .. }: &PreparedJob) {
    if let Some(spec @ MeshSpec::Hybrid { .. }) = &config.ulysses.mesh {
        log_line(format_args!("placement: {spec}"));
    }
    match (*sp_groups, hosts) {
        (SpGroups::Reordered { axis, before, after }, _) => log_line(format_args!(
            "placement: ranks are ordered by node, so that {} group spans {} instead of {before}",
            with_article(axis),
            counted(after, "node")
        )),
        (SpGroups::Scattered { axis, nodes, needed }, Some(hosts)) => {
            let spans = format!("{} group spans {nodes} nodes; {needed} would be enough", with_article(axis));
            log_line(scattered(&spans, bytes_between_nodes(config, &model.config, hosts, mesh)));
        }
        _ => {}
    }
}

fn with_article(axis: &str) -> String {
    format!("{} {axis}", if axis == "sp" { "an" } else { "a" })
}

/// Returns the line for sp groups that span more nodes than they must: a warning, unless that saves bytes.
fn scattered(spans: &str, bytes: Option<[u64; 2]>) -> String {
    let Some([given, by_node]) = bytes else { return format!("warning: {spans}") };
    let [sent, of_other] = [given, by_node].map(|bytes| format_bytes(bytes as f64));
    match given > by_node {
        true => format!(
            "warning: {spans}: rank 0 sends {sent} between nodes per step instead of {of_other}; `ulysses.mesh` or --mesh \
             sets the order of the ranks"
        ),
        false => format!(
            "placement: {spans}; rank 0 sends {sent} between nodes per step, {of_other} if ranks were ordered by node"
        ),
    }
}

/// Returns the bytes that rank 0 sends between nodes per step: with this mesh, and with ranks ordered by node. `None` if
/// the step cannot be planned.
fn bytes_between_nodes(
    config: &Config,
    model: &ModelConfig,
    hosts: &RankHosts,
    mesh: &DeviceMesh,
) -> Option<[u64; 2]> {
    let ranks_per_node = hosts.cluster().ok()?.ranks_per_node;
    let sent = |mesh: Option<MeshSpec>| {
        let mut config = config.clone();
        config.ulysses.mesh = mesh;
        let (model, device) = (model.clone(), DeviceKind::Cpu);
        let workload = Workload { config, model, document_len: None, ranks_per_node, device };
        Some(workload.plan_of(0).ok()?.sent.inter_node_bytes)
    };
    Some([sent(Some(MeshSpec::rank_map(&hosts.renumbered(mesh).ok()?)))?, sent(None)?])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scattered_groups_are_a_warning_where_they_cost_bytes() {
        let line = |given, by_node| {
            scattered("an sp group spans 2 nodes; 1 would be enough", Some([given, by_node]))
        };
        let warning = line(4096, 1024);
        assert!(warning.starts_with("warning: an sp group spans 2 nodes"), "{warning}");
        assert!(warning.contains("sends 4.00 KiB between nodes per step instead of 1.00 KiB"), "{warning}");
        let note = line(1024, 4096);
        assert!(
            note.starts_with("placement: ") && note.ends_with("4.00 KiB if ranks were ordered by node"),
            "{note}"
        );
    }
}
