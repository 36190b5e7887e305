//! Matmuls of packed panels: 32 rows of A by 32 columns of B, with f32 sums.

#[cfg(test)]
use super::BLOCK;
use super::Sums;
#[cfg(test)]
use super::pack::PAIRS;
use super::pack::TILE_WORDS;
use crate::OpError;
use std::sync::OnceLock;

/// The environment variable that selects how bf16 matrices are multiplied: `f32`, or `auto` for the fastest
/// way.
const VARIABLE: &str = "ULYSSES_BF16_GEMM";

/// Its name in earlier versions, used if the new one is not set.
const OLD_VARIABLE: &str = "ULYSSES_BF16_PRODUCTS";

/// The instructions that compute a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kernel {
    /// AMX's tile registers (`TDPBF16PS`): Intel from Sapphire Rapids on.
    Amx,
    /// AVX512-BF16 (`VDPBF16PS`): AMD from Zen 4 on. Intel CPUs have it too.
    Avx512,
    /// Plain loops, for tests on any machine; slower than f32.
    #[cfg(test)]
    Portable,
}

impl Kernel {
    /// The fastest kernel of this machine, if it is faster than f32 and [`VARIABLE`] does not select f32.
    pub(crate) fn detect() -> Option<Self> {
        static KERNEL: OnceLock<Option<Kernel>> = OnceLock::new();
        *KERNEL.get_or_init(|| match gemm_in_f32() {
            Ok(true) => None,
            // `checked` reports invalid values.
            Ok(false) | Err(_) => Self::fastest(Self::all(), is_intel()),
        })
    }

    /// As [`detect`](Self::detect).
    ///
    /// # Errors
    /// An invalid value of [`VARIABLE`].
    pub(crate) fn checked() -> Result<Option<Self>, OpError> {
        gemm_in_f32()?;
        Ok(Self::detect())
    }

    /// Selects among a machine's kernels. On Intel CPUs `VDPBF16PS` has not been measured to be faster than
    /// f32; the only measurement used an earlier kernel that was slow everywhere.
    fn fastest(mut found: impl Iterator<Item = Self>, is_intel: bool) -> Option<Self> {
        found.find(|kernel| *kernel != Self::Avx512 || !is_intel)
    }

    /// A note on [`OLD_VARIABLE`], if it is set.
    pub(crate) fn deprecation() -> Option<String> {
        std::env::var_os(OLD_VARIABLE)?;
        Some(format!("the environment variable `{OLD_VARIABLE}` is deprecated: use `{VARIABLE}`"))
    }

    /// Name for reports.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Amx => "AMX",
            Self::Avx512 => "AVX512-BF16",
            #[cfg(test)]
            Self::Portable => "portable",
        }
    }

    /// All kernels of this machine, fastest first.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn all() -> impl Iterator<Item = Self> {
        let amx = super::amx::is_available().then_some(Self::Amx);
        amx.into_iter().chain(super::avx512::is_available().then_some(Self::Avx512))
    }

    /// All kernels of this machine, fastest first.
    #[cfg(not(target_arch = "x86_64"))]
    pub(crate) fn all() -> impl Iterator<Item = Self> {
        std::iter::empty()
    }

    /// Calls `work` with the thread set up for [`block`](Self::block).
    pub(super) fn ready<R>(self, work: impl FnOnce() -> R) -> R {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Amx => super::amx::with_tiles(work),
            _ => work(),
        }
    }

    /// Multiplies two panels of A by two of B, all with the same number of tiles. The thread must be
    /// [`ready`](Self::ready).
    pub(super) fn block(self, a: [&[u32]; 2], b: [&[u32]; 2], sums: &mut Sums) {
        let tiles = a[0].len() / TILE_WORDS;
        assert!(a.iter().chain(&b).all(|panel| panel.len() == tiles * TILE_WORDS));
        match self {
            // SAFETY: `detect` and `all` found the instructions, `ready` has configured the tiles, and the panels
            // have `tiles` tiles each, as just checked.
            #[cfg(target_arch = "x86_64")]
            Self::Amx => unsafe { super::amx::block(a, b, tiles, sums) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => unsafe { super::avx512::block(a, b, tiles, sums) },
            #[cfg(not(target_arch = "x86_64"))]
            Self::Amx | Self::Avx512 => unreachable!("`all` has none of x86-64's"),
            #[cfg(test)]
            Self::Portable => portable(a, b, tiles, sums),
        }
    }
}

/// Returns whether the environment selects f32.
fn gemm_in_f32() -> Result<bool, OpError> {
    let read = |variable| Some((variable, std::env::var_os(variable)?));
    match [VARIABLE, OLD_VARIABLE].into_iter().find_map(read) {
        None => Ok(false),
        Some((_, value)) if value == "auto" => Ok(false),
        Some((_, value)) if value == "f32" => Ok(true),
        Some((variable, value)) => Err(OpError::Environment {
            variable,
            value: value.to_string_lossy().into_owned(),
            expected: "`f32` or `auto`",
        }),
    }
}

#[cfg(target_arch = "x86_64")]
fn is_intel() -> bool {
    // SAFETY: every x86-64 CPU has `cpuid`.
    #[allow(unused_unsafe, reason = "newer Rust has it as a safe function")]
    let leaf = unsafe { std::arch::x86_64::__cpuid(0) };
    [leaf.ebx, leaf.edx, leaf.ecx].map(u32::to_le_bytes).as_flattened() == b"GenuineIntel"
}

#[cfg(not(target_arch = "x86_64"))]
fn is_intel() -> bool {
    false
}

#[cfg(test)]
fn portable(a: [&[u32]; 2], b: [&[u32]; 2], tiles: usize, sums: &mut Sums) {
    let term = |word: u32, high: bool| f32::from_bits(if high { word & 0xffff_0000 } else { word << 16 });
    for (row, column) in (0..BLOCK).flat_map(|row| (0..BLOCK).map(move |column| (row, column))) {
        sums.0[row][column] = (0..tiles * PAIRS)
            .map(|pair| {
                let tile = pair / PAIRS * TILE_WORDS;
                let a = a[row / 16][tile + row % 16 * PAIRS + pair % PAIRS];
                let b = b[column / 16][tile + pair % PAIRS * 16 + column % 16];
                term(a, false) * term(b, false) + term(a, true) * term(b, true)
            })
            .sum();
    }
}

#[cfg(test)]
mod tests {
    use super::Kernel::{Amx, Avx512};
    use super::*;

    #[test]
    fn the_fastest_kernel_is_selected_and_on_intel_only_amx() {
        let fastest = |found: &[Kernel], is_intel| Kernel::fastest(found.iter().copied(), is_intel);
        assert_eq!(fastest(&[Amx, Avx512], true), Some(Amx));
        assert_eq!(fastest(&[Avx512], true), None);
        assert_eq!(fastest(&[Avx512], false), Some(Avx512));
        assert_eq!(fastest(&[], false), None);
    }

    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    #[test]
    fn the_vendor_matches_the_system_report() {
        let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap();
        let vendor = cpuinfo.lines().find_map(|line| line.strip_prefix("vendor_id")).unwrap();
        assert_eq!(is_intel(), vendor.contains("GenuineIntel"), "{vendor}");
    }
}
