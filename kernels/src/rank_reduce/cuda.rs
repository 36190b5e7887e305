//! The launch of `cuda/rank_reduce.cu`.

use super::ReduceOp;
use crate::device::{Arg, DeviceError, Grid, Kernel, Launcher, sources::RANK_REDUCE};
use candle_core::Tensor;

const MAX_RANKS: usize = 256;
const PACK_BYTES: usize = 16;

/// `struct Ranks` of the kernel.
#[repr(C)]
struct Ranks {
    sources: [u64; MAX_RANKS],
    count: u32,
    op: u32,
}

impl Ranks {
    fn bytes(&self) -> &[u8] {
        // SAFETY: only integers and no padding, so every byte is initialized.
        unsafe { std::slice::from_raw_parts(std::ptr::from_ref(self).cast(), size_of::<Self>()) }
    }
}

pub(super) fn reduce(
    launcher: &Launcher,
    op: ReduceOp,
    sources: &[&Tensor],
    begin: usize,
    target: &Tensor,
) -> Result<(), DeviceError> {
    let (dtype, elements) = (target.dtype(), target.elem_count());
    let kernel = Kernel::named(&RANK_REDUCE, format!("rank_reduce_{}", dtype.as_str()));
    if sources.len() > MAX_RANKS {
        let message = format!("{} ranks on one device, at most {MAX_RANKS} are possible", sources.len());
        return Err(DeviceError::Launch { kernel: kernel.name().to_owned(), message });
    }
    if elements == 0 {
        return Ok(());
    }
    launcher.open_slices(&[target], sources, |addresses| {
        let (target, sources) = (addresses[0], &addresses[1..]);
        let mut ranks = Ranks { sources: [0; MAX_RANKS], count: sources.len() as u32, op: op as u32 };
        let mut is_aligned = target.is_aligned_to(PACK_BYTES as u64);
        for (at, source) in ranks.sources.iter_mut().zip(sources) {
            let source = source.offset(begin);
            is_aligned &= source.is_aligned_to(PACK_BYTES as u64);
            *at = source.as_u64();
        }
        let per_pack = PACK_BYTES / dtype.size_in_bytes();
        let packs = if is_aligned { elements / per_pack } else { 0 };
        let threads = packs + elements - packs * per_pack;
        let args =
            [target.into(), Arg::Struct(ranks.bytes()), (packs as u64).into(), (elements as u64).into()];
        // SAFETY: `target` has `elements` elements and every source at least as many from `begin` on; the op
        // has checked this.
        unsafe { launcher.launch(&kernel, Grid::threads(threads), &args) }
    })
}
