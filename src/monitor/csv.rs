//! Metrics as CSV, one file per metric, like DeepSpeed's `csv_monitor`.

use super::append_file::AppendFile;
use crate::regular_file;
use std::collections::HashMap;
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};

/// Writes each metric to its own file: `Train/Samples/lr` to `Train_Samples_lr.csv`, with the columns `step` and `lr`.
#[derive(Debug)]
pub struct CsvFiles {
    dir: PathBuf,
    files: HashMap<String, AppendFile>,
}

impl CsvFiles {
    /// Creates the directory.
    ///
    /// # Errors
    /// An error of the operating system.
    pub fn create(dir: &Path) -> io::Result<Self> {
        std::fs::create_dir_all(dir)?;
        Ok(Self { dir: dir.to_owned(), files: HashMap::new() })
    }

    /// Appends a row. If the disk is full, it is written before the next one. A file of an earlier run keeps its rows
    /// before `step`.
    ///
    /// # Errors
    /// An error of the operating system.
    pub fn add(&mut self, tag: &str, step: u64, value: f64) -> io::Result<()> {
        if !self.files.contains_key(tag) {
            let file = self.open(tag, step)?;
            self.files.insert(tag.to_owned(), file);
        }
        let Some(file) = self.files.get_mut(tag) else { return Ok(()) };
        file.append(format!("{step},{value}\n").as_bytes())
    }

    /// Writes rows that wait for disk space.
    ///
    /// # Errors
    /// An error of the operating system.
    pub fn flush(&mut self) -> io::Result<()> {
        self.files.values_mut().try_for_each(AppendFile::flush)
    }

    fn open(&self, tag: &str, step: u64) -> io::Result<AppendFile> {
        let path = self.dir.join(format!("{}.csv", tag.replace(['/', ' '], "_")));
        let kept = match regular_file::open(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            file => rows_before(BufReader::new(file?.0), step)?,
        };
        let name = tag.rsplit('/').next().unwrap_or(tag);
        let lines = std::iter::once(format!("step,{name}")).chain(kept);
        AppendFile::replacing(&path, lines)
    }
}

/// Returns the rows of steps before `step`, without the header.
fn rows_before(file: impl BufRead, step: u64) -> io::Result<Vec<String>> {
    let mut rows = Vec::new();
    for line in file.lines() {
        let line = line?;
        let of_line = line.split_once(',').and_then(|(of_line, _)| of_line.parse::<u64>().ok());
        if of_line.is_some_and(|of_line| of_line < step) {
            rows.push(line);
        }
    }
    Ok(rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_metric_has_a_file_that_a_resumed_run_continues() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join("runs/csv");
        let mut files = CsvFiles::create(&place).unwrap();
        for step in 1..=3 {
            files.add("Train/Samples/lr", step, 0.5 * step as f64).unwrap();
        }
        files.add("Train/Samples/train_loss", 1, 2.0).unwrap();
        let mut resumed = CsvFiles::create(&place).unwrap();
        resumed.add("Train/Samples/lr", 3, 9.0).unwrap();
        let read = |name: &str| std::fs::read_to_string(place.join(name)).unwrap();
        assert_eq!(read("Train_Samples_lr.csv"), "step,lr\n1,0.5\n2,1\n3,9\n");
        assert_eq!(read("Train_Samples_train_loss.csv"), "step,train_loss\n1,2\n");
    }
}
