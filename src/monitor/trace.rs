//! `--trace FILE`: a timeline of the ranks for Perfetto or `chrome://tracing`.
//!
//! The spans of the library (see [`tracing`]) become slices, with one track per rank. A span belongs to the rank and the
//! step of the enclosing spans `rank { rank }` and `step { step, done }`, where `done` is the number of completed steps of
//! the run. Spans outside of steps are not recorded. Counters show the memory of the rank, if it is
//! [recorded](Tracer::record_memory). The file is in Chrome's Trace Event Format.

mod memory;

pub use memory::MemorySample;

use parking_lot::{Mutex, MutexGuard};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::fmt::Debug;
use std::io::{self, Write};
use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id};
use tracing::{Metadata, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;
use tracing_subscriber::registry::LookupSpan;
use ulysses_kernels::memory::ByCategory;

/// A slice of a rank's track: one span.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Slice {
    /// Global rank.
    pub rank: u64,
    /// The name of the span, with the number of the layer, step or unit.
    pub name: String,
    /// The start, in microseconds since 1970.
    pub begin_us: f64,
    /// The end, in microseconds since 1970.
    pub end_us: f64,
    /// The span's fields.
    pub fields: Map<String, Value>,
}

/// The recorded slices and memory of some ranks.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct TraceData {
    /// The slices.
    pub slices: Vec<Slice>,
    /// The memory samples.
    pub memory: Vec<MemorySample>,
}

impl FromIterator<Self> for TraceData {
    fn from_iter<I: IntoIterator<Item = Self>>(all: I) -> Self {
        all.into_iter().fold(Self::default(), |mut sum, traced| {
            sum.slices.extend(traced.slices);
            sum.memory.extend(traced.memory);
            sum
        })
    }
}

/// A layer of a `tracing` subscriber that records the spans of some steps.
#[derive(Debug, Clone)]
pub struct Tracer {
    traced: Arc<Mutex<TraceData>>,
    steps: u64,
    origin: Instant,
    origin_us: f64,
}

/// The data of an open span.
struct Open {
    track: Track,
    begun: Option<Instant>,
    fields: Map<String, Value>,
}

/// The rank of a span, and whether its step is traced.
#[derive(Debug, Clone, Copy, Default)]
struct Track {
    rank: Option<u64>,
    is_traced: bool,
}

impl Tracer {
    /// Creates a tracer of the first `steps` steps of each rank.
    pub fn new(steps: u64) -> Self {
        let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let origin_us = since_1970.as_micros() as f64;
        Self { traced: Arc::default(), steps, origin: Instant::now(), origin_us }
    }

    /// Returns whether the step after `done` completed steps is traced.
    pub fn traces(&self, done: u64) -> bool {
        done < self.steps
    }

    /// Records the memory of a rank in a step that has just ended: the start of each part, and its peak in total and by
    /// category.
    pub fn record_memory(&self, rank: u64, parts: impl Iterator<Item = (Instant, u64, ByCategory)>) {
        let parts = parts.map(|(begun, bytes, by_category)| MemorySample {
            rank,
            begin_us: self.microseconds(begun),
            bytes,
            by_category,
        });
        let samples: Vec<_> =
            parts.chain([MemorySample::now(rank, self.microseconds(Instant::now()))]).collect();
        self.lock().memory.extend(samples);
    }

    /// Takes the data of a rank.
    pub fn take(&self, rank: u64) -> TraceData {
        let mut traced = self.lock();
        let TraceData { slices, memory } = std::mem::take(&mut *traced);
        let (slices, of_others) = slices.into_iter().partition(|slice| slice.rank == rank);
        let (memory, held_by_others) = memory.into_iter().partition(|sample| sample.rank == rank);
        *traced = TraceData { slices: of_others, memory: held_by_others };
        TraceData { slices, memory }
    }

    /// Takes the data of all ranks of this process.
    pub fn take_all(&self) -> TraceData {
        std::mem::take(&mut *self.lock())
    }

    fn lock(&self) -> MutexGuard<'_, TraceData> {
        self.traced.lock()
    }

    fn microseconds(&self, at: Instant) -> f64 {
        self.origin_us + at.duration_since(self.origin).as_nanos() as f64 / 1e3
    }

    /// Returns the track of a span, given the track of its parent.
    fn track(&self, metadata: &Metadata<'_>, fields: &Map<String, Value>, parent: Track) -> Track {
        let number = |key| fields.get(key).and_then(Value::as_u64);
        match metadata.name() {
            "rank" => Track { rank: number("rank"), is_traced: false },
            "step" => Track { is_traced: number("done").is_some_and(|done| self.traces(done)), ..parent },
            _ => parent,
        }
    }
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Tracer {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let Some(span) = context.span(id) else { return };
        let parent = span.parent().and_then(|parent| Some(parent.extensions().get::<Open>()?.track));
        let mut fields = Fields::default();
        attributes.record(&mut fields);
        let track = self.track(attributes.metadata(), &fields.0, parent.unwrap_or_default());
        span.extensions_mut().insert(Open { track, begun: None, fields: fields.0 });
    }

    fn on_enter(&self, id: &Id, context: Context<'_, S>) {
        if let Some(span) = context.span(id)
            && let Some(open) = span.extensions_mut().get_mut::<Open>()
        {
            open.begun = Some(Instant::now());
        }
    }

    fn on_exit(&self, id: &Id, context: Context<'_, S>) {
        let ended = Instant::now();
        let Some(span) = context.span(id) else { return };
        let mut extensions = span.extensions_mut();
        let Some(open) = extensions.get_mut::<Open>() else { return };
        let (Some(rank), true, Some(begun)) = (open.track.rank, open.track.is_traced, open.begun) else {
            return;
        };
        let slice = Slice {
            rank,
            name: name(span.name(), &open.fields),
            begin_us: self.microseconds(begun),
            end_us: self.microseconds(ended),
            fields: open.fields.clone(),
        };
        self.lock().slices.push(slice);
    }
}

/// Returns the name of a span's slice.
fn name(span: &str, fields: &Map<String, Value>) -> String {
    let text = |key| fields.get(key).and_then(Value::as_str);
    match (span, text("op"), text("axis")) {
        ("start", Some(op), Some(axis)) => format!("start {axis} {op}"),
        ("wait", Some(op), Some(axis)) => format!("{axis} {op}"),
        _ => match fields.get("layer").or(fields.get("step")).or(fields.get("unit")) {
            Some(number) => format!("{span} {number}"),
            None => span.to_owned(),
        },
    }
}

/// A span's fields as JSON.
#[derive(Default)]
struct Fields(Map<String, Value>);

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.0.insert(field.name().to_owned(), format!("{value:?}").into());
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name().to_owned(), value.into());
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.0.insert(field.name().to_owned(), value.into());
    }
}

/// Writes the slices and memory of all ranks as one timeline, with arrows from the rank that arrived last at a collective
/// to the ranks that waited for it. `tracks` are the names of the ranks, by rank.
///
/// # Errors
/// An error of the writer.
pub fn write_trace(out: &mut impl Write, tracks: &[String], traced: &TraceData) -> io::Result<()> {
    let TraceData { slices, memory } = traced;
    let begins = slices.iter().map(|slice| slice.begin_us).chain(memory.iter().map(|sample| sample.begin_us));
    let origin = begins.fold(f64::INFINITY, f64::min);
    let microseconds = |at: f64| (1e3 * (at - origin)).round() / 1e3;
    let tracks = tracks.iter().enumerate().flat_map(|(rank, name)| {
        [("thread_name", json!({ "name": name })), ("thread_sort_index", json!({ "sort_index": rank }))]
            .map(|(what, args)| json!({ "ph": "M", "pid": 0, "tid": rank, "name": what, "args": args }))
    });
    let drawn = slices.iter().map(|slice| {
        let (begin, end) = (microseconds(slice.begin_us), microseconds(slice.end_us));
        let category = if slice.fields.contains_key("op") { "communication" } else { "engine" };
        json!({
            "ph": "X", "pid": 0, "tid": slice.rank, "ts": begin, "dur": (1e3 * (end - begin)).round() / 1e3,
            "name": slice.name, "cat": category, "args": slice.fields,
        })
    });
    let arrows = arrows(slices).into_iter().enumerate().flat_map(|(id, arrow)| {
        let Arrow { name, from, to } = arrow;
        let end = |phase: &str, (rank, at): (u64, f64)| {
            json!({
                "ph": phase, "bp": "e", "id": id, "pid": 0, "tid": rank, "ts": microseconds(at),
                "name": name, "cat": "waited for",
            })
        };
        [end("s", from), end("f", to)]
    });
    let counters = memory.iter().flat_map(|sample| sample.events(microseconds(sample.begin_us)));
    write!(out, "{{\"displayTimeUnit\":\"ms\",\"traceEvents\":[")?;
    for (index, event) in tracks.chain(drawn).chain(arrows).chain(counters).enumerate() {
        write!(out, "{}{event}", if index == 0 { "\n" } else { ",\n" })?;
    }
    writeln!(out, "\n]}}")
}

/// An arrow from the start of the last rank's call to the end of another rank's.
struct Arrow {
    name: String,
    from: (u64, f64),
    to: (u64, f64),
}

/// The slices of one rank in a collective.
#[derive(Default)]
struct Part<'a> {
    start: Option<&'a Slice>,
    wait: Option<&'a Slice>,
}

fn arrows(slices: &[Slice]) -> Vec<Arrow> {
    let mut collectives: BTreeMap<_, BTreeMap<u64, Part<'_>>> = BTreeMap::new();
    for slice in slices {
        let number = |key| slice.fields.get(key).and_then(Value::as_u64);
        let axis = slice.fields.get("axis").and_then(Value::as_str);
        if let (Some(axis), Some(first), Some(sequence)) = (axis, number("first"), number("sequence")) {
            let parts = collectives.entry((axis, first, sequence)).or_default();
            let part = parts.entry(slice.rank).or_default();
            let is_start = slice.name.starts_with("start ");
            *(if is_start { &mut part.start } else { &mut part.wait }) = Some(slice);
        }
    }
    collectives.values().flat_map(arrows_within).collect()
}

/// Returns the arrows of one collective.
fn arrows_within(parts: &BTreeMap<u64, Part<'_>>) -> Vec<Arrow> {
    let starts = parts.values().filter_map(|part| part.start);
    let Some(last) = starts.max_by(|a, b| a.begin_us.total_cmp(&b.begin_us)) else { return Vec::new() };
    let waiting = parts.values().filter_map(|part| part.wait);
    let waiting = waiting.filter(|wait| wait.rank != last.rank && wait.end_us >= last.begin_us);
    let arrow = |wait: &Slice| Arrow {
        name: wait.name.clone(),
        from: (last.rank, last.begin_us),
        // Inside the slice that it ends in.
        to: (wait.rank, wait.begin_us.max(last.begin_us).midpoint(wait.end_us)),
    };
    waiting.map(arrow).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use tracing_subscriber::layer::SubscriberExt;

    fn slice(rank: u64, name: &str, (begin_us, end_us): (f64, f64)) -> Slice {
        let fields = json!({ "axis": "sp", "op": "all_gather", "first": 0, "sequence": 7 });
        let Value::Object(fields) = fields else { unreachable!() };
        Slice { rank, name: name.into(), begin_us, end_us, fields }
    }

    #[test]
    fn arrows_lead_from_the_last_rank_to_those_that_waited() {
        let slices = [
            slice(0, "start sp all_gather", (10.0, 11.0)),
            slice(0, "sp all_gather", (12.0, 40.0)),
            slice(1, "start sp all_gather", (30.0, 31.0)),
            slice(1, "sp all_gather", (31.0, 39.0)),
        ];
        let arrows = arrows(&slices);
        assert_eq!(arrows.len(), 1);
        assert_eq!((arrows[0].from, arrows[0].to), ((1, 30.0), (0, 35.0)));
    }

    #[test]
    fn spans_belong_to_the_enclosing_rank_and_only_traced_steps_are_recorded() {
        let tracer = Tracer::new(1);
        let subscriber = tracing_subscriber::registry().with(tracer.clone());
        tracing::subscriber::with_default(subscriber, || {
            let _rank = tracing::info_span!("rank", rank = 3_u64).entered();
            for (done, step) in [5_u64, 6].into_iter().enumerate() {
                let _step = tracing::info_span!("step", step, done).entered();
                tracing::trace_span!("wait", op = "all_reduce", axis = "dp").in_scope(|| {});
            }
        });
        assert_eq!(tracer.take(0), TraceData::default());
        let slices = tracer.take(3).slices;
        let names: Vec<_> = slices.iter().map(|slice| slice.name.as_str()).collect();
        assert_eq!(names, ["dp all_reduce", "step 5"], "inner spans end first, and step 6 is not traced");
        assert!(slices[0].begin_us >= slices[1].begin_us && slices[0].end_us <= slices[1].end_us);
    }
}
