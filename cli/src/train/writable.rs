//! Early checks of output files.

use std::fs::File;
use std::path::Path;

/// Checks that a file can be written, without changing its content.
pub(super) fn check_writable(path: &Path) -> std::io::Result<()> {
    let is_new = !path.exists();
    File::options().append(true).create(true).open(path)?;
    if is_new {
        // An empty file would look like a result. Failing to remove it does no harm.
        let _ = std::fs::remove_file(path);
    }
    Ok(())
}
