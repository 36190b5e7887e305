//! `ulysses bench max-seq-len`: the longest row that trains within a memory limit, found by trying.

mod features;
mod memory;

use super::report::{cores, processor};
use super::{Failure, OrFail, dp_sp, print};
use crate::config_flags::SetFlags;
use crate::note;
use crate::settings::WritableMemory;
use anyhow::{Context, Result, anyhow};
use memory::{StepMemory, run_watched, workload};
use serde_json::{Value, json};
use std::fmt::{self, Display, Formatter};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Instant;
use ulysses::config::{Config, Overrides, RawConfig};

/// What the threads of a process take before it computes anything.
const LEAST_GIB: f64 = 1.0 / 32.0;

/// Where a search begins at most.
const LONGEST: u32 = 1 << 24;

/// Tokens of a document, its end included: attention's cost per token is the same in every row.
const DOCUMENT_TOKENS: usize = 4096;

/// What a process says that runs out of memory: the allocator, the system, a thread that does not start.
const OUT_OF_MEMORY: [&str; 3] =
    ["memory allocation of", "Cannot allocate memory", "Resource temporarily unavailable"];

const METHOD: &str = "every length is one training step in a process of its own, which may map no more writable memory than \
                      gib_per_rank for each rank (RLIMIT_DATA): heap, stacks and what the allocator keeps; rows of \
                      documents of 4096 tokens";

#[derive(clap::Args)]
pub(super) struct Args {
    /// DeepSpeed-style JSON config, with the features to try.
    config: PathBuf,
    #[command(flatten)]
    set: SetFlags,
    /// Preset (nano, tiny, small, base), or directory with config.json and model.safetensors; `small` if neither this nor
    /// the config says one.
    #[arg(long)]
    model: Option<String>,
    /// Ranks: `DPxSP` or `dp=2,sp=2`; the config's mesh without it.
    #[arg(long, allow_hyphen_values = true)]
    mesh: Option<String>,
    /// Memory of each rank in GiB; the ranks of the process share the sum.
    #[arg(long, visible_alias = "memory-gib", default_value_t = 2.0, value_parser = parse_gib)]
    gib_per_rank: f64,
    /// Search anew for each of the config's features that save memory: first without them, then with one more each time.
    #[arg(long)]
    by_feature: bool,
    /// Where the search begins, if not near the longest row that is planned; at least `--resolution`.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=i64::from(LONGEST)))]
    from: Option<u32>,
    /// The search ends when the longest that fits and the shortest that does not are as close.
    #[arg(long, default_value_t = 8192, value_parser = clap::value_parser!(u32).range(1..=1 << 24))]
    resolution: u32,
    /// Threads of each rank; a fair share of the cores without it.
    #[arg(long)]
    threads_per_rank: Option<usize>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

fn parse_gib(text: &str) -> Result<f64, String> {
    let gib = text.parse().ok().filter(|gib: &f64| (LEAST_GIB..=f64::from(1 << 20)).contains(gib));
    gib.ok_or_else(|| {
        format!("it must be a number of GiB, such as 2 or 0.5, from {LEAST_GIB} on, which a process takes before it trains")
    })
}

pub(super) fn run(args: Args) -> Result<(), Failure> {
    if !cfg!(target_os = "linux") {
        return Err(Failure::Usage(anyhow!("max-seq-len limits memory as only Linux can")));
    }
    let mesh = args.mesh.as_deref().map(dp_sp).transpose()?;
    let overrides = Overrides { mesh, model: args.model.clone(), ..Overrides::default() };
    let raw = RawConfig::from_file_with(&args.config, &args.set.settings()).or_usage()?;
    let mut config = raw.resolve(&overrides).or_usage()?;
    let limit_kib = (args.gib_per_rank * config.world_size() as f64 * f64::from(1 << 20)) as u64;
    config.ulysses.model.get_or_insert_with(|| "small".to_owned());
    let model = config.require_model().or_usage()?.to_owned();
    let directory = tempfile::tempdir().context("cannot make a directory for the rows").or_run()?;
    let path = args.config.clone();
    let mut search = Search {
        args,
        model,
        mesh: format!("{}x{}", config.mesh.dp_size, config.mesh.sp_size),
        num_rows: config.train_batch_size,
        limit_kib,
        directory,
        config: path,
        attempts: Vec::new(),
    };
    if search.args.by_feature {
        return by_feature(search, &config);
    }
    if !search.args.set.is_empty() {
        search.write(&config)?;
    }
    let longest = search.longest(&config)?.map_err(|too_long| too_little(&search.args, too_long)).or_run()?;
    let planned = search.planned(&config, longest)?;
    if search.args.json {
        let mut report = search.settings();
        (report["max_seq_len"], report["attempts"]) = (longest.into(), search.attempts());
        (report["planned_max_seq_len"], report["memory"]) = (planned.max_seq_len.into(), json!(planned.step));
        return print(format_args!("{report:#}\n"));
    }
    let (mesh, gib_per_rank) = (&search.mesh, search.args.gib_per_rank);
    print(format_args!("mesh {mesh}: {longest} tokens train within {gib_per_rank} GiB per rank; {planned}\n"))
}

/// One search for every feature of the config, each added to those before it.
fn by_feature(mut search: Search, config: &Config) -> Result<(), Failure> {
    let mut found = Vec::new();
    for (feature, config) in features::cumulative(config) {
        note(format_args!("{feature}:"));
        search.write(&config)?;
        search.attempts.clear();
        let longest = search.longest(&config)?.unwrap_or(0);
        let planned = search.planned(&config, longest)?;
        found.push((feature, longest, planned, search.attempts()));
    }
    if found.iter().all(|(_, longest, ..)| *longest == 0) {
        return Err(too_little(&search.args, search.args.resolution as usize)).or_run();
    }
    if search.args.json {
        let mut report = search.settings();
        let each = found.into_iter().map(|(feature, longest, planned, attempts)| {
            json!({
                "feature": feature,
                "max_seq_len": longest,
                "planned_max_seq_len": planned.max_seq_len,
                "memory": planned.step,
                "attempts": attempts,
            })
        });
        report["features"] = each.collect();
        return print(format_args!("{report:#}\n"));
    }
    let (mesh, gib_per_rank) = (&search.mesh, search.args.gib_per_rank);
    let mut table = format!(
        "mesh {mesh}, {gib_per_rank} GiB per rank; each line adds to the one before it\n\n| settings | longest row that trained | planned |\n|---|---|---|\n"
    );
    let tokens = |longest: usize| if longest == 0 { "none".to_owned() } else { longest.to_string() };
    for (feature, longest, planned, _) in found {
        let planned = tokens(planned.max_seq_len.unwrap_or(0));
        table += &format!("| {feature} | {} | {planned} |\n", tokens(longest));
    }
    print(table)
}

fn too_little(args: &Args, too_long: usize) -> anyhow::Error {
    anyhow!("{} GiB per rank are too little for rows of {too_long} tokens", args.gib_per_rank)
}

/// What the plan says of what was found.
struct Planned {
    /// The longest row that it has room for.
    max_seq_len: Option<usize>,
    /// Of the longest row that trained, if one did.
    step: Option<StepMemory>,
}

impl Display for Planned {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let longest = self.max_seq_len.map_or_else(|| "none".to_owned(), |longest| longest.to_string());
        write!(f, "planned for what is in use: {longest}")?;
        self.step.map_or(Ok(()), |step| write!(f, "\n{step}"))
    }
}

/// One search.
struct Search {
    args: Args,
    model: String,
    mesh: String,
    /// Rows of a step.
    num_rows: usize,
    limit_kib: u64,
    directory: tempfile::TempDir,
    /// What the steps are trained by.
    config: PathBuf,
    attempts: Vec<Attempt>,
}

/// One length that was tried.
struct Attempt {
    seq_len: usize,
    fits: bool,
    seconds: f64,
    /// The most writable memory that its process had when asked.
    memory: Option<WritableMemory>,
}

impl Search {
    /// Makes the steps train by a config that is not the given file.
    fn write(&mut self, config: &Config) -> Result<(), Failure> {
        self.config = self.directory.path().join("config.json");
        let text = serde_json::to_string(config).context("cannot write the config").or_run()?;
        std::fs::write(&self.config, text).context("cannot write the config").or_run()
    }

    /// The longest length that fits, searched from `--from` or from near the longest that is planned. The shortest that
    /// was tried, where none fits.
    fn longest(&mut self, config: &Config) -> Result<Result<usize, usize>, Failure> {
        let resolution = (self.args.resolution as usize).max(config.mesh.sp_size);
        let first = self.expected(config)?;
        longest_by(first, resolution, |seq_len| self.fits(seq_len))
    }

    /// A length that may be near the longest: the plan does not count what a process maps beside what it uses.
    fn expected(&self, config: &Config) -> Result<usize, Failure> {
        let Some(from) = self.args.from else {
            let planned =
                workload(config, self.args.threads_per_rank)?.max_seq_len(self.budget()).or_usage()?;
            return Ok((planned.unwrap_or(0) / 8 * 7).min(LONGEST as usize));
        };
        Ok(from as usize)
    }

    /// Whether one training step on rows of `seq_len` tokens completes.
    fn fits(&mut self, seq_len: usize) -> Result<bool, Failure> {
        if self.attempts.is_empty() {
            // Minutes may go by until there is an answer.
            note(format_args!("trying rows of {seq_len} tokens"));
        }
        let start = Instant::now();
        let (step, memory) = self.step(seq_len).or_run()?;
        let seconds = start.elapsed().as_secs_f64();
        let fits = step.status.success();
        let said = String::from_utf8_lossy(&step.stderr);
        // Any other failure says nothing about memory.
        if !fits && !OUT_OF_MEMORY.iter().any(|sign| said.contains(sign)) {
            let cause = said.trim_end().lines().next_back().unwrap_or_default();
            let cause = cause.strip_prefix("error: ").unwrap_or(cause);
            let error = anyhow!("a step on {seq_len} tokens failed ({}): {cause}", step.status);
            return Err(if step.status.code() == Some(2) {
                Failure::Usage(error)
            } else {
                Failure::Run(error)
            });
        }
        note(format_args!("{seq_len} tokens {} ({seconds:.0} s)", if fits { "fit" } else { "do not fit" }));
        self.attempts.push(Attempt { seq_len, fits, seconds, memory });
        Ok(fits)
    }

    fn step(&self, seq_len: usize) -> Result<(Output, Option<WritableMemory>)> {
        let rows = self.directory.path().join("rows");
        write_documents(&rows, self.num_rows * seq_len)?;
        let output = self.output(seq_len);
        // The shell sets the limit on itself and becomes the step.
        let mut command = Command::new("sh");
        command
            .args(["-c", "ulimit -d \"$0\" && exec \"$@\"", &self.limit_kib.to_string()])
            .arg(std::env::current_exe().context("where is this program?")?)
            .arg("train")
            .arg(&self.config)
            .args(["--model", &self.model, "--mesh", &self.mesh, "--steps", "1"])
            .args(["--seq-len", &seq_len.to_string()])
            .args([Path::new("--data"), &rows, Path::new("--output"), &output]);
        if let Some(threads) = self.args.threads_per_rank {
            command.args(["--threads-per-rank", &threads.to_string()]);
        }
        // Without arenas, mimalloc unmaps large blocks that are freed, at once if it is told to.
        command.envs([("MIMALLOC_ARENA_RESERVE", "0"), ("MIMALLOC_PURGE_DELAY", "0")]);
        run_watched(&mut command).context("cannot start sh")
    }

    /// Where the step on rows of such a length writes.
    fn output(&self, seq_len: usize) -> PathBuf {
        self.directory.path().join(format!("output-{seq_len}"))
    }

    /// What the plan says of what was found for a config; 0 tokens where nothing fits.
    fn planned(&self, config: &Config, longest: usize) -> Result<Planned, Failure> {
        let workload = workload(config, self.args.threads_per_rank)?;
        let found = self.attempts.iter().find(|attempt| attempt.seq_len == longest);
        let step =
            |attempt: &Attempt| StepMemory::of(&workload, longest, &self.output(longest), attempt.memory);
        Ok(Planned {
            max_seq_len: workload.max_seq_len(self.budget()).or_usage()?,
            step: found.map(step).transpose()?,
        })
    }

    /// Of a rank, in bytes.
    fn budget(&self) -> u64 {
        (self.args.gib_per_rank * f64::from(1 << 30)) as u64
    }

    fn attempts(&self) -> Value {
        let attempts = self.attempts.iter().map(|Attempt { seq_len, fits, seconds, .. }| {
            json!({ "seq_len": seq_len, "fits": fits, "seconds": seconds })
        });
        attempts.collect()
    }

    fn settings(&self) -> Value {
        let Args { config, gib_per_rank, resolution, .. } = &self.args;
        let Self { model, mesh, .. } = self;
        json!({
            "bench": "max-seq-len",
            "settings": {
                "config": config, "model": model, "mesh": mesh, "gib_per_rank": gib_per_rank, "resolution": resolution,
            },
            "method": METHOD,
            "processor": processor(),
            "cores": cores(),
        })
    }
}

/// The longest length that fits, within `resolution` of one that does not: from `first` in steps that double, up while
/// lengths fit or down until one does, then by halving the gap. `Err` with the shortest that was tried, where none fits.
fn longest_by<E>(
    first: usize,
    resolution: usize,
    mut fits: impl FnMut(usize) -> Result<bool, E>,
) -> Result<Result<usize, usize>, E> {
    let mut next = first.max(resolution);
    let mut step = resolution.max(next / 8);
    let (mut longest, mut too_long) = (0, None);
    loop {
        if fits(next)? {
            longest = next
        } else {
            too_long = Some(next)
        }
        next = match too_long {
            Some(too_long) if too_long - longest <= resolution => {
                return Ok(if longest == 0 { Err(too_long) } else { Ok(longest) });
            }
            Some(too_long) if longest == 0 => too_long.saturating_sub(step).max(resolution),
            Some(too_long) => longest + (too_long - longest) / 2,
            None => longest + step,
        };
        step *= 2;
    }
}

/// Documents of [`DOCUMENT_TOKENS`] bytes, their end included, one more than `num_tokens` are.
fn write_documents(directory: &Path, num_tokens: usize) -> Result<()> {
    std::fs::create_dir_all(directory)?;
    for index in 0..num_tokens.div_ceil(DOCUMENT_TOKENS) + 1 {
        let path = directory.join(format!("{index:06}.txt"));
        if !path.exists() {
            let letters =
                (0..DOCUMENT_TOKENS - 1).map(|place| b'a' + ((place * place + index * 7) % 26) as u8);
            std::fs::write(&path, letters.collect::<Vec<u8>>())
                .with_context(|| format!("cannot write {}", path.display()))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_search_ends_within_the_resolution_of_the_longest_from_wherever_it_begins() {
        for (resolution, first) in
            [1, 7, 64].into_iter().flat_map(|r| [0, 1, 63, 64, 500, 5000].map(|f| (r, f)))
        {
            for limit in 0..600 {
                let mut tried = Vec::new();
                let found = longest_by(first, resolution, |length| {
                    tried.push(length);
                    Ok::<_, ()>(length <= limit)
                });
                let case = format!("{resolution} from {first}, {limit}: {tried:?}");
                match found.unwrap() {
                    Ok(longest) => {
                        assert!(longest <= limit && limit - longest < resolution, "{longest}: {case}")
                    }
                    Err(shortest) => {
                        assert!(shortest == resolution && limit < resolution, "{shortest}: {case}")
                    }
                }
                assert!(tried.iter().all(|length| *length >= resolution), "{case}");
                assert!(
                    tried.len() <= 6 + 2 * (first.max(limit) / resolution + 1).ilog2() as usize,
                    "{case}"
                );
                tried.sort_unstable();
                assert!(tried.is_sorted_by(|a, b| a < b), "twice: {case}");
            }
        }
        assert_eq!(longest_by(8, 1, |_| Err("broken")), Err("broken"));
    }
}
