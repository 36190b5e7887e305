//! A change of the store, as it is sent.

use std::sync::Arc;

/// A key that a rank set or deleted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::comm) struct Change {
    /// The rank that made the change.
    pub(in crate::comm) rank: usize,
    pub(in crate::comm) key: String,
    /// `None` if the key was deleted.
    pub(in crate::comm) value: Option<Arc<[u8]>>,
}

/// Departure of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::comm) enum Departure {
    /// The rank has announced its end.
    Ended(usize),
    /// The connection ended without an announcement.
    Lost(usize),
}

impl Change {
    /// Encodes rank, key length, whether there is a value, key, and value.
    pub(super) fn encode(&self) -> Vec<u8> {
        let (rank, key_bytes) = ((self.rank as u32).to_le_bytes(), (self.key.len() as u16).to_le_bytes());
        let value = self.value.as_deref().unwrap_or_default();
        [&rank[..], &key_bytes, &[u8::from(self.value.is_some())], self.key.as_bytes(), value].concat()
    }

    /// Returns `None` if the frame is malformed.
    pub(super) fn decode(frame: &[u8]) -> Option<Self> {
        let (rank, rest) = frame.split_first_chunk()?;
        let (key_bytes, rest) = rest.split_first_chunk()?;
        let (has_value, rest) = rest.split_first()?;
        let (key, value) = rest.split_at_checked(usize::from(u16::from_le_bytes(*key_bytes)))?;
        let value = match has_value {
            0 if value.is_empty() => None,
            1 => Some(value.into()),
            _ => return None,
        };
        let key = std::str::from_utf8(key).ok()?.to_owned();
        Some(Self { rank: u32::from_le_bytes(*rank) as usize, key, value })
    }

    /// Returns the rank that has left, if that is what the change means.
    pub(in crate::comm) fn departure(&self) -> Option<Departure> {
        let rank = self.key.strip_prefix("rank/").filter(|_| self.value.is_none())?.parse().ok()?;
        Some(if rank == self.rank { Departure::Ended(rank) } else { Departure::Lost(rank) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_survive_encoding_and_malformed_frames_are_none() {
        for value in [None, Some(&b""[..]), Some(&b"value"[..])] {
            let change = Change { rank: 7, key: "schlüssel".into(), value: value.map(Into::into) };
            let frame = change.encode();
            assert_eq!(Change::decode(&frame), Some(change));
            assert!((0..7 + "schlüssel".len()).all(|end| Change::decode(&frame[..end]).is_none()));
        }
        let mut frame = Change { rank: 0, key: "ab".into(), value: None }.encode();
        frame.push(1);
        assert_eq!(Change::decode(&frame), None, "a deleted key has no value");
        frame[6] = 2;
        assert_eq!(Change::decode(&frame), None);
        frame[6] = 1;
        assert!(Change::decode(&frame).is_some());
        frame[7] = 0xff;
        assert_eq!(Change::decode(&frame), None, "keys are text");
    }
}
