//! TensorBoard's event files.
//!
//! A file is a sequence of records (TensorFlow's `TFRecord`): length as u64, the masked CRC-32C of those eight
//! bytes, the data, the masked CRC-32C of the data, all little-endian. The data is the protobuf message `Event`
//! (`tensorboard/compat/proto/event.proto`), of which scalars need six fields.

use super::append_file::AppendFile;
use std::fs::File;
use std::io;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

/// Writes scalars for TensorBoard.
#[derive(Debug)]
pub struct EventFile {
    file: AppendFile,
}

impl EventFile {
    /// Creates a new file in a directory, and the directory. TensorBoard reads all files of a directory as one run.
    ///
    /// # Errors
    /// An error of the operating system.
    pub fn create(dir: &Path) -> io::Result<Self> {
        std::fs::create_dir_all(dir)?;
        let (now, process) = (now_seconds(), std::process::id());
        // TensorBoard orders the files of a directory by name; a resumed run's file must come later.
        let name = format!(
            "events.out.tfevents.{:010}.ulysses.{process}.{:09}",
            now as u64,
            (now.fract() * 1e9) as u64
        );
        let mut this = Self { file: AppendFile::new(File::create_new(dir.join(name))?) };
        this.write(&Message::default().double(1, now).text(3, "brain.Event:2"))?;
        Ok(this)
    }

    /// Appends the value of a metric at a step. If the disk is full, it is written before the next one.
    ///
    /// # Errors
    /// An error of the operating system.
    pub fn add_scalar(&mut self, tag: &str, step: u64, value: f64) -> io::Result<()> {
        let value = Message::default().text(1, tag).float(2, value as f32);
        let summary = Message::default().message(1, &value);
        self.write(&Message::default().double(1, now_seconds()).integer(2, step).message(5, &summary))
    }

    /// Writes values that wait for disk space.
    ///
    /// # Errors
    /// An error of the operating system.
    pub fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }

    fn write(&mut self, event: &Message) -> io::Result<()> {
        let length = (event.0.len() as u64).to_le_bytes();
        let mut record = Vec::with_capacity(16 + event.0.len());
        record.extend(length);
        record.extend(masked_crc(&length).to_le_bytes());
        record.extend(&event.0);
        record.extend(masked_crc(&event.0).to_le_bytes());
        // In one call, so that readers see whole records.
        self.file.append(&record)
    }
}

fn now_seconds() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

/// A protobuf message.
#[derive(Default)]
struct Message(Vec<u8>);

impl Message {
    /// The wire types of protobuf's encoding.
    const VARINT: u32 = 0;
    const FIXED_64: u32 = 1;
    const LENGTH_DELIMITED: u32 = 2;
    const FIXED_32: u32 = 5;

    fn varint(mut self, mut value: u64) -> Self {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
        self
    }

    fn key(self, field: u32, wire_type: u32) -> Self {
        self.varint(u64::from(field << 3 | wire_type))
    }

    fn integer(self, field: u32, value: u64) -> Self {
        self.key(field, Self::VARINT).varint(value)
    }

    fn double(self, field: u32, value: f64) -> Self {
        self.key(field, Self::FIXED_64).raw(&value.to_le_bytes())
    }

    fn float(self, field: u32, value: f32) -> Self {
        self.key(field, Self::FIXED_32).raw(&value.to_le_bytes())
    }

    fn text(self, field: u32, value: &str) -> Self {
        self.key(field, Self::LENGTH_DELIMITED).varint(value.len() as u64).raw(value.as_bytes())
    }

    fn message(self, field: u32, value: &Self) -> Self {
        self.key(field, Self::LENGTH_DELIMITED).varint(value.0.len() as u64).raw(&value.0)
    }

    fn raw(mut self, bytes: &[u8]) -> Self {
        self.0.extend_from_slice(bytes);
        self
    }
}

/// TensorFlow's `MaskedCrc`, because a CRC of data that contains CRCs is weak.
fn masked_crc(bytes: &[u8]) -> u32 {
    crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

/// CRC-32C (Castagnoli), reflected, bit by bit: records are small.
fn crc32c(bytes: &[u8]) -> u32 {
    const POLYNOMIAL: u32 = 0x82f6_3b78;
    let add_bit = |crc: u32, _| if crc & 1 == 1 { crc >> 1 ^ POLYNOMIAL } else { crc >> 1 };
    !bytes.iter().fold(!0, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), add_bit))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_is_castagnolis() {
        // The check value of the CRC catalog, and a vector of RFC 3720, B.4.
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
    }

    /// The data of every record, their checksums compared.
    fn records(mut bytes: &[u8]) -> Vec<Vec<u8>> {
        let mut records = Vec::new();
        while !bytes.is_empty() {
            let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
            let crc = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
            let data = bytes[12..12 + length].to_vec();
            assert_eq!((crc(8), crc(12 + length)), (masked_crc(&bytes[..8]), masked_crc(&data)));
            records.push(data);
            bytes = &bytes[16 + length..];
        }
        records
    }

    #[test]
    fn a_file_has_its_version_and_then_the_scalars() {
        let dir = tempfile::tempdir().unwrap();
        let mut file = EventFile::create(&dir.path().join("run")).unwrap();
        file.add_scalar("Train/loss", 300, 2.5).unwrap();
        file.add_scalar("Train/loss", 301, -0.5).unwrap();
        let path = std::fs::read_dir(dir.path().join("run")).unwrap().next().unwrap().unwrap().path();
        assert!(path.file_name().unwrap().to_str().unwrap().starts_with("events.out.tfevents."), "{path:?}");
        let records = records(&std::fs::read(path).unwrap());
        assert_eq!(records.len(), 3);
        // Field 1 is the time: a key and eight bytes.
        assert_eq!(records[0][9..], *b"\x1a\x0dbrain.Event:2");
        let scalar = |step: &[u8], value: f32| {
            let mut value_message = b"\x0a\x0aTrain/loss\x15".to_vec();
            value_message.extend(value.to_le_bytes());
            let mut event = [b"\x10", step].concat();
            event.extend([0x2a, value_message.len() as u8 + 2, 0x0a, value_message.len() as u8]);
            event.extend(value_message);
            event
        };
        assert_eq!(records[1][9..], scalar(&[0xac, 0x02], 2.5));
        assert_eq!(records[2][9..], scalar(&[0xad, 0x02], -0.5));
    }
}
