//! The convolution in f64, token by token.

use crate::Documents;

/// The sizes and options of a call.
#[derive(Debug, Clone)]
pub struct Problem {
    /// Documents of the sequences.
    pub documents: Documents,
    /// Number of channels.
    pub channels: usize,
    /// Number of taps.
    pub width: usize,
    /// Whether SiLU follows.
    pub silu: bool,
}

impl Problem {
    /// Calls `term` with the indices of y, x and weight of each product.
    fn for_each_term(&self, mut term: impl FnMut(usize, usize, usize)) {
        let Self { documents, channels, width, .. } = self;
        for sequence in 0..documents.batch() {
            for document in documents.of_sequence(sequence) {
                for (token, tap) in document.clone().flat_map(|t| (0..*width).map(move |tap| (t, tap))) {
                    let Some(source) = (token + tap + 1).checked_sub(*width) else { continue };
                    for channel in (0..*channels).filter(|_| source >= document.start) {
                        let at = |token| (sequence * documents.seq_len() + token) * channels + channel;
                        term(at(token), at(source), channel * width + tap);
                    }
                }
            }
        }
    }

    fn sums(&self, x: &[f64], weight: &[f64], bias: &[f64]) -> Vec<f64> {
        let mut sums: Vec<f64> = (0..x.len()).map(|i| bias[i % self.channels]).collect();
        self.for_each_term(|y, from, tap| sums[y] += weight[tap] * x[from]);
        sums
    }

    /// y of `x: [B, S, C]`, `weight: [C, w]` and `bias: [C]`.
    #[must_use]
    pub fn forward(&self, x: &[f64], weight: &[f64], bias: &[f64]) -> Vec<f64> {
        let sums = self.sums(x, weight, bias).into_iter();
        sums.map(|sum| if self.silu { sum * sigmoid(sum) } else { sum }).collect()
    }

    /// (dx, dweight, dbias) for the upstream gradient dy.
    #[must_use]
    pub fn backward(&self, dy: &[f64], x: &[f64], weight: &[f64], bias: &[f64]) -> [Vec<f64>; 3] {
        let slope = |sum: f64| sigmoid(sum) * (1.0 + sum * (1.0 - sigmoid(sum)));
        let sums = self.sums(x, weight, bias);
        let slopes = sums.iter().map(|sum| if self.silu { slope(*sum) } else { 1.0 });
        let dsums: Vec<f64> = dy.iter().zip(slopes).map(|(dy, slope)| dy * slope).collect();
        let [mut dx, mut dweight, mut dbias] = [x, weight, bias].map(|like| vec![0.0; like.len()]);
        self.for_each_term(|y, from, tap| {
            dx[from] += weight[tap] * dsums[y];
            dweight[tap] += x[from] * dsums[y];
        });
        dsums.iter().enumerate().for_each(|(i, dsum)| dbias[i % self.channels] += dsum);
        [dx, dweight, dbias]
    }
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}
