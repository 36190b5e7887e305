//! The embedding in f64.

/// The rows of weight: [vocab, d] for the ids.
#[must_use]
pub fn forward(ids: &[u32], weight: &[f64], d: usize) -> Vec<f64> {
    ids.iter().flat_map(|id| weight[*id as usize * d..][..d].to_vec()).collect()
}

/// The gradient of weight: [vocab, d].
#[must_use]
pub fn backward(ids: &[u32], dy: &[f64], vocab_size: usize, d: usize) -> Vec<f64> {
    let mut dweight = vec![0.0; vocab_size * d];
    for (i, id) in ids.iter().enumerate() {
        for j in 0..d {
            dweight[*id as usize * d + j] += dy[i * d + j];
        }
    }
    dweight
}
