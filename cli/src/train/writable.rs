//! Files that are tried before there is anything to write.

use std::fs::File;
use std::path::Path;

/// Whether a file can be written, before there is anything to write. What is in it stays.
pub(super) fn check_writable(path: &Path) -> std::io::Result<()> {
    let is_new = !path.exists();
    File::options().append(true).create(true).open(path)?;
    if is_new {
        // An empty file would look like an answer; one that stays does no harm.
        let _ = std::fs::remove_file(path);
    }
    Ok(())
}
