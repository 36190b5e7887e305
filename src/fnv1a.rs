//! 64-bit FNV-1a (RFC 9923). Unlike `std`'s hashers, its values are stable across releases and platforms, so ranks
//! may compare them and files may store them.

/// Initial value of a hash.
pub(crate) const OFFSET_BASIS: u64 = 0xcbf2_9ce4_8422_2325;
const PRIME: u64 = 0x0100_0000_01b3;

/// Hashes one byte, or one word (faster, but with a different result).
///
/// Different words always give different results, because multiplication by an odd number is invertible.
pub(crate) const fn step(hash: u64, word: u64) -> u64 {
    (hash ^ word).wrapping_mul(PRIME)
}

/// An incremental hasher.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Fnv1a(u64);

impl Default for Fnv1a {
    fn default() -> Self {
        Self(OFFSET_BASIS)
    }
}

impl Fnv1a {
    pub(crate) fn write(&mut self, bytes: &[u8]) {
        self.0 = bytes.iter().fold(self.0, |hash, &byte| step(hash, byte.into()));
    }

    pub(crate) fn write_len(&mut self, len: usize) {
        self.write(&(len as u64).to_le_bytes());
    }

    pub(crate) fn finish(self) -> u64 {
        self.0
    }
}

/// Returns the hash of `bytes`.
pub(crate) fn hash(bytes: &[u8]) -> u64 {
    let mut hash = Fnv1a::default();
    hash.write(bytes);
    hash.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_match_the_published_test_vectors() {
        let vectors =
            [("", 0xcbf2_9ce4_8422_2325), ("a", 0xaf63_dc4c_8601_ec8c), ("foobar", 0x8594_4171_f739_67e8)];
        for (text, expected) in vectors {
            assert_eq!(hash(text.as_bytes()), expected, "{text:?}");
        }
    }

    #[test]
    fn incremental_hash_equals_the_hash_of_the_whole() {
        let mut pieces = Fnv1a::default();
        [&b"foo"[..], b"", b"bar"].into_iter().for_each(|piece| pieces.write(piece));
        assert_eq!(pieces.finish(), hash(b"foobar"));
    }
}
