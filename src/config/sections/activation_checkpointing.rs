//! The `activation_checkpointing` section.

use crate::config_file::define::keys;
use crate::config_file::define::words::flag;
use crate::config_file::reader::Section;

keys! {
    /// Storage of checkpointed activations; `ulysses.activation_checkpointing` switches checkpointing on.
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub struct ActivationCheckpointingConfig {
        /// Offloads activation checkpoints until the backward pass: from a GPU to host memory, from a CPU to a file.
        pub cpu_checkpointing: bool = flag(),
    }
}

impl ActivationCheckpointingConfig {
    pub(crate) fn check(&self, section: &Section<'_>, is_on: bool) {
        if self.cpu_checkpointing && !is_on {
            let expected =
                "false, unless `ulysses.activation_checkpointing` is true: nothing is checkpointed";
            section.contradiction("cpu_checkpointing", expected);
        }
    }
}
