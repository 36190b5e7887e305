//! The config of a run: the file, overridden by flags.

use super::args::TrainArgs;
#[cfg(unix)]
use crate::failure::{Failure, OrFail};
use crate::mesh_flag::{mesh_overrides, stated_mesh};
#[cfg(unix)]
use ulysses::config::{Backend, Config};
use ulysses::config::{DataSource, Overrides, RawConfig};
use ulysses::mesh::Cluster;
use ulysses::trainer::JobError;
#[cfg(unix)]
use ulysses::trainer::job::{likely_device, resolve, with_location};

#[cfg(unix)]
impl TrainArgs {
    /// Returns the config as a process of a job on `cluster` will resolve it, and the backend that file or flag gives.
    pub(crate) fn for_launch(&self, cluster: Cluster) -> Result<(Config, Option<Backend>), Failure> {
        let raw = RawConfig::from_file_with(self.config(), &self.flags.settings()).or_usage()?;
        let backend = self.backend.map(Backend::from).or(raw.backend());
        let device = likely_device(self.device.kind(), backend);
        let overrides =
            with_location(overrides(self.clone(), &raw, Some(cluster))?, &raw, Some(cluster), device);
        Ok((resolve(&raw, &overrides).or_usage()?, backend))
    }
}

/// Converts flags into config overrides, for a job on `cluster`, if any.
pub(super) fn overrides(
    args: TrainArgs,
    raw: &RawConfig,
    cluster: Option<Cluster>,
) -> Result<Overrides, JobError> {
    let mesh = args.mesh.as_deref().map(|mesh| stated_mesh(mesh, cluster)).transpose()?;
    if let Some(selector) = args.mesh_selector.as_ref().filter(|_| !raw.has_mesh_rules()) {
        return Err(JobError::usage(format!(
            "--mesh-selector {selector}: {} has no `ulysses.mesh_rules` to select from; add some, or remove the flag",
            args.config().display()
        )));
    }
    let TrainArgs { mesh_selector, model, tokenizer, seq_len, steps, epochs, .. } = args;
    let TrainArgs { threads_per_rank, output, seed, packing, data, .. } = args;
    Ok(Overrides {
        mesh_selector,
        seq_len,
        steps,
        epochs,
        seed,
        threads_per_rank,
        model,
        data: data.into_iter().map(DataSource::from).collect(),
        packing,
        tokenizer,
        output,
        ..mesh_overrides(mesh.as_ref())
    })
}
