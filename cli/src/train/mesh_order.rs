//! The order of the ranks on the mesh, for the log: where it differs from row-major, and its cost.

use crate::log_line;
use ulysses::config::Config;
use ulysses::device::DeviceKind;
use ulysses::estimate::{SentBytes, Workload};
use ulysses::mesh::{DeviceMesh, MeshSpec, PlacedMesh, RankHosts, SpGroups};
use ulysses::model::LlamaConfig;
use ulysses::monitor::format_bytes;

/// Logs how ranks are ordered, if not row-major, and what sp groups that span too many nodes cost.
pub(super) fn log(config: &Config, model: &LlamaConfig, hosts: Option<&RankHosts>, placed: &PlacedMesh) {
    if let Some(spec @ MeshSpec::Hybrid { .. }) = &config.ulysses.mesh {
        log_line(format_args!("placement: {spec}"));
    }
    match (placed.sp_groups, hosts) {
        (SpGroups::Reordered { before, after }, _) => log_line(format_args!(
            "placement: ranks are ordered by node, so that an sp group spans {after} node(s) instead of {before}"
        )),
        (SpGroups::Scattered { nodes, needed }, Some(hosts)) => {
            let cost = cost(config, model, hosts, &placed.mesh).unwrap_or_default();
            log_line(format_args!(
                "warning: an sp group spans {nodes} nodes, though {needed} would do, and its ranks communicate in every \
                 layer{cost}; `ulysses.mesh` or --mesh sets the order of the ranks"
            ));
        }
        _ => {}
    }
}

/// Returns what rank 0 sends between nodes per step, compared with ranks that are ordered by node. `None` if the step
/// cannot be planned.
fn cost(config: &Config, model: &LlamaConfig, hosts: &RankHosts, mesh: &DeviceMesh) -> Option<String> {
    let ranks_per_node = hosts.cluster().ok()?.ranks_per_node;
    let sent = |mesh: Option<MeshSpec>| {
        let mut config = config.clone();
        config.ulysses.mesh = mesh;
        let (model, device) = (model.clone(), DeviceKind::Cpu);
        let workload = Workload { config, model, document_len: None, ranks_per_node, device };
        let SentBytes { inter_node_bytes, .. } = workload.plan_of(0).ok()?.sent;
        Some(format_bytes(inter_node_bytes as f64))
    };
    let given = sent(Some(MeshSpec::rank_map(&hosts.renumbered(mesh).ok()?)))?;
    Some(format!(": rank 0 sends {given} between nodes per step instead of {}", sent(None)?))
}
