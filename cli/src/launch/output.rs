//! The output of processes, forwarded line by line with the rank as prefix.

use parking_lot::Mutex;
use std::io::{BufRead, BufReader, Read, Write};
use std::sync::Arc;
use std::thread::JoinHandle;

/// Maximum bytes of a stored line.
const MAX_LINE_BYTES: usize = 500;

/// The source of a process's lines.
#[derive(Clone, Copy)]
pub(super) enum Source {
    /// The process is this rank.
    Rank(usize),
    /// The process is `mpirun --tag-output`, which prefixes lines of rank 3 with `[1,3]<stderr>:`.
    Mpirun,
}

/// The last lines of standard error.
#[derive(Default)]
pub(super) struct StderrTail {
    /// The last non-empty line of each rank.
    pub(super) last_lines: Vec<(usize, String)>,
    /// All lines of `mpirun` itself.
    pub(super) mpirun: Vec<String>,
}

impl StderrTail {
    /// Returns the last non-empty line of a rank.
    pub(super) fn last_line(&self, rank: usize) -> Option<&str> {
        self.last_lines.iter().find(|(of, _)| *of == rank).map(|(_, line)| line.as_str())
    }

    fn record(&mut self, rank: Option<usize>, line: &str) {
        if line.trim().is_empty() {
            return;
        }
        let mut end = line.len().min(MAX_LINE_BYTES);
        while !line.is_char_boundary(end) {
            end -= 1;
        }
        let line = line[..end].to_owned();
        match rank {
            None => self.mpirun.push(line),
            Some(rank) => match self.last_lines.iter_mut().find(|(of, _)| *of == rank) {
                Some((_, last)) => *last = line,
                None => self.last_lines.push((rank, line)),
            },
        }
    }
}

impl Source {
    /// Splits a line into its rank, if any, and its text.
    fn attribute(self, line: &str) -> (Option<usize>, &str) {
        match self {
            Self::Rank(rank) => (Some(rank), line),
            Self::Mpirun => match untag(line) {
                Some((rank, line)) => (Some(rank), line),
                None => (None, line),
            },
        }
    }
}

/// Parses `[1,3]<stdout>:text` into rank 3 and `text`.
fn untag(line: &str) -> Option<(usize, &str)> {
    let (_job, rest) = line.strip_prefix('[')?.split_once(',')?;
    let (rank, rest) = rest.split_once("]<std")?;
    let text = rest.strip_prefix("out>:").or_else(|| rest.strip_prefix("err>:"))?;
    Some((rank.parse().ok()?, text))
}

/// Starts a thread that forwards lines with the prefix `[rank] ` until the end of input, and records them in `tail`.
///
/// # Errors
/// A thread that cannot be started.
pub(super) fn forward_output(
    from: impl Read + Send + 'static,
    mut to: impl Write + Send + 'static,
    source: Source,
    tail: Option<Arc<Mutex<StderrTail>>>,
) -> std::io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name("output".to_owned()).spawn(move || {
        let mut from = BufReader::new(from);
        let mut bytes = Vec::new();
        while let Ok(1..) = from.read_until(b'\n', &mut bytes) {
            let line = String::from_utf8_lossy(&bytes);
            let (rank, text) = source.attribute(line.trim_end_matches(['\n', '\r']));
            if let Some(tail) = &tail {
                tail.lock().record(rank, text);
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
        let attribute = |line| Source::Mpirun.attribute(line);
        assert_eq!(
            attribute("[1,12]<stderr>:error: no [1,2]<stdout>:"),
            (Some(12), "error: no [1,2]<stdout>:")
        );
        assert_eq!(attribute("[1,0]<stdout>:"), (Some(0), ""));
        for own in ["mpirun noticed that", "[host:12] [1,2] x", "[1,x]<stdout>:y", ""] {
            assert_eq!(attribute(own), (None, own));
        }
        assert_eq!(Source::Rank(3).attribute("[1,0]<stdout>:x"), (Some(3), "[1,0]<stdout>:x"));
    }

    #[test]
    fn the_last_non_empty_line_of_each_rank_is_recorded() {
        let tail = Arc::new(Mutex::new(StderrTail::default()));
        let text = "[1,0]<stderr>:a\n[1,1]<stderr>:b\n[1,0]<stderr>:c\n[1,0]<stderr>:\nmpirun: d";
        forward_output(text.as_bytes(), std::io::sink(), Source::Mpirun, Some(tail.clone()))
            .unwrap()
            .join()
            .unwrap();
        let tail = tail.lock();
        assert_eq!((tail.last_line(0), tail.last_line(1), tail.last_line(2)), (Some("c"), Some("b"), None));
        assert_eq!(tail.mpirun, ["mpirun: d"]);
    }
}
