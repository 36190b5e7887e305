//! `ulysses max-seq-len`: the longest row that trains within a memory limit, found by trying.

use super::{Failure, OrFail, dp_sp, note, print};
use anyhow::Context;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

/// Tokens of a document, its end included: attention's cost per token is the same in every row.
const DOCUMENT_TOKENS: usize = 4096;

#[derive(clap::Args)]
pub(super) struct MaxSeqLenArgs {
    /// DeepSpeed-style JSON config, with the features to try.
    config: PathBuf,
    /// Preset, or directory with config.json.
    #[arg(long, default_value = "small")]
    model: String,
    /// Ranks: `DPxSP` or `dp=2,sp=2`.
    #[arg(long, default_value = "1x1")]
    mesh: String,
    /// Memory of each rank: the process may write to as much as all of them have (RLIMIT_DATA).
    #[arg(long, default_value_t = 2.0)]
    gib_per_rank: f64,
    /// A length that is expected to fit, where the search begins.
    #[arg(long, default_value_t = 65536)]
    from: usize,
    /// The search ends when the longest that fits and the shortest that does not are as close.
    #[arg(long, default_value_t = 8192)]
    resolution: usize,
}

/// One search: lengths are tried as whole training steps in processes of their own.
struct Search {
    args: MaxSeqLenArgs,
    limit_kib: u64,
    directory: tempfile::TempDir,
}

pub(super) fn run(args: MaxSeqLenArgs) -> Result<(), Failure> {
    let (dp, sp) = dp_sp(&args.mesh)?;
    let limit_kib = (args.gib_per_rank * (dp * sp) as f64 * f64::from(1 << 20)) as u64;
    let directory = tempfile::tempdir().context("cannot make a directory for the rows").or_run()?;
    let (mesh, gib) = (args.mesh.clone(), args.gib_per_rank);
    let mut search = Search { args, limit_kib, directory };
    let longest = search.longest().or_run()?;
    print(format_args!("mesh {mesh}: {longest} tokens train within {gib} GiB per rank\n"))
}

impl Search {
    /// Doubles until a length does not fit, then halves the gap.
    fn longest(&mut self) -> anyhow::Result<usize> {
        let resolution = self.args.resolution.max(1);
        let (mut fits, mut next) = (0, self.args.from.max(resolution));
        while self.fits(next)? {
            (fits, next) = (next, 2 * next);
        }
        let mut too_long = next;
        while too_long - fits > resolution {
            let middle = fits + (too_long - fits) / 2;
            if self.fits(middle)? { fits = middle } else { too_long = middle }
        }
        Ok(fits)
    }

    /// Whether one training step on a row of `seq_len` tokens completes.
    fn fits(&self, seq_len: usize) -> anyhow::Result<bool> {
        let rows = self.directory.path().join("rows");
        write_documents(&rows, seq_len)?;
        let output = self.directory.path().join(format!("output-{seq_len}"));
        let start = Instant::now();
        // The shell sets the limit on itself and becomes the step. mimalloc takes memory as it is needed and
        // returns it at once, where it would take a gibibyte at a time.
        let status = Command::new("sh")
            .args(["-c", "ulimit -d \"$0\" && exec \"$@\"", &self.limit_kib.to_string()])
            .arg(std::env::current_exe().context("where is this program?")?)
            .arg("train")
            .arg(&self.args.config)
            .args(["--model", &self.args.model, "--mesh", &self.args.mesh, "--steps", "1"])
            .args(["--seq-len", &seq_len.to_string()])
            .args([Path::new("--data"), &rows, Path::new("--output"), &output])
            .envs([("MIMALLOC_ARENA_EAGER_COMMIT", "0"), ("MIMALLOC_PURGE_DELAY", "0")])
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .output()
            .context("cannot start sh")?;
        // Bad arguments are no answer; a step that runs out of memory aborts or fails.
        anyhow::ensure!(status.status.code() != Some(2), "{}", String::from_utf8_lossy(&status.stderr));
        let (fits, seconds) = (status.status.success(), start.elapsed().as_secs_f64());
        note(format_args!("{seq_len} tokens {} ({seconds:.0} s)", if fits { "fit" } else { "do not fit" }));
        Ok(fits)
    }
}

/// Documents of [`DOCUMENT_TOKENS`] bytes, their end included, one more than fill a row.
fn write_documents(directory: &Path, seq_len: usize) -> anyhow::Result<()> {
    std::fs::create_dir_all(directory)?;
    for index in 0..seq_len.div_ceil(DOCUMENT_TOKENS) + 1 {
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
