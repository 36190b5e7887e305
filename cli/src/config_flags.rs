//! Flags that override config keys, for every command that takes a config.

use ulysses::config::{PartitionAxes, Setting, Settings};

/// `--set` alone, for commands without the shortcuts of [`ConfigFlags`].
#[derive(clap::Args, Clone, Default)]
pub(super) struct SetFlags {
    /// Config key to override, such as `--set zero_optimization.stage=3`. VALUE is JSON, else a string. Repeatable;
    /// other flags take precedence.
    #[arg(long = "set", value_name = "KEY=VALUE", value_parser = Setting::parse)]
    set: Vec<Setting>,
}

/// `--set` and shortcuts for the most frequently changed keys.
#[derive(clap::Args, Clone, Default)]
pub(super) struct ConfigFlags {
    #[command(flatten)]
    set: SetFlags,
    /// Learning rate: `optimizer.params.lr`.
    #[arg(long)]
    lr: Option<f64>,
    /// Sequences per optimizer step over all ranks: `train_batch_size`. Keeps the micro batch size and adapts gradient
    /// accumulation.
    #[arg(long)]
    batch_size: Option<usize>,
    /// ZeRO stage (0 to 3): `zero_optimization.stage`.
    #[arg(long, value_parser = clap::value_parser!(u8).range(0..=3))]
    zero_stage: Option<u8>,
    /// Mesh axes over which ZeRO partitions: `ulysses.zero_partition_axes`. `dp`: every sp rank has a full
    /// set of partitions; `dp,sp`: the partitions are spread over all ranks, so state is stored once.
    #[arg(long, value_parser = partition_axes, value_name = "dp|dp,sp")]
    zero_partition_axes: Option<PartitionAxes>,
}

fn partition_axes(text: &str) -> Result<PartitionAxes, String> {
    PartitionAxes::from_names(text.split(',')).ok_or_else(|| "expected `dp` or `dp,sp`".to_owned())
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
        let Self { lr, batch_size, zero_stage, zero_partition_axes, .. } = *self;
        Settings { lr, batch_size, zero_stage, zero_partition_axes, ..self.set.settings() }
    }
}
