//! The result of a benchmark as a table or JSON object.

use super::turns::median;
use crate::placement::Placement;
use serde_json::{Map, Value, json};
use std::fmt::{self, Display, Formatter};
use ulysses::comm::LaunchOptions;

/// The unit of work of a [`Figure`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unit {
    /// Bytes moved.
    Bytes,
    /// Floating-point operations; a multiply-add is two.
    Flops,
}

impl Unit {
    fn key(self) -> &'static str {
        match self {
            Self::Bytes => "gb_per_s",
            Self::Flops => "gflop_per_s",
        }
    }

    fn heading(self) -> &'static str {
        match self {
            Self::Bytes => "GB/s",
            Self::Flops => "GFLOP/s",
        }
    }
}

/// One measured operation.
#[derive(Clone, Debug)]
pub(crate) struct Figure {
    name: String,
    /// Seconds of every repetition.
    seconds: Vec<f64>,
    /// Work of one repetition on all ranks together.
    work: f64,
    /// Further values by key.
    more: Vec<(&'static str, f64)>,
    /// Baselines, and the ratios of the rates.
    ratios: Vec<(String, f64)>,
}

impl Figure {
    pub(crate) fn new(name: impl Into<String>, seconds: Vec<f64>, work: f64) -> Self {
        Self { name: name.into(), seconds, work, more: Vec::new(), ratios: Vec::new() }
    }

    /// Adds a value next to the rate.
    pub(super) fn with(mut self, key: &'static str, value: f64) -> Self {
        self.more.push((key, value));
        self
    }

    /// Adds the ratio to a baseline: the median over repetitions, in each of which a disturbance affects both.
    pub(super) fn against(mut self, baseline: &Self) -> Self {
        let both = self.seconds.iter().zip(&baseline.seconds);
        let ratios: Vec<f64> = both.map(|(own, base)| (self.work / own) / (baseline.work / base)).collect();
        self.ratios.push((baseline.name.clone(), median(&ratios)));
        self
    }

    /// Returns the median seconds of a repetition.
    pub(super) fn seconds(&self) -> f64 {
        median(&self.seconds)
    }

    /// Returns its name in reports.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Returns the rate in GB/s or GFLOP/s.
    pub(crate) fn rate(&self) -> f64 {
        self.work / self.seconds() * 1e-9
    }
}

/// A benchmark's settings, method and figures.
#[derive(Debug)]
pub(super) struct Report {
    pub(super) bench: &'static str,
    /// Settings by flag.
    pub(super) settings: Value,
    /// The method in one sentence: repetition, baseline, ratios.
    pub(super) method: String,
    pub(super) ranks: usize,
    pub(super) threads_per_rank: usize,
    pub(super) unit: Unit,
    pub(super) figures: Vec<Figure>,
}

impl Report {
    pub(super) fn new(bench: &'static str, settings: Value, method: impl Into<String>, unit: Unit) -> Self {
        let (ranks, threads_per_rank) = (1, 1);
        Self { bench, settings, method: method.into(), ranks, threads_per_rank, unit, figures: Vec::new() }
    }

    /// Adds the ranks, with their backend, device and GPU to the settings.
    pub(super) fn on(mut self, ranks: usize, options: &LaunchOptions, placement: &Placement) -> Self {
        (self.ranks, self.threads_per_rank) = (ranks, options.threads_per_rank);
        self.settings["backend"] = json!(placement.backend);
        self.settings["device"] = json!(placement.device.name());
        if let Some(gpu) = placement.gpu_name() {
            self.settings["gpu"] = json!(gpu);
        }
        self
    }

    pub(super) fn to_json(&self) -> Value {
        let (mut figures, mut ratios) = (Map::new(), Map::new());
        for figure in &self.figures {
            let fastest = figure.seconds.iter().copied().fold(f64::INFINITY, f64::min);
            let mut entry = Map::new();
            entry.insert("ms".into(), json!(figure.seconds() * 1e3));
            entry.insert("ms_fastest".into(), json!(fastest * 1e3));
            entry.insert("repeats".into(), json!(figure.seconds.len()));
            entry.insert(self.unit.key().into(), json!(figure.rate()));
            entry.extend(figure.more.iter().map(|(key, value)| ((*key).to_owned(), json!(value))));
            figures.insert(figure.name.clone(), entry.into());
            for (baseline, ratio) in &figure.ratios {
                ratios.insert(format!("{} / {baseline}", figure.name), json!(ratio));
            }
        }
        json!({
            "bench": self.bench,
            "settings": self.settings,
            "method": self.method,
            "processor": cpu_name(),
            "cores": cores(),
            "ranks": self.ranks,
            "threads_per_rank": self.threads_per_rank,
            "figures": figures,
            "ratios": ratios,
        })
    }
}

impl Display for Report {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Self { ranks, threads_per_rank, .. } = self;
        writeln!(
            f,
            "{} on {} core(s): {ranks} rank(s) of {threads_per_rank} thread(s)",
            cpu_name(),
            cores()
        )?;
        for (key, value) in self.settings.as_object().into_iter().flatten() {
            writeln!(f, "{key:<11} {}", value.as_str().map_or_else(|| value.to_string(), str::to_owned))?;
        }
        writeln!(f, "{}\n", self.method)?;
        let width = self.figures.iter().map(|figure| figure.name.chars().count()).max().unwrap_or(0);
        writeln!(f, "{:width$} {:>10} {:>9}", "", "ms", self.unit.heading())?;
        for figure in &self.figures {
            let ms = figure.seconds() * 1e3;
            write!(f, "{:width$} {ms:>10.3} {:>9.2}", figure.name, figure.rate())?;
            for (baseline, ratio) in &figure.ratios {
                write!(f, "  {ratio:.2} × {baseline}")?;
            }
            for (key, value) in &figure.more {
                write!(f, "  {key} {value:.2}")?;
            }
            writeln!(f)?;
        }
        Ok(())
    }
}

/// Returns the CPU's name, or the architecture if the system does not report it.
pub(crate) fn cpu_name() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("model name"));
    let name = line.and_then(|line| line.split_once(':')).map(|(_, name)| name.trim().to_owned());
    name.unwrap_or_else(|| std::env::consts::ARCH.to_owned())
}

pub(crate) fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ratio_is_the_median_over_repetitions() {
        let baseline = Figure::new("copy", vec![1.0, 10.0, 1.0], 8.0);
        // Half the rate each time, whatever the machine did in the second repetition.
        let figure = Figure::new("exchange", vec![1.0, 10.0, 1.0], 4.0).against(&baseline);
        assert_eq!(figure.ratios, [("copy".to_owned(), 0.5)]);
        assert_eq!(figure.rate(), 4e-9);
    }
}
