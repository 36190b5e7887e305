//! Exchanging the rows and columns of a tile in registers, and what a row of a tile is loaded from.

/// Rows and columns of a [`Tile`].
pub(crate) const TILE: usize = 16;

/// As many rows as columns of 32-bit elements: a row is a register of AVX-512.
pub(crate) type Tile<T> = [[T; TILE]; TILE];

/// Rows that are half of the rows apart become neighbours; four rounds of it exchange rows and columns.
/// Loops with known bounds over whole rows, which the compiler turns into shuffles of registers.
#[inline(always)]
pub(crate) fn transpose<T: Copy + Default>(mut tile: Tile<T>) -> Tile<T> {
    for _ in 0..TILE.ilog2() {
        let mut next = [[T::default(); TILE]; TILE];
        for row in 0..TILE / 2 {
            [next[2 * row], next[2 * row + 1]] = interleave(&tile[row], &tile[row + TILE / 2]);
        }
        tile = next;
    }
    tile
}

#[inline(always)]
fn interleave<T: Copy + Default>(a: &[T; TILE], b: &[T; TILE]) -> [[T; TILE]; 2] {
    let mut both = [[T::default(); TILE]; 2];
    for (half, both) in both.iter_mut().enumerate() {
        for pair in 0..TILE / 2 {
            both[2 * pair] = a[TILE / 2 * half + pair];
            both[2 * pair + 1] = b[TILE / 2 * half + pair];
        }
    }
    both
}

/// A word of each pair of elements, zeros where there are none.
#[inline(always)]
pub(crate) fn pairs_of(bits: &[u16]) -> [u32; TILE] {
    let bits = padded::<{ 2 * TILE }>(bits);
    std::array::from_fn(|index| word_of(bits[2 * index], bits[2 * index + 1]))
}

/// As many elements as a tile has, zeros where there are fewer. A whole tile's copy has a length that the compiler
/// knows.
#[inline(always)]
pub(crate) fn padded<const N: usize>(source: &[u16]) -> [u16; N] {
    match source.first_chunk::<N>() {
        Some(whole) => *whole,
        None => {
            let mut padded = [0; N];
            padded[..source.len()].copy_from_slice(source);
            padded
        }
    }
}

#[inline(always)]
pub(crate) fn word_of(low: u16, high: u16) -> u32 {
    u32::from(low) | u32::from(high) << 16
}
