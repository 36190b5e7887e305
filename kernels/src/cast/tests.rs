use super::*;
use crate::testing::*;
use candle_core::{DType, Device};

const TYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

/// Values of `dtype` in the middle of a larger buffer, and their exact values.
fn source(dtype: DType, data: &[f32]) -> (Tensor, Vec<f64>) {
    let padded: Vec<f32> = [&[f32::NAN; 3], data, &[f32::NAN; 2]].concat();
    let flat = Tensor::from_slice(&padded, padded.len(), &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
    let tensor = flat.to_device(&device()).unwrap().narrow(0, 3, data.len()).unwrap();
    let values = to_f64(&read(&tensor));
    (tensor, values)
}

/// Values with every exponent of f32, and those that are hard to round: ties, largest and smallest numbers.
fn values(len: usize) -> Vec<f32> {
    let delicate = [
        0.0,
        -0.0,
        1.0 + 1.0 / 256.0,
        1.0 + 3.0 / 256.0,
        1.0 + 1.0 / 2048.0,
        -1.0 - 3.0 / 2048.0,
        65504.0,
        65519.0,
        65520.0,
        -65536.0,
        f32::MAX,
        f32::MIN_POSITIVE,
        5.9e-8,
        2.9e-8,
        6.1e-5,
        f32::from_bits(1),
        f32::INFINITY,
        f32::NEG_INFINITY,
    ];
    let spread = random(1, len).into_iter().enumerate().map(|(i, x)| x * ((i % 250) as f32 - 125.0).exp2());
    delicate.into_iter().chain(spread).take(len).collect()
}

#[test]
fn every_pair_of_types_rounds_to_nearest_even_on_every_target() {
    on_every_target(|target| {
        for len in [1, 7, 18, 1024, 4096, 9001] {
            for (from, to) in TYPES.into_iter().flat_map(|from| TYPES.map(|to| (from, to))) {
                let (source, exact) = source(from, &values(len));
                let (converted, _) = self::source(to, &vec![f32::NAN; len]);
                cast(&source, &converted).unwrap();
                for (got, exact) in read(&converted).iter().zip(&exact) {
                    let expected = reference::round(*exact, to);
                    let same = got.to_bits() == (expected as f32).to_bits();
                    assert!(same, "{target}, {from:?} to {to:?}: {exact:e} became {got:e}, not {expected:e}");
                }
            }
        }
    });
}

#[test]
fn nan_stays_nan() {
    on_every_target(|_| {
        for (from, to) in TYPES.into_iter().flat_map(|from| TYPES.map(|to| (from, to))) {
            let (source, _) = source(from, &[f32::NAN, 1.0, -f32::NAN]);
            let (converted, _) = self::source(to, &[5.0; 3]);
            cast(&source, &converted).unwrap();
            let [first, one, last] = read(&converted)[..] else { panic!("three elements") };
            assert!(first.is_nan() && one == 1.0 && last.is_nan());
        }
    });
}

#[test]
fn the_reference_agrees_with_the_cpu_on_f32() {
    for bits in (0..u64::from(u32::MAX)).step_by(99_991) {
        // An f64 near every magnitude of f32, with digits that f32 does not have.
        let x = f64::from(f32::from_bits(bits as u32)) * (1.0 + 1e-9 * (bits % 97) as f64);
        if x.is_finite() {
            assert_eq!(reference::round(x, DType::F32), f64::from(x as f32), "{x:e}");
        }
    }
}

#[test]
fn large_tensors_give_the_same_bits_on_any_number_of_threads() {
    let data = values(300_007);
    assert_same_for_any_thread_count(|| {
        let (converted, _) = source(DType::BF16, &vec![0.0; data.len()]);
        cast(&tensor(&data, &[data.len()]), &converted).unwrap();
        read(&converted)
    });
}

#[test]
fn an_empty_tensor_is_no_error() {
    on_every_target(|_| cast(&source(DType::F32, &[]).0, &source(DType::F16, &[]).0).unwrap());
}

#[test]
fn wrong_arguments_are_named() {
    let error = cast(&output(&[3]), &output(&[4])).unwrap_err();
    assert!(matches!(error, OpError::Shape { argument: "target", .. }), "{error}");
    let error = cast(&wrong_dtype(&[3]), &output(&[3])).unwrap_err();
    assert_eq!(error.to_string(), "cast: `source` holds F64, expected F32, BF16 or F16");
    let flat = output(&[8]);
    let error = cast(&flat.narrow(0, 0, 4).unwrap(), &flat.narrow(0, 4, 4).unwrap()).unwrap_err();
    assert!(matches!(error, OpError::SharedStorage { output: "target", other: "source", .. }), "{error}");
}

#[test]
fn rounding_on_the_host_gives_the_bits_of_a_cast() {
    let values = values(1003);
    for dtype in TYPES {
        let target = Tensor::zeros(values.len(), dtype, &Device::Cpu).unwrap();
        cast(&Tensor::from_slice(&values, values.len(), &Device::Cpu).unwrap(), &target).unwrap();
        // f32 elements, so that the bytes are aligned.
        let mut elements = vec![0.0_f32; values.len()];
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut elements);
        let bytes = &mut bytes[..values.len() * dtype.size_in_bytes()];
        round_on_host(&values, bytes, dtype).unwrap();
        crate::tensor::with_bytes(&target, |expected| assert!(*bytes == *expected, "{dtype:?}")).unwrap();
        let error = round_on_host(&values[1..], bytes, dtype).unwrap_err().to_string();
        assert!(error.contains("the bytes of as many elements as `source`"), "{error}");
    }
}
