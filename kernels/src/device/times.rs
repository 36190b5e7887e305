//! Times of work on a device.

#[cfg(feature = "cuda")]
use super::DeviceError;
use candle_core::Device;
#[cfg(feature = "cuda")]
use candle_core::{
    Error,
    cuda::cudarc::driver::{CudaEvent, sys::CUevent_flags},
};
use std::collections::VecDeque;
use std::time::Instant;

/// Entries of [`DeviceTimes`] that may wait for a GPU. A step that is read has fewer, since the host waits at its end.
const MAX_WAITING: usize = 4096;

/// A point in time of a device's work. On the CPU it is the time of the call. On a GPU it is the time when the stream
/// has done all work queued so far (`torch.cuda.Event(enable_timing=True)`).
#[derive(Debug)]
pub struct TimeStamp(Point);

#[derive(Debug)]
enum Point {
    Host(Instant),
    #[cfg(feature = "cuda")]
    Gpu(CudaEvent),
}

impl TimeStamp {
    /// Records the point that the device's work has reached, without waiting for it.
    ///
    /// # Errors
    /// An error of the driver.
    pub fn now(device: &Device) -> candle_core::Result<Self> {
        Ok(Self(match device {
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => Point::Gpu(
                device
                    .cuda_stream()
                    .record_event(Some(CUevent_flags::CU_EVENT_DEFAULT))
                    .map_err(Error::wrap)?,
            ),
            _ => Point::Host(Instant::now()),
        }))
    }

    /// The seconds from this point to a later one of the same device. Waits for the latter.
    fn seconds_until(&self, end: &Self) -> candle_core::Result<f64> {
        match (&self.0, &end.0) {
            (Point::Host(begin), Point::Host(end)) => Ok((*end - *begin).as_secs_f64()),
            #[cfg(feature = "cuda")]
            (Point::Gpu(begin), Point::Gpu(end)) => {
                Ok(f64::from(begin.elapsed_ms(end).map_err(Error::wrap)?) / 1e3)
            }
            #[cfg(feature = "cuda")]
            _ => Err(Error::wrap(DeviceError::MixedDevices)),
        }
    }

    fn is_on_host(&self) -> bool {
        matches!(self.0, Point::Host(_))
    }
}

/// Work whose time is known once the device has done it, with a key and `N` intervals for each piece.
///
/// Times on a GPU are read at [`settle`](Self::settle), so that the host need not wait in the middle of a step. If
/// that is not called, the oldest are read when there are thousands.
#[derive(Debug)]
pub struct DeviceTimes<K, const N: usize> {
    waiting: VecDeque<(K, [[TimeStamp; 2]; N])>,
}

impl<K, const N: usize> Default for DeviceTimes<K, N> {
    fn default() -> Self {
        Self { waiting: VecDeque::new() }
    }
}

impl<K, const N: usize> DeviceTimes<K, N> {
    /// Adds a piece of work with the begin and the end of each interval. `count` gets keys and seconds of the pieces
    /// that are read, in the order in which they were added: those on the CPU at once.
    ///
    /// # Errors
    /// An error of the driver.
    pub fn add(
        &mut self,
        key: K,
        intervals: [[TimeStamp; 2]; N],
        count: impl FnMut(K, [f64; N]),
    ) -> candle_core::Result<()> {
        let is_done = intervals.iter().all(|[_, end]| end.is_on_host());
        self.waiting.push_back((key, intervals));
        match self.waiting.len() {
            _ if is_done => self.settle(count),
            waiting if waiting > MAX_WAITING => self.settle_to(MAX_WAITING / 2, count),
            _ => Ok(()),
        }
    }

    /// Gives all times to `count`. Waits for work that the device has not done.
    ///
    /// # Errors
    /// An error of the driver, which drops one time.
    pub fn settle(&mut self, count: impl FnMut(K, [f64; N])) -> candle_core::Result<()> {
        self.settle_to(0, count)
    }

    fn settle_to(&mut self, rest: usize, mut count: impl FnMut(K, [f64; N])) -> candle_core::Result<()> {
        while self.waiting.len() > rest
            && let Some((key, intervals)) = self.waiting.pop_front()
        {
            let mut seconds = [0.0; N];
            for (seconds, [begin, end]) in seconds.iter_mut().zip(&intervals) {
                *seconds = begin.seconds_until(end)?;
            }
            count(key, seconds);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{device, on_every_target};

    fn interval() -> [TimeStamp; 2] {
        [(); 2].map(|()| TimeStamp::now(&device()).unwrap())
    }

    #[test]
    fn times_are_counted_once_in_the_order_of_the_work() {
        on_every_target(|target| {
            let (mut times, mut counted) = (DeviceTimes::default(), Vec::new());
            for key in 0..5 {
                let intervals = [interval(), interval()];
                times.add(key, intervals, |key, seconds| counted.push((key, seconds))).unwrap();
                let is_on_gpu = device().is_cuda();
                assert_eq!(
                    counted.len(),
                    if is_on_gpu { 0 } else { key + 1 },
                    "{target}: at once on the CPU only"
                );
            }
            times.settle(|key, seconds| counted.push((key, seconds))).unwrap();
            assert!(
                counted
                    .iter()
                    .all(|(_, seconds)| seconds.iter().all(|seconds| (0.0..60.0).contains(seconds))),
                "{target}: {counted:?}"
            );
            assert_eq!(counted.iter().map(|(key, _)| *key).collect::<Vec<_>>(), [0, 1, 2, 3, 4], "{target}");
            times.settle(|_, _| panic!("{target}: counted twice")).unwrap();
        });
    }

    #[test]
    fn times_that_are_never_read_do_not_pile_up() {
        on_every_target(|target| {
            let (mut times, mut counted) = (DeviceTimes::default(), 0);
            for key in 0..3 * MAX_WAITING {
                times.add(key, [interval()], |_, _| counted += 1).unwrap();
                assert!(times.waiting.len() <= MAX_WAITING, "{target}");
            }
            assert_eq!(counted + times.waiting.len(), 3 * MAX_WAITING, "{target}");
        });
    }

    #[test]
    fn an_interval_is_not_longer_than_one_around_it() {
        on_every_target(|target| {
            let first = TimeStamp::now(&device()).unwrap();
            let [second, third] = interval();
            let [part, whole] =
                [(&second, &third), (&first, &third)].map(|(begin, end)| begin.seconds_until(end).unwrap());
            assert!(0.0 <= part && part <= whole, "{target}: {part} of {whole}");
        });
    }
}
