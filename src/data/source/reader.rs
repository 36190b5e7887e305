//! Opens data files, and decompresses those of gzip and Zstandard.

use super::files::read_error;
use crate::data::DataError;
use crate::regular_file;
use flate2::bufread::MultiGzDecoder;
use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom};
use std::path::Path;

const BUFFER_BYTES: usize = 1 << 20;

/// The contents of a file, decompressed.
pub(super) type Reader = Box<dyn BufRead + Send>;

/// Opens a file at an offset of its contents. The first bytes of the file, not its name, decide whether it is compressed.
pub(super) fn open(path: &Path, offset: u64) -> Result<Reader, DataError> {
    let failed = |source| read_error(path, source);
    let (file, _) = regular_file::open(path).map_err(failed)?;
    let mut file = BufReader::with_capacity(BUFFER_BYTES, file);
    let buffered = |decoder: Box<dyn Read + Send>| BufReader::with_capacity(BUFFER_BYTES, decoder);
    let mut contents: Reader = match *file.fill_buf().map_err(failed)? {
        [0x1f, 0x8b, ..] => Box::new(buffered(Box::new(MultiGzDecoder::new(file)))),
        // Of a frame, or of a frame to skip.
        [0x28, 0xb5, 0x2f, 0xfd, ..] | [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => {
            Box::new(buffered(Box::new(ZstdFrames { source: file, frame: FrameDecoder::new() })))
        }
        _ => {
            file.seek(SeekFrom::Start(offset)).map_err(failed)?;
            return Ok(Box::new(file));
        }
    };
    io::copy(&mut contents.by_ref().take(offset), &mut io::sink()).map_err(failed)?;
    Ok(contents)
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
