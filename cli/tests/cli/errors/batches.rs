//! Invalid batch files of `verify`.

use crate::golden;
use crate::support::cli::{Outcome, Workplace};
use crate::support::reference::{Tensors, load_tensors};
use candle_core::{DType, Device, Tensor};
use std::collections::HashMap;
use std::path::Path;

/// Verifies with a changed batch of the fixture.
fn verify(change: impl FnOnce(&mut Tensors)) -> Outcome {
    let place = Workplace::new();
    let mut tensors = load_tensors(Path::new(&golden("tiny_strong", "inputs.safetensors"))).unwrap();
    change(&mut tensors);
    let tensors: HashMap<_, _> = tensors.into_iter().collect();
    candle_core::safetensors::save(&tensors, place.path("b.safetensors")).unwrap();
    run(&place, "b.safetensors")
}

fn run(place: &Workplace, batch: &str) -> Outcome {
    let model = golden("tiny_strong", "");
    place.run(&["verify", "--model", &model, "--batch", batch, "--mesh", "1x2"])
}

/// Sets one value of a tensor `[2, 64]`.
fn set(tensors: &mut Tensors, name: &str, row: usize, position: usize, value: i64) {
    let mut values: Vec<i64> = tensors[name].flatten_all().unwrap().to_vec1().unwrap();
    values[row * 64 + position] = value;
    tensors.insert(name.to_owned(), Tensor::from_vec(values, (2, 64), &Device::Cpu).unwrap());
}

#[test]
fn invalid_batch_files_are_named() {
    let place = Workplace::new();
    run(&place, "missing.safetensors").assert_refused(2, &["missing.safetensors", "No such file"]);
    run(&place, "text.txt").assert_refused(2, &["text.txt", "not a safetensors file"]);
    run(&place, ".").assert_refused(2, &["directory"]);
    let no_ids = verify(|tensors| drop(tensors.remove("input_ids")));
    no_ids.assert_refused(2, &["b.safetensors", "missing tensor input_ids", "shift_labels"]);
}

#[test]
fn types_other_than_integers_are_refused() {
    for name in ["input_ids", "position_ids", "shift_labels"] {
        let outcome = verify(|tensors| {
            let floats = tensors[name].to_dtype(DType::F32).unwrap();
            tensors.insert(name.to_owned(), floats);
        });
        outcome.assert_refused(2, &["b.safetensors", name, "F32", "expected I64, I32 or U32"]);
    }
    verify(|tensors| {
        let ids = tensors["input_ids"].to_dtype(DType::U32).unwrap();
        tensors.insert("input_ids".to_owned(), ids);
    })
    .assert_done();
}

#[test]
fn shapes_that_do_not_fit_are_refused() {
    for name in ["position_ids", "shift_labels"] {
        let outcome = verify(|tensors| {
            let cut = tensors[name].narrow(1, 0, 63).unwrap();
            tensors.insert(name.to_owned(), cut);
        });
        outcome.assert_refused(2, &["b.safetensors", name, "[2, 63]", "[2, 64]"]);
    }
    let flat = verify(|tensors| {
        let flat = tensors["input_ids"].flatten_all().unwrap();
        tensors.insert("input_ids".to_owned(), flat);
    });
    flat.assert_refused(2, &["input_ids", "[128]", "[batch, seq_len]"]);
    for (shape, expected) in
        [((0, 64), "at least one sequence"), ((2, 0), "seq_len 0"), ((2, 1), "seq_len = 1")]
    {
        let outcome = verify(|tensors| {
            let ids = Tensor::zeros(shape, DType::I64, &Device::Cpu).unwrap();
            *tensors = Tensors::from([("input_ids".to_owned(), ids)]);
        });
        outcome.assert_refused(2, &[expected]);
    }
}

#[test]
fn values_out_of_range_are_refused_with_sequence_and_position() {
    for (name, value, expected) in [
        ("input_ids", 256, "token id 256"),
        ("input_ids", -3, "input_ids is -3"),
        ("input_ids", 1 << 40, "input_ids is 1099511627776"),
        ("position_ids", -1, "position_ids is -1"),
        ("shift_labels", 999, "label 999"),
        ("shift_labels", -5, "label -5"),
    ] {
        let outcome = verify(|tensors| set(tensors, name, 1, 5, value));
        outcome.assert_refused(2, &["b.safetensors", expected, "1, position 5"]);
    }
}

#[test]
fn a_batch_without_labels_predicts_the_next_tokens() {
    verify(|tensors| drop(tensors.remove("shift_labels"))).assert_done();
    let unshifted = verify(|tensors| {
        let labels = tensors.remove("shift_labels").unwrap();
        tensors.insert("labels".to_owned(), labels);
    });
    let warned = unshifted.assert_done().stderr.contains("`labels` is ignored");
    assert!(warned, "unshifted labels must not be taken silently: {unshifted:?}");
}
