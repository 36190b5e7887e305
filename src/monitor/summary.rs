//! The summary of a run: what was learnt, moved and held, against the formulas.

use super::Metrics;
use crate::comm::{CollectiveOp, GroupStats};
use std::fmt::{self, Display, Formatter};

/// What one rank reports when a run ends.
#[derive(Debug, Clone, PartialEq)]
pub struct RankSummary {
    /// Global rank.
    pub rank: usize,
    /// Name and counters of each of its groups.
    pub groups: Vec<(String, GroupStats)>,
    /// Bytes that the Ulysses exchange must have sent by its formula.
    pub expected_exchange_bytes: u64,
    /// Measured and expected bytes by category: parameters, gradients, optimizer state.
    pub held_bytes: [(u64, u64); 3],
}

/// What a run's steps add up to.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RunTotals {
    /// Steps, skipped ones included.
    pub steps: u64,
    /// Loss of the first step that was not skipped, and its number.
    pub first_loss: Option<(u64, f64)>,
    /// Loss of the last step that was not skipped, and its number.
    pub last_loss: Option<(u64, f64)>,
    /// Valid tokens of all steps.
    pub tokens: u64,
    /// Wall time of all steps.
    pub seconds: f64,
}

impl RunTotals {
    /// Adds a step.
    pub fn record(&mut self, metrics: &Metrics) {
        self.steps += 1;
        self.tokens += metrics.tokens;
        self.seconds += metrics.step_seconds;
        if !metrics.skipped {
            let loss = (metrics.step, metrics.loss);
            self.first_loss.get_or_insert(loss);
            self.last_loss = Some(loss);
        }
    }
}

/// The end of a run.
#[derive(Debug, Clone, PartialEq)]
pub struct RunSummary {
    /// What rank 0 saw.
    pub totals: RunTotals,
    /// Every rank's report.
    pub ranks: Vec<RankSummary>,
}

const CATEGORIES: [&str; 3] = ["parameters", "gradients", "optimizer"];

impl Display for RunSummary {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Self { totals: RunTotals { first_loss, last_loss, tokens, seconds, .. }, ranks } = self;
        if let (Some((first_step, first)), Some((last_step, last))) = (first_loss, last_loss) {
            writeln!(f, "loss        {first:.4} at step {first_step}, {last:.4} at step {last_step}")?;
        } else {
            writeln!(f, "loss        none: every step was skipped")?;
        }
        writeln!(f, "throughput  {:.0} tokens/s over {seconds:.1} s", *tokens as f64 / seconds)?;
        writeln!(f, "\nbytes sent per rank, by group and operation")?;
        for rank in ranks {
            rank.write_traffic(f)?;
        }
        writeln!(
            f,
            "\nbytes held per rank: measured by the allocator, bookkeeping included (by the ZeRO formula)"
        )?;
        for rank in ranks {
            let part = |(name, (measured, expected)): (&str, (u64, u64))| {
                let measured =
                    if measured == 0 && expected > 0 { "not counted".into() } else { bytes(measured) };
                format!("{name} {measured} ({})", bytes(expected))
            };
            let parts: Vec<String> = CATEGORIES.into_iter().zip(rank.held_bytes).map(part).collect();
            writeln!(f, "  rank {:<3} {}", rank.rank, parts.join("  "))?;
        }
        Ok(())
    }
}

impl RankSummary {
    /// Bytes that this rank sent in Ulysses exchanges.
    pub fn exchange_bytes(&self) -> u64 {
        self.groups.iter().map(|(_, stats)| stats.get(CollectiveOp::AllToAllStrided).bytes_sent).sum()
    }

    fn write_traffic(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let mut parts = Vec::new();
        for (group, stats) in &self.groups {
            for (op, counted) in stats.ops.iter().filter(|(_, counted)| counted.bytes_sent > 0) {
                let sent = bytes(counted.bytes_sent);
                parts.push(match op {
                    CollectiveOp::AllToAllStrided => {
                        format!("{group} all_to_all {sent} (formula {})", bytes(self.expected_exchange_bytes))
                    }
                    op => format!("{group} {op} {sent}"),
                });
            }
        }
        let parts = if parts.is_empty() { "nothing".to_owned() } else { parts.join("  ") };
        writeln!(f, "  rank {:<3} {parts}", self.rank)
    }
}

/// Whole bytes with separators.
fn bytes(bytes: u64) -> String {
    let digits = bytes.to_string();
    let groups: Vec<&str> =
        digits.as_bytes().rchunks(3).rev().map(|group| str::from_utf8(group).unwrap_or_default()).collect();
    groups.join("_")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_grouped_by_thousands() {
        assert_eq!([0, 999, 1000, 1_234_567].map(bytes), ["0", "999", "1_000", "1_234_567"]);
    }
}
