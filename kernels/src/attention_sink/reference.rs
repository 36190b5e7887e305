//! Attention sinks in f64.

/// `[o, lse]` with sinks of `o [B, S, H, D]` and `lse [B, H, S]` without.
#[must_use]
pub fn forward(sinks: &[f64], o: &[f64], lse: &[f64], tokens: usize, head_dim: usize) -> [Vec<f64>; 2] {
    let heads = sinks.len();
    let with_sink = |(at, lse): (usize, &f64)| (lse.exp() + sinks[at / tokens % heads].exp()).ln();
    let lse_with_sinks: Vec<f64> = lse.iter().enumerate().map(with_sink).collect();
    let scaled = |(at, o): (usize, &f64)| {
        let (head, row) = (at / head_dim % heads, at / (head_dim * heads));
        let at = (row / tokens * heads + head) * tokens + row % tokens;
        o * (lse[at] - lse_with_sinks[at]).exp()
    };
    [o.iter().enumerate().map(scaled).collect(), lse_with_sinks]
}

/// The gradient of the sinks, for `lse` with sinks and `delta`, both `[B, H, S]`.
#[must_use]
pub fn backward(sinks: &[f64], lse: &[f64], delta: &[f64], tokens: usize) -> Vec<f64> {
    let mut dsinks = vec![0.0; sinks.len()];
    for (at, (lse, delta)) in lse.iter().zip(delta).enumerate() {
        let head = at / tokens % sinks.len();
        dsinks[head] -= (sinks[head] - lse).exp() * delta;
    }
    dsinks
}
