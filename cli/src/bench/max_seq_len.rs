//! `ulysses bench max-seq-len`: searches for the longest sequence that trains within a memory limit.

mod memory;

use super::report::{cores, cpu_name};
use super::{Failure, OrFail, print, without_ring};
use crate::config_flags::SetFlags;
use crate::output::log_line;
use crate::settings::WritableMemory;
use anyhow::{Context, Result, anyhow};
use memory::{Ended, StepMemory, run_watched, workload};
use serde::Serialize;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;
use ulysses::config::{Config, Overrides, RawConfig};

/// Memory of a process before it computes anything.
const MIN_GIB: f64 = 1.0 / 32.0;

/// Maximum start of a search.
const MAX_START: u32 = 1 << 24;

/// Tokens per document, including its end, so that attention costs the same per token at every length.
const DOCUMENT_TOKENS: usize = 4096;

/// Messages of a process that runs out of memory: from the allocator, the system, a thread that cannot start.
const OUT_OF_MEMORY: [&str; 3] =
    ["memory allocation of", "Cannot allocate memory", "Resource temporarily unavailable"];

const METHOD: &str = "each length is one training step in a process of its own, whose writable memory (heap, stacks, allocator \
                      overhead) is limited to gib_per_rank × ranks (RLIMIT_DATA); sequences are packed with documents of \
                      4096 tokens";

#[derive(clap::Args)]
pub(super) struct Args {
    /// DeepSpeed-style JSON config.
    config: PathBuf,
    #[command(flatten)]
    set: SetFlags,
    /// Model directory (config.json, model.safetensors), or preset (nano, tiny, small, base) [default: the config's, else
    /// small].
    #[arg(long)]
    model: Option<String>,
    /// Mesh: `DPxSP`, `DPxSPxTP` or `pp=2,dp=2,sp=2,tp=2` [default: the config's].
    #[arg(long, allow_hyphen_values = true)]
    mesh: Option<String>,
    /// Memory limit per rank in GiB. The limit applies to the sum over ranks, which share a process.
    #[arg(long, visible_alias = "memory-gib", default_value_t = 2.0, value_parser = parse_gib)]
    gib_per_rank: f64,
    /// First length to try [default: near the longest planned sequence]; at least --resolution.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_START)))]
    from: Option<u32>,
    /// Resolution of the search in tokens.
    #[arg(long, default_value_t = 8192, value_parser = clap::value_parser!(u32).range(1..=1 << 24))]
    resolution: u32,
    /// CPU threads per rank [default: an equal share of the cores].
    #[arg(long)]
    threads_per_rank: Option<usize>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

fn parse_gib(text: &str) -> Result<f64, String> {
    let gib = text.parse().ok().filter(|gib: &f64| (MIN_GIB..=f64::from(1 << 20)).contains(gib));
    gib.ok_or_else(|| format!("expected a number of GiB of at least {MIN_GIB}, such as 2 or 0.5"))
}

pub(super) fn run(args: Args) -> Result<(), Failure> {
    if !cfg!(target_os = "linux") {
        return Err(Failure::Usage(anyhow!("max-seq-len is only supported on Linux")));
    }
    let mesh = args.mesh.as_deref().map(without_ring).transpose()?;
    let overrides = Overrides { mesh, model: args.model.clone(), ..Overrides::default() };
    let raw = RawConfig::from_file_with(&args.config, &args.set.settings()).or_usage()?;
    let mut config = raw.resolve(&overrides).or_usage()?;
    let limit_kib = (args.gib_per_rank * config.world_size() as f64 * f64::from(1 << 20)) as u64;
    config.ulysses.model.get_or_insert_with(|| "small".to_owned());
    let is_decided = config.saves_attention_output_if_it_fits();
    if is_decided {
        // The longest sequence has no memory for it.
        config.ulysses.save_attention_output = Some(false);
    }
    let model = config.require_model().or_usage()?.to_owned();
    let directory = tempfile::tempdir().context("cannot create a temporary directory").or_run()?;
    let path = args.config.clone();
    let mut search = Search {
        args,
        model,
        mesh: config.mesh.shape().notation(),
        batch_size: config.train_batch_size,
        limit_kib,
        directory,
        config: path,
        attempts: Vec::new(),
    };
    if is_decided || !search.args.set.is_empty() {
        search.write(&config)?;
    }
    let found = search.find(&config)?;
    if found.max_seq_len == 0 {
        let (gib_per_rank, tokens) = (search.args.gib_per_rank, search.resolution(&config));
        let message = format!("{gib_per_rank} GiB per rank is too little for sequences of {tokens} tokens");
        return Err(Failure::Run(anyhow!(message)));
    }
    match search.args.json {
        true => print(format_args!("{:#}\n", search.to_json(&found))),
        false => print(search.to_text(&found)),
    }
}

/// The longest sequence with a config.
struct Found {
    /// The longest sequence that trained; 0 if none did.
    max_seq_len: usize,
    /// The longest sequence that fits by the plan.
    planned_max_seq_len: Option<usize>,
    /// Memory of the step on the longest sequence that trained, if any.
    memory: Option<StepMemory>,
    attempts: Vec<Attempt>,
}

/// The state of a search.
struct Search {
    args: Args,
    model: String,
    mesh: String,
    /// Sequences per step.
    batch_size: usize,
    limit_kib: u64,
    directory: tempfile::TempDir,
    /// The config that steps train with.
    config: PathBuf,
    attempts: Vec<Attempt>,
}

/// A tried length.
#[derive(Serialize)]
struct Attempt {
    seq_len: usize,
    fits: bool,
    seconds: f64,
    /// Maximum observed writable memory of its process.
    #[serde(skip)]
    memory: Option<WritableMemory>,
}

impl Search {
    /// Writes a config other than the given file for the steps.
    fn write(&mut self, config: &Config) -> Result<(), Failure> {
        self.config = self.directory.path().join("config.json");
        let text = serde_json::to_string(config).context("cannot write the config").or_run()?;
        std::fs::write(&self.config, text).context("cannot write the config").or_run()
    }

    /// Searches for the longest length that fits, from `--from` or near the longest planned one.
    fn find(&mut self, config: &Config) -> Result<Found, Failure> {
        let workload = workload(config, self.args.threads_per_rank)?;
        let bytes_per_rank = (self.args.gib_per_rank * f64::from(1 << 30)) as u64;
        let planned_max_seq_len = workload.max_seq_len(bytes_per_rank).or_usage()?;
        // The plan does not count memory that is mapped but unused.
        let expected = (planned_max_seq_len.unwrap_or(0) / 8 * 7).min(MAX_START as usize);
        let first = self.args.from.map_or(expected, |from| from as usize);
        let resolution = self.resolution(config);
        let longest = longest_by(first, resolution, |seq_len| self.fits(seq_len))?;
        let attempts = std::mem::take(&mut self.attempts);
        let found = attempts.iter().find(|attempt| longest == Some(attempt.seq_len));
        let memory = |Attempt { seq_len, memory, .. }: &Attempt| {
            StepMemory::of(&workload, *seq_len, &self.output(*seq_len), *memory)
        };
        let memory = found.map(memory).transpose()?;
        Ok(Found { max_seq_len: longest.unwrap_or(0), planned_max_seq_len, memory, attempts })
    }

    fn resolution(&self, config: &Config) -> usize {
        (self.args.resolution as usize).max(config.mesh.ranks_per_sequence())
    }

    /// Returns whether one training step on sequences of `seq_len` tokens completes.
    fn fits(&mut self, seq_len: usize) -> Result<bool, Failure> {
        if self.attempts.is_empty() {
            // The first result may take minutes.
            log_line(format_args!("trying sequences of {seq_len} tokens"));
        }
        let start = Instant::now();
        let Ended { status, stderr, memory } = self.step(seq_len).or_run()?;
        let seconds = start.elapsed().as_secs_f64();
        let fits = status.success();
        // Any other failure is an error of the search.
        if !fits && !OUT_OF_MEMORY.iter().any(|sign| stderr.contains(sign)) {
            let cause = stderr.trim_end().lines().next_back().unwrap_or_default();
            let cause = cause.strip_prefix("error: ").unwrap_or(cause);
            let error = anyhow!("a step on {seq_len} tokens failed ({status}): {cause}");
            return Err(if status.code() == Some(2) { Failure::Usage(error) } else { Failure::Run(error) });
        }
        log_line(format_args!(
            "{seq_len} tokens {} ({seconds:.0} s)",
            if fits { "fit" } else { "do not fit" }
        ));
        self.attempts.push(Attempt { seq_len, fits, seconds, memory });
        Ok(fits)
    }

    fn step(&self, seq_len: usize) -> Result<Ended> {
        let data = self.directory.path().join("data");
        write_documents(&data, self.batch_size * seq_len)?;
        let output = self.output(seq_len);
        // The shell limits itself and then executes the step.
        let mut command = Command::new("sh");
        command
            .args(["-c", "ulimit -d \"$0\" && exec \"$@\"", &self.limit_kib.to_string()])
            .arg(std::env::current_exe().context("cannot find the path of this program")?)
            .arg("train")
            .arg(&self.config)
            .args(["--model", &self.model, "--mesh", &self.mesh, "--steps", "1"])
            // The limit is on host memory.
            .args(["--device", "cpu", "--backend", "thread"])
            .args(["--seq-len", &seq_len.to_string()])
            .args([Path::new("--data"), &data, Path::new("--output"), &output]);
        if let Some(threads) = self.args.threads_per_rank {
            command.args(["--threads-per-rank", &threads.to_string()]);
        }
        // Without arenas and purge delay, mimalloc unmaps large freed blocks at once.
        command.envs([("MIMALLOC_ARENA_RESERVE", "0"), ("MIMALLOC_PURGE_DELAY", "0")]);
        run_watched(&mut command).context("cannot start sh")
    }

    /// Returns the output directory of the step at a length.
    fn output(&self, seq_len: usize) -> PathBuf {
        self.directory.path().join(format!("output-{seq_len}"))
    }

    fn to_json(&self, found: &Found) -> Value {
        let Args { config, gib_per_rank, resolution, .. } = &self.args;
        let Self { model, mesh, .. } = self;
        json!({
            "bench": "max-seq-len",
            "settings": {
                "config": config, "model": model, "mesh": mesh, "gib_per_rank": gib_per_rank, "resolution": resolution,
            },
            "method": METHOD,
            "processor": cpu_name(),
            "cores": cores(),
            "max_seq_len": found.max_seq_len,
            "planned_max_seq_len": found.planned_max_seq_len,
            "memory": found.memory,
            "attempts": found.attempts,
        })
    }

    fn to_text(&self, Found { max_seq_len, planned_max_seq_len, memory, .. }: &Found) -> String {
        let (mesh, gib_per_rank) = (&self.mesh, self.args.gib_per_rank);
        let planned = planned_max_seq_len.map_or_else(|| "none".to_owned(), |longest| longest.to_string());
        let memory = memory.map_or_else(String::new, |memory| format!("\n{memory}"));
        format!(
            "mesh {mesh}: longest sequence within {gib_per_rank} GiB per rank: {max_seq_len} tokens; planned: \
             {planned}{memory}\n"
        )
    }
}

/// Returns the longest length that fits, within `resolution` of one that does not; `None` if `resolution` does not fit.
/// Moves from `first` in doubling steps, up while lengths fit or down until one does, then bisects.
fn longest_by<E>(
    first: usize,
    resolution: usize,
    mut fits: impl FnMut(usize) -> Result<bool, E>,
) -> Result<Option<usize>, E> {
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
                return Ok(Some(longest).filter(|longest| *longest > 0));
            }
            Some(too_long) if longest == 0 => too_long.saturating_sub(step).max(resolution),
            Some(too_long) => longest + (too_long - longest) / 2,
            None => longest + step,
        };
        step *= 2;
    }
}

/// Writes documents of [`DOCUMENT_TOKENS`] tokens, including their end: one more than `num_tokens` require.
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
    fn the_search_ends_within_its_resolution_from_any_start() {
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
                    Some(longest) => {
                        assert!(longest <= limit && limit - longest < resolution, "{longest}: {case}")
                    }
                    None => assert!(tried.contains(&resolution) && limit < resolution, "{case}"),
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
