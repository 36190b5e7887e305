//! The resolved values of `"auto"` keys.
//!
//! Hugging Face's Trainer replaces `"auto"` by its own arguments. There is no Trainer here, so
//! the defaults of those arguments apply where the key means the same. DeepSpeed drops any other
//! `"auto"`, which leaves its default.

use super::config::{Config, ResolvedAuto};
use super::reader::Auto as Given;
use super::vocabulary::{Auto, Default, Effect, Key};
use serde_json::Value;

/// Looks the keys up in the resolved config.
pub(crate) fn resolve_autos(autos: &[Given], config: &Config) -> Vec<ResolvedAuto> {
    // Serialization fails only for sizes that JSON cannot hold.
    let written = serde_json::to_value(config).unwrap_or_default();
    let resolve = |Given { path, key }: &Given| ResolvedAuto {
        key: path.clone(),
        value: value_of(key, path, &written),
        source: source_of(key),
    };
    autos.iter().map(resolve).collect()
}

fn value_of(key: &Key, path: &str, written: &Value) -> Option<Value> {
    if !matches!(key.effect, Effect::Supported) {
        return None;
    }
    // As in `ulysses.parameter_groups[0].lr_scale`.
    let place = format!("/{}", path.replace(['.', '['], "/").replace(']', ""));
    let fixed = || match (key.auto, key.default) {
        (Auto::Is(literal), _) | (Auto::AsDefault, Default::Is(literal)) => Some(literal.to_json()),
        _ => None,
    };
    // A disabled section, such as `fp16`, is not written.
    written.pointer(&place).cloned().or_else(fixed)
}

fn source_of(key: &Key) -> String {
    match (key.effect, key.auto, key.default) {
        (Effect::Ignored(why), ..) => format!("no effect: {why}"),
        (_, Auto::Is(_), _) => "the default of Hugging Face's Trainer".to_owned(),
        (_, Auto::Derived(from), _) | (_, Auto::AsDefault, Default::Derived(from)) => format!("from {from}"),
        (_, Auto::AsDefault, _) => "the default".to_owned(),
    }
}
