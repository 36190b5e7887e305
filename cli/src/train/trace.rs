//! The file of `--trace`.

use super::rank_outcome::RankOutcome;
use super::writable::check_writable;
use crate::{Failure, OrFail, note};
use anyhow::Context;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;
use ulysses::mesh::DeviceMesh;
use ulysses::monitor::{TraceData, Tracer, write_trace};

/// Whether the file can be written, before there is anything to write.
pub(super) fn check(path: &Path) -> Result<(), Failure> {
    check_writable(path).with_context(|| format!("--trace: cannot write {}", path.display())).or_usage()
}

/// Writes what ranks have brought, and what those of this process have left that did not come to their end.
pub(super) fn write(
    path: &Path,
    mesh: &DeviceMesh,
    tracer: &Tracer,
    outcomes: &[RankOutcome],
) -> Result<(), Failure> {
    let brought = outcomes.iter().map(|outcome| outcome.trace.clone());
    let traced: TraceData = brought.chain([tracer.take_all()]).collect();
    if traced.slices.is_empty() {
        // A run without a step leaves an earlier one's trace alone.
        return Ok(());
    }
    let track = |rank: &usize| {
        let place = mesh.coordinate(*rank).unwrap_or_default();
        let place = mesh.axis_names().iter().zip(place).map(|(axis, index)| format!("{axis} {index}"));
        format!("rank {rank} ({})", place.collect::<Vec<_>>().join(", "))
    };
    let tracks: Vec<String> = mesh.ranks().iter().map(track).collect();
    let write = || -> std::io::Result<()> {
        let mut file = BufWriter::new(File::create(path)?);
        write_trace(&mut file, &tracks, &traced)?;
        file.flush()
    };
    write().with_context(|| format!("--trace: cannot write {}", path.display())).or_run()?;
    note(format_args!(
        "trace       {} ({} slices); open it in ui.perfetto.dev",
        path.display(),
        traced.slices.len()
    ));
    Ok(())
}
