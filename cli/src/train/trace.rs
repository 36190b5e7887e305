//! The output file of `--trace`.

use crate::failure::{Failure, OrFail};
use crate::output::log_line;
use anyhow::Context;
use std::io::{BufWriter, Write};
use std::path::Path;
use ulysses::mesh::DeviceMesh;
use ulysses::monitor::{TraceData, Tracer, write_trace};
use ulysses::trainer::JobError;

/// Checks in advance that the file can be written, without changing its content.
pub(super) fn check(path: &Path) -> Result<(), JobError> {
    let is_new = path.symlink_metadata().is_err();
    let writable = ulysses::regular_file::append(path);
    writable.with_context(|| format!("--trace: cannot write {}", path.display())).map_err(JobError::usage)?;
    if is_new {
        // An empty file would look like a result. Failing to remove it does no harm.
        let _ = std::fs::remove_file(path);
    }
    Ok(())
}

/// Writes the traces of all ranks: `completed`, and those of failed ranks in this process.
pub(super) fn write(
    path: &Path,
    mesh: &DeviceMesh,
    tracer: &Tracer,
    completed: Option<&TraceData>,
) -> Result<(), Failure> {
    let traced: TraceData = completed.cloned().into_iter().chain([tracer.take_all()]).collect();
    if traced.slices.is_empty() {
        // A run without steps keeps an earlier trace.
        return Ok(());
    }
    let track = |rank: &usize| {
        let coordinate = mesh.coordinate(*rank).unwrap_or_default();
        let axes =
            mesh.axis_names().into_iter().zip(coordinate).map(|(axis, index)| format!("{axis} {index}"));
        format!("rank {rank} ({})", axes.collect::<Vec<_>>().join(", "))
    };
    let tracks: Vec<String> = mesh.ranks().iter().map(track).collect();
    let write = || -> std::io::Result<()> {
        let mut file = BufWriter::new(ulysses::regular_file::create(path)?);
        write_trace(&mut file, &tracks, &traced)?;
        file.flush()
    };
    write().with_context(|| format!("--trace: cannot write {}", path.display())).or_run()?;
    log_line(format_args!(
        "trace       {} ({} slices); view it at ui.perfetto.dev",
        path.display(),
        traced.slices.len()
    ));
    Ok(())
}
