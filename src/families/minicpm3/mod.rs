//! MiniCPM3: latent attention, with constant factors on embedding, residual branches and logits.

use super::latent;
use super::{DecoderLayer, Family, HfConfig, ModelConfig, ModelError, ModelNames, Multipliers};
use serde_json::{Value, json};

pub(super) static MINICPM3: Family = Family {
    model_type: "minicpm3",
    class: "MiniCPM3ForCausalLM",
    names: ModelNames::LLAMA,
    read,
    write,
    block: |config, index| Box::new(DecoderLayer::new(config, index)),
    models: &[],
};

/// The factors of the first model, for files without them.
const SCALE_EMB: f64 = 12.0;
const SCALE_DEPTH: f64 = 1.4;
const DIM_MODEL_BASE: usize = 256;

fn read(file: &HfConfig<'_>) -> Result<ModelConfig, ModelError> {
    file.check_activation("hidden_act", "silu")?;
    file.require_kv_heads()?;
    let of_hidden = file.size("hidden_size")? / file.size("num_attention_heads")?.max(1);
    let layer =
        latent::read(file, Some(file.rope()?), file.optional_size("v_head_dim")?.unwrap_or(of_hidden))?;
    let config = file.decoder(&MINICPM3, layer, 1e-5)?;
    let multipliers = multipliers(file, &config)?;
    Ok(file.tied_by_default(ModelConfig { multipliers, ..config }))
}

/// The factors, of which two are 1 for `null`.
fn multipliers(file: &HfConfig<'_>, config: &ModelConfig) -> Result<Multipliers, ModelError> {
    let is_null = |key| file.has(key) && file.get(key).is_none();
    let positive = |key, default| match file.number(key, default)? {
        factor if factor.is_finite() && factor > 0.0 => Ok(factor),
        _ => Err(file.error(key, "it must be positive")),
    };
    let residual = match is_null("scale_depth") {
        true => 1.0,
        false => positive("scale_depth", SCALE_DEPTH)? / root_of_layers(config),
    };
    let logits = match is_null("dim_model_base") {
        true => 1.0,
        false => {
            file.optional_size("dim_model_base")?.unwrap_or(DIM_MODEL_BASE) as f64 / config.hidden_size as f64
        }
    };
    if logits == 0.0 {
        return Err(file.error("dim_model_base", "it must be a positive integer, or null"));
    }
    Ok(Multipliers { embedding: positive("scale_emb", SCALE_EMB)?, residual, logits })
}

fn root_of_layers(config: &ModelConfig) -> f64 {
    (config.num_layers() as f64).sqrt()
}

/// The inverse of [`read`].
fn write(config: &ModelConfig, json: &mut Value) {
    latent::write(config, json);
    let Multipliers { embedding, residual, logits } = config.multipliers;
    let root = root_of_layers(config);
    // The division by the root undoes the product with it, or the product with its neighbor.
    let product = residual * root;
    let candidates = [product, product.next_up(), product.next_down()];
    let scale_depth = candidates.into_iter().find(|depth| depth / root == residual).unwrap_or(product);
    json["scale_depth"] = if residual == 1.0 { Value::Null } else { json!(scale_depth) };
    json["scale_emb"] = json!(embedding);
    json["dim_model_base"] = match logits == 1.0 {
        true => Value::Null,
        false => json!((logits * config.hidden_size as f64).round() as u64),
    };
}
