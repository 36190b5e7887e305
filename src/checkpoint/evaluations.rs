//! Results of evaluations on held-out data: the best step, and the state of early stopping.

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The evaluation loss after a step.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct EvaluationResult {
    /// Number of completed steps.
    pub step: u64,
    /// Mean loss per held-out token, in nats. Stored as text, to preserve every bit.
    #[serde(serialize_with = "as_text", deserialize_with = "from_text")]
    pub loss: f64,
}

/// The summary of a run's evaluations, saved so that a resumed run makes the same decisions.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct EvaluationSummary {
    /// The evaluation with the lowest loss.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub best: Option<EvaluationResult>,
    /// Number of consecutive evaluations without an improvement above the threshold.
    #[serde(default)]
    pub without_improvement: u64,
    /// The evaluation of the checkpoint that `keep_best` preserves.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub best_checkpoint: Option<EvaluationResult>,
    /// Hash of the held-out data. Losses on different data are not comparable.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data_hash: Option<u64>,
}

impl EvaluationSummary {
    /// Adds an evaluation.
    ///
    /// Counts like Hugging Face's `EarlyStoppingCallback`: an improvement on the lowest loss counts only above
    /// `threshold`, but also a smaller one becomes the new lowest loss. A non-finite loss is not an improvement.
    pub fn add(&mut self, evaluated: EvaluationResult, threshold: f64) {
        let improvement = match self.best {
            _ if !evaluated.loss.is_finite() => f64::NEG_INFINITY,
            None => f64::INFINITY,
            Some(best) => best.loss - evaluated.loss,
        };
        self.without_improvement = if improvement > threshold { 0 } else { self.without_improvement + 1 };
        if improvement > 0.0 {
            self.best = Some(evaluated);
        }
    }

    /// Returns whether a checkpoint after this evaluation would be the best one.
    pub fn is_best_checkpoint(&self, evaluated: EvaluationResult) -> bool {
        evaluated.loss.is_finite() && self.best_checkpoint.is_none_or(|best| evaluated.loss < best.loss)
    }

    pub(super) fn is_empty(&self) -> bool {
        *self == Self { data_hash: self.data_hash, ..Self::default() }
    }
}

fn as_text<S: Serializer>(loss: &f64, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(loss)
}

fn from_text<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn early_stopping_counts_like_hugging_face() {
        let mut evaluations = EvaluationSummary::default();
        let losses = [f64::NAN, 3.0, 2.0, 1.95, 1.9, 2.5, 1.0, f64::INFINITY];
        let counted = losses.into_iter().zip(1..).map(|(loss, step)| {
            evaluations.add(EvaluationResult { step, loss }, 0.1);
            (evaluations.without_improvement, evaluations.best.map_or(0, |best| best.step))
        });
        // 1.95 is the new best, but improves on 2.0 by less than 0.1; so does 1.9 on 1.95.
        let expected = [(1, 0), (0, 2), (0, 3), (1, 4), (2, 5), (3, 5), (0, 7), (1, 7)];
        assert_eq!(counted.collect::<Vec<_>>(), expected);
    }

    #[test]
    fn losses_round_trip_bit_exactly() {
        for bits in 0..1000 {
            let loss = f64::from_bits(2.345_f64.to_bits() + bits);
            let best = Some(EvaluationResult { step: 7, loss });
            let evaluations = EvaluationSummary {
                best,
                without_improvement: 2,
                best_checkpoint: best,
                data_hash: Some(bits),
            };
            let text = serde_json::to_string(&evaluations).unwrap();
            assert_eq!(serde_json::from_str::<EvaluationSummary>(&text).unwrap(), evaluations, "{text}");
        }
    }
}
