//! Shared parts of the safetensors readers: header bytes, and chunked reads of elements.

use std::io::{self, Read, Seek, SeekFrom};

/// Size of the header-length field at the start of a file.
const LENGTH_BYTES: u64 = 8;

/// Maximum header size, as in the safetensors library.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// Size of a chunk that is read and decoded at once. It fits in a core's cache.
pub(crate) const CHUNK_BYTES: usize = 1 << 18;

/// A failure to read a header.
pub(crate) enum HeaderError {
    /// An I/O error.
    Io(io::Error),
    /// An invalid file, with the reason.
    Invalid(String),
}

/// Returns the JSON text of a file's header, and the offset of the data.
///
/// It checks the header length against `file_bytes` before it allocates memory.
pub(crate) fn read_header(
    file: &mut (impl Read + Seek),
    file_bytes: u64,
) -> Result<(Vec<u8>, u64), HeaderError> {
    let invalid = |reason: String| Err(HeaderError::Invalid(reason));
    if file_bytes < LENGTH_BYTES {
        return invalid(format!("file has {file_bytes} bytes, too few for a safetensors header"));
    }
    let mut length = [0; LENGTH_BYTES as usize];
    file.seek(SeekFrom::Start(0)).map_err(HeaderError::Io)?;
    file.read_exact(&mut length).map_err(HeaderError::Io)?;
    let length = u64::from_le_bytes(length);
    let available = file_bytes - LENGTH_BYTES;
    if length > available.min(MAX_HEADER_BYTES) {
        return invalid(format!(
            "header length is {length} bytes; the file has {available} more bytes, and the maximum is \
             {MAX_HEADER_BYTES}"
        ));
    }
    let mut json = vec![0; length as usize];
    file.read_exact(&mut json).map_err(HeaderError::Io)?;
    Ok((json, LENGTH_BYTES + length))
}

/// Reads `out.len()` elements of `N` bytes, starting at byte `start`.
///
/// `read_at(offset, buffer)` must fill the buffer with the bytes at `offset`.
pub(crate) fn read_elements<const N: usize>(
    start: u64,
    out: &mut [f32],
    decode: impl Fn([u8; N]) -> f32,
    mut read_at: impl FnMut(u64, &mut [u8]) -> io::Result<()>,
) -> io::Result<()> {
    let mut chunk = vec![0; CHUNK_BYTES.min(out.len() * N)];
    let mut position = start;
    for out in out.chunks_mut(CHUNK_BYTES / N) {
        let bytes = &mut chunk[..out.len() * N];
        read_at(position, bytes)?;
        position += bytes.len() as u64;
        let (encoded, _) = bytes.as_chunks::<N>();
        out.iter_mut().zip(encoded).for_each(|(element, bytes)| *element = decode(*bytes));
    }
    Ok(())
}
