//! What every reader of safetensors files does: the header's bytes, and elements in chunks.

use std::io::{self, Read, Seek, SeekFrom};

/// Bytes of the number at a file's beginning that states the header's length.
const LENGTH_BYTES: u64 = 8;

/// Longest header that is read: that of the safetensors library.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// Bytes that are read and decoded at a time. They stay in a core's cache meanwhile.
pub(crate) const CHUNK_BYTES: usize = 1 << 18;

/// Why a header cannot be read.
pub(crate) enum HeaderError {
    /// What the system reports.
    Io(io::Error),
    /// What is wrong with the file.
    Invalid(String),
}

/// The JSON text of a file's header, and where the data begins. What the file claims is held against
/// `file_bytes` before anything is allocated for it.
pub(crate) fn read_header(
    file: &mut (impl Read + Seek),
    file_bytes: u64,
) -> Result<(Vec<u8>, u64), HeaderError> {
    let invalid = |reason: String| Err(HeaderError::Invalid(reason));
    if file_bytes < LENGTH_BYTES {
        return invalid(format!("its {file_bytes} bytes are too few for a safetensors header"));
    }
    let mut length = [0; LENGTH_BYTES as usize];
    file.seek(SeekFrom::Start(0)).map_err(HeaderError::Io)?;
    file.read_exact(&mut length).map_err(HeaderError::Io)?;
    let length = u64::from_le_bytes(length);
    let available = file_bytes - LENGTH_BYTES;
    if length > available.min(MAX_HEADER_BYTES) {
        return invalid(format!(
            "the header claims {length} bytes; the file has {available} more, and the longest header that is \
             read has {MAX_HEADER_BYTES}"
        ));
    }
    let mut json = vec![0; length as usize];
    file.read_exact(&mut json).map_err(HeaderError::Io)?;
    Ok((json, LENGTH_BYTES + length))
}

/// Fills `out` with the elements of `N` bytes that begin at byte `start`. `read_at` reads whole chunks, from a byte on.
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
