//! SLURM's compact lists.

/// Returns the number of tasks on a node from `SLURM_STEP_TASKS_PER_NODE`: `4(x2),3` means 4, 4 and 3.
pub(super) fn tasks_on_node(list: &str, node: usize) -> Option<usize> {
    let mut nodes_before = 0_usize;
    for entry in list.split(',') {
        let (tasks, repeated) = match entry.trim().split_once("(x") {
            Some((tasks, times)) => (tasks, times.strip_suffix(')')?.parse().ok()?),
            None => (entry.trim(), 1),
        };
        nodes_before = nodes_before.checked_add(repeated)?;
        if node < nodes_before {
            return tasks.parse().ok();
        }
    }
    None
}

/// Returns the first host of a list such as `node[007-012,15],login1`, where rank 0 runs.
#[cfg_attr(
    not(feature = "nccl"),
    allow(dead_code, reason = "tested without NCCL, but used by its ranks only")
)]
pub(in crate::comm) fn first_host(list: &str) -> Option<String> {
    let host = match list.split_once('[') {
        // A bracket belongs to the first host only if no comma precedes it.
        Some((prefix, rest)) if !prefix.contains(',') => {
            let (numbers, rest) = rest.split_once(']')?;
            let first = numbers.split([',', '-']).next()?;
            let suffix = rest.split(',').next().unwrap_or_default();
            format!("{prefix}{first}{suffix}")
        }
        _ => list.split(',').next()?.to_owned(),
    };
    (!host.is_empty()).then_some(host)
}
