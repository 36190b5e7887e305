//! Parquet files: their rows, and what damaged ones come to.

use super::corpus::as_texts;
use super::*;
use ::parquet::basic::Compression;
use ::parquet::data_type::{ByteArray, ByteArrayType};
use ::parquet::file::properties::WriterProperties;
use ::parquet::file::writer::SerializedFileWriter;
use ::parquet::schema::parser::parse_message_type;
use std::path::Path;
use std::sync::Arc;

/// The text of a row; every seventh is null.
fn text(row: usize) -> Option<String> {
    (row % 7 != 3).then(|| format!("row {row} ").repeat(1 + row % 5))
}

/// Writes groups of rows with a number and a text.
fn write_rows(path: &Path, groups: &[usize], compression: Compression) {
    let schema = "message rows { required int64 id; optional binary text (UTF8); }";
    let schema = Arc::new(parse_message_type(schema).unwrap());
    let properties = WriterProperties::builder().set_compression(compression).build();
    let file = std::fs::File::create(path).unwrap();
    let mut writer = SerializedFileWriter::new(file, schema, Arc::new(properties)).unwrap();
    let mut row = 0;
    for &rows in groups {
        let texts: Vec<_> = (row..row + rows).map(text).collect();
        let mut group = writer.next_row_group().unwrap();
        let ids: Vec<i64> = (row..row + rows).map(|id| id as i64).collect();
        let mut column = group.next_column().unwrap().unwrap();
        column.typed::<::parquet::data_type::Int64Type>().write_batch(&ids, None, None).unwrap();
        column.close().unwrap();
        let levels: Vec<i16> = texts.iter().map(|text| i16::from(text.is_some())).collect();
        let values: Vec<ByteArray> =
            texts.iter().flatten().map(|text| ByteArray::from(text.as_str())).collect();
        let mut column = group.next_column().unwrap().unwrap();
        column.typed::<ByteArrayType>().write_batch(&values, Some(&levels), None).unwrap();
        column.close().unwrap();
        group.close().unwrap();
        row += rows;
    }
    writer.close().unwrap();
}

#[test]
fn a_row_of_parquet_is_a_document_whatever_groups_nulls_and_compression() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("a.parquet");
    for compression in [Compression::UNCOMPRESSED, Compression::SNAPPY, Compression::LZ4_RAW] {
        write_rows(&path, &[600, 1, 300], compression);
        let corpus = Corpus::load(&path, &Tokenizer::bytes()).unwrap();
        let expected: Vec<String> = (0..901).filter_map(text).collect();
        assert_eq!(as_texts(&corpus), expected, "{compression:?}");
        assert_eq!(corpus.skipped().empty, (0..901).filter(|&row| text(row).is_none()).count());
    }
}

#[test]
fn a_missing_or_non_text_column_is_named() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("a.parquet");
    write_rows(&path, &[5], Compression::UNCOMPRESSED);
    let tokenizer = Tokenizer::bytes();
    let refuse = |text_field, expected: &str| {
        let options = SourceOptions { text_field, ..SourceOptions::new(&tokenizer) };
        let error = Corpus::open(&[&path], &options).unwrap_err();
        let message = format!("{:#}", anyhow::Error::from(error));
        assert!(message.contains(expected) && message.contains("a.parquet"), "{message}");
    };
    refuse("content", "no column `content`; the columns are: id, text");
    refuse("id", "column `id` contains INT64, not one string per row");
}

#[test]
fn a_damaged_parquet_file_is_an_error_or_other_text_and_never_a_panic() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("a.parquet");
    write_rows(&path, &[40, 20], Compression::SNAPPY);
    let valid = std::fs::read(&path).unwrap();
    let mut refused = 0;
    for (at, change) in (0..valid.len()).flat_map(|at| [0x01, 0x80, 0xff].map(|change| (at, change))) {
        let mut damaged = valid.clone();
        damaged[at] ^= change;
        std::fs::write(&path, damaged).unwrap();
        refused += usize::from(Corpus::load(&path, &Tokenizer::bytes()).is_err());
    }
    for length in 0..valid.len() {
        std::fs::write(&path, &valid[..length]).unwrap();
        Corpus::load(&path, &Tokenizer::bytes()).unwrap_err();
    }
    assert!(refused > valid.len() / 2, "{refused} of {} changes were noticed", 3 * valid.len());
}
