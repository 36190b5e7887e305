//! Results of the evaluations of held-out data: which step was the best, and whether training still gets
//! anywhere.

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A step and the evaluation loss after it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct EvaluationResult {
    /// Steps that were done.
    pub step: u64,
    /// Mean loss of the held-out tokens, in nats. WrittenFile as text: every bit of it counts.
    #[serde(serialize_with = "as_text", deserialize_with = "from_text")]
    pub loss: f64,
}

/// Summary of all evaluations of a run, saved so that a resumed run decides as an uninterrupted one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct EvaluationSummary {
    /// The lowest loss.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub best: Option<EvaluationResult>,
    /// EvaluationSummary in a row that did not improve on the lowest loss before by more than a threshold.
    #[serde(default)]
    pub without_improvement: u64,
    /// The lowest loss of a step whose checkpoint stays for it, whatever the number of checkpoints to keep.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub best_checkpoint: Option<EvaluationResult>,
    /// A hash of the held-out data: losses on other data do not compare.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data_hash: Option<u64>,
}

impl EvaluationSummary {
    /// Adds an evaluation. As Hugging Face's `EarlyStoppingCallback` counts, one that improves by no more than
    /// `threshold` is one without improvement, though the loss to improve on is the lowest there was. A loss that is
    /// not finite is no improvement.
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

    /// Whether a checkpoint after this evaluation would be the best one.
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
    fn patience_counts_as_hugging_face_counts_it() {
        let mut evaluations = EvaluationSummary::default();
        let losses = [f64::NAN, 3.0, 2.0, 1.95, 1.9, 2.5, 1.0, f64::INFINITY];
        let counted = losses.into_iter().zip(1..).map(|(loss, step)| {
            evaluations.add(EvaluationResult { step, loss }, 0.1);
            (evaluations.without_improvement, evaluations.best.map_or(0, |best| best.step))
        });
        // 1.95 is the best so far, yet no improvement on 2.0 by more than 0.1; nor is 1.9 on 1.95.
        let expected = [(1, 0), (0, 2), (0, 3), (1, 4), (2, 5), (3, 5), (0, 7), (1, 7)];
        assert_eq!(counted.collect::<Vec<_>>(), expected);
    }

    #[test]
    fn every_bit_of_a_loss_is_read_back() {
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
