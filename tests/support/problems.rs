//! Models and batches whose results must not depend on the mesh.

use super::mesh_run::{Problem, Rule};
use super::reference::{
    AdagradConfig, AdamWConfig, Batch, Family, LambConfig, LionConfig, ReferenceConfig, RopeScaling,
    random_weights,
};

/// Two layers, 8 query heads, sequences of 22 tokens: neither 3 nor 4 divides 22.
pub const CONFIG: ReferenceConfig = ReferenceConfig {
    family: Family::Llama,
    vocab_size: 61,
    hidden_size: 24,
    intermediate_size: 40,
    num_layers: 2,
    num_heads: 8,
    num_kv_heads: 4,
    head_dim: 4,
    rope_theta: 10_000.0,
    rope_scaling: RopeScaling::Default,
    rms_norm_eps: 1e-5,
    tie_word_embeddings: false,
    partial_rotary_factor: 1.0,
    qkv_bias: false,
    qk_norm: false,
    sliding_window: None,
};

pub const SEQ_LEN: usize = 22;

pub const ADAMW: AdamWConfig = AdamWConfig { lr: 1e-3, betas: (0.9, 0.95), eps: 1e-8, weight_decay: 0.1 };

pub const LION: LionConfig = LionConfig { lr: 1e-3, betas: (0.9, 0.99), weight_decay: 0.1 };

/// The accumulator starts above the squared gradients. Starting at 0, the first step would be the gradient's sign.
pub const ADAGRAD: AdagradConfig =
    AdagradConfig { lr: 1e-2, lr_decay: 0.5, eps: 1e-10, weight_decay: 0.1, initial_accumulator_value: 1e-3 };

/// `eps` exceeds the rounding errors of gradients, which the first steps would otherwise amplify.
pub const LAMB: LambConfig =
    LambConfig { lr: 1e-2, betas: (0.9, 0.95), eps: 1e-5, weight_decay: 0.1, coefficients: (0.01, 10.0) };

/// Returns eight sequences packed with documents of many lengths, including 1 token and a whole sequence.
pub fn packed_batch() -> Batch {
    let rows: [&[usize]; 8] =
        [&[22], &[9, 13], &[1, 4, 17], &[21, 1], &[7, 8, 7], &[22], &[11, 11], &[3, 2, 1, 16]];
    Batch::packed(CONFIG.vocab_size, &rows, 11)
}

pub fn problem(config: ReferenceConfig, batch: Batch) -> Problem {
    let weights = random_weights(&config, 5).expect("random weights");
    Problem::new(config, weights, batch)
}

/// The model and batch of the full grid.
pub fn main_problem(rule: Rule, clip: Option<f64>) -> Problem {
    Problem { rule, clip, ..problem(CONFIG, packed_batch()) }
}
