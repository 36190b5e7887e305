//! `run.json`: what a run was and what it came to, beside its metrics; `ulysses report` reads it.

use super::prepare::Prepared;
use super::rank_outcome::RankOutcome;
use super::run::Run;
use crate::{note, settings};
use anyhow::Context;
use serde_json::{Map, Value, json};
use std::io::ErrorKind;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};
use ulysses::mesh::{REPLICAS_AXIS, SHARD_AXIS};
use ulysses::monitor::{Groups, RankComms, straggler_stats, volumes};
use ulysses::trainer::StepMemory;

const FILE: &str = "run.json";

/// What a run keeps of each part that came before it was resumed.
const KEPT: [&str; 8] = [
    "command",
    "started_unix_seconds",
    "first_step",
    "mesh",
    "totals",
    "peak_flops",
    "ranks",
    "communication",
];

/// What the `run.json` of an output directory is to a run that goes on there.
pub(super) enum Earlier {
    /// It tells of the same run: the records of its parts, the oldest first.
    Parts(Vec<Value>),
    /// Nobody can tell.
    Damaged,
    /// It tells of another run, or of none.
    Another,
}

impl Earlier {
    /// Looks for the parts of the run called `run_id`. `is_new_here`: it was in another directory until now, unless the
    /// file tells that it has been here before.
    pub(super) fn read(output: &Path, run_id: &str, is_new_here: bool) -> anyhow::Result<Self> {
        let path = output.join(FILE);
        let text = match ulysses::regular_file::read(&path) {
            // A run writes the file before its metrics: what lies here without it is of another run or, where the
            // checkpoints lie too, of an earlier version.
            Err(error) if error.kind() == ErrorKind::NotFound => {
                return Ok(if is_new_here { Self::Another } else { Self::Parts(Vec::new()) });
            }
            text => text.with_context(|| format!("cannot read {}", path.display()))?,
        };
        let Ok(Value::Object(mut record)) = serde_json::from_slice(&text) else {
            note(format_args!(
                "{}: damaged, so the report will not tell what was communicated before",
                path.display()
            ));
            return Ok(Self::Damaged);
        };
        if record.get("run_id").is_some_and(|other| other != run_id) {
            return Ok(Self::Another);
        }
        let mut parts = match record.remove("earlier") {
            Some(Value::Array(parts)) => parts,
            _ => Vec::new(),
        };
        record.retain(|key, _| KEPT.contains(&key.as_str()));
        parts.push(record.into());
        Ok(Self::Parts(parts))
    }
}

/// What is known before the ranks start.
pub(super) fn begin(prepared: &Prepared, config_path: &Path) -> Value {
    let Prepared { config, mesh, model, .. } = prepared;
    let started = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    // As it was written.
    let given = std::fs::read_to_string(config_path).unwrap_or_default();
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "command": std::env::args_os().map(|word| word.to_string_lossy().into_owned()).collect::<Vec<_>>(),
        "started_unix_seconds": started.as_secs(),
        "environment": environment(prepared),
        "mesh": {
            "axes": mesh.axis_names(),
            "shape": mesh.shape(),
            "ranks": mesh.ranks(),
            "shard_size": config.zero_shard_size(),
        },
        "model": { "parameters": model.config.num_parameters(), "config": model.config.to_hf_json() },
        "given_config": serde_json::from_str::<Value>(&given).unwrap_or(Value::Null),
    })
}

/// The same of a part of a run, after `first_step` steps.
pub(super) fn of_part(run: &Run, run_id: &str, first_step: u64, earlier: Earlier) -> Value {
    let mut record = run.record.clone();
    record["run_id"] = run_id.into();
    record["first_step"] = (first_step + 1).into();
    if let Earlier::Parts(parts) = earlier {
        record["earlier"] = parts.into();
    }
    record
}

/// The same with what the ranks came to.
pub(super) fn finish(prepared: &Prepared, record: &mut Value, outcomes: &[RankOutcome]) {
    let comms: Vec<RankComms> = outcomes.iter().map(|outcome| outcome.comms.clone()).collect();
    let first = outcomes.first();
    record["totals"] =
        json!(first.and_then(|outcome| outcome.reported.as_ref()).map(|reported| &reported.totals));
    if let Some(best) = first.and_then(|outcome| outcome.train.evaluations.best) {
        record["best_evaluation"] = json!({ "step": best.step, "eval_loss": best.loss });
    }
    record["peak_flops"] = json!(first.and_then(|outcome| outcome.peak_flops));
    let rank = |outcome: &RankOutcome| {
        let held = ["parameters", "gradients", "optimizer"].into_iter().zip(outcome.summary.held_bytes);
        let mut formula: Map<String, Value> =
            held.clone().map(|(what, (_, expected))| (what.to_owned(), expected.into())).collect();
        formula.insert("exchange".to_owned(), outcome.summary.expected_exchange_bytes.into());
        let held: Map<String, Value> = held.map(|(what, (held, _))| (what.to_owned(), held.into())).collect();
        let sent = outcome.summary.groups.iter().flat_map(|(axis, stats)| {
            stats.ops.iter().map(move |(op, counted)| (format!("{axis} {op}"), counted.bytes_sent))
        });
        let sent: Map<String, Value> =
            sent.filter(|(_, sent)| *sent > 0).map(|(what, sent)| (what, sent.into())).collect();
        json!({
            "rank": outcome.summary.rank,
            "peak_bytes": outcome.peak_bytes,
            "peak_by_category": outcome.summary.peak_by_category,
            "held_bytes": held,
            "formula_bytes": formula,
            "sent_bytes": sent,
        })
    };
    record["ranks"] = outcomes.iter().map(rank).collect();
    // Those of the first sp group: the plan looks at one of them, and others hold as much.
    let watched = outcomes.iter().take(prepared.config.mesh.sp_size).filter_map(|outcome| {
        let StepMemory { step, seq_len, parts } = outcome.step_memory.as_ref()?;
        Some(json!({ "rank": outcome.summary.rank, "step": step, "seq_len": seq_len, "parts": parts }))
    });
    record["memory_over_step"] = watched.collect();
    record["communication"] = json!({
        "calls": comms.first().map(|comms| &comms.calls),
        "straggling": straggler_stats(&comms, &groups(prepared)),
        "volumes": volumes(&comms),
    });
}

/// Which ranks share an axis.
pub(super) fn groups(prepared: &Prepared) -> Groups {
    let Prepared { config, mesh, .. } = prepared;
    let hybrid = config.zero_shard_size().and_then(|size| mesh.hybrid_sharded(size).ok());
    let of_mesh = mesh.axis_names().iter().map(|axis| (mesh, axis.as_str()));
    let of_zero = hybrid.iter().flat_map(|mesh| [SHARD_AXIS, REPLICAS_AXIS].map(|axis| (mesh, axis)));
    let all = of_mesh.chain(of_zero);
    all.map(|(mesh, axis)| (axis.to_owned(), mesh.all_groups(axis).unwrap_or_default())).collect()
}

pub(super) fn write(output: &Path, record: &Value) -> anyhow::Result<()> {
    let path = output.join(FILE);
    let unfinished = output.join("run.json.part");
    let text = serde_json::to_string_pretty(record)?;
    let written = std::fs::write(&unfinished, text).and_then(|()| std::fs::rename(&unfinished, &path));
    written.with_context(|| format!("cannot write {}", path.display()))
}

fn environment(run: &Prepared) -> Value {
    let of_file = |path: &str| std::fs::read_to_string(path).ok();
    let field = |text: Option<String>, name: &str| {
        let line = text?.lines().find(|line| line.starts_with(name))?.to_owned();
        line.split_once([':', '=']).map(|(_, value)| value.trim().trim_matches('"').to_owned())
    };
    let memory = field(of_file("/proc/meminfo"), "MemTotal");
    let memory =
        memory.and_then(|kib| kib.strip_suffix("kB")?.trim().parse::<u64>().ok()).map(|kib| kib << 10);
    let features =
        [("cuda", cfg!(feature = "cuda")), ("nccl", cfg!(feature = "nccl")), ("mpi", cfg!(feature = "mpi"))];
    let mut environment = json!({
        "host": of_file("/proc/sys/kernel/hostname").map(|host| host.trim().to_owned()),
        "system": field(of_file("/etc/os-release"), "PRETTY_NAME")
            .unwrap_or_else(|| format!("{} {}", std::env::consts::OS, std::env::consts::ARCH)),
        "processor": field(of_file("/proc/cpuinfo"), "model name"),
        "cores": std::thread::available_parallelism().map_or(1, |cores| cores.get()),
        "memory_bytes": memory,
        "threads_per_rank": run.launch.threads_per_rank,
        "device": run.device.name(),
        "backend": run.config.ulysses.backend,
        "features": features.iter().filter(|(_, is_on)| *is_on).map(|(name, _)| *name).collect::<Vec<_>>(),
    });
    // Not every system tells.
    if let Some(memory) = settings::writable_memory("self") {
        environment["data_bytes_at_start"] = memory.mapped.into();
    }
    environment
}
