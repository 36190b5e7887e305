use super::*;
use candle_core::DType;

const USE: StoreLabel = StoreLabel { holds: "numbers", key: "a.key" };

/// A file, and host memory whose copies complete as late as allowed.
fn stores() -> [OffloadStore; 2] {
    [OffloadStore::in_file(USE, None).unwrap(), OffloadStore::with_late_copies()]
}

fn filled(first: u32, len: u32, dtype: DType) -> Tensor {
    Tensor::arange(first, first + len, &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
}

fn bits(tensor: &Tensor) -> Vec<f32> {
    tensor.to_dtype(DType::F32).unwrap().to_vec1().unwrap()
}

fn read(store: &OffloadStore, extent: &Extent, like: &Tensor) -> Tensor {
    store.read(extent, || Ok::<_, OffloadError>(like.zeros_like().unwrap())).unwrap()
}

fn read_ahead(store: &OffloadStore, extent: &Extent, like: &Tensor) {
    store.read_ahead(extent, || Ok::<_, OffloadError>(like.zeros_like().unwrap())).unwrap();
}

/// A tensor of two elements in the store.
fn one_and_two(store: &OffloadStore) -> (Extent, Tensor) {
    let (extent, tensor) = (store.reserve(8), filled(1, 2, DType::F32));
    store.write(&extent, tensor.clone()).unwrap();
    (extent, tensor)
}

#[test]
fn every_extent_returns_its_last_write() {
    for store in stores() {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let extents = [5, 7, 7].map(|len| store.reserve(len * dtype.size_in_bytes()));
            for round in 0..3 {
                let tensors =
                    [5, 7, 7].iter().zip(0..).map(|(&len, first)| filled(10 * (first + round), len, dtype));
                let tensors: Vec<_> = tensors.collect();
                for (extent, tensor) in extents.iter().zip(&tensors) {
                    store.write(extent, tensor.clone()).unwrap();
                }
                for (extent, tensor) in extents.iter().zip(&tensors).rev() {
                    read_ahead(&store, extent, tensor);
                    assert_eq!(bits(&read(&store, extent, tensor)), bits(tensor), "{store:?}");
                }
            }
        }
    }
}

#[test]
fn a_tensor_that_was_settled_may_be_overwritten() {
    for store in stores() {
        let (extent, tensor) = (store.reserve(16), filled(3, 4, DType::F32));
        store.write(&extent, tensor.clone()).unwrap();
        store.settle().unwrap();
        crate::elementwise::fill(&tensor, f32::NAN).unwrap();
        assert_eq!(bits(&read(&store, &extent, &tensor)), [3.0, 4.0, 5.0, 6.0], "{store:?}");
    }
}

#[test]
fn a_write_invalidates_an_earlier_read_ahead() {
    for store in stores() {
        let (extent, tensor) = one_and_two(&store);
        read_ahead(&store, &extent, &tensor);
        store.write(&extent, filled(8, 2, DType::F32)).unwrap();
        assert_eq!(bits(&read(&store, &extent, &tensor)), [8.0, 9.0], "{store:?}");
    }
}

#[test]
fn an_extent_that_is_freed_before_its_copies_are_done_keeps_their_order() {
    for store in stores() {
        let tensors = [filled(1, 2, DType::F32), filled(8, 2, DType::F32)];
        let read: Vec<_> = tensors
            .iter()
            .map(|tensor| {
                let extent = store.reserve(8);
                assert_eq!(extent.offset, 0);
                store.write(&extent, tensor.clone()).unwrap();
                read(&store, &extent, tensor)
            })
            .collect();
        assert_eq!(read.iter().flat_map(bits).collect::<Vec<_>>(), [1.0, 2.0, 8.0, 9.0], "{store:?}");
    }
}

/// Copies to and from freed extents may still be pending.
#[test]
fn a_trim_frees_what_is_not_in_use_and_nothing_else() {
    for store in stores() {
        let (lasting, tensor) = one_and_two(&store);
        for len in [3, 5] {
            let (extent, other) = (store.reserve(4 * len as usize), filled(4, len, DType::F32));
            store.write(&extent, other.clone()).unwrap();
            let loaded = read(&store, &extent, &other);
            drop(extent);
            store.trim().unwrap();
            assert_eq!(bits(&loaded), bits(&other), "{store:?}");
        }
        assert_eq!(bits(&read(&store, &lasting, &tensor)), [1.0, 2.0], "{store:?}");
        drop(lasting);
        store.trim().unwrap();
        assert_eq!(store.reserve(16).offset, 0, "{store:?}: everything is free");
    }
}

#[test]
fn every_read_returns_a_tensor_of_its_own() {
    for store in stores() {
        let (extent, tensor) = one_and_two(&store);
        read_ahead(&store, &extent, &tensor);
        let [first, second] = [(); 2].map(|()| read(&store, &extent, &tensor));
        crate::elementwise::fill(&first, 0.0).unwrap();
        assert_eq!(bits(&second), [1.0, 2.0], "{store:?}");
    }
}

#[test]
fn host_memory_reads_one_tensor_ahead_and_a_file_none() {
    for (store, expected) in stores().into_iter().zip([0, 1]) {
        let (extent, tensor) = one_and_two(&store);
        let made = std::cell::Cell::new(0);
        let empty = || {
            made.set(made.get() + 1);
            Ok::<_, OffloadError>(tensor.zeros_like().unwrap())
        };
        store.read_ahead(&extent, empty).unwrap();
        store.read_ahead(&extent, empty).unwrap();
        assert_eq!(made.get(), expected, "{store:?}");
        store.read(&extent, empty).unwrap();
        assert_eq!(made.get(), 1, "{store:?}");
    }
}

#[test]
fn a_missing_directory_is_named_with_its_key() {
    let error = OffloadStore::in_file(USE, Some(Path::new("/nowhere"))).unwrap_err().to_string();
    assert!(error.starts_with("cannot offload numbers to a file in /nowhere: "), "{error}");
    assert!(error.ends_with("; set `a.key` to another directory"), "{error}");
}

#[test]
fn reading_what_was_never_written_is_an_error() {
    for store in stores() {
        let extent = store.reserve(8);
        let empty = || Ok::<_, OffloadError>(filled(0, 2, DType::F32));
        let error = store.read(&extent, empty).unwrap_err().to_string();
        assert!(error.starts_with("cannot offload numbers to "), "{error}");
    }
}

/// Copies to the extent are done before, copies from it see the changes, and what was read ahead is stale.
#[test]
fn work_on_host_memory_is_ordered_with_copies() {
    let store = OffloadStore::with_late_copies();
    let (extent, tensor) = one_and_two(&store);
    let other = store.reserve(2);
    read_ahead(&store, &extent, &tensor);
    store
        .with_bytes(&[other.whole(), extent.whole()], |bytes| {
            let [other, own] = bytes.try_into().unwrap();
            assert_eq!(other.len(), 2);
            let own = crate::tensor::f32_elements(own);
            assert_eq!(own, [1.0, 2.0]);
            own[1] = 7.0;
        })
        .unwrap();
    let first = read(&store, &extent, &tensor);
    store.with_bytes(&[extent.slice(4..8)], |mut bytes| bytes[0].fill(0)).unwrap();
    assert_eq!(bits(&first), [1.0, 7.0]);
    assert_eq!(bits(&read(&store, &extent, &tensor)), [1.0, 0.0]);
}

#[test]
fn a_file_refuses_work_on_its_bytes() {
    let [file, memory] = stores();
    assert_eq!([file.is_in_host_memory(), memory.is_in_host_memory()], [false, true]);
    let (extent, _) = one_and_two(&file);
    let error = file.with_bytes(&[extent.whole()], |_| panic!("no bytes")).unwrap_err().to_string();
    assert!(error.contains("cannot be updated in place"), "{error}");
}

#[test]
fn tensors_on_a_cpu_are_already_in_host_memory() {
    assert!(OffloadStore::in_host_memory(USE, &Device::Cpu).unwrap().is_none());
}
