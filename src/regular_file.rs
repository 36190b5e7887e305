//! The one place where files that the user names, or that may lie in a directory of the user's, are opened: only regular
//! files, read up to their size when opened.
//!
//! Reading a named pipe could block forever, a device such as `/dev/zero` never ends, and a sparse file of a terabyte costs
//! nothing to make. Symbolic links are followed for reading. For writing they are not, and neither is a file with a second
//! name (hard link) changed: what a link in a run's directory points to belongs to somebody else.

use std::fs::{File, OpenOptions};
use std::io::{Error, ErrorKind, Read, Result, Write};
use std::path::Path;

/// The largest file that is read as a whole, unless the reader states another limit.
pub const MAX_BYTES: u64 = 1 << 30;

/// Opens a regular file for reading, and returns it with its size.
///
/// # Errors
/// Fails if the path is not a regular file or cannot be opened.
pub fn open(path: &Path) -> Result<(File, u64)> {
    // Checked before opening, which may have side effects on a device, and after, as the path may have been replaced.
    check(&std::fs::metadata(path)?)?;
    let file = non_blocking(OpenOptions::new().read(true), 0).open(path)?;
    let metadata = file.metadata()?;
    check(&metadata)?;
    Ok((file, metadata.len()))
}

/// Reads a file of at most [`MAX_BYTES`], up to its size when opened.
///
/// # Errors
/// Fails like [`open`], or if the file is larger.
pub fn read(path: &Path) -> Result<Vec<u8>> {
    read_at_most(path, MAX_BYTES)
}

/// Reads a file of at most `limit` bytes, up to its size when opened.
///
/// # Errors
/// Fails like [`open`], or if the file is larger or does not fit into memory.
pub fn read_at_most(path: &Path, limit: u64) -> Result<Vec<u8>> {
    let (file, size) = open(path)?;
    if size > limit {
        return Err(Error::other(format!("the file has {size} bytes: expected at most {limit}")));
    }
    let mut bytes = Vec::new();
    bytes
        .try_reserve_exact(usize::try_from(size).unwrap_or(usize::MAX))
        .map_err(|_| Error::other(format!("no memory for its {size} bytes")))?;
    file.take(size).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Reads a text file of at most [`MAX_BYTES`], up to its size when opened.
///
/// # Errors
/// Fails like [`read`], or if the content is not UTF-8.
pub fn read_to_string(path: &Path) -> Result<String> {
    String::from_utf8(read(path)?).map_err(|error| Error::new(ErrorKind::InvalidData, error))
}

/// Opens a file for reading and writing, or creates it. Existing contents stay.
///
/// # Errors
/// Fails if the path is a link, has another hard link, is not a regular file or cannot be opened.
pub fn open_to_write(path: &Path) -> Result<File> {
    open_to_change(OpenOptions::new().read(true).write(true).create(true), path)
}

/// Opens a file to append to it, or creates it.
///
/// # Errors
/// Fails like [`open_to_write`].
pub fn append(path: &Path) -> Result<File> {
    open_to_change(OpenOptions::new().append(true).create(true), path)
}

/// Creates a file, or empties it.
///
/// # Errors
/// Fails like [`open_to_write`].
pub fn create(path: &Path) -> Result<File> {
    // Emptied once it is known what it is.
    let file = open_to_change(OpenOptions::new().write(true).create(true).truncate(false), path)?;
    file.set_len(0)?;
    Ok(file)
}

/// Writes a file that is created or replaced.
///
/// # Errors
/// Fails like [`create`], or if the disk is full.
pub fn write(path: &Path, content: impl AsRef<[u8]>) -> Result<()> {
    create(path)?.write_all(content.as_ref())
}

fn open_to_change(options: &mut OpenOptions, path: &Path) -> Result<File> {
    if let Ok(metadata) = path.symlink_metadata() {
        check(&metadata)?;
    }
    #[cfg(unix)]
    let options = non_blocking(options, libc::O_NOFOLLOW);
    let file = options.open(path)?;
    let metadata = file.metadata()?;
    check(&metadata)?;
    #[cfg(unix)]
    if std::os::unix::fs::MetadataExt::nlink(&metadata) > 1 {
        return Err(Error::other(
            "the file has another name (a hard link), whose contents would change: remove it",
        ));
    }
    Ok(file)
}

/// Opening a named pipe that has replaced a file must not block.
fn non_blocking(options: &mut OpenOptions, flags: i32) -> &mut OpenOptions {
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::custom_flags(options, libc::O_NONBLOCK | flags);
    options
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
        let sparse = dir.path().join("sparse");
        File::create(&sparse).unwrap().set_len(1 << 40).unwrap();
        assert_eq!(
            refused(&sparse),
            format!("the file has {} bytes: expected at most {MAX_BYTES}", 1_u64 << 40)
        );
        // A file of size 0 is read as empty, even one that never ends.
        assert_eq!(read(Path::new("/proc/self/pagemap")).unwrap(), b"");
    }

    #[test]
    fn files_are_not_written_through_links_pipes_and_devices() {
        let dir = tempfile::tempdir().unwrap();
        let [own, link, dangling, hard, pipe, null] =
            ["own", "link", "dangling", "hard", "pipe", "null"].map(|name| dir.path().join(name));
        write(&own, "a longer text").unwrap();
        write(&own, "mine").unwrap();
        symlink(&own, &link).unwrap();
        symlink(dir.path().join("none"), &dangling).unwrap();
        symlink("/dev/null", &null).unwrap();
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let openers: [fn(&Path) -> Result<File>; 3] = [create, append, open_to_write];
        let refused = |path: &Path| openers.map(|open| open(path).unwrap_err().to_string());
        for path in [&link, &dangling, &null] {
            assert_eq!(refused(path), ["not a regular file but a symbolic link"; 3]);
        }
        assert_eq!(refused(&pipe), ["not a regular file but a named pipe"; 3]);
        assert_eq!(refused(Path::new("/dev/full")), ["not a regular file but a device"; 3]);
        assert_eq!(refused(dir.path()), ["not a regular file but a directory"; 3]);
        append(&own).unwrap().write_all(b"!").unwrap();
        assert_eq!(read(&own).unwrap(), b"mine!");
        std::fs::hard_link(&own, &hard).unwrap();
        assert!(refused(&hard).iter().all(|error| error.contains("a hard link")));
        assert_eq!(read(&own).unwrap(), b"mine!");
    }
}
