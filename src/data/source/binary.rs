//! Files that are not text.

/// The advice for an Arrow file.
pub(super) const ARROW: &str = "an Arrow file; write JSONL, \
                                 as with `datasets.load_from_disk(DIR).to_json(\"train.jsonl\")` in Python";

/// The advice for a NumPy file.
pub(super) const NUMPY: &str = "a NumPy file; write its token ids with `array.astype(\"uint16\").tofile(\"tokens.bin\")`, \
                                 or with \"uint32\" and `ulysses.token_dtype`";

/// First bytes of files that are not text, whatever their name, and what to do.
const MAGIC: [(&[u8], &str); 9] = [
    (b"PK\x03\x04", "it is a ZIP archive: extract it"),
    (b"\xfd7zXZ\0", "it is compressed with xz: extract it, or use gzip or Zstandard"),
    (b"BZh", "it is compressed with bzip2: extract it, or use gzip or Zstandard"),
    (b"PAR1", "it is a Parquet file: name it `.parquet`"),
    (b"ARROW1", ARROW),
    (b"\x93NUMPY", NUMPY),
    (b"%PDF", "it is a PDF document: extract its text"),
    (b"\xff\xfe", "it is UTF-16: convert it with `iconv -f UTF-16 -t UTF-8`"),
    (b"\xfe\xff", "it is UTF-16: convert it with `iconv -f UTF-16 -t UTF-8`"),
];

/// Returns what the beginning of a file that is not UTF-8 says about it.
pub(super) fn describe_binary(beginning: &[u8]) -> &'static str {
    let found = MAGIC.iter().find(|(magic, _)| beginning.starts_with(magic));
    found.map_or("convert it to UTF-8, or write JSONL", |(_, advice)| advice)
}
