//! The flags that change a config, on every command that takes one.

use ulysses::config::{Setting, Settings};

/// `--set`, where other flags have the names of the shortcuts or do without.
#[derive(clap::Args, Clone, Default)]
pub(super) struct SetFlags {
    /// Set a key of the config, as in `--set zero_optimization.stage=3`. VALUE is JSON, or else a string. May be given
    /// several times; other flags override it.
    #[arg(long = "set", value_name = "KEY=VALUE", value_parser = Setting::parse)]
    set: Vec<Setting>,
}

/// `--set` and the shortcuts of the keys that are changed most.
#[derive(clap::Args, Clone, Default)]
pub(super) struct ConfigFlags {
    #[command(flatten)]
    set: SetFlags,
    /// Learning rate: `optimizer.params.lr`.
    #[arg(long)]
    lr: Option<f64>,
    /// Sequences per optimizer step, over all ranks: `train_batch_size`. The micro batch of the config stays, and the
    /// accumulation follows.
    #[arg(long)]
    batch_size: Option<usize>,
    /// ZeRO stage, 0 to 3: `zero_optimization.stage`.
    #[arg(long, value_parser = clap::value_parser!(u8).range(0..=3))]
    zero_stage: Option<u8>,
}

impl SetFlags {
    pub(super) fn settings(&self) -> Settings {
        Settings { set: self.set.clone(), ..Settings::default() }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.set.is_empty()
    }
}

impl ConfigFlags {
    pub(super) fn settings(&self) -> Settings {
        let Self { lr, batch_size, zero_stage, .. } = *self;
        Settings { lr, batch_size, zero_stage, ..self.set.settings() }
    }
}
