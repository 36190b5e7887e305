//! What processes say, line by line, with who says it.

use parking_lot::Mutex;
use std::io::{BufRead, BufReader, Read, Write};
use std::sync::Arc;
use std::thread::JoinHandle;

/// Longest line that is kept in mind, in bytes.
const MAX_REMEMBERED_BYTES: usize = 500;

/// How a process's lines tell which rank they are of.
#[derive(Clone, Copy)]
pub(super) enum Speaker {
    /// The process is this rank.
    Rank(usize),
    /// It is `mpirun --tag-output`, which puts `[1,3]<stderr>:` before what rank 3 says.
    Mpirun,
}

/// What is remembered of what was said on standard error.
#[derive(Default)]
pub(super) struct Said {
    /// The last line of each rank that has said something.
    pub(super) last: Vec<(usize, String)>,
    /// What `mpirun` itself has said.
    pub(super) mpirun: Vec<String>,
}

impl Said {
    /// The last line of a rank that was not empty.
    pub(super) fn last_of(&self, rank: usize) -> Option<&str> {
        self.last.iter().find(|(of, _)| *of == rank).map(|(_, line)| line.as_str())
    }

    fn remember(&mut self, rank: Option<usize>, line: &str) {
        if line.trim().is_empty() {
            return;
        }
        let mut end = line.len().min(MAX_REMEMBERED_BYTES);
        while !line.is_char_boundary(end) {
            end -= 1;
        }
        let line = line[..end].to_owned();
        match rank {
            None => self.mpirun.push(line),
            Some(rank) => match self.last.iter_mut().find(|(of, _)| *of == rank) {
                Some((_, last)) => *last = line,
                None => self.last.push((rank, line)),
            },
        }
    }
}

impl Speaker {
    /// The rank, if it is one that speaks, and its words.
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

/// `[1,3]<stdout>:words` is rank 3's `words`.
fn untag(line: &str) -> Option<(usize, &str)> {
    let (_job, rest) = line.strip_prefix('[')?.split_once(',')?;
    let (rank, rest) = rest.split_once("]<std")?;
    let words = rest.strip_prefix("out>:").or_else(|| rest.strip_prefix("err>:"))?;
    Some((rank.parse().ok()?, words))
}

/// Passes lines on with `[rank] ` before them, on a thread of its own, until there are no more. Those of standard
/// error are remembered in `said`. An error is that of a thread that does not start.
pub(super) fn pass_on(
    from: impl Read + Send + 'static,
    mut to: impl Write + Send + 'static,
    speaker: Speaker,
    said: Option<Arc<Mutex<Said>>>,
) -> std::io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name("output".to_owned()).spawn(move || {
        let mut from = BufReader::new(from);
        let mut bytes = Vec::new();
        while let Ok(1..) = from.read_until(b'\n', &mut bytes) {
            let line = String::from_utf8_lossy(&bytes);
            let (rank, words) = speaker.attribute(line.trim_end_matches(['\n', '\r']));
            if let Some(said) = &said {
                said.lock().remember(rank, words);
            }
            // One write for each line: those of several ranks do not mix. A reader that has gone away has seen enough.
            let prefixed = match rank {
                Some(rank) => format!("[{rank}] {words}\n"),
                None => format!("[mpirun] {words}\n"),
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
    fn lines_of_mpirun_are_told_from_those_of_its_ranks() {
        let attribute = |line| Speaker::Mpirun.attribute(line);
        assert_eq!(
            attribute("[1,12]<stderr>:error: no [1,2]<stdout>:"),
            (Some(12), "error: no [1,2]<stdout>:")
        );
        assert_eq!(attribute("[1,0]<stdout>:"), (Some(0), ""));
        for own in ["mpirun noticed that", "[host:12] [1,2] x", "[1,x]<stdout>:y", ""] {
            assert_eq!(attribute(own), (None, own));
        }
        assert_eq!(Speaker::Rank(3).attribute("[1,0]<stdout>:x"), (Some(3), "[1,0]<stdout>:x"));
    }

    #[test]
    fn the_last_line_that_says_something_is_remembered_for_each_rank() {
        let said = Arc::new(Mutex::new(Said::default()));
        let text = "[1,0]<stderr>:a\n[1,1]<stderr>:b\n[1,0]<stderr>:c\n[1,0]<stderr>:\nmpirun: d";
        pass_on(text.as_bytes(), std::io::sink(), Speaker::Mpirun, Some(said.clone()))
            .unwrap()
            .join()
            .unwrap();
        let said = said.lock();
        assert_eq!((said.last_of(0), said.last_of(1), said.last_of(2)), (Some("c"), Some("b"), None));
        assert_eq!(said.mpirun, ["mpirun: d"]);
    }
}
