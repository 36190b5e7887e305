//! Exchanging the rows and columns of a tile in registers.

/// Rows and columns of a [`Tile`].
pub(in crate::ops) const TILE: usize = 16;

/// As many rows as columns of 32-bit elements: a row is a register of AVX-512.
pub(in crate::ops) type Tile<T> = [[T; TILE]; TILE];

/// Rows that are half of the rows apart become neighbours; four rounds of it exchange rows and columns.
/// Loops with known bounds over whole rows, which the compiler turns into shuffles of registers.
#[inline(always)]
pub(in crate::ops) fn transpose<T: Copy + Default>(mut tile: Tile<T>) -> Tile<T> {
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
