//! The process that tokenizes, as its parent sees it.

use super::limits::Limits;
use super::protocol::{self, Reply, Request};
use crate::config::ChatDate;
use crate::data::Tokenizer;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::Signal;
use std::fmt;
use std::io::{self, ErrorKind, Read};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

/// Bytes of standard error that are read.
const MAX_MESSAGE: u64 = 4096;

/// A process. It ends when its standard input is closed.
#[derive(Debug)]
pub(super) struct Process {
    child: Child,
    /// None after the end.
    input: Option<ChildStdin>,
    output: ChildStdout,
    tokenizer_bytes: u64,
}

/// Why a process ended. Its text continues "the tokenizer …".
#[derive(Debug)]
pub(super) enum Ended {
    Time(u64),
    Memory(u64),
    Stack,
    Flood(u64),
    Silence(Duration),
    Other(String),
}

impl fmt::Display for Ended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Time(seconds) => write!(f, "takes more than {seconds} s of processor time"),
            Self::Memory(bytes) => write!(f, "takes more than {} MiB of memory", bytes >> 20),
            Self::Stack => f.write_str("overflows the stack: something is nested too deeply"),
            Self::Flood(bytes) => write!(f, "makes more than {} MiB of tokens", bytes >> 20),
            Self::Silence(limit) => write!(f, "gives no answer within {} s", limit.as_secs()),
            Self::Other(reason) => write!(f, "ends its process: {reason}"),
        }
    }
}

impl Process {
    pub(super) fn start(program: &Path, tokenizer: &Path, date: ChatDate) -> io::Result<Self> {
        let mut command = Command::new(program);
        command.arg(Tokenizer::WORKER).arg(tokenizer).arg(date.to_string());
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        // mimalloc would map its first GiB as writable, which is more than the limit.
        command.env("MIMALLOC_ARENA_EAGER_COMMIT", "0");
        // Nobody reads its log.
        command.env("RUST_LOG", "off");
        // Signals to the group of the parent are the parent's to handle.
        let mut child = command.process_group(0).spawn()?;
        let (Some(input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(io::Error::other("it has no pipes"));
        };
        let tokenizer_bytes = std::fs::metadata(tokenizer).map_or(0, |metadata| metadata.len());
        Ok(Self { child, input: Some(input), output, tokenizer_bytes })
    }

    pub(super) fn call(&mut self, request: &Request<'_>) -> Result<Reply, Ended> {
        let request = protocol::encode(request).map_err(|error| Ended::Other(error.to_string()))?;
        let limits = Limits::new(self.tokenizer_bytes, request.len() as u64);
        let sent = self.input.as_mut().map(|input| protocol::write(input, &request));
        if !matches!(sent, Some(Ok(()))) {
            return Err(self.ended(limits, ErrorKind::BrokenPipe));
        }
        self.read(limits)
    }

    /// Reads the reply to no request: that the tokenizer is loaded.
    pub(super) fn read_reply(&mut self) -> Result<Reply, Ended> {
        self.read(Limits::new(self.tokenizer_bytes, 0))
    }

    fn read(&mut self, limits: Limits) -> Result<Reply, Ended> {
        let mut output = Within { output: &mut self.output, until: Instant::now() + limits.silence() };
        let reply =
            protocol::read(&mut output, limits.reply_bytes).and_then(|reply| protocol::decode(&reply));
        reply.map_err(|error| self.ended(limits, error.kind()))
    }

    /// Ends the process and returns why it failed.
    fn ended(&mut self, limits: Limits, error: ErrorKind) -> Ended {
        self.input = None;
        // What has not ended yet is past its limits or has closed its output, which it does at its end.
        if matches!(error, ErrorKind::FileTooLarge | ErrorKind::TimedOut) {
            let _ = self.child.kill();
        }
        let status = self.child.wait();
        let mut message = Vec::new();
        if let Some(errors) = self.child.stderr.take() {
            let _ = errors.take(MAX_MESSAGE).read_to_end(&mut message);
        }
        let message = String::from_utf8_lossy(&message);
        let signal = status.as_ref().ok().and_then(ExitStatusExt::signal);
        match error {
            ErrorKind::FileTooLarge => Ended::Flood(limits.reply_bytes),
            ErrorKind::TimedOut => Ended::Silence(limits.silence()),
            _ if signal == Some(Signal::XCPU.as_raw()) => Ended::Time(limits.cpu_seconds),
            _ if message.contains("overflowed its stack") => Ended::Stack,
            _ if message.contains("memory") => Ended::Memory(limits.memory_bytes),
            _ => Ended::Other(match status {
                Ok(status) => format!("{status} {}", message.trim()).trim_end().to_owned(),
                Err(error) => error.to_string(),
            }),
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.input = None;
        let _ = self.child.wait();
    }
}

/// Reads until a moment, then fails with [`ErrorKind::TimedOut`].
struct Within<'a> {
    output: &'a mut ChildStdout,
    until: Instant,
}

impl Read for Within<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = self.until.saturating_duration_since(Instant::now());
        let left = Timespec { tv_sec: left.as_secs().cast_signed(), tv_nsec: left.subsec_nanos().into() };
        let ready = poll(&mut [PollFd::new(self.output, PollFlags::IN)], Some(&left))?;
        if ready == 0 {
            return Err(ErrorKind::TimedOut.into());
        }
        self.output.read(buffer)
    }
}
