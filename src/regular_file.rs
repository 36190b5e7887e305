//! Safe reads of files from the user: only regular files, up to their size when opened.
//!
//! Reading a named pipe could block forever, and a device such as `/dev/zero` never ends. Symbolic links are followed.

use std::fs::{File, OpenOptions};
use std::io::{Error, ErrorKind, Read, Result};
use std::path::Path;

/// Opens a regular file for reading, and returns it with its size.
///
/// # Errors
/// Fails if the path is not a regular file or cannot be opened.
pub fn open(path: &Path) -> Result<(File, u64)> {
    // Checked before opening, which may have side effects on a device, and after, as the path may have been replaced.
    check(&std::fs::metadata(path)?)?;
    let mut options = OpenOptions::new();
    options.read(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, libc::O_NONBLOCK);
    let file = options.open(path)?;
    let metadata = file.metadata()?;
    check(&metadata)?;
    Ok((file, metadata.len()))
}

/// Reads a file, up to its size when opened.
///
/// # Errors
/// Fails like [`open`].
pub fn read(path: &Path) -> Result<Vec<u8>> {
    let (file, size) = open(path)?;
    let mut bytes = Vec::new();
    file.take(size).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Reads a text file, up to its size when opened.
///
/// # Errors
/// Fails like [`open`], or if the content is not UTF-8.
pub fn read_to_string(path: &Path) -> Result<String> {
    String::from_utf8(read(path)?).map_err(|error| Error::new(ErrorKind::InvalidData, error))
}

/// Checks that the metadata is that of a regular file.
///
/// # Errors
/// Returns an error with the actual kind of file.
pub fn check(metadata: &std::fs::Metadata) -> Result<()> {
    if metadata.is_file() {
        return Ok(());
    }
    Err(Error::other(format!("not a regular file but {}", kind(metadata.file_type()))))
}

fn kind(file_type: std::fs::FileType) -> &'static str {
    #[cfg(unix)]
    {
        use std::os::unix::fs::FileTypeExt;
        if file_type.is_fifo() {
            return "a named pipe";
        }
        if file_type.is_char_device() || file_type.is_block_device() {
            return "a device";
        }
        if file_type.is_socket() {
            return "a socket";
        }
    }
    match file_type {
        other if other.is_dir() => "a directory",
        other if other.is_symlink() => "a symbolic link",
        _ => "a special file",
    }
}

#[cfg(unix)]
#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn only_regular_files_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let [text, link, pipe, endless] =
            ["text", "link", "pipe", "endless"].map(|name| dir.path().join(name));
        std::fs::write(&text, "as it is").unwrap();
        symlink(&text, &link).unwrap();
        symlink("/dev/zero", &endless).unwrap();
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        assert_eq!(read_to_string(&link).unwrap(), "as it is");
        let refused = |path: &Path| read(path).unwrap_err().to_string();
        assert_eq!(refused(&pipe), "not a regular file but a named pipe");
        assert_eq!(refused(&endless), "not a regular file but a device");
        assert_eq!(refused(dir.path()), "not a regular file but a directory");
        assert_eq!(open(&dir.path().join("none")).unwrap_err().kind(), ErrorKind::NotFound);
    }
}
