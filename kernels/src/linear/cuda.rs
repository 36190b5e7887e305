//! The matmul on a device, with its matrix library.

use super::{Dense, Product};
use crate::device::{Address, DeviceError, Launcher, Matmul, MatrixAt};

pub(super) fn multiply(
    launcher: &Launcher,
    Product { a, b, c, accumulate, .. }: Product<'_>,
) -> Result<(), DeviceError> {
    launcher.open([c.tensor], [a.tensor, b.tensor], |[at_c], [at_a, at_b]| {
        let beta = if accumulate { 1.0 } else { 0.0 };
        let matmul = Matmul { alpha: 1.0, a: a.at(at_a), b: b.at(at_b), beta, c: c.at(at_c), batch: 1 };
        // SAFETY: three dense matrices of the shapes that the op checked.
        unsafe { launcher.gemm(&matmul) }
    })
}

impl Dense<'_> {
    fn at(self, address: Address) -> MatrixAt {
        let matrix = MatrixAt::row_major(address, self.rows, self.cols, self.cols);
        if self.is_transposed { matrix.transposed() } else { matrix }
    }
}
