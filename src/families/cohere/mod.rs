//! Cohere's Command: attention and MLP side by side behind one LayerNorm, neighboring elements rotate as pairs, and a factor on the
//! logits. The second version has windows in three of four layers; the others have no position embedding.

use super::read::{remove_fields, write_windows};
use super::{
    DecoderParts, Family, HfConfig, KnownModel, ModelConfig, ModelError, ModelNames, Multipliers,
    ParallelDecoderLayer, Sizes,
};
use crate::nn::BranchNorms;
use serde_json::{Value, json};

pub(super) static COHERE: Family = Family {
    model_type: "cohere",
    class: "CohereForCausalLM",
    names: ModelNames::LLAMA,
    read: |file| {
        if file.flag("use_qk_norm")? {
            return Err(file.error("use_qk_norm", "this version has no norms of queries and keys here"));
        }
        let config = read(file, &COHERE)?;
        file.check_full_attention(&config)?;
        Ok(config)
    },
    write,
    block: |config, index| Box::new(ParallelDecoderLayer::with_parts(config, index, PARTS)),
    models: &[
        KnownModel::new("c4ai-command-r-v01", 34_980_831_232, 131_072, || {
            let config = published(&COHERE, [8192, 40, 64, 64, 22528], 8_000_000.0, 0.0625);
            ModelConfig { vocab_size: 256_000, ..config }
        }),
        KnownModel::new("aya-23-8B", 8_028_033_024, 8192, || {
            let config = published(&COHERE, [4096, 32, 32, 8, 14336], 10_000.0, 0.0625);
            ModelConfig { vocab_size: 256_000, ..config }
        }),
    ],
};

pub(super) static COHERE2: Family = Family {
    model_type: "cohere2",
    class: "Cohere2ForCausalLM",
    names: ModelNames::LLAMA,
    read: |file| {
        let config = read(file, &COHERE2)?;
        let pattern = match file.has("layer_types") {
            true => {
                file.accept(&["sliding_window_pattern"]);
                4
            }
            false => file.interval("sliding_window_pattern", 4)?,
        };
        let windowed = file.windowed_layers(config.num_layers(), |index| (index + 1) % pattern != 0)?;
        let config = file.with_windows(config, &windowed, file.window_or(4096)?, None)?;
        Ok(without_position_in_full_layers(config))
    },
    write: |config, json| {
        write(config, json);
        write_windows(config, json);
    },
    block: |config, index| Box::new(ParallelDecoderLayer::with_parts(config, index, PARTS)),
    models: &[KnownModel::new("c4ai-command-r7b-12-2024", 8_028_033_024, 132_096, || {
        let config = published(&COHERE2, [4096, 32, 32, 8, 14336], 50_000.0, 0.25);
        let windowed: Vec<bool> = (1..=32).map(|layer| layer % 4 != 0).collect();
        let config = ModelConfig { vocab_size: 256_000, ..config };
        without_position_in_full_layers(config.with_windows(&windowed, 4096, None))
    })],
};

/// One norm for both modules.
const PARTS: DecoderParts =
    DecoderParts { mlp_norms: BranchNorms { before: None, after: None }, ..DecoderParts::LLAMA };

fn read(file: &HfConfig<'_>, family: &'static Family) -> Result<ModelConfig, ModelError> {
    file.check_block()?;
    let mut layer = file.attention()?;
    layer.rope.iter_mut().for_each(|rope| rope.interleaved = true);
    let logits = match file.number("logit_scale", 0.0625)? {
        factor if factor.is_finite() && factor > 0.0 => factor,
        _ => return Err(file.error("logit_scale", "it must be positive")),
    };
    let config = ModelConfig {
        rms_norm_eps: file.eps("layer_norm_eps", 1e-5)?,
        centered_norms: true,
        multipliers: Multipliers { logits, ..Multipliers::default() },
        ..file.decoder(family, layer, 1e-5)?
    };
    Ok(file.tied_by_default(config))
}

fn without_position_in_full_layers(config: ModelConfig) -> ModelConfig {
    config.with_attention(|layer| {
        if layer.window.is_none() {
            layer.rope = None;
        }
    })
}

fn write(config: &ModelConfig, json: &mut Value) {
    json["layer_norm_eps"] = json!(config.rms_norm_eps);
    json["logit_scale"] = json!(config.multipliers.logits);
    remove_fields(json, &["rms_norm_eps"]);
}

fn published(family: &'static Family, sizes: Sizes, theta: f64, logits: f64) -> ModelConfig {
    let config = ModelConfig::with_sizes(family, sizes)
        .with_rope(|rope| (rope.theta, rope.interleaved) = (theta, true));
    ModelConfig {
        centered_norms: true,
        tie_word_embeddings: true,
        multipliers: Multipliers { logits, ..Multipliers::default() },
        ..config
    }
}
