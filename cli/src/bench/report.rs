//! The result of a benchmark as a table or JSON object.

use super::BenchRanks;
use super::case::Figure;
use serde_json::{Map, Value, json};
use std::fmt::{self, Display, Formatter};

/// The unit of the rates of a benchmark.
#[derive(Clone, Copy)]
pub(super) struct Unit {
    key: &'static str,
    heading: &'static str,
}

/// Bytes moved.
pub(super) const BYTES: Unit = Unit { key: "gb_per_s", heading: "GB/s" };
/// Floating-point operations; a multiply-add is two.
pub(super) const FLOPS: Unit = Unit { key: "gflop_per_s", heading: "GFLOP/s" };

/// A benchmark's settings, method and figures.
pub(super) struct Report<'a> {
    pub(super) bench: &'static str,
    /// Settings by flag.
    pub(super) settings: Value,
    /// The method in one sentence: repetition, baseline, ratios.
    pub(super) method: String,
    pub(super) unit: Unit,
    pub(super) figures: Vec<Figure>,
    pub(super) ranks: BenchRanks<'a>,
}

impl Report<'_> {
    /// Returns the settings with the ranks' backend, device and GPU.
    fn all_settings(&self) -> Value {
        let (mut settings, placement) = (self.settings.clone(), self.ranks.on.placement());
        settings["backend"] = json!(placement.backend());
        settings["device"] = json!(placement.device().name());
        if let Some(gpu) = placement.gpu_name() {
            settings["gpu"] = json!(gpu);
        }
        settings
    }

    /// Returns the baselines of a figure, and the ratios of the rates.
    fn ratios<'a>(&'a self, figure: &'a Figure) -> impl Iterator<Item = (&'a str, f64)> {
        let find = |name: &String| self.figures.iter().find(|baseline| baseline.name == *name);
        figure.baselines.iter().filter_map(find).map(|baseline| (&*baseline.name, figure.ratio(baseline)))
    }

    pub(super) fn to_json(&self) -> Value {
        let (mut figures, mut ratios) = (Map::new(), Map::new());
        for figure in &self.figures {
            let fastest = figure.seconds.iter().copied().fold(f64::INFINITY, f64::min);
            let mut entry = json!({
                "ms": figure.seconds() * 1e3,
                "ms_fastest": fastest * 1e3,
                "repeats": figure.seconds.len(),
                self.unit.key: figure.rate(),
            });
            for (key, value) in &figure.values {
                entry[key] = json!(value);
            }
            figures.insert(figure.name.clone(), entry);
            for (baseline, ratio) in self.ratios(figure) {
                ratios.insert(format!("{} / {baseline}", figure.name), json!(ratio));
            }
        }
        json!({
            "bench": self.bench,
            "settings": self.all_settings(),
            "method": self.method,
            "processor": cpu_name(),
            "cores": cores(),
            "ranks": self.ranks.count,
            "threads_per_rank": self.ranks.options.threads_per_rank,
            "figures": figures,
            "ratios": ratios,
        })
    }
}

impl Display for Report<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let (ranks, threads) = (self.ranks.count, self.ranks.options.threads_per_rank);
        writeln!(f, "{} on {} core(s): {ranks} rank(s) of {threads} thread(s)", cpu_name(), cores())?;
        for (key, value) in self.all_settings().as_object().into_iter().flatten() {
            writeln!(f, "{key:<11} {}", value.as_str().map_or_else(|| value.to_string(), str::to_owned))?;
        }
        writeln!(f, "{}\n", self.method)?;
        let width = self.figures.iter().map(|figure| figure.name.chars().count()).max().unwrap_or(0);
        writeln!(f, "{:width$} {:>10} {:>9}", "", "ms", self.unit.heading)?;
        for figure in &self.figures {
            let ms = figure.seconds() * 1e3;
            write!(f, "{:width$} {ms:>10.3} {:>9.2}", figure.name, figure.rate())?;
            for (baseline, ratio) in self.ratios(figure) {
                write!(f, "  {ratio:.2} × {baseline}")?;
            }
            for (key, value) in &figure.values {
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
