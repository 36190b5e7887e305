//! `--model` for commands that need no weights.

use crate::failure::{Failure, OrFail};
use crate::output::log_line;
use std::path::Path;
use ulysses::model::{HfDescription, HfWeights, ModelConfig};

/// Reads the shape of a model from a directory or file, for commands that need no weights. If weights exist, they decide
/// whether the head is tied, as in training.
pub(super) fn describe(path: &Path) -> Result<ModelConfig, Failure> {
    let mut description = match path.is_file() {
        true => HfDescription::from_file(path),
        false => HfDescription::from_dir(path),
    }
    .or_usage()?;
    if let Ok(weights) = HfWeights::open(path) {
        description.untie_if_weights_differ(&weights).or_usage()?;
    }
    description.notes.iter().for_each(|text| log_line(format_args!("note: {text}")));
    Ok(description.config)
}
