//! More elements than fit into C's `int`, the type of MPI counts.

use crate::support::comm::Backend;
use candle_core::{DType, Device, Tensor};
use std::time::Duration;
use ulysses::comm::ProcessGroupExt;
use ulysses::tensor::to_vec;

/// Three pieces of at most 1 GiB.
const ELEMENTS: usize = (1 << 31) + 5;

pub(crate) fn a_tensor_with_more_elements_than_an_int_arrives_complete(mpi: &dyn Backend) {
    let received = mpi.run_for(2, Duration::from_secs(200), |group| {
        let tensor = match group.rank() {
            0 => Tensor::ones(ELEMENTS, DType::U8, &Device::Cpu)?,
            _ => Tensor::zeros(ELEMENTS, DType::U8, &Device::Cpu)?,
        };
        group.broadcast(&tensor, 0)?;
        // Both ends, and both sides of every boundary between pieces.
        let around = |place: usize| to_vec::<u8>(&tensor.narrow(0, place, 5)?);
        let places = [0, (1 << 30) - 2, (1 << 31) - 2, ELEMENTS - 5];
        Ok(places.into_iter().map(around).collect::<candle_core::Result<Vec<_>>>()?.concat())
    });
    assert_eq!(received.unwrap(), vec![vec![1; 20]; 2]);
}
