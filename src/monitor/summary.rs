//! The summary of a run: loss, throughput and memory, and tables of the traffic and memory of its ranks.

use super::Metrics;
use super::table::{bytes, format_bytes, format_table};
use crate::comm::{CollectiveOp, GroupStats, RING_AXIS, TP_AXIS};
use serde::{Deserialize, Serialize};
use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::fmt::{self, Display, Formatter};
use ulysses_kernels::memory::{ByCategory, Category};

/// The summary of one rank.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RankSummary {
    /// Global rank.
    pub rank: usize,
    /// The name and counters of each group of the rank.
    pub groups: Vec<(String, GroupStats)>,
    /// Bytes of the Ulysses exchange, by formula.
    pub expected_exchange_bytes: u64,
    /// Measured and expected bytes of parameters, gradients and optimizer state.
    pub held_bytes: [(u64, u64); 3],
    /// Peak memory of the rank's thread, by category.
    pub peak_by_category: ByCategory,
    /// The idle time of a pipeline stage; `None` without a pipeline.
    pub pipeline: Option<StageIdle>,
}

/// The idle time of a pipeline stage.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct StageIdle {
    /// Seconds of all steps in which it waited for messages of other stages, or sent to them.
    pub seconds: f64,
    /// The share of a step by the formula of its schedule, for stages that take equally long.
    pub expected: f64,
}

/// The totals of a run's steps.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct RunTotals {
    /// Number of steps, including skipped ones.
    pub steps: u64,
    /// Number and loss of the first step that was not skipped.
    pub first_loss: Option<(u64, f64)>,
    /// Number and loss of the last step that was not skipped.
    pub last_loss: Option<(u64, f64)>,
    /// Tokens of all steps, including masked tokens and padding.
    pub tokens: u64,
    /// Tokens with a label.
    pub label_tokens: u64,
    /// Wall time of all steps.
    pub seconds: f64,
    /// Time spent waiting for data.
    pub data_seconds: f64,
    /// The share of padding in the data of the last step.
    pub padding_share: f64,
}

impl RunTotals {
    /// Adds a step.
    pub fn record(&mut self, metrics: &Metrics) {
        self.steps += 1;
        self.tokens += metrics.tokens;
        self.label_tokens += metrics.label_tokens;
        self.seconds += metrics.step_seconds;
        self.data_seconds += metrics.data_seconds;
        self.padding_share = metrics.padding_share;
        if !metrics.skipped {
            let loss = (metrics.step, metrics.loss);
            self.first_loss.get_or_insert(loss);
            self.last_loss = Some(loss);
        }
    }
}

/// The summary of a run.
#[derive(Debug, Clone, PartialEq)]
pub struct RunSummary {
    /// The totals on rank 0.
    pub totals: RunTotals,
    /// The summary of every rank.
    pub ranks: Vec<RankSummary>,
}

impl Display for RunSummary {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let RunTotals { first_loss, last_loss, tokens, label_tokens, seconds, .. } = &self.totals;
        if let (Some((first_step, first)), Some((last_step, last))) = (first_loss, last_loss) {
            write!(f, "loss        {first:.4} at step {first_step}")?;
            match last_step > first_step {
                true => writeln!(f, ", {last:.4} at step {last_step}")?,
                false => writeln!(f)?,
            }
        } else {
            writeln!(f, "loss        none: every step was skipped")?;
        }
        let [all, with_labels] = [tokens, label_tokens].map(|tokens| *tokens as f64 / seconds);
        writeln!(f, "throughput  {all:.0} tokens/s ({with_labels:.0} with labels) over {seconds:.1} s")?;
        if let Some((measured, expected)) = self.pipeline_idle() {
            writeln!(
                f,
                "pipeline    {:.1} % of the time waiting for other stages; {:.1} % by formula, if all take equally long",
                100.0 * measured,
                100.0 * expected
            )?;
        }
        writeln!(f, "peak memory {}", self.peak_memory())
    }
}

/// A [`RunSummary`] with tables; see [`RunSummary::verbose`].
pub struct VerboseSummary<'a>(&'a RunSummary);

impl Display for VerboseSummary<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Self(summary) = self;
        let RunTotals { seconds, data_seconds, padding_share, .. } = &summary.totals;
        write!(f, "{summary}")?;
        let (waited, padding) = (100.0 * data_seconds / seconds, 100.0 * padding_share);
        writeln!(
            f,
            "data        {waited:.1} % of the time waiting for data; {padding:.2} % of the tokens are padding"
        )?;
        writeln!(f, "\nbytes sent per rank, by axis and operation; the Ulysses exchange with its formula")?;
        f.write_str(&format_table(&summary.traffic(), 0))?;
        writeln!(f, "\nbytes stored per rank, by allocator (with bookkeeping) and by ZeRO formula")?;
        f.write_str(&format_table(&summary.held(), 0))?;
        writeln!(f, "\npeak bytes per rank, by category")?;
        f.write_str(&format_table(&summary.peaks(), 0))
    }
}

impl RunSummary {
    /// Returns the share of the steps in which pipeline stages are idle, on average: measured, and by formula.
    pub fn pipeline_idle(&self) -> Option<(f64, f64)> {
        let stages: Vec<StageIdle> = self.ranks.iter().filter_map(|rank| rank.pipeline).collect();
        let seconds: f64 = stages.iter().map(|stage| stage.seconds).sum();
        Some((seconds / stages.len() as f64 / self.totals.seconds, stages.first()?.expected))
    }

    /// Returns the summary with tables of the traffic and memory of every rank, next to the formulas.
    pub fn verbose(&self) -> VerboseSummary<'_> {
        VerboseSummary(self)
    }

    /// Returns the largest and the smallest peak of the ranks.
    fn peak_memory(&self) -> String {
        let peaks = self.ranks.iter().map(|rank| (rank.peak_by_category.total(), rank.rank));
        // The first of equal ranks.
        let most = peaks.clone().min_by_key(|(peak, rank)| (Reverse(*peak), *rank));
        match (most, peaks.min()) {
            // The program has no counting allocator.
            (None | Some((0, _)), _) | (_, None) => "not counted".to_owned(),
            (Some((most, _)), _) if self.ranks.len() == 1 => format_bytes(most as f64),
            (Some((most, of_most)), Some((least, of_least))) => {
                let [most, least] = [most, least].map(|peak| format_bytes(peak as f64));
                format!("max {most} (rank {of_most}), min {least} (rank {of_least})")
            }
        }
    }

    /// Returns a table with a column for every operation that sent bytes on any rank.
    fn traffic(&self) -> Vec<Vec<String>> {
        let columns: BTreeSet<(&str, CollectiveOp)> =
            self.ranks.iter().flat_map(RankSummary::traffic).map(|(axis, op, _)| (axis, op)).collect();
        let exchanges: Vec<_> = columns.iter().filter(|(axis, op)| has_formula(axis, *op)).collect();
        // Linear attention exchanges over sp, attention within a ring over its Ulysses groups.
        let formula = if exchanges.len() > 1 { "formula of both" } else { "formula" };
        let mut header = vec!["rank".to_owned()];
        for column @ (axis, op) in &columns {
            match has_formula(axis, *op) {
                true => header.push(format!("{axis} all_to_all")),
                false => header.push(format!("{axis} {op}")),
            }
            header.extend((exchanges.last() == Some(&column)).then(|| formula.to_owned()));
        }
        let row = |rank: &RankSummary| {
            let mut row = vec![rank.rank.to_string()];
            for column in &columns {
                let sent =
                    rank.traffic().find(|(axis, op, _)| (*axis, *op) == *column).map_or(0, |(.., sent)| sent);
                row.push(bytes(sent));
                row.extend((exchanges.last() == Some(&column)).then(|| bytes(rank.expected_exchange_bytes)));
            }
            row
        };
        std::iter::once(header).chain(self.ranks.iter().map(row)).collect()
    }

    fn peaks(&self) -> Vec<Vec<String>> {
        let mut header = vec!["rank".to_owned()];
        header.extend(Category::ALL.map(|category| category.name().to_owned()));
        header.push("total".to_owned());
        let row = |rank: &RankSummary| {
            let (of, total) = (rank.peak_by_category.values(), rank.peak_by_category.total());
            let count = |held| if total > 0 { bytes(held) } else { "not counted".to_owned() };
            let cells = of.into_iter().chain([total]).map(count);
            std::iter::once(rank.rank.to_string()).chain(cells).collect()
        };
        std::iter::once(header).chain(self.ranks.iter().map(row)).collect()
    }

    fn held(&self) -> Vec<Vec<String>> {
        let header = ["rank", "parameters", "formula", "gradients", "formula", "optimizer", "formula"];
        let row = |rank: &RankSummary| {
            let mut row = vec![rank.rank.to_string()];
            for (measured, expected) in rank.held_bytes {
                let is_counted = measured > 0 || expected == 0;
                row.push(if is_counted { bytes(measured) } else { "not counted".into() });
                row.push(bytes(expected));
            }
            row
        };
        std::iter::once(header.map(str::to_owned).to_vec()).chain(self.ranks.iter().map(row)).collect()
    }
}

/// Returns whether an operation is the Ulysses exchange, which is strided or packed, depending on the backend. The bytes
/// of a ring have no formula: they depend on the documents. Those of tp are no exchange of heads.
fn has_formula(axis: &str, op: CollectiveOp) -> bool {
    matches!(op, CollectiveOp::AllToAllStrided | CollectiveOp::AllToAll)
        && ![RING_AXIS, TP_AXIS].contains(&axis)
}

impl RankSummary {
    /// Returns axis, operation and bytes of all operations that sent bytes.
    fn traffic(&self) -> impl Iterator<Item = (&str, CollectiveOp, u64)> {
        self.groups.iter().flat_map(|(axis, stats)| {
            let sent = stats.ops.iter().map(|(op, counted)| (axis.as_str(), *op, counted.bytes_sent));
            sent.filter(|(.., sent)| *sent > 0)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::{MeshShape, OpStats};

    fn rank(rank: usize, sent: u64) -> RankSummary {
        let stats = |op, bytes_sent| {
            let counted = OpStats { calls: 1, bytes_sent, bytes_received: 0 };
            GroupStats { ops: [(op, counted)].into() }
        };
        RankSummary {
            rank,
            groups: vec![
                ("dp".into(), stats(CollectiveOp::Barrier, 0)),
                ("sp".into(), stats(CollectiveOp::AllToAllStrided, sent)),
            ],
            expected_exchange_bytes: 4096,
            held_bytes: [(400, 400), (0, 400), (0, 0)],
            peak_by_category: ByCategory { gradients: sent / 2, other: 7, ..ByCategory::default() },
            pipeline: None,
        }
    }

    #[test]
    fn the_summary_shows_measured_bytes_next_to_the_formulas() {
        let totals = RunTotals {
            tokens: 400,
            label_tokens: 300,
            seconds: 2.0,
            data_seconds: 0.5,
            padding_share: 0.0175,
            ..RunTotals::default()
        };
        let summary = RunSummary { totals, ranks: vec![rank(0, 4096), rank(1, 0)] };
        let text = summary.verbose().to_string();
        let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        let throughput = "200 tokens/s (150 with labels) over 2.0 s";
        assert!(text.contains("every step was skipped") && text.contains(throughput), "{text}");
        assert!(
            text.contains("25.0 % of the time waiting for data; 1.75 % of the tokens are padding"),
            "{text}"
        );
        assert!(lines.contains(&vec!["rank", "sp", "all_to_all", "formula"]), "{text}");
        assert!(
            lines.contains(&vec!["0", "4_096", "4_096"]) && lines.contains(&vec!["1", "0", "4_096"]),
            "{text}"
        );
        assert!(lines.contains(&vec!["0", "0", "2_048", "0", "0", "0", "7", "2_055"]), "{text}");
        // Without a counting allocator a category is not zero, it is unknown.
        assert!(lines.contains(&vec!["0", "400", "400", "not", "counted", "400", "0", "0"]), "{text}");
    }

    #[test]
    fn exchanges_over_two_axes_have_one_formula() {
        let with_ulysses = |rank: RankSummary| {
            let exchange = rank.groups[1].1.clone();
            let groups = rank.groups.into_iter().chain([("ulysses".into(), exchange)]).collect();
            RankSummary { groups, ..rank }
        };
        let summary = RunSummary { totals: RunTotals::default(), ranks: vec![with_ulysses(rank(0, 2048))] };
        let text = summary.verbose().to_string();
        let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        let header = ["rank", "sp", "all_to_all", "ulysses", "all_to_all", "formula", "of", "both"];
        assert!(lines.contains(&header.to_vec()), "{text}");
        assert!(lines.contains(&vec!["0", "2_048", "2_048", "4_096"]), "{text}");
    }

    #[test]
    fn the_short_summary_has_the_largest_and_the_smallest_peak_and_no_table() {
        let summary = |ranks| {
            let totals = RunTotals { tokens: 400, label_tokens: 300, seconds: 2.0, ..RunTotals::default() };
            RunSummary { totals, ranks }.to_string()
        };
        let gib = |rank, bytes: u64| RankSummary {
            peak_by_category: ByCategory { other: bytes, ..ByCategory::default() },
            pipeline: None,
            ..self::rank(rank, 0)
        };
        let text = summary(vec![gib(0, 3 << 29), gib(1, 1 << 31), gib(2, 1 << 30), gib(3, 1 << 31)]);
        let peaks = "peak memory max 2.00 GiB (rank 1), min 1.00 GiB (rank 2)";
        assert_eq!(text.lines().last(), Some(peaks), "{text}");
        assert_eq!(text.lines().count(), 3, "{text}");
        assert!(summary(vec![gib(0, 3 << 29)]).ends_with("peak memory 1.50 GiB\n"));
        assert!(summary(vec![gib(0, 0)]).ends_with("peak memory not counted\n"));
    }

    #[test]
    fn skipped_steps_have_no_loss() {
        let step = |step, loss, skipped| Metrics {
            step,
            loss,
            lr: 0.0,
            grad_norm: 0.0,
            tokens: 2,
            label_tokens: 1,
            step_seconds: 1.0,
            data_seconds: 0.25,
            slowest_rank: 0,
            slowest_rank_ratio: 1.0,
            mesh: MeshShape::ONE_RANK,
            padding_share: 0.125,
            loss_scale: 1.0,
            skipped,
            overflow: false,
            comm_bytes: 0,
            memory_bytes: 0,
            ..Metrics::default()
        };
        let mut totals = RunTotals::default();
        let steps = [step(1, 0.0, true), step(2, 5.0, false), step(3, 4.0, false), step(4, 0.0, true)];
        steps.iter().for_each(|metrics| totals.record(metrics));
        assert_eq!((totals.first_loss, totals.last_loss), (Some((2, 5.0)), Some((3, 4.0))));
        assert_eq!((totals.steps, totals.data_seconds, totals.padding_share), (4, 1.0, 0.125));
        assert_eq!((totals.tokens, totals.label_tokens), (8, 4));
    }
}
