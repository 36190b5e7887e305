//! FNV-1a, 64 bits (RFC 9923): unlike those of `std`'s hashers, its values are the same in every release and
//! on every platform, so ranks may compare them and files keep them.

/// What a hash starts from.
pub(crate) const OFFSET_BASIS: u64 = 0xcbf2_9ce4_8422_2325;
const PRIME: u64 = 0x0100_0000_01b3;

/// Takes in one byte. Whole words may take its place: faster, with other values. A change of `word` alone always
/// changes the result: multiplying by an odd number can be undone.
pub(crate) const fn step(hash: u64, word: u64) -> u64 {
    (hash ^ word).wrapping_mul(PRIME)
}

/// The hash of bytes that come piece by piece.
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

/// The hash of `bytes`.
pub(crate) fn hash(bytes: &[u8]) -> u64 {
    let mut hash = Fnv1a::default();
    hash.write(bytes);
    hash.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_are_those_of_the_published_test_vectors() {
        let vectors =
            [("", 0xcbf2_9ce4_8422_2325), ("a", 0xaf63_dc4c_8601_ec8c), ("foobar", 0x8594_4171_f739_67e8)];
        for (text, expected) in vectors {
            assert_eq!(hash(text.as_bytes()), expected, "{text:?}");
        }
    }

    #[test]
    fn bytes_hash_alike_however_they_are_cut() {
        let mut pieces = Fnv1a::default();
        [&b"foo"[..], b"", b"bar"].into_iter().for_each(|piece| pieces.write(piece));
        assert_eq!(pieces.finish(), hash(b"foobar"));
    }
}
