//! The device under test, from `ULYSSES_TEST_DEVICE`: `cpu` (default), `emulated` (GPU kernels on the CPU, feature
//! `kernel-emulation`) or `cuda` (feature `cuda`; the ranks share the first GPU).

use candle_core::Device;
use std::cell::RefCell;

thread_local! {
    static DEVICE: RefCell<Device> = const { RefCell::new(Device::Cpu) };
}

/// Runs one rank of a test on the device under test.
pub fn on_test_device<R>(run: impl FnOnce() -> R) -> R {
    match choice().as_str() {
        "cpu" => run(),
        #[cfg(feature = "kernel-emulation")]
        "emulated" => ulysses::device::emulate(run),
        "cuda" => {
            let device = ulysses::device::DeviceKind::Cuda.open();
            DEVICE.set(device.expect("a GPU, as ULYSSES_TEST_DEVICE asks for"));
            run()
        }
        other => panic!("ULYSSES_TEST_DEVICE={other}: this build supports no such device"),
    }
}

fn choice() -> String {
    std::env::var("ULYSSES_TEST_DEVICE").unwrap_or_else(|_| "cpu".to_owned())
}

/// Returns whether the device under test is the CPU.
pub fn is_cpu() -> bool {
    choice() == "cpu"
}

/// Returns the device of this thread's rank.
pub fn test_device() -> Device {
    DEVICE.with_borrow(Device::clone)
}
