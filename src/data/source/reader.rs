//! Opens data files, and decompresses those of gzip and Zstandard.

use super::binary::describe_binary;
use crate::data::DataError;
use crate::regular_file;
use flate2::bufread::MultiGzDecoder;
use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom};
use std::path::Path;

/// U+FEFF in UTF-8, with which some editors begin a file.
const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();

const BUFFER_BYTES: usize = 1 << 20;

/// The limit of a text file or a line: positions in a document have 32 bits.
const MAX_DOCUMENT_BYTES: u64 = 1 << 32;

/// The contents of a file, decompressed.
pub(super) type Reader = Box<dyn BufRead + Send>;

/// Opens a file at an offset of its contents, up to its size at that time. The first bytes of the file, not its name, decide
/// whether it is compressed.
///
/// # Errors
/// A file that cannot be read, or that has a NUL byte where it is opened, which no text has.
pub(super) fn open(path: &Path, offset: u64) -> Result<Reader, DataError> {
    let mut contents = decompressed(path, offset)?;
    let beginning = contents.fill_buf().map_err(|source| read_error(path, source))?;
    match beginning.contains(&0) {
        true => Err(DataError::NotText { path: path.to_owned(), advice: describe_binary(beginning) }),
        false => Ok(contents),
    }
}

fn decompressed(path: &Path, offset: u64) -> Result<Reader, DataError> {
    let failed = |source| read_error(path, source);
    let (file, size) = regular_file::open(path).map_err(failed)?;
    let mut file = BufReader::with_capacity(BUFFER_BYTES, file);
    let buffered = |decoder: Box<dyn Read + Send>| BufReader::with_capacity(BUFFER_BYTES, decoder);
    let mut contents: Reader = match *file.fill_buf().map_err(failed)? {
        [0x1f, 0x8b, ..] => Box::new(buffered(Box::new(MultiGzDecoder::new(file.take(size))))),
        // Of a frame, or of a frame to skip.
        [0x28, 0xb5, 0x2f, 0xfd, ..] | [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => {
            Box::new(buffered(Box::new(ZstdFrames { source: file.take(size), frame: FrameDecoder::new() })))
        }
        _ => {
            file.seek(SeekFrom::Start(offset)).map_err(failed)?;
            return Ok(Box::new(file.take(size.saturating_sub(offset))));
        }
    };
    io::copy(&mut contents.by_ref().take(offset), &mut io::sink()).map_err(failed)?;
    Ok(contents)
}

/// Opens a file of JSON, behind its byte order mark.
pub(super) fn open_json(path: &Path) -> Result<Reader, DataError> {
    let mut file = open(path, 0)?;
    if file.fill_buf().map_err(|source| read_error(path, source))?.starts_with(BYTE_ORDER_MARK) {
        file.consume(BYTE_ORDER_MARK.len());
    }
    Ok(file)
}

/// Appends a text or a line of a file up to `end` (its whole rest if that is `None`), and returns its length.
pub(super) fn read_document(
    file: &mut impl BufRead,
    end: Option<u8>,
    path: &Path,
    document: &mut Vec<u8>,
) -> Result<usize, DataError> {
    let mut file = file.take(MAX_DOCUMENT_BYTES);
    let read = match end {
        Some(end) => file.read_until(end, document),
        None => file.read_to_end(document),
    };
    let read = read.map_err(|source| read_error(path, source))?;
    if read as u64 == MAX_DOCUMENT_BYTES {
        return Err(DataError::TooLong { path: path.to_owned(), limit: MAX_DOCUMENT_BYTES });
    }
    Ok(read)
}

/// Consumes white space, and then `byte`. Returns the number of line ends, or `None` if another byte follows.
pub(super) fn skip_to(file: &mut impl BufRead, byte: u8) -> io::Result<Option<u64>> {
    let lines = skip_space(file)?;
    let is_next = file.fill_buf()?.first() == Some(&byte);
    file.consume(usize::from(is_next));
    Ok(is_next.then_some(lines))
}

/// Consumes white space; returns the number of line ends in it.
pub(super) fn skip_space(file: &mut impl BufRead) -> io::Result<u64> {
    let mut lines = 0;
    loop {
        match file.fill_buf()?.first() {
            Some(byte) if byte.is_ascii_whitespace() => lines += u64::from(*byte == b'\n'),
            _ => return Ok(lines),
        }
        file.consume(1);
    }
}

/// Returns the error of a path that cannot be read.
pub(super) fn read_error(path: &Path, source: io::Error) -> DataError {
    let path = path.to_owned();
    match source.kind() {
        io::ErrorKind::NotFound => DataError::Missing { path },
        _ => DataError::Read { path, source },
    }
}

/// Decodes the frames of a Zstandard file, of which a parallel compressor writes several.
struct ZstdFrames<R> {
    source: R,
    frame: FrameDecoder,
}

impl<R: BufRead> Read for ZstdFrames<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.frame.can_collect() == 0 {
            if !self.frame.is_finished() {
                let one = BlockDecodingStrategy::UptoBlocks(1);
                self.frame.decode_blocks(&mut self.source, one).map_err(io::Error::other)?;
                continue;
            }
            if self.source.fill_buf()?.is_empty() {
                return Ok(0);
            }
            match self.frame.init(&mut self.source) {
                Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame {
                    length,
                    ..
                })) => {
                    io::copy(&mut self.source.by_ref().take(length.into()), &mut io::sink())?;
                }
                result => result.map_err(io::Error::other)?,
            }
        }
        self.frame.read(buffer)
    }
}
