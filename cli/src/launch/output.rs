//! The output of processes, forwarded line by line with the rank as prefix.

use anyhow::Context;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;

/// Maximum bytes of a stored line.
const MAX_LINE_BYTES: usize = 500;
/// Maximum bytes of a forwarded line: a process that prints no newline must not exhaust the memory of `launch`.
const MAX_FORWARDED_BYTES: usize = 64 << 10;
/// Minimum number of the last lines of `mpirun` to store: they say why it ended.
const MIN_MPIRUN_LINES: usize = 1000;
/// Mark at the end of a line that was cut there; the rest follows as further lines.
const CUT: &str = " [line cut by launch]";

/// The source of a process's lines.
#[derive(Clone, Copy)]
pub(super) enum Source {
    /// The process is this rank.
    Rank(usize),
    /// The process is `mpirun`, which prefixes the lines of ranks.
    Mpirun(MpiLauncher),
}

/// An implementation of `mpirun`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MpiLauncher {
    /// With `--tag-output` it prefixes lines of rank 3 with `[1,3]<stderr>:`.
    OpenMpi,
    /// That of MPICH and Intel MPI. With `-prepend-rank` it prefixes lines of rank 3 with `[3] `.
    Hydra,
}

/// Files with the output of each rank, besides that of this process. Restarts append.
#[derive(Debug)]
pub(super) struct RankLogs {
    directory: PathBuf,
    files: Mutex<BTreeMap<usize, File>>,
}

impl RankLogs {
    /// Creates the directory if it is missing.
    ///
    /// # Errors
    /// A directory that cannot be created.
    pub(super) fn in_directory(directory: PathBuf) -> anyhow::Result<Self> {
        let refused = || format!("--log-dir: cannot create {}", directory.display());
        std::fs::create_dir_all(&directory).with_context(refused)?;
        Ok(Self { directory, files: Mutex::default() })
    }

    /// Appends a line to the file of a rank.
    fn write(&self, rank: usize, line: &str) -> std::io::Result<()> {
        let mut files = self.files.lock();
        let file = match files.entry(rank) {
            Entry::Occupied(open) => open.into_mut(),
            Entry::Vacant(new) => {
                let path = self.directory.join(format!("rank_{rank}.log"));
                new.insert(ulysses::regular_file::append(&path)?)
            }
        };
        file.write_all(format!("{line}\n").as_bytes())
    }
}

/// A line without its newline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Line<'a> {
    /// The rank that has written it; `None` for `mpirun` itself.
    rank: Option<usize>,
    text: &'a str,
}

/// The last lines of standard error.
#[derive(Default)]
pub(super) struct StderrTail {
    /// The last non-empty line of each rank.
    pub(super) last_lines: BTreeMap<usize, String>,
    /// The last lines of `mpirun` itself.
    pub(super) mpirun: Vec<String>,
}

impl StderrTail {
    fn record(&mut self, line: Line<'_>) {
        let Line { rank, text } = line;
        if text.trim().is_empty() {
            return;
        }
        let mut ends = (0..=text.len().min(MAX_LINE_BYTES)).rev();
        let end = ends.find(|end| text.is_char_boundary(*end)).unwrap_or(0);
        let line = text[..end].to_owned();
        match rank {
            None => {
                if self.mpirun.len() == 2 * MIN_MPIRUN_LINES {
                    self.mpirun.drain(..MIN_MPIRUN_LINES);
                }
                self.mpirun.push(line);
            }
            Some(rank) => _ = self.last_lines.insert(rank, line),
        }
    }
}

impl Source {
    /// Finds out which rank has written a line.
    fn attribute(self, text: &str) -> Line<'_> {
        match self {
            Self::Rank(rank) => Line { rank: Some(rank), text },
            Self::Mpirun(launcher) => launcher.untag(text).unwrap_or(Line { rank: None, text }),
        }
    }
}

impl MpiLauncher {
    /// Parses `[1,3]<stdout>:text` or `[3] text` into rank 3 and `text`.
    fn untag(self, line: &str) -> Option<Line<'_>> {
        let rest = line.strip_prefix('[')?;
        let (rank, text) = match self {
            Self::OpenMpi => {
                let (rank, rest) = rest.split_once(',')?.1.split_once("]<std")?;
                (rank, rest.strip_prefix("out>:").or_else(|| rest.strip_prefix("err>:"))?)
            }
            Self::Hydra => rest.split_once("] ")?,
        };
        Some(Line { rank: Some(rank.parse().ok()?), text })
    }
}

/// Starts a thread that forwards lines with the prefix `[rank] ` until the end of input, and records them in `tail` and in the
/// `logs` of the ranks.
///
/// # Errors
/// A thread that cannot be started.
pub(super) fn forward_output(
    from: impl Read + Send + 'static,
    mut to: impl Write + Send + 'static,
    source: Source,
    tail: Option<Arc<Mutex<StderrTail>>>,
    logs: Option<Arc<RankLogs>>,
) -> std::io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name("output".to_owned()).spawn(move || {
        let mut from = BufReader::new(from);
        let mut bytes = Vec::new();
        let mut last_rank = None;
        let mut continues = false;
        while let Ok(1..) = from.by_ref().take(MAX_FORWARDED_BYTES as u64).read_until(b'\n', &mut bytes) {
            let is_cut = bytes.len() == MAX_FORWARDED_BYTES && !bytes.ends_with(b"\n");
            let mut line = String::from_utf8_lossy(&bytes);
            if is_cut {
                line.to_mut().push_str(CUT);
            }
            let text = line.trim_end_matches(['\n', '\r']);
            // The rest of a line has no prefix of `mpirun`.
            let line = if continues { Line { rank: last_rank, text } } else { source.attribute(text) };
            let Line { rank, text } = line;
            (last_rank, continues) = (rank, is_cut);
            if let Some(tail) = &tail {
                tail.lock().record(line);
            }
            if let (Some(logs), Some(rank)) = (&logs, rank) {
                // A full disk does not end the job.
                let _ = logs.write(rank, text);
            }
            // One write per line, so that lines of several ranks do not mix. A closed output is no error.
            let prefixed = match rank {
                Some(rank) => format!("[{rank}] {text}\n"),
                None => format!("[mpirun] {text}\n"),
            };
            let _ = to.write_all(prefixed.as_bytes()).and_then(|()| to.flush());
            bytes.clear();
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_mpirun_and_of_its_ranks_are_distinguished() {
        let from = |rank, text| Line { rank: Some(rank), text };
        let of_mpirun = |text| Line { rank: None, text };
        let attribute = |line| Source::Mpirun(MpiLauncher::OpenMpi).attribute(line);
        assert_eq!(
            attribute("[1,12]<stderr>:error: no [1,2]<stdout>:"),
            from(12, "error: no [1,2]<stdout>:")
        );
        assert_eq!(attribute("[1,0]<stdout>:"), from(0, ""));
        for own in ["mpirun noticed that", "[host:12] [1,2] x", "[1,x]<stdout>:y", ""] {
            assert_eq!(attribute(own), of_mpirun(own));
        }
        let attribute = |line| Source::Mpirun(MpiLauncher::Hydra).attribute(line);
        assert_eq!(attribute("[12] error: [1] x"), from(12, "error: [1] x"));
        assert_eq!(attribute("[proxy:0:0@n1] x"), of_mpirun("[proxy:0:0@n1] x"));
        assert_eq!(Source::Rank(3).attribute("[1,0]<stdout>:x"), from(3, "[1,0]<stdout>:x"));
    }

    #[test]
    fn only_the_last_lines_of_mpirun_are_stored() {
        let mut tail = StderrTail::default();
        for index in 0..10 * MIN_MPIRUN_LINES {
            tail.record(Line { rank: None, text: &format!("line {index}") });
        }
        assert!((MIN_MPIRUN_LINES..=2 * MIN_MPIRUN_LINES).contains(&tail.mpirun.len()));
        assert_eq!(tail.mpirun.last().unwrap(), "line 9999");
    }

    #[test]
    fn a_line_without_end_is_cut_with_a_mark() {
        let place = tempfile::tempdir().unwrap();
        let logs = Arc::new(RankLogs::in_directory(place.path().to_owned()).unwrap());
        let text = format!("[1,3]<stdout>:{}\n[1,2]<stdout>:b\n", "a".repeat(2 * MAX_FORWARDED_BYTES));
        let source = Source::Mpirun(MpiLauncher::OpenMpi);
        forward_output(std::io::Cursor::new(text), std::io::sink(), source, None, Some(logs))
            .unwrap()
            .join()
            .unwrap();
        let log = |rank| std::fs::read_to_string(place.path().join(format!("rank_{rank}.log"))).unwrap();
        let parts: Vec<String> = log(3).lines().map(str::to_owned).collect();
        assert_eq!(parts.len(), 3);
        assert!(parts[..2].iter().all(|part| part.ends_with(CUT)), "two parts are as long as allowed");
        assert!(parts.iter().all(|part| part.len() <= MAX_FORWARDED_BYTES + CUT.len()));
        let all: usize = parts.iter().map(|part| part.trim_end_matches(CUT).len()).sum();
        assert_eq!((all, log(2).as_str()), (2 * MAX_FORWARDED_BYTES, "b\n"), "nothing is lost");
    }

    #[test]
    fn the_last_line_of_each_rank_is_recorded_and_all_are_logged() {
        let tail = Arc::new(Mutex::new(StderrTail::default()));
        let text = "[1,0]<stderr>:a\n[1,1]<stderr>:b\n[1,0]<stderr>:c\n[1,0]<stderr>:\nmpirun: d";
        let place = tempfile::tempdir().unwrap();
        let logs = Arc::new(RankLogs::in_directory(place.path().join("logs")).unwrap());
        let source = Source::Mpirun(MpiLauncher::OpenMpi);
        forward_output(text.as_bytes(), std::io::sink(), source, Some(tail.clone()), Some(logs))
            .unwrap()
            .join()
            .unwrap();
        let tail = tail.lock();
        assert_eq!(tail.last_lines, BTreeMap::from([(0, "c".to_owned()), (1, "b".to_owned())]));
        assert_eq!(tail.mpirun, ["mpirun: d"]);
        let log = |rank| std::fs::read_to_string(place.path().join(format!("logs/rank_{rank}.log"))).unwrap();
        assert_eq!((log(0).as_str(), log(1).as_str()), ("a\nc\n\n", "b\n"));
    }
}
