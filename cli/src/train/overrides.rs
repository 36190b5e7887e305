//! The config of a run: the file, overridden by flags.

use super::args::TrainArgs;
use crate::failure::{Failure, OrFail};
use crate::mesh_flag::{mesh_overrides, stated_mesh};
use crate::output::log_line;
#[cfg(unix)]
use crate::placement::likely_device;
use anyhow::anyhow;
use std::path::Path;
use ulysses::comm::host_name;
use ulysses::config::{Backend, Config, DataSource, Overrides, RawConfig};
use ulysses::device::DeviceKind;
use ulysses::mesh::Cluster;

/// Resolves the config of a run. An unspecified mesh size fills the job; a mesh that does not fill it gets a better error
/// later.
pub(super) fn resolve(raw: &RawConfig, overrides: &Overrides) -> Result<Config, Failure> {
    let unfilled = || Overrides { world_size: None, ..overrides.clone() };
    raw.resolve(overrides).or_else(|error| raw.resolve(&unfilled()).map_err(|_| error)).or_usage()
}

#[cfg(unix)]
impl TrainArgs {
    /// Returns the config as a process of a job on `cluster` will resolve it, and the backend that file or flag gives.
    pub(crate) fn for_launch(&self, cluster: Cluster) -> Result<(Config, Option<Backend>), Failure> {
        let raw = RawConfig::from_file_with(self.config(), &self.flags.settings()).or_usage()?;
        let backend = self.backend.map(Backend::from).or(raw.backend());
        let overrides = overrides(self.clone(), &raw, Some(cluster), likely_device(self.device, backend))?;
        Ok((resolve(&raw, &overrides)?, backend))
    }
}

/// Converts flags into config overrides, for a job on `cluster`, if any. `device` is the kind of device of the ranks.
pub(super) fn overrides(
    args: TrainArgs,
    raw: &RawConfig,
    cluster: Option<Cluster>,
    device: DeviceKind,
) -> Result<Overrides, Failure> {
    let mesh = args.mesh.as_deref().map(|mesh| stated_mesh(mesh, cluster)).transpose()?;
    let notes = mesh.iter().filter_map(|mesh| mesh.note.as_ref());
    notes.for_each(|note| log_line(format_args!("warning: {note}")));
    let mesh_selector = mesh_selector(args.mesh_selector.clone(), raw, args.config(), device)?;
    let TrainArgs { model, tokenizer, seq_len, steps, epochs, threads_per_rank, output, seed, .. } = args;
    let data = args.data.into_iter().map(DataSource::from).collect();
    let packing = args.packing;
    Ok(Overrides {
        mesh_selector,
        world_size: cluster.map(Cluster::world_size),
        ranks_per_node: cluster.map(|cluster| cluster.ranks_per_node),
        seq_len,
        steps,
        epochs,
        seed,
        threads_per_rank,
        model,
        data,
        packing,
        tokenizer,
        output,
        ..mesh_overrides(mesh.as_ref())
    })
}

/// Returns the text that the config's mesh rules are matched with, if it has any.
fn mesh_selector(
    given: Option<String>,
    raw: &RawConfig,
    file: &Path,
    device: DeviceKind,
) -> Result<Option<String>, Failure> {
    match given {
        Some(selector) if !raw.has_mesh_rules() => Err(Failure::Usage(anyhow!(
            "--mesh-selector {selector}: {} has no `ulysses.mesh_rules` to select from; add some, or remove the flag",
            file.display()
        ))),
        None if raw.has_mesh_rules() => Ok(Some(machine(device))),
        given => Ok(given),
    }
}

/// Returns the default selector of this machine. A GPU that does not report its name fails later, when it is opened.
fn machine(device: DeviceKind) -> String {
    let device = device.describe().unwrap_or_else(|_| "cuda".to_owned());
    format!("{}/{device}", host_name())
}
