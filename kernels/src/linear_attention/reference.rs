//! All rules in f64, one token after the other.

use super::{LinearAttentionLayout, NORM_EPS, Rule};

/// The sizes of a call.
#[derive(Debug, Clone)]
pub struct Problem {
    /// Documents, and the key head of each value head.
    pub layout: LinearAttentionLayout,
    /// Number of key heads.
    pub key_heads: usize,
    /// Elements of a query and of a key.
    pub key_dim: usize,
    /// Elements of a value.
    pub value_dim: usize,
    /// How a token changes the state.
    pub rule: Rule,
}

/// Inputs, `[B, S, heads, dim]` and `[B, S, heads]`.
#[derive(Debug, Clone)]
pub struct Inputs {
    /// Queries.
    pub q: Vec<f64>,
    /// Keys.
    pub k: Vec<f64>,
    /// Values.
    pub v: Vec<f64>,
    /// Logarithms of the decays, of the shape of `k` if each channel has one.
    pub g: Vec<f64>,
    /// Rates of the updates.
    pub beta: Vec<f64>,
    /// Factor of the skip connection of each value head. Its gradient is `[B, S, Hv]`, the term of each token.
    pub skip: Vec<f64>,
}

/// One token of one value head.
struct Step {
    query: Vec<f64>,
    key: Vec<f64>,
    /// The state after the decay, `[key_dim, value_dim]`.
    decayed: Vec<f64>,
    /// The value; by the delta rule minus the one that the decayed state has for the key.
    error: Vec<f64>,
    /// The state after the update.
    state: Vec<f64>,
}

impl Problem {
    /// The output `[B, S, Hv, Dv]`.
    #[must_use]
    pub fn forward(&self, inputs: &Inputs) -> Vec<f64> {
        let mut o = vec![0.0; inputs.v.len()];
        self.for_each_document(inputs, |tokens, steps| {
            for (token, step) in tokens.iter().zip(steps) {
                let o = &mut o[token.value * self.value_dim..][..self.value_dim];
                o.copy_from_slice(&transposed_product(&step.state, &step.query));
                if !self.rule.is_delta() {
                    let v = &inputs.v[token.value * self.value_dim..][..self.value_dim];
                    let skip = inputs.skip[token.value % self.layout.v_to_k().len()];
                    o.iter_mut().zip(v).for_each(|(o, v)| *o += skip * v);
                }
            }
        });
        o
    }

    /// The gradients of the inputs, for the upstream gradient of the output.
    #[must_use]
    pub fn backward(&self, inputs: &Inputs, dout: &[f64]) -> Inputs {
        let (dk, dv) = (self.key_dim, self.value_dim);
        let zeros = |like: &[f64]| vec![0.0; like.len()];
        let Inputs { q, k, v, g, beta, skip } = inputs;
        let mut gradients = Inputs {
            q: zeros(q),
            k: zeros(k),
            v: zeros(v),
            g: zeros(g),
            beta: zeros(beta),
            skip: zeros(beta),
        };
        self.for_each_document(inputs, |tokens, steps| {
            let mut dstate = vec![0.0; dk * dv];
            for (token, step) in tokens.iter().zip(steps).rev() {
                let dout = &dout[token.value * dv..][..dv];
                let beta = beta[token.value];
                add_outer(&mut dstate, &step.query, dout);
                let dquery = product(&step.state, dout);
                // state = decayed + key updateᵀ with update = beta · error and error = v − decayedᵀ key
                let dupdate = transposed_product(&dstate, &step.key);
                let update: Vec<f64> = step.error.iter().map(|error| beta * error).collect();
                let mut dkey = product(&dstate, &update);
                let derror: Vec<f64> = dupdate.iter().map(|d| beta * d).collect();
                gradients.beta[token.value] = dot(&dupdate, &step.error);
                gradients.v[token.value * dv..][..dv].copy_from_slice(&derror);
                if self.rule.is_delta() {
                    let negative: Vec<f64> = derror.iter().map(|d| -d).collect();
                    add(&mut dkey, &product(&step.decayed, &negative));
                    add_outer(&mut dstate, &step.key, &negative);
                } else {
                    let skip = skip[token.value % self.layout.v_to_k().len()];
                    let through_skip: Vec<f64> = dout.iter().map(|d| skip * d).collect();
                    add(&mut gradients.v[token.value * dv..][..dv], &through_skip);
                    gradients.skip[token.value] = dot(dout, &step.error);
                }
                // decayed = exp(g) · the previous state
                let rows = dstate.chunks_exact_mut(dv).zip(step.decayed.chunks_exact(dv));
                for (channel, (row, decayed)) in rows.enumerate() {
                    let at = self.decay_at(token, channel);
                    gradients.g[at] += dot(row, decayed);
                    row.iter_mut().for_each(|d| *d *= g[at].exp());
                }

                let at = token.key * dk..(token.key + 1) * dk;
                if !self.rule.is_delta() {
                    add(&mut gradients.q[at.clone()], &dquery);
                    add(&mut gradients.k[at], &dkey);
                    continue;
                }
                let dquery: Vec<f64> = dquery.iter().map(|d| d * self.query_scale()).collect();
                add(&mut gradients.q[at.clone()], &normalized_backward(&q[at.clone()], &dquery));
                add(&mut gradients.k[at.clone()], &normalized_backward(&k[at], &dkey));
            }
        });
        gradients
    }

    fn query_scale(&self) -> f64 {
        1.0 / (self.key_dim as f64).sqrt()
    }

    /// The index of the decay of a row of the state.
    fn decay_at(&self, token: &Token, channel: usize) -> usize {
        if self.rule.has_channel_decays() { token.key * self.key_dim + channel } else { token.value }
    }

    /// Calls `work` with the tokens of each document and value head.
    fn for_each_document(&self, inputs: &Inputs, mut work: impl FnMut(&[Token], &[Step])) {
        let (documents, v_to_k) = (self.layout.documents(), self.layout.v_to_k());
        for sequence in 0..documents.batch() {
            for document in documents.of_sequence(sequence) {
                for (value_head, &key_head) in v_to_k.iter().enumerate() {
                    let tokens: Vec<Token> = document
                        .clone()
                        .map(|token| sequence * documents.seq_len() + token)
                        .map(|token| Token {
                            key: token * self.key_heads + key_head,
                            value: token * v_to_k.len() + value_head,
                        })
                        .collect();
                    work(&tokens, &self.steps(inputs, &tokens));
                }
            }
        }
    }

    fn steps(&self, inputs: &Inputs, tokens: &[Token]) -> Vec<Step> {
        let (dk, dv) = (self.key_dim, self.value_dim);
        let Inputs { q, k, v, g, beta, .. } = inputs;
        let mut state = vec![0.0; dk * dv];
        let mut steps = Vec::new();
        for token in tokens {
            let of_key = |x: &[f64], scale: f64| -> Vec<f64> {
                let x = &x[token.key * dk..][..dk];
                if self.rule.is_delta() {
                    normalized(x).iter().map(|x| x * scale).collect()
                } else {
                    x.to_vec()
                }
            };
            let (query, key) = (of_key(q, self.query_scale()), of_key(k, 1.0));
            let decay = |element: usize| g[self.decay_at(token, element / dv)].exp();
            let decayed: Vec<f64> = state.iter().enumerate().map(|(i, s)| s * decay(i)).collect();
            let recalled = transposed_product(&decayed, &key);
            let v = &v[token.value * dv..][..dv];
            let error: Vec<f64> = match self.rule.is_delta() {
                true => v.iter().zip(recalled).map(|(v, recalled)| v - recalled).collect(),
                false => v.to_vec(),
            };
            let update: Vec<f64> = error.iter().map(|error| beta[token.value] * error).collect();
            state.clone_from(&decayed);
            add_outer(&mut state, &key, &update);
            steps.push(Step { query, key, decayed, error, state: state.clone() });
        }
        steps
    }
}

/// The index of a token's head among the keys, and among the values.
struct Token {
    key: usize,
    value: usize,
}

/// x / √(Σx² + ε)
fn normalized(x: &[f64]) -> Vec<f64> {
    let r = 1.0 / (dot(x, x) + NORM_EPS).sqrt();
    x.iter().map(|x| x * r).collect()
}

fn normalized_backward(x: &[f64], dy: &[f64]) -> Vec<f64> {
    let r = 1.0 / (dot(x, x) + NORM_EPS).sqrt();
    let along = dot(x, dy) * r * r;
    x.iter().zip(dy).map(|(x, dy)| r * (dy - x * along)).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn add(to: &mut [f64], from: &[f64]) {
    to.iter_mut().zip(from).for_each(|(to, from)| *to += from);
}

/// matrix · vector, with as many columns as the vector has elements.
fn product(matrix: &[f64], vector: &[f64]) -> Vec<f64> {
    matrix.chunks_exact(vector.len()).map(|row| dot(row, vector)).collect()
}

/// matrixᵀ · vector, with as many rows as the vector has elements.
fn transposed_product(matrix: &[f64], vector: &[f64]) -> Vec<f64> {
    let cols = matrix.len() / vector.len();
    let mut sums = vec![0.0; cols];
    for (row, factor) in matrix.chunks_exact(cols).zip(vector) {
        sums.iter_mut().zip(row).for_each(|(sum, element)| *sum += factor * element);
    }
    sums
}

/// matrix += a bᵀ
fn add_outer(matrix: &mut [f64], a: &[f64], b: &[f64]) {
    for (row, a) in matrix.chunks_exact_mut(b.len()).zip(a) {
        row.iter_mut().zip(b).for_each(|(element, b)| *element += a * b);
    }
}
