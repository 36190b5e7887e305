//! `run.json`: environment, settings and results of a run, for `ulysses report`.

use crate::launch::Restart;
use crate::output::log_line;
use crate::settings;
use anyhow::Context;
use parking_lot::Mutex;
use serde_json::{Map, Value, json};
use std::collections::HashSet;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::{SystemTime, UNIX_EPOCH};
use ulysses::comm::host_name;
use ulysses::config::Config;
use ulysses::mesh::{REPLICAS_AXIS, RING_AXIS, SHARD_AXIS, TOKENS_AXIS, TP_AXIS, ULYSSES_AXIS};
use ulysses::monitor::{Groups, RankSummary, RestartMetrics, straggler_stats, volumes};
use ulysses::trainer::job::{PreparedJob, meminfo_bytes};
use ulysses::trainer::{JobReport, StepMemory, Trainer};

const FILE: &str = "run.json";

/// Keys that a resumed run keeps for each of its earlier parts.
const PART_KEYS: [&str; 9] = [
    "command",
    "started_unix_seconds",
    "first_step",
    "restart",
    "mesh",
    "totals",
    "peak_flops",
    "ranks",
    "communication",
];

/// The `run.json` that a resumed run finds in its output directory.
pub(super) enum EarlierRecord {
    /// A record of the same run: its parts, oldest first.
    Parts(Vec<Value>),
    /// An unreadable record.
    Damaged,
    /// A record of another run, or none.
    OtherRun,
}

impl EarlierRecord {
    /// Reads the earlier parts of the run `run_id`. `is_new_here`: the run comes from another directory, unless the file
    /// shows that it has been here before.
    pub(super) fn read(output: &Path, run_id: &str, is_new_here: bool) -> anyhow::Result<Self> {
        let path = output.join(FILE);
        let text = match ulysses::regular_file::read(&path) {
            // A run writes this file before its metrics. Metrics without it are another run's or, next to the run's
            // checkpoints, an earlier version's.
            Err(error) if error.kind() == ErrorKind::NotFound => {
                return Ok(if is_new_here { Self::OtherRun } else { Self::Parts(Vec::new()) });
            }
            text => text.with_context(|| format!("cannot read {}", path.display()))?,
        };
        let Ok(Value::Object(mut record)) = serde_json::from_slice(&text) else {
            log_line(format_args!(
                "{}: damaged; the report will lack the communication of earlier parts",
                path.display()
            ));
            return Ok(Self::Damaged);
        };
        if record.get("run_id").is_some_and(|other| other != run_id) {
            return Ok(Self::OtherRun);
        }
        let mut parts = match record.remove("earlier") {
            Some(Value::Array(parts)) => parts,
            _ => Vec::new(),
        };
        record.retain(|key, _| PART_KEYS.contains(&key.as_str()));
        parts.push(record.into());
        Ok(Self::Parts(parts))
    }
}

/// The `run.json` of this run, which its first rank begins and its first process completes.
pub(super) struct Record {
    output: PathBuf,
    content: Mutex<Value>,
    peak_flops: OnceLock<f64>,
}

impl Record {
    /// Collects what is known before ranks start, for a run that writes to `output`.
    pub(super) fn begin(prepared: &PreparedJob, output: PathBuf, config_path: &Path) -> Self {
        let PreparedJob { config, mesh, model, .. } = prepared;
        let started = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        // The user's file, before flags.
        let given = ulysses::regular_file::read_to_string(config_path).unwrap_or_default();
        let content = json!({
            "version": env!("CARGO_PKG_VERSION"),
            "command": std::env::args_os().map(|word| word.to_string_lossy().into_owned()).collect::<Vec<_>>(),
            "started_unix_seconds": started.as_secs(),
            "environment": environment(prepared),
            "mesh": {
                "axes": mesh.axis_names(),
                "shape": mesh.shape(),
                "ranks": mesh.ranks(),
                "shard_size": config.zero_shard_size(),
                "zero_partition_axes": config.zero_axes(),
            },
            "model": { "parameters": model.config.num_parameters(), "config": model.config.to_hf_json() },
            "given_config": serde_json::from_str::<Value>(&given).unwrap_or(Value::Null),
        });
        Self { output, content: Mutex::new(content), peak_flops: OnceLock::new() }
    }

    /// Returns the output directory.
    pub(super) fn output(&self) -> &Path {
        &self.output
    }

    /// Sets the peak FLOP rate of all ranks.
    pub(super) fn set_peak_flops(&self, peak_flops: f64) {
        // The same on all ranks.
        let _ = self.peak_flops.set(peak_flops);
    }

    /// Writes the beginning of a part of the run.
    pub(super) fn begin_part(&self, trainer: &Trainer<'_>, earlier: EarlierRecord) -> anyhow::Result<()> {
        let mut record = self.content.lock();
        record["run_id"] = trainer.run_id().into();
        record["first_step"] = (trainer.steps().start + 1).into();
        if let Some(restart) = Restart::of_this_rank() {
            record["restart"] = restart.reason.into();
        }
        if let EarlierRecord::Parts(parts) = earlier {
            record["earlier"] = parts.into();
        }
        self.write(&record)
    }

    /// Adds the results of all ranks, and writes the record.
    pub(super) fn finish(&self, job: &PreparedJob, report: &JobReport) -> anyhow::Result<()> {
        let mut record = self.content.lock();
        record["totals"] = json!(report.summary.totals);
        if let Some(best) = report.train.evaluations.best {
            record["best_evaluation"] = json!({ "step": best.step, "eval_loss": best.loss });
        }
        record["peak_flops"] = json!(self.peak_flops.get());
        let ranks = report.summary.ranks.iter().zip(&report.memory);
        record["ranks"] =
            ranks.clone().map(|(summary, memory)| rank_results(summary, memory.peak_bytes)).collect();
        // The first dp row of each stage is enough: the plan is of one of their ranks, and other rows hold as much.
        let mesh = job.config.mesh;
        let dp_rows = job.mesh.ranks().chunks(mesh.ranks_per_sequence()).step_by(mesh.dp_size);
        let planned: HashSet<usize> = dp_rows.flatten().copied().collect();
        let watched = ranks.filter(|(summary, _)| planned.contains(&summary.rank));
        let watched = watched.filter_map(|(summary, memory)| {
            let StepMemory { step, seq_len, parts } = memory.step.as_ref()?;
            Some(json!({ "rank": summary.rank, "step": step, "seq_len": seq_len, "parts": parts }))
        });
        record["memory_over_step"] = watched.collect();
        record["communication"] = json!({
            "calls": report.comms.first().map(|comms| &comms.calls),
            "straggling": straggler_stats(&report.comms, &groups(job)),
            "volumes": volumes(&report.comms),
        });
        self.write(&record)
    }

    fn write(&self, record: &Value) -> anyhow::Result<()> {
        let path = self.output.join(FILE);
        let unfinished = self.output.join("run.json.part");
        let text = serde_json::to_string_pretty(record)?;
        let written = ulysses::regular_file::write(&unfinished, text);
        let written = written.and_then(|()| std::fs::rename(&unfinished, &path));
        written.with_context(|| format!("cannot write {}", path.display()))
    }
}

/// Returns the results of a rank.
fn rank_results(summary: &RankSummary, peak_bytes: u64) -> Value {
    let held = ["parameters", "gradients", "optimizer"].into_iter().zip(summary.held_bytes);
    let mut formula: Map<String, Value> =
        held.clone().map(|(what, (_, expected))| (what.to_owned(), expected.into())).collect();
    formula.insert("exchange".to_owned(), summary.expected_exchange_bytes.into());
    let held: Map<String, Value> = held.map(|(what, (held, _))| (what.to_owned(), held.into())).collect();
    let sent = summary.groups.iter().flat_map(|(axis, stats)| {
        stats.ops.iter().map(move |(op, counted)| (format!("{axis} {op}"), counted.bytes_sent))
    });
    let sent: Map<String, Value> =
        sent.filter(|(_, sent)| *sent > 0).map(|(what, sent)| (what, sent.into())).collect();
    json!({
        "rank": summary.rank,
        "peak_bytes": peak_bytes,
        "peak_by_category": summary.peak_by_category,
        "held_bytes": held,
        "formula_bytes": formula,
        "sent_bytes": sent,
    })
}

/// Returns what the metrics say of a restart.
pub(super) fn restart_metrics(restart: Restart, trainer: &Trainer<'_>, config: &Config) -> RestartMetrics {
    let Restart { number, reason, cause, mesh_before } = restart;
    RestartMetrics {
        step: trainer.steps().start,
        restart: number,
        reason,
        failed_rank: cause.failed_rank,
        lost_hosts: cause.lost_hosts,
        resumed_from: trainer.resumed().map(|resumed| resumed.source),
        dp_size_before: mesh_before.map(|(dp_size, _)| dp_size),
        sp_size_before: mesh_before.map(|(_, sp_size)| sp_size),
        mesh: config.mesh.shape(),
    }
}

/// Returns the groups of each axis.
pub(super) fn groups(prepared: &PreparedJob) -> Groups {
    let PreparedJob { config, mesh, .. } = prepared;
    let sharded = config.zero_shards().and_then(|shape| mesh.sharded(shape).ok());
    let ring_size = config.seq_sharding().ring_size;
    let ring = if ring_size > 1 { mesh.ring(ring_size).ok() } else { None };
    let tokens = mesh.flatten(&["sp", TP_AXIS], TOKENS_AXIS).ok();
    let of_mesh = mesh.axis_names().into_iter().map(|axis| (mesh, axis));
    let of_zero = sharded.iter().flat_map(|mesh| [SHARD_AXIS, REPLICAS_AXIS].map(|axis| (mesh, axis)));
    let of_ring = ring.iter().flat_map(|mesh| [RING_AXIS, ULYSSES_AXIS].map(|axis| (mesh, axis)));
    let of_tokens = tokens.iter().map(|mesh| (mesh, TOKENS_AXIS));
    let all = of_mesh.chain(of_zero).chain(of_ring).chain(of_tokens);
    all.map(|(mesh, axis)| (axis.to_owned(), mesh.all_groups(axis).unwrap_or_default())).collect()
}

fn environment(run: &PreparedJob) -> Value {
    let of_file = |path: &str| std::fs::read_to_string(path).ok();
    let field = |text: Option<String>, name: &str| {
        let line = text?.lines().find(|line| line.starts_with(name))?.to_owned();
        line.split_once([':', '=']).map(|(_, value)| value.trim().trim_matches('"').to_owned())
    };
    let features =
        [("cuda", cfg!(feature = "cuda")), ("nccl", cfg!(feature = "nccl")), ("mpi", cfg!(feature = "mpi"))];
    let mut environment = json!({
        "host": host_name(),
        "system": field(of_file("/etc/os-release"), "PRETTY_NAME")
            .unwrap_or_else(|| format!("{} {}", std::env::consts::OS, std::env::consts::ARCH)),
        "processor": field(of_file("/proc/cpuinfo"), "model name"),
        "cores": std::thread::available_parallelism().map_or(1, |cores| cores.get()),
        "memory_bytes": meminfo_bytes("MemTotal:").map(|bytes| bytes as u64),
        "threads_per_rank": run.launch.threads_per_rank,
        "device": run.placement.device().name(),
        "backend": run.config.ulysses.backend,
        "features": features.iter().filter(|(_, is_on)| *is_on).map(|(name, _)| *name).collect::<Vec<_>>(),
    });
    // Unknown on some systems.
    if let Some(memory) = settings::writable_memory("self") {
        environment["data_bytes_at_start"] = memory.mapped.into();
    }
    environment
}
