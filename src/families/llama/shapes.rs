//! Published models of Llama.

use super::LLAMA;
use crate::families::{KnownModel, ModelConfig, Sizes};
use ulysses_kernels::rope::Scaling;

/// Length for which Llama 3.1 is made.
const LONG: usize = 131_072;

pub(super) const MODELS: &[KnownModel] = &[
    KnownModel::new("llama2-7b", 6_738_415_616, 4096, || llama2([4096, 32, 32, 32, 11008])),
    KnownModel::new("llama3-8b", 8_030_261_248, 8192, || llama3([4096, 32, 32, 8, 14336])),
    KnownModel::new("llama3-70b", 70_553_706_496, 8192, || llama3([8192, 80, 64, 8, 28672])),
    KnownModel::new("llama3-405b", 405_853_388_800, 8192, || llama3([16384, 126, 128, 8, 53248])),
    KnownModel::new("Llama-3.1-8B", 8_030_261_248, LONG, || llama3_1([4096, 32, 32, 8, 14336])),
    KnownModel::new("Llama-3.1-70B", 70_553_706_496, LONG, || llama3_1([8192, 80, 64, 8, 28672])),
    KnownModel::new("Llama-3.1-405B", 405_853_388_800, LONG, || llama3_1([16384, 126, 128, 8, 53248])),
    KnownModel::new("Llama-3.2-1B", 1_235_814_400, LONG, || llama3_2([2048, 16, 32, 8, 8192])),
    KnownModel::new("Llama-3.2-3B", 3_212_749_824, LONG, || llama3_2([3072, 28, 24, 8, 8192])),
    KnownModel::new("Llama-3.3-70B", 70_553_706_496, LONG, || llama3_1([8192, 80, 64, 8, 28672])),
];

fn llama2(sizes: Sizes) -> ModelConfig {
    ModelConfig::with_sizes(&LLAMA, sizes)
}

fn llama3(sizes: Sizes) -> ModelConfig {
    let config = llama2(sizes).with_rope(|rope| rope.theta = 500_000.0);
    ModelConfig { vocab_size: 128_256, ..config }
}

fn llama3_1(sizes: Sizes) -> ModelConfig {
    llama3(sizes).with_rope(|rope| rope.scaling = scaling(8.0))
}

fn llama3_2(sizes: Sizes) -> ModelConfig {
    let config = llama3(sizes).with_rope(|rope| rope.scaling = scaling(32.0));
    ModelConfig { tie_word_embeddings: true, ..config }
}

fn scaling(factor: f64) -> Scaling {
    Scaling::Llama3 { factor, low_freq_factor: 1.0, high_freq_factor: 4.0, original_len: 8192 }
}
