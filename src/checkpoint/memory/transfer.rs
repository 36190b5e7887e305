//! Files sent from ranks to other ranks, in pieces.

use crate::checkpoint::{CheckpointError, FileEntry, Storage, StorageFile};
use crate::comm::{ProcessGroup, ProcessGroupExt};
use crate::regular_file;
use std::collections::HashMap;
use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::Path;

/// Maximum number of bytes that a rank sends to another at once.
const PIECE_BYTES: u64 = 4 << 20;

/// A file that one rank sends to another.
#[derive(Debug, Clone)]
pub(super) struct Transfer {
    pub(super) file: FileEntry,
    pub(super) from: usize,
    pub(super) to: usize,
}

/// Range of bytes of the file of a transfer, given by its index.
type Piece = (usize, Range<u64>);

/// Sends files of each sender's `dir` into each receiver's `dir`. All ranks pass the same transfers. Collective.
///
/// The result is this rank's own: after a failure it sends zeros to the end, so that the other ranks do not wait.
///
/// # Errors
/// Fails if communication fails.
pub(super) fn send_files(
    group: &dyn ProcessGroup,
    storage: &dyn Storage,
    dir: &Path,
    transfers: &[Transfer],
) -> Result<Result<(), String>, CheckpointError> {
    send_in_pieces(group, storage, dir, transfers, PIECE_BYTES)
}

fn send_in_pieces(
    group: &dyn ProcessGroup,
    storage: &dyn Storage,
    dir: &Path,
    transfers: &[Transfer],
    piece_bytes: u64,
) -> Result<Result<(), String>, CheckpointError> {
    let (own, ranks) = (group.rank(), group.world_size());
    let sent: Vec<_> = (0..ranks).map(|to| pieces(transfers, own, to, piece_bytes)).collect();
    let received: Vec<_> = (0..ranks).map(|from| pieces(transfers, from, own, piece_bytes)).collect();
    let mut files: HashMap<usize, Box<dyn StorageFile>> = HashMap::new();
    let mut outcome = Ok(());
    for round in 0..num_rounds(transfers, piece_bytes) {
        let counts =
            |pieces: &[Vec<Piece>]| -> Vec<usize> { pieces.iter().map(|p| len(p.get(round))).collect() };
        let mut bytes = Vec::new();
        for (index, range) in sent.iter().filter_map(|pieces| pieces.get(round)) {
            let start = bytes.len();
            bytes.resize(start + (range.end - range.start) as usize, 0);
            let read = read_at(dir, &transfers[*index].file, range.start, &mut bytes[start..]);
            outcome = outcome.and(read);
        }
        let all = group.all_to_all_values(&bytes, &counts(&sent), &counts(&received))?;
        let mut rest = all.as_slice();
        for (index, range) in received.iter().filter_map(|pieces| pieces.get(round)) {
            let (piece, after) = rest.split_at((range.end - range.start) as usize);
            rest = after;
            if outcome.is_ok() {
                let path = dir.join(&transfers[*index].file.name);
                outcome = append(storage, &path, files.entry(*index), piece);
            }
        }
    }
    Ok(outcome.map_err(|error| error.to_string()))
}

/// Returns the pieces that one rank sends to another, in order.
fn pieces(transfers: &[Transfer], from: usize, to: usize, piece_bytes: u64) -> Vec<Piece> {
    let of_file = |(index, transfer): (usize, &Transfer)| {
        let bytes = transfer.file.bytes;
        (0..bytes.div_ceil(piece_bytes)).map(move |piece| {
            let start = piece * piece_bytes;
            (index, start..bytes.min(start + piece_bytes))
        })
    };
    let is_between = |(_, transfer): &(usize, &Transfer)| transfer.from == from && transfer.to == to;
    transfers.iter().enumerate().filter(is_between).flat_map(of_file).collect()
}

/// Returns the largest number of pieces that a rank sends to another.
fn num_rounds(transfers: &[Transfer], piece_bytes: u64) -> usize {
    let mut pieces: HashMap<(usize, usize), u64> = HashMap::new();
    for Transfer { file, from, to } in transfers {
        *pieces.entry((*from, *to)).or_default() += file.bytes.div_ceil(piece_bytes);
    }
    pieces.into_values().max().unwrap_or(0) as usize
}

fn len(piece: Option<&Piece>) -> usize {
    piece.map_or(0, |(_, range)| (range.end - range.start) as usize)
}

fn read_at(dir: &Path, file: &FileEntry, start: u64, out: &mut [u8]) -> Result<(), CheckpointError> {
    let path = dir.join(&file.name);
    let mut read = || {
        let (mut file, _) = regular_file::open(&path)?;
        file.seek(SeekFrom::Start(start))?;
        file.read_exact(out)
    };
    read().map_err(CheckpointError::io("read", &path))
}

fn append(
    storage: &dyn Storage,
    path: &Path,
    file: std::collections::hash_map::Entry<'_, usize, Box<dyn StorageFile>>,
    piece: &[u8],
) -> Result<(), CheckpointError> {
    use std::collections::hash_map::Entry;
    let file = match file {
        Entry::Occupied(open) => open.into_mut(),
        Entry::Vacant(vacant) => {
            vacant.insert(storage.create(path).map_err(CheckpointError::io("create", path))?)
        }
    };
    file.write_all(piece).map_err(CheckpointError::io("write", path))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::LocalStorage;
    use crate::comm::{LaunchOptions, launch};
    use std::fs;

    fn transfer(name: &str, bytes: u64, from: usize, to: usize) -> Transfer {
        let (name, kind) = (name.to_owned(), "parameters".to_owned());
        let file = FileEntry { name, kind, partition: 0, tp_rank: 0, stage: 0, bytes, blake3: String::new() };
        Transfer { file, from, to }
    }

    /// Bytes that encode their position.
    fn content(transfer: &Transfer) -> Vec<u8> {
        (0..transfer.file.bytes).map(|at| (at as u8).wrapping_mul(transfer.from as u8 + 3)).collect()
    }

    #[test]
    fn files_of_any_length_arrive_in_pieces_at_several_ranks() {
        let sent = [
            transfer("a", 20, 0, 1),
            transfer("b", 7, 0, 1),
            transfer("c", 1, 1, 2),
            transfer("d", 15, 2, 0),
            transfer("a", 20, 0, 2),
        ];
        let place = tempfile::tempdir().unwrap();
        let outcomes = launch(3, &LaunchOptions::default(), |rank| {
            let dir = place.path().join(rank.rank.to_string());
            fs::create_dir(&dir)?;
            for transfer in sent.iter().filter(|transfer| transfer.from == rank.rank) {
                fs::write(dir.join(&transfer.file.name), content(transfer))?;
            }
            Ok::<_, anyhow::Error>(send_in_pieces(&*rank.group, &LocalStorage, &dir, &sent, 7)?)
        });
        assert_eq!(outcomes.unwrap(), [Ok(()), Ok(()), Ok(())]);
        for transfer in &sent {
            let path = place.path().join(transfer.to.to_string()).join(&transfer.file.name);
            assert_eq!(fs::read(path).unwrap(), content(transfer), "{transfer:?}");
        }
    }

    #[test]
    fn a_file_that_cannot_be_read_is_an_error_of_its_sender() {
        let place = tempfile::tempdir().unwrap();
        let sent = [transfer("missing", 20, 1, 0)];
        let outcomes = launch(2, &LaunchOptions::default(), |rank| {
            let dir = place.path().join(rank.rank.to_string());
            fs::create_dir(&dir)?;
            Ok::<_, anyhow::Error>(send_in_pieces(&*rank.group, &LocalStorage, &dir, &sent, 7)?)
        });
        let outcomes = outcomes.unwrap();
        assert_eq!(outcomes[0], Ok(()));
        assert!(outcomes[1].as_ref().unwrap_err().contains("missing"), "{outcomes:?}");
    }
}
