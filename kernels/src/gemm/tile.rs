//! Transposes a tile in registers, and loads its rows.

/// Rows and columns of a [`Tile`].
pub(crate) const TILE: usize = 16;

/// A square tile of 32-bit elements; a row fills an AVX-512 register.
pub(crate) type Tile<T> = [[T; TILE]; TILE];

/// Interleaves the two halves of the rows; four rounds transpose the tile. Loops with constant bounds over
/// whole rows, which the compiler turns into register shuffles.
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

/// Combines each pair of elements into a word; missing elements are zeros.
#[inline(always)]
pub(crate) fn pairs_of(bits: &[u16]) -> [u32; TILE] {
    let bits = padded::<{ 2 * TILE }>(bits);
    std::array::from_fn(|index| word_of(bits[2 * index], bits[2 * index + 1]))
}

/// The elements of a tile's row; missing elements are zeros. Copying a full row has a constant length.
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
