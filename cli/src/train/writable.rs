//! Early checks of output files.

use std::path::Path;

/// Checks that a file can be written, without changing its content.
pub(super) fn check_writable(path: &Path) -> std::io::Result<()> {
    let is_new = path.symlink_metadata().is_err();
    ulysses::regular_file::append(path)?;
    if is_new {
        // An empty file would look like a result. Failing to remove it does no harm.
        let _ = std::fs::remove_file(path);
    }
    Ok(())
}
