use super::*;
use std::sync::Arc;

fn loader() -> DataLoader {
    let options = LoaderOptions { seed: 1, micro_batch: 2, accumulation: 3, rank: DataRank::single() };
    DataLoader::new(Arc::new(packed(&[9, 100, 14, 3, 20], 16)), options).unwrap()
}

#[test]
fn batches_equal_those_of_the_loader_and_the_cursor_is_the_consumers() {
    let (mut direct, mut ahead) = (loader(), ReadAhead::new(loader()));
    for _ in 0..20 {
        assert_eq!(ahead.next_micro_batch().unwrap(), direct.next_micro_batch().unwrap());
        assert_eq!(ahead.cursor().samples_consumed(), direct.samples_consumed());
    }
}

#[test]
fn errors_of_the_loader_arrive_in_order() {
    let mut loader = loader();
    loader.set_samples_consumed(u64::MAX - 6);
    let mut ahead = ReadAhead::new(loader);
    for _ in 0..3 {
        ahead.next_micro_batch().unwrap();
    }
    for _ in 0..2 {
        let error = ahead.next_micro_batch().unwrap_err();
        assert!(matches!(error, DataError::CursorOverflow { .. }), "{error:?}");
    }
}
