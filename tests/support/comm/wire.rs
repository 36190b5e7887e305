//! Serialization of the values that ranks return, to send them between processes.

use half::{bf16, f16};
use ulysses::comm::OpStats;

pub(crate) trait Wire: Send + Sized {
    fn write(&self, to: &mut Vec<u8>);

    /// Reads a value from the front of the bytes.
    fn read(from: &mut &[u8]) -> Self;

    fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        self.write(&mut bytes);
        bytes
    }
}

macro_rules! numbers {
    ($($number:ty),+) => {$(
        impl Wire for $number {
            fn write(&self, to: &mut Vec<u8>) {
                to.extend(self.to_le_bytes());
            }

            fn read(from: &mut &[u8]) -> Self {
                let (bytes, rest) = from.split_first_chunk().unwrap();
                *from = rest;
                Self::from_le_bytes(*bytes)
            }
        }
    )+};
}
numbers!(f32, f64, bf16, f16, i64, u64, u32, u8, usize);

impl Wire for () {
    fn write(&self, _: &mut Vec<u8>) {}

    fn read(_: &mut &[u8]) -> Self {}
}

impl<T: Wire> Wire for Vec<T> {
    fn write(&self, to: &mut Vec<u8>) {
        self.len().write(to);
        self.iter().for_each(|element| element.write(to));
    }

    fn read(from: &mut &[u8]) -> Self {
        (0..usize::read(from)).map(|_| T::read(from)).collect()
    }
}

impl<A: Wire, B: Wire> Wire for (A, B) {
    fn write(&self, to: &mut Vec<u8>) {
        self.0.write(to);
        self.1.write(to);
    }

    fn read(from: &mut &[u8]) -> Self {
        (A::read(from), B::read(from))
    }
}

impl Wire for String {
    fn write(&self, to: &mut Vec<u8>) {
        self.as_bytes().to_vec().write(to);
    }

    fn read(from: &mut &[u8]) -> Self {
        String::from_utf8(Wire::read(from)).unwrap()
    }
}

impl Wire for OpStats {
    fn write(&self, to: &mut Vec<u8>) {
        ((self.calls, self.bytes_sent), self.bytes_received).write(to);
    }

    fn read(from: &mut &[u8]) -> Self {
        let ((calls, bytes_sent), bytes_received) = Wire::read(from);
        Self { calls, bytes_sent, bytes_received }
    }
}
