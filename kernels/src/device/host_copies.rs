//! Copies between tensors on a device and host memory, overlapping with the device's other work.

use super::DeviceError;
use candle_core::Tensor;

/// Starts copies of one device's tensors. The host waits for none of them.
pub(crate) trait HostCopies: Send + Sync {
    /// Host memory. Copies to and from it run in the order in which they were started, and are done before it is freed.
    type Memory: Send;

    /// A started copy.
    type Copy: Send;

    /// Allocates so many bytes of host memory.
    ///
    /// # Errors
    /// When the driver is out of memory.
    fn allocate(&self, bytes: usize) -> Result<Self::Memory, DeviceError>;

    /// Starts to copy a contiguous tensor to host memory, after all work queued on its device so far.
    ///
    /// # Errors
    /// A tensor on another device, or an error of the driver.
    fn store(&self, tensor: &Tensor, memory: &mut Self::Memory) -> Result<Self::Copy, DeviceError>;

    /// Starts to overwrite a contiguous tensor from host memory, after all work queued on its device so far.
    ///
    /// # Errors
    /// As [`store`](Self::store).
    fn load(&self, memory: &mut Self::Memory, tensor: &Tensor) -> Result<Self::Copy, DeviceError>;

    /// Makes all later work of the device wait for a copy.
    ///
    /// # Errors
    /// An error of the driver, or a failed copy.
    fn hold(&self, copy: &Self::Copy) -> Result<(), DeviceError>;

    /// Returns the bytes of host memory, for the host to read and write; at least those that were allocated. The host
    /// waits for the copies to and from it.
    ///
    /// # Errors
    /// As [`hold`](Self::hold).
    fn bytes<'a>(&self, memory: &'a mut Self::Memory) -> Result<&'a mut [u8], DeviceError>;
}

pub(crate) use late::LateCopies;

mod late {
    use super::{DeviceError, HostCopies};
    use crate::tensor::{with_bytes, with_bytes_mut};
    use candle_core::Tensor;
    use parking_lot::Mutex;
    use std::collections::VecDeque;
    use std::sync::Arc;

    /// Copies of CPU tensors that complete as late as allowed: at their `hold`. So using a result or
    /// overwriting a source without waiting fails at once, while on a GPU that depends on timing.
    #[derive(Debug, Default)]
    pub(crate) struct LateCopies(Mutex<Queue>);

    #[derive(Debug, Default)]
    struct Queue {
        done: u64,
        waiting: VecDeque<Job>,
    }

    #[derive(Debug)]
    enum Job {
        Store(Tensor, Memory),
        Load(Memory, Tensor),
    }

    /// f32 elements, because the host reads and writes f32.
    type Memory = Arc<Mutex<Vec<f32>>>;

    impl LateCopies {
        fn start(&self, job: Job) -> u64 {
            let mut queue = self.0.lock();
            queue.waiting.push_back(job);
            queue.done + queue.waiting.len() as u64
        }
    }

    impl HostCopies for LateCopies {
        type Memory = Memory;
        type Copy = u64;

        fn allocate(&self, bytes: usize) -> Result<Memory, DeviceError> {
            Ok(Arc::new(Mutex::new(vec![0.0; bytes.div_ceil(size_of::<f32>())])))
        }

        fn store(&self, tensor: &Tensor, memory: &mut Memory) -> Result<u64, DeviceError> {
            Ok(self.start(Job::Store(tensor.clone(), memory.clone())))
        }

        fn load(&self, memory: &mut Memory, tensor: &Tensor) -> Result<u64, DeviceError> {
            Ok(self.start(Job::Load(memory.clone(), tensor.clone())))
        }

        fn hold(&self, copy: &u64) -> Result<(), DeviceError> {
            let mut queue = self.0.lock();
            while queue.done < *copy
                && let Some(job) = queue.waiting.pop_front()
            {
                job.run()?;
                queue.done += 1;
            }
            Ok(())
        }

        fn bytes<'a>(&self, memory: &'a mut Memory) -> Result<&'a mut [u8], DeviceError> {
            let last = {
                let queue = self.0.lock();
                let last = queue.waiting.iter().rposition(|job| Arc::ptr_eq(job.memory(), memory));
                last.map(|index| queue.done + index as u64 + 1)
            };
            last.map_or(Ok(()), |copy| self.hold(&copy))?;
            let Some(memory) = Arc::get_mut(memory) else { unreachable!("its copies are done") };
            Ok(bytemuck::cast_slice_mut::<f32, u8>(memory.get_mut()))
        }
    }

    impl Job {
        fn memory(&self) -> &Memory {
            match self {
                Self::Store(_, memory) | Self::Load(memory, _) => memory,
            }
        }

        fn run(self) -> candle_core::Result<()> {
            match self {
                Self::Store(tensor, memory) => {
                    let copy = |bytes: &[u8]| {
                        bytemuck::cast_slice_mut::<f32, u8>(&mut memory.lock())[..bytes.len()]
                            .copy_from_slice(bytes);
                    };
                    with_bytes(&tensor, copy)
                }
                Self::Load(memory, tensor) => {
                    let copy = |bytes: &mut [u8]| {
                        bytes
                            .copy_from_slice(&bytemuck::cast_slice::<f32, u8>(&memory.lock())[..bytes.len()]);
                    };
                    with_bytes_mut(&tensor, copy)
                }
            }
        }
    }
}
