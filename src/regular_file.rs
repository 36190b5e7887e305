//! Files that somebody else may have replaced: only regular files are opened, and no more of them is read than they
//! held then.
//!
//! A named pipe waits for its writer for ever, and a device like `/dev/zero` never ends. Symbolic links are followed
//! to what they name.

use std::fs::{File, OpenOptions};
use std::io::{Error, ErrorKind, Read, Result};
use std::path::Path;

/// Opens a file for reading; with it comes its size.
///
/// # Errors
/// Anything but a regular file, which is named, and what the operating system reports.
pub fn open(path: &Path) -> Result<(File, u64)> {
    // Before it is opened, as opening a device may do something; and after, as the name may have changed hands.
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

/// Reads a file, up to the size that it has when it is opened.
///
/// # Errors
/// As [`open`].
pub fn read(path: &Path) -> Result<Vec<u8>> {
    let (file, size) = open(path)?;
    let mut bytes = Vec::new();
    file.take(size).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// The same of a file of text.
///
/// # Errors
/// As [`open`], and bytes that are not UTF-8.
pub fn read_to_string(path: &Path) -> Result<String> {
    String::from_utf8(read(path)?).map_err(|error| Error::new(ErrorKind::InvalidData, error))
}

/// Refuses what is not a regular file.
///
/// # Errors
/// Its kind, and that a regular file is needed.
pub fn check(metadata: &std::fs::Metadata) -> Result<()> {
    if metadata.is_file() {
        return Ok(());
    }
    Err(Error::other(format!("it is {}, a regular file is needed", kind(metadata.file_type()))))
}

fn kind(of: std::fs::FileType) -> &'static str {
    #[cfg(unix)]
    {
        use std::os::unix::fs::FileTypeExt;
        if of.is_fifo() {
            return "a named pipe";
        }
        if of.is_char_device() || of.is_block_device() {
            return "a device";
        }
        if of.is_socket() {
            return "a socket";
        }
    }
    match of {
        of if of.is_dir() => "a directory",
        of if of.is_symlink() => "a symbolic link",
        _ => "something else",
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
        assert_eq!(refused(&pipe), "it is a named pipe, a regular file is needed");
        assert_eq!(refused(&endless), "it is a device, a regular file is needed");
        assert_eq!(refused(dir.path()), "it is a directory, a regular file is needed");
        assert_eq!(open(&dir.path().join("none")).unwrap_err().kind(), ErrorKind::NotFound);
    }
}
