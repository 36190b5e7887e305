use super::*;
use crate::testing::*;

#[test]
fn forward_copies_the_named_rows() {
    on_every_target(|_| {
        let weight = tensor(&[0.0, 0.5, 1.0, 1.5, 2.0, 2.5], &[3, 2]);
        let y = output(&[2, 2, 2]);
        forward(&Ids::new([2, 0, 1, 2]), &weight, &y).unwrap();
        assert_eq!(read(&y), [2.0, 2.5, 0.0, 0.5, 1.0, 1.5, 2.0, 2.5]);
    });
}

#[test]
fn gather_copies_rows_of_a_view_to_a_view() {
    on_every_target(|_| {
        let x = tensor(&[9.0, 9.0, 0.0, 0.5, 1.0, 1.5, 2.0, 2.5], &[4, 2]);
        let y = tensor(&[7.0; 8], &[4, 2]);
        let (rows, x) = (RowIndices::new([2, 2, 0]), x.narrow(0, 1, 3).unwrap());
        gather(&rows, &x, &y.narrow(0, 1, 3).unwrap()).unwrap();
        assert_eq!(read(&y), [7.0, 7.0, 2.0, 2.5, 2.0, 2.5, 0.0, 0.5]);
        gather(&RowIndices::new([]), &x, &output(&[0, 2])).unwrap();
        let error = gather(&RowIndices::new([3]), &x, &output(&[1, 2])).unwrap_err();
        assert_eq!(error.to_string(), "embedding::gather: `ids[0]` is 3, valid are 0..3");
    });
}

#[test]
fn gradients_of_repeated_ids_add_up_on_top_of_what_is_there() {
    on_every_target(|_| {
        let (ids, vocab_size, d) = ([3, 0, 3, 3, 1], 5, 7);
        let dy = random(1, ids.len() * d);
        let dweight = tensor(&vec![1.0; vocab_size * d], &[vocab_size, d]);
        backward(&Ids::new(ids), &tensor(&dy, &[ids.len(), d]), &dweight).unwrap();
        let expected: Vec<f64> =
            reference::backward(&ids, &to_f64(&dy), vocab_size, d).iter().map(|g| g + 1.0).collect();
        assert_close("dweight", &read(&dweight), &expected, 3e-7);
        assert_eq!(read(&dweight)[2 * d..3 * d], [1.0; 7], "an id that does not occur");
    });
}

#[test]
fn the_reference_gradient_is_the_derivative_of_the_forward() {
    let (ids, vocab_size, d) = ([1, 1, 3], 4, 2);
    let (weight, dy) = (to_f64(&random(1, vocab_size * d)), to_f64(&random(2, ids.len() * d)));
    let dweight = reference::backward(&ids, &dy, vocab_size, d);
    let loss = |weight: &[f64]| weighted_sum(&reference::forward(&ids, weight, d), &dy);
    assert_gradient("dweight", loss, &weight, &dweight);
}

#[test]
fn large_inputs_give_the_same_bits_on_any_number_of_threads() {
    let (n, vocab_size, d) = (4000, 97, 33);
    let ids: Vec<u32> = (0..n as u32).map(|i| i * i % 97).collect();
    let (weight, dy) = (random(1, vocab_size * d), random(2, n * d));
    assert_same_for_any_thread_count(|| {
        let y = output(&[n, d]);
        let ids = Ids::new(&*ids);
        forward(&ids, &tensor(&weight, &[vocab_size, d]), &y).unwrap();
        let dweight = tensor(&weight, &[vocab_size, d]);
        backward(&ids, &tensor(&dy, &[n, d]), &dweight).unwrap();
        [read(&y), read(&dweight)]
    });
}

#[test]
fn an_id_outside_the_vocabulary_is_named_with_its_place() {
    on_every_target(|_| {
        let (weight, y) = (output(&[3, 2]), tensor(&[7.0; 4], &[2, 2]));
        let error = forward(&Ids::new([1, 3]), &weight, &y).unwrap_err();
        assert_eq!(error.to_string(), "embedding::forward: `ids[1]` is 3, valid are 0..3");
        assert_eq!(read(&y), [7.0; 4]);
        let error = backward(&Ids::new([u32::MAX, 0]), &y, &weight).unwrap_err();
        assert!(matches!(error, OpError::IdOutOfRange { position: 0, vocab_size: 3, .. }), "{error}");
        let error = forward(&Ids::new([1]), &weight, &y).unwrap_err();
        assert!(matches!(error, OpError::Shape { argument: "y", .. }), "{error}");
    });
}

#[test]
fn no_tokens_leave_the_gradient_alone() {
    on_every_target(|_| {
        let (none, weight) = (output(&[0, 4]), tensor(&[2.0; 12], &[3, 4]));
        forward(&Ids::new([]), &weight, &none).unwrap();
        backward(&Ids::new([]), &none, &weight).unwrap();
        assert_eq!(read(&weight), [2.0; 12]);
    });
}

#[test]
fn slices_of_the_table_add_up_to_the_whole_one() {
    on_every_target(|_| {
        let (ids, vocab_size, d) = ([3, 0, 4, 3, 1, 2], 5, 7);
        let (weight, dy) = (random(1, vocab_size * d), random(2, ids.len() * d));
        let (table, dy) = (tensor(&weight, &[vocab_size, d]), tensor(&dy, &[ids.len(), d]));
        let (mut sum, dweight) =
            (vec![0.0; ids.len() * d], tensor(&vec![1.0; vocab_size * d], &[vocab_size, d]));
        for rows in [0..2, 2..4, 4..5] {
            let of_slice = |table: &Tensor| table.narrow(0, rows.start, rows.len()).unwrap();
            let in_slice = Ids::in_slice(&ids, vocab_size, &rows).unwrap();
            let y = output(&[ids.len(), d]);
            forward(&in_slice, &of_slice(&table), &y).unwrap();
            sum.iter_mut().zip(read(&y)).for_each(|(sum, y)| *sum += y);
            backward(&in_slice, &dy, &of_slice(&dweight)).unwrap();
        }
        assert_eq!(to_f64(&sum), reference::forward(&ids, &to_f64(&weight), d));
        let expected = tensor(&vec![1.0; vocab_size * d], &[vocab_size, d]);
        backward(&Ids::new(ids), &dy, &expected).unwrap();
        assert_eq!(read(&dweight), read(&expected));
        let error = Ids::in_slice(&[1, 5], 5, &(0..2)).unwrap_err();
        assert_eq!(error.to_string(), "embedding::forward: `ids[1]` is 5, valid are 0..5");
    });
}

#[cfg(feature = "cuda")]
#[test]
fn kernels_of_every_element_type_copy_rows_and_sum_gradients_in_f32_on_a_gpu() {
    for_every_dtype(|dtype, _| {
        for (n, vocab_size, d) in
            [(1, 1, 1), (5, 3, 7), (40, 11, 64), (300, 2, 40), (9, 5, 1032), (9, 5, 515)]
        {
            let ids: Vec<u32> = (0..n as u32).map(|i| i * i % vocab_size as u32).collect();
            let (weight, weight64) = rounded(dtype, &random(1, vocab_size * d), &[vocab_size, d]);
            let y = rounded(dtype, &vec![f32::NAN; n * d], &[n, d]).0;
            let on_both = Ids::new(&*ids);
            forward(&on_both, &weight, &y).unwrap();
            assert_eq!(to_f64(&read(&y)), reference::forward(&ids, &weight64, d));

            let (dy, dy64) = rounded(dtype, &random(2, n * d), &[n, d]);
            let dweight = tensor(&vec![1.0; vocab_size * d], &[vocab_size, d]);
            backward(&on_both, &dy, &dweight).unwrap();
            let expected = reference::backward(&ids, &dy64, vocab_size, d);
            let expected: Vec<f64> = expected.iter().map(|g| g + 1.0).collect();
            assert_close("dweight", &read(&dweight), &expected, 2e-6);
        }
    });
}
