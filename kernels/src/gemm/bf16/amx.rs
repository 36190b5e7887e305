//! AMX through inline assembly, since its intrinsics are not in stable Rust.

use super::Sums;
use super::pack::TILE_WORDS;
use std::arch::asm;
use std::arch::x86_64::__cpuid_count;

/// Returns whether the CPU has AMX for bf16 and the operating system lets this process use it.
pub(super) fn is_available() -> bool {
    const TILES_AND_BF16: u32 = 1 << 24 | 1 << 22;
    // SAFETY: every x86-64 CPU has `cpuid`.
    #[allow(unused_unsafe, reason = "newer Rust has it as a safe function")]
    let leaf = |leaf| unsafe { __cpuid_count(leaf, 0) };
    leaf(0).eax >= 7 && leaf(7).edx & TILES_AND_BF16 == TILES_AND_BF16 && has_permission()
}

/// Requests the tile registers from Linux, which a process must do once (Documentation/arch/x86/xstate.rst).
#[cfg(target_os = "linux")]
fn has_permission() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_ulong = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_ulong = 18;
    // SAFETY: the call accesses no memory of the process; a kernel that does not know it returns an error.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
}

#[cfg(not(target_os = "linux"))]
fn has_permission() -> bool {
    false
}

/// The operand of `ldtilecfg`: eight tiles of 16 rows of 64 bytes.
#[repr(C, align(64))]
struct TileConfig {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    bytes_per_row: [u16; 16],
    rows: [u8; 16],
}

static CONFIG: TileConfig = {
    let (mut bytes_per_row, mut rows) = ([0; 16], [0; 16]);
    let mut tile = 0;
    while tile < 8 {
        (bytes_per_row[tile], rows[tile]) = (64, 16);
        tile += 1;
    }
    TileConfig { palette: 1, start_row: 0, reserved: [0; 14], bytes_per_row, rows }
};

/// Calls `work` with this thread's tiles configured.
pub(super) fn with_tiles<R>(work: impl FnOnce() -> R) -> R {
    /// Releases the tiles, even if `work` panics: a thread with tiles in use costs 8 KiB per context switch.
    struct Release;
    impl Drop for Release {
        fn drop(&mut self) {
            // SAFETY: the tiles are this thread's, and their content is no longer needed.
            unsafe { asm!("tilerelease", options(nostack, nomem)) }
        }
    }
    // SAFETY: `Kernel::Amx` exists where `is_available`; the configuration is valid for palette 1.
    unsafe { asm!("ldtilecfg [{config}]", config = in(reg) &raw const CONFIG, options(nostack, readonly)) }
    let _release = Release;
    work()
}

/// # Safety
/// AMX is available, the thread is within [`with_tiles`], and all panels have `tiles` tiles.
pub(super) unsafe fn block(a: [&[u32]; 2], b: [&[u32]; 2], tiles: usize, sums: &mut Sums) {
    const TILE_BYTES: usize = TILE_WORDS * size_of::<u32>();
    // SAFETY: reads `tiles` tiles of each panel and writes the four quarters of `sums`, whose rows are 128 bytes.
    unsafe {
        asm!(
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "test {tiles}, {tiles}",
            "jz 3f",
            "2:",
            "tileloadd tmm4, [{a0} + {row}]",
            "tileloadd tmm6, [{b0} + {row}]",
            "tileloadd tmm7, [{b1} + {row}]",
            "tileloadd tmm5, [{a1} + {row}]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "add {a0}, {tile_bytes}",
            "add {a1}, {tile_bytes}",
            "add {b0}, {tile_bytes}",
            "add {b1}, {tile_bytes}",
            "dec {tiles}",
            "jnz 2b",
            "3:",
            "tilestored [{sums} + {row}*2], tmm0",
            "tilestored [{sums} + {row}*2 + 64], tmm1",
            "tilestored [{sums} + {row}*2 + 2048], tmm2",
            "tilestored [{sums} + {row}*2 + 2112], tmm3",
            a0 = inout(reg) a[0].as_ptr() => _,
            a1 = inout(reg) a[1].as_ptr() => _,
            b0 = inout(reg) b[0].as_ptr() => _,
            b1 = inout(reg) b[1].as_ptr() => _,
            tiles = inout(reg) tiles => _,
            row = in(reg) 64_usize,
            sums = in(reg) sums,
            tile_bytes = const TILE_BYTES,
            options(nostack),
        );
    }
}
