//! Process-wide settings and resource limits.

#![allow(unsafe_code, reason = "settings of the allocator and the system")]

use super::progress::above_progress;
use serde::Serialize;
use std::fmt;
use std::io::{IsTerminal, Write};
use std::sync::OnceLock;
use tracing::level_filters::LevelFilter;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields, FormattedFields};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer};
use ulysses::monitor::{Tracer, brief};
use ulysses::trainer::job::proc_bytes;

/// The planned peak memory per rank, for out-of-memory errors.
pub(crate) static PLANNED_PEAK: OnceLock<String> = OnceLock::new();

/// Limits candle to one thread, unless the user overrides it: candle's global pool would be shared by all ranks, which
/// have thread pools of their own.
pub(crate) fn limit_candle_threads() {
    const VARIABLE: &str = "CANDLE_NUM_THREADS";
    if std::env::var_os(VARIABLE).is_none() {
        // SAFETY: called first thing in `main`, while the process has one thread.
        unsafe { std::env::set_var(VARIABLE, "1") };
    }
}

/// Catches the signal of a write beyond the file size limit (`ulimit -f`), so that the write fails with an error that
/// names the file.
pub(crate) fn survive_file_size_limit() {
    if let Err(error) = signal_hook::flag::register(signal_hook::consts::SIGXFSZ, std::sync::Arc::default()) {
        tracing::warn!("cannot catch SIGXFSZ: {error}");
    }
}

/// Starts logging to standard error, filtered by `RUST_LOG` (default: warnings). A tracer receives all spans of the
/// library.
pub(crate) fn start_logging(tracer: Option<&Tracer>) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("warn"));
    let lines = tracing_subscriber::fmt::layer()
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(|| LogLine)
        .event_format(LineFormat)
        .with_filter(filter);
    let registry = tracing_subscriber::registry().with(lines);
    match tracer {
        // Without a tracer, disabled spans cost nothing.
        None => registry.init(),
        Some(tracer) => {
            let spans = Targets::new().with_target("ulysses", LevelFilter::TRACE);
            registry.with(tracer.clone().with_filter(spans)).init();
        }
    }
}

/// Formats an event as the program's other lines, such as `warning: the spans: the message`.
struct LineFormat;

impl<S, N> FormatEvent<S, N> for LineFormat
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut line: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let level = match *event.metadata().level() {
            Level::WARN => "warning".to_owned(),
            other => other.to_string().to_lowercase(),
        };
        write!(line, "{level}: ")?;
        for span in context.event_scope().into_iter().flat_map(|scope| scope.from_root()) {
            write!(line, "{}", span.name())?;
            if let Some(fields) =
                span.extensions().get::<FormattedFields<N>>().filter(|fields| !fields.is_empty())
            {
                write!(line, "{{{fields}}}")?;
            }
            write!(line, ":")?;
        }
        if context.lookup_current().is_some() {
            write!(line, " ")?;
        }
        context.format_fields(line.by_ref(), event)?;
        writeln!(line)
    }
}

/// Writes to standard error above the live progress line.
struct LogLine;

impl Write for LogLine {
    fn write(&mut self, line: &[u8]) -> std::io::Result<usize> {
        let text = String::from_utf8_lossy(line);
        let text = brief(&text);
        let end = if text.ends_with('\n') { "" } else { "\n" };
        above_progress(|| std::io::stderr().write_all(format!("{text}{end}").as_bytes()))?;
        Ok(line.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        std::io::stderr().flush()
    }
}

/// Writable memory of a process (`self` is this one).
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(super) struct WritableMemory {
    /// Private writable bytes that it has mapped, as RLIMIT_DATA counts them.
    pub(super) mapped: u64,
    /// Resident anonymous bytes.
    pub(super) resident: u64,
}

impl WritableMemory {
    /// Returns the maximum of each field.
    pub(super) fn max(self, other: Self) -> Self {
        Self { mapped: self.mapped.max(other.mapped), resident: self.resident.max(other.resident) }
    }
}

/// Reads the writable memory of a process; `None` on systems without `/proc`.
pub(super) fn writable_memory(process: &str) -> Option<WritableMemory> {
    let path = format!("/proc/{process}/status");
    let bytes = |label| proc_bytes(&path, label);
    Some(WritableMemory { mapped: bytes("VmData:")?, resident: bytes("RssAnon:")? })
}
