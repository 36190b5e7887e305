//! Checkpoints of one division over tp, read as another. Every element encodes its place in the whole parameter.

use super::state_file::write_state_file;
use super::stored_layouts::StoredLayouts;
use super::*;
use crate::comm::{LaunchOptions, MeshGroups, TrainingGroups, launch};
use crate::config::{OptimizerConfig, Sgd, ZeroStage};
use crate::mesh::{DeviceMesh, TensorShard};
use crate::zero::{CheckpointPart, FlatLayout, FlatParameter, StateIndex, StateSlice, ZeroOptimizer};
use candle_core::{Device, Tensor};
use safetensors::SafeTensors;
use serde_json::Value;
use std::cell::RefCell;
use std::fs;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use tempfile::TempDir;
use ulysses_kernels::tensor::{TensorOptions, to_vec};

const KINDS: [&str; 2] = ["parameters", "momentum"];

type Ranks = Vec<Vec<Range<usize>>>;

/// Name, shape, whether it is frozen, and its divided dimension, of every parameter.
const PARAMETERS: [(&str, &[usize], bool, Option<usize>); 7] = [
    ("norm", &[5], false, None),
    ("qkv", &[12, 3], false, Some(0)),
    ("o", &[4, 7], false, Some(1)),
    ("frozen_norm", &[3], true, None),
    ("experts", &[2, 5, 3], false, Some(1)),
    ("bias", &[7], false, Some(0)),
    ("frozen", &[6, 2], true, Some(0)),
];

/// The indices that each rank has of a dimension of the given length: uneven, in several ranges, and once none.
fn divided(len: usize, tp: usize) -> Ranks {
    match (len, tp) {
        (12, 2) => vec![vec![0..4, 6..8, 9..11], vec![4..6, 8..9, 11..12]],
        (12, 3) => vec![vec![0..1, 6..7, 9..10], vec![1..4, 7..8, 10..11], vec![4..6, 8..9, 11..12]],
        (7, 2) => vec![vec![0..5], vec![5..7]],
        (7, 3) => vec![vec![0..2], vec![], vec![2..7]],
        (5, 2) => vec![vec![0..1, 4..5], vec![1..4]],
        (5, 3) => vec![vec![0..2], vec![4..5], vec![2..4]],
        (6, 2) => vec![vec![2..6], vec![0..2]],
        (6, 3) => vec![vec![0..1, 5..6], vec![1..2], vec![2..5]],
        _ => panic!("no division of {len} over {tp}"),
    }
}

/// The flat buffers of a rank: trained and frozen, and with tp sharded and replicated ones apart.
fn layouts(dp: usize, tp: usize, tp_rank: usize) -> Vec<FlatLayout> {
    let buffer = |frozen: bool, sharded: Option<bool>| {
        let own = PARAMETERS.iter().filter(|(_, _, is_frozen, dim)| {
            *is_frozen == frozen && sharded.is_none_or(|sharded| sharded == dim.is_some())
        });
        let shard = |shape: &[usize], dim: Option<usize>| {
            let dim = dim.filter(|_| tp > 1)?;
            Some(TensorShard::new(dim, shape[dim], divided(shape[dim], tp), tp_rank))
        };
        let shards: Vec<_> = own.clone().map(|(_, shape, _, dim)| shard(shape, *dim)).collect();
        let shapes = own.zip(&shards).map(|((name, shape, ..), shard)| {
            let local = shard.as_ref().map_or(shape.to_vec(), |shard| shard.local_shape(shape));
            ((*name).to_owned(), local)
        });
        let name = format!(
            "layer{}{}",
            ["", " (frozen)"][usize::from(frozen)],
            match sharded {
                Some(false) => " (replicated)",
                _ => "",
            }
        );
        let layout = FlatLayout::new(name, shapes, dp).with_shards(shards);
        layout.with_frozen(|_| frozen)
    };
    let sharded: &[_] = if tp > 1 { &[Some(true), Some(false)] } else { &[None] };
    [false, true].into_iter().flat_map(|frozen| sharded.iter().map(move |of| buffer(frozen, *of))).collect()
}

/// The elements of a rank's part of a parameter, by the definition of a shard.
fn part(parameter: &FlatParameter, kind: usize) -> Vec<f32> {
    let index = PARAMETERS.iter().position(|(name, ..)| *name == parameter.name).unwrap();
    let (_, shape, _, dim) = PARAMETERS[index];
    let is_own = |element: usize| match (&parameter.shard, dim) {
        (Some(shard), Some(dim)) => {
            let inner: usize = shape[dim + 1..].iter().product();
            let at = element / inner % shape[dim];
            shard.ranks[shard.rank].iter().any(|range| range.contains(&at))
        }
        _ => true,
    };
    let value = |element| (10_000 * kind + 1000 * index + element) as f32;
    (0..shape.iter().product()).filter(|element| is_own(*element)).map(value).collect()
}

/// The elements of a flat buffer.
fn flat(layout: &FlatLayout, kind: usize) -> Vec<f32> {
    layout.parameters().iter().flat_map(|parameter| part(parameter, kind)).collect()
}

fn kinds_of(layout: &FlatLayout) -> Range<usize> {
    0..if layout.is_frozen() { 1 } else { KINDS.len() }
}

fn entries(layouts: &[FlatLayout]) -> Vec<UnitEntry> {
    layouts.iter().map(UnitEntry::of).collect()
}

fn manifest(dp: usize, sp: usize, tp: usize) -> Manifest {
    let mesh = MeshSizes { dp, sp, tp, pp: 1 };
    let data = DataCursor { samples_consumed: 0, seed: 1, seq_len: 8, num_sequences: 9, data_hash: None };
    Manifest {
        format_version: mesh.format_version(),
        run_id: "a-run".into(),
        saved_unix_seconds: 0,
        mesh,
        zero_stage: 3,
        num_partitions: dp,
        progress: TrainingProgress {
            step: 1,
            optimizer_step: 1,
            scheduler_step: 1,
            data,
            precision: None,
            loss_scaler: None,
            consecutive_skips: 0,
            evaluations: EvaluationSummary::default(),
        },
        config: Value::Null,
        model: Value::Null,
        source: None,
        kinds: KINDS.map(str::to_owned).to_vec(),
        units: layouts(dp, tp, tp - 1).iter().map(UnitEntry::of).collect(),
        files: Vec::new(),
    }
}

/// Writes a checkpoint by hand.
fn save(dp: usize, tp: usize) -> (TempDir, Checkpoint) {
    let dir = tempfile::tempdir().unwrap();
    let mut manifest = manifest(dp, 1, tp);
    let stored = StoredLayouts::new(&manifest);
    for (tp_rank, partition) in (0..tp).flat_map(|tp_rank| (0..dp).map(move |dp| (tp_rank, dp))) {
        let is_written = |layout: &&FlatLayout| tp_rank == 0 || layout.is_sharded();
        for (kind, name) in KINDS.iter().enumerate() {
            let layouts = layouts(dp, tp, tp_rank);
            let units = layouts.iter().filter(is_written).filter(|layout| kinds_of(layout).contains(&kind));
            let slices = units.filter_map(|layout| {
                let own = &flat(layout, kind)[layout.unpadded(layout.partition(partition))];
                let slice = || Tensor::from_slice(own, own.len(), &Device::Cpu).unwrap();
                (!own.is_empty()).then(|| StateSlice::whole(slice()))
            });
            let (slices, part) =
                (slices.collect::<Vec<_>>(), CheckpointPart { partition, tp_rank, stage: 0 });
            let entry =
                write_state_file(&LocalStorage, dir.path(), &manifest, &stored, name, part, &slices).unwrap();
            manifest.files.push(entry);
        }
    }
    fs::write(dir.path().join(MANIFEST), manifest.to_text().unwrap()).unwrap();
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    checkpoint.verify().unwrap();
    (dir, checkpoint)
}

/// Reads every flat buffer of a rank on another mesh, whole and in partitions.
#[track_caller]
fn assert_reads(checkpoint: &Checkpoint, dp: usize, tp: usize, tp_rank: usize) {
    let layouts = layouts(dp, tp, tp_rank);
    checkpoint.check_fits(&entries(&layouts), &KINDS).unwrap();
    let mut reader = checkpoint.reader();
    for layout in &layouts {
        let partitions = (0..dp).map(|rank| layout.unpadded(layout.partition(rank)));
        for (kind, range) in partitions
            .chain(std::iter::once(0..layout.numel()))
            .flat_map(|range| kinds_of(layout).map(move |kind| (kind, range.clone())))
        {
            let mut out = vec![-1.0; range.len()];
            reader.read(layout, kind, range.clone(), &mut out).unwrap();
            let label = format!("{:?} to dp {dp}, tp {tp_rank} of {tp}", checkpoint.manifest().mesh);
            assert_eq!(out, flat(layout, kind)[range], "{label}: {} of {}", KINDS[kind], layout.name());
        }
    }
}

#[test]
fn every_division_is_read_from_every_other() {
    for (saved_dp, saved_tp) in [(1, 1), (2, 1), (1, 2), (3, 2), (1, 3), (2, 3), (40, 2)] {
        let (_dir, checkpoint) = save(saved_dp, saved_tp);
        for (dp, tp) in [(1, 1), (3, 1), (1, 2), (2, 2), (1, 3), (4, 3)] {
            (0..tp).for_each(|tp_rank| assert_reads(&checkpoint, dp, tp, tp_rank));
        }
    }
}

#[test]
fn a_rank_with_the_same_shards_reads_a_buffer_in_one_piece() {
    let stored = StoredLayouts::new(&manifest(2, 1, 3));
    for (tp_rank, layout) in (0..3).flat_map(|rank| layouts(5, 3, rank).into_iter().map(move |l| (rank, l))) {
        let pieces = stored.find(&layout, 0..layout.numel()).unwrap();
        let elements: Vec<_> = pieces.iter().map(|piece| (piece.tp_rank, piece.elements.clone())).collect();
        let tp_rank = if layout.is_sharded() { tp_rank } else { 0 };
        assert_eq!(elements, [(tp_rank, 0..layout.numel())], "{}", layout.name());
    }
}

#[test]
fn the_files_with_a_rank_s_elements_suffice_to_read_them() {
    let (dir, checkpoint) = save(2, 2);
    let manifest = checkpoint.manifest();
    let all = layouts(2, 2, 1);
    let of_partition = |layout: &FlatLayout| layout.unpadded(layout.partition(1));
    let items = |layouts: &[FlatLayout]| {
        let of_layout = |layout| kinds_of(layout).map(move |kind| (layout, kind, of_partition(layout)));
        let all: Vec<_> = layouts.iter().flat_map(of_layout).collect();
        Checkpoint::files_with(manifest, &all)
    };
    let needed = items(&all);
    let parts: Vec<_> = needed.iter().map(|index| manifest.files[*index].part()).collect();
    let expected = [0, 0, 1, 1].map(|tp_rank| CheckpointPart { partition: 1, tp_rank, stage: 0 });
    assert_eq!(parts, expected, "its shards, and what all have from the first rank");
    for (_, file) in manifest.files.iter().enumerate().filter(|(index, _)| !needed.contains(index)) {
        fs::remove_file(dir.path().join(&file.name)).unwrap();
    }
    let mut reader = checkpoint.reader();
    for layout in &all {
        for kind in kinds_of(layout) {
            let mut out = vec![-1.0; of_partition(layout).len()];
            reader.read(layout, kind, of_partition(layout), &mut out).unwrap();
            assert_eq!(out, flat(layout, kind)[of_partition(layout)]);
        }
    }
    let unknown = FlatLayout::new("layer", [("norm".into(), vec![6]), ("other".into(), vec![2])], 2);
    assert!(items(&[unknown]).is_empty());
}

#[test]
fn exports_and_differences_see_whole_parameters() {
    let ((_whole_dir, whole), (_dir, sharded)) = (save(2, 1), save(1, 3));
    let comparisons = diff(&whole, &sharded).unwrap();
    assert_eq!(comparisons.len(), 7 + 5);
    assert!(comparisons.values().all(|comparison| *comparison == Comparison::Equal), "{comparisons:?}");
    let place = tempfile::tempdir().unwrap();
    let output = place.path().join("exported");
    export(&sharded, &output, ExportOptions::new(ExportDtype::F32), &LocalStorage).unwrap();
    let bytes = fs::read(output.join("model.safetensors")).unwrap();
    let exported = SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(exported.len(), PARAMETERS.len());
    for parameter in layouts(1, 1, 0).iter().flat_map(FlatLayout::parameters) {
        let tensor = exported.tensor(&parameter.name).unwrap();
        let elements = part(parameter, 0).into_iter().flat_map(f32::to_le_bytes).collect::<Vec<_>>();
        assert_eq!((tensor.shape(), tensor.data()), (parameter.shape.as_slice(), &*elements));
    }
}

#[test]
fn only_checkpoints_with_shards_have_the_newer_format() {
    let ((_whole_dir, whole), (_dir, sharded)) = (save(2, 1), save(2, 3));
    let text = whole.manifest().to_text().unwrap();
    assert!(!text.contains("tp") && !text.contains("shard"), "{text}");
    assert_eq!(whole.manifest().format_version, 1);
    assert_eq!(whole.manifest().files[0].name, "parameters.00000-of-00002.safetensors");
    assert_eq!(sharded.manifest().format_version, 2);
    assert_eq!(sharded.manifest().files.len(), 2 * 2 * 3);
    assert_eq!(sharded.manifest().files[6].name, "parameters.00001-of-00002.tp-01-of-03.safetensors");
    assert_eq!(sharded.manifest().mesh.to_string(), "dp 2 × sp 1 × tp 3");
}

#[test]
fn another_whole_shape_is_refused_by_name() {
    let (_dir, checkpoint) = save(1, 2);
    for (wanted, expected) in [
        (
            vec![("qkv", vec![12, 4])],
            "parameter qkv of `ulysses.model` is [12, 3] in the checkpoint, but [12, 4]",
        ),
        (
            vec![("qkv", vec![12, 3])],
            "parameter o of `ulysses.model` is [4, 7] in the checkpoint, but missing",
        ),
    ] {
        let wanted = wanted.into_iter().map(|(name, shape)| (name.to_owned(), shape));
        let error = checkpoint.check_fits(&entries(&[FlatLayout::new("layer", wanted, 1)]), &KINDS);
        let error = error.unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn shards_that_are_not_a_division_are_refused() {
    let refused = |expected: &str, change: &dyn Fn(&mut Manifest)| {
        let (dir, checkpoint) = save(1, 2);
        let mut manifest = checkpoint.manifest().clone();
        change(&mut manifest);
        fs::write(dir.path().join(MANIFEST), manifest.to_text().unwrap()).unwrap();
        let error = Checkpoint::open(dir.path()).unwrap_err().to_string();
        assert!(error.contains(expected), "no {expected:?} in {error:?}");
    };
    let with_ranks = |expected: &str, ranks: Ranks| {
        refused(&format!("parameter qkv: {expected}"), &|manifest| {
            manifest.units[0].parameters[0].shard.as_mut().unwrap().ranks = ranks.clone();
        });
    };
    with_ranks("its shard has 1 ranks, but the mesh has tp 2", vec![vec![0..12]]);
    with_ranks("the ranges of tp rank 1 are not ascending", vec![vec![0..4], vec![8..12, 4..8]]);
    with_ranks("the ranges of tp rank 0 are not ascending", vec![vec![0..4, 3..6], vec![6..12]]);
    #[expect(clippy::reversed_empty_ranges, reason = "this is what must be refused")]
    with_ranks("the ranges of tp rank 0 are not ascending", vec![vec![4..0], vec![0..12]]);
    with_ranks("the range 3..12 of its shards begins at 3, expected 4", vec![vec![0..4], vec![3..12]]);
    with_ranks("the range 5..12 of its shards begins at 5, expected 4", vec![vec![0..4], vec![5..12]]);
    with_ranks("its shards end at 11, but dimension 0 of [12, 3] has 12", vec![vec![0..4], vec![4..11]]);
    with_ranks("its shards end at 18446744073709551615", vec![vec![0..4], vec![4..usize::MAX]]);
    refused("parameter qkv: its shard is of dimension 2, but its shape is [12, 3]", &|manifest| {
        manifest.units[0].parameters[0].shard.as_mut().unwrap().dim = 2;
    });
    refused("unit layer has sharded and whole parameters", &|manifest| {
        manifest.units[0].parameters[1].shard = None;
    });
    refused("tp of the mesh is 0", &|manifest| manifest.mesh.tp = 0);
    refused("no file for parameters of partition 0 of tp rank 1", &|manifest| {
        manifest.files.retain(|file| file.tp_rank == 0);
    });
    refused("unexpected file parameters.00000-of-00001.tp-00-of-02.safetensors", &|manifest| {
        manifest.files.push(FileEntry { tp_rank: 2, ..manifest.files[0].clone() });
    });
}

/// Runs `work` on every rank of a mesh, with an optimizer of the trained parameters.
fn on_mesh(
    (dp, sp, tp): (usize, usize, usize),
    work: impl Fn(&mut ZeroOptimizer, TrainingGroups, Arc<dyn crate::comm::ProcessGroup>) + Sync,
) {
    let sizes = [("dp", dp as i64), ("sp", sp as i64), ("tp", tp as i64)];
    let mesh = DeviceMesh::new(&sizes[..if tp > 1 { 3 } else { 2 }], None).unwrap();
    launch(mesh.world_size(), &LaunchOptions::default(), |rank| {
        let all = rank.group.clone();
        let groups = TrainingGroups::new(&MeshGroups::new(&mesh, rank.group.clone())?, None)?;
        let units = layouts(dp, tp, groups.tp_rank());
        let units = units.into_iter().filter(|layout| !layout.is_frozen()).collect();
        let config = OptimizerConfig::Sgd(Sgd { lr: 1.0, momentum: 0.5, nesterov: false, weight_decay: 0.0 });
        let (stage, options) = (ZeroStage::Parameters, TensorOptions::default());
        let zeros: crate::zero::Initialize<'_, crate::zero::ZeroError> = &|_, _, _| Ok(());
        let mut zero = ZeroOptimizer::new(units, stage, config, &[], groups.clone(), options, zeros)?;
        work(&mut zero, groups, all);
        Ok::<_, crate::zero::ZeroError>(())
    })
    .unwrap();
}

fn save_of_ranks(dir: &Path, (dp, sp, tp): (usize, usize, usize)) {
    on_mesh((dp, sp, tp), |zero, groups, all| {
        let layouts: Vec<_> = zero.layouts().cloned().collect();
        let fill = |StateIndex { unit, kind }, range: Range<usize>, out: &mut [f32]| {
            out.copy_from_slice(&flat(&layouts[unit], kind)[range]);
            Ok(())
        };
        zero.restore_state::<crate::zero::ZeroError>(&fill).unwrap();
        let units = layouts.iter().map(UnitEntry::of).collect();
        let manifest = Manifest { units, ..manifest(dp, sp, tp) };
        let part = groups.part_replica();
        let options = SaveOptions { keep_last: Some(1), background: false };
        let mut saver = Saver::new(all, Arc::new(LocalStorage), dir, part, options).unwrap();
        saver.begin(zero, manifest).unwrap();
        saver.finish().unwrap().unwrap();
    });
}

#[test]
fn ranks_save_on_one_mesh_and_load_on_another() {
    for saving in [(2, 2, 2), (1, 1, 3), (3, 2, 1)] {
        let dir = tempfile::tempdir().unwrap();
        save_of_ranks(dir.path(), saving);
        let checkpoint = Checkpoint::open(&dir.path().join(step_name(1))).unwrap();
        checkpoint.verify().unwrap();
        assert_eq!(checkpoint.manifest().files.len(), 2 * saving.0 * saving.2);
        for loading in [(1, 1, 1), (2, 1, 2), (1, 2, 3)] {
            on_mesh(loading, |zero, _, _| {
                let layouts: Vec<_> = zero.layouts().cloned().collect();
                checkpoint.check_fits(&entries(&layouts), &zero.state_kinds()).unwrap();
                let reader = RefCell::new(checkpoint.reader());
                let read = |StateIndex { unit, kind }, range: Range<usize>, out: &mut [f32]| {
                    reader.borrow_mut().read(&layouts[unit], kind, range, out).unwrap();
                    Ok(())
                };
                zero.restore_state::<crate::zero::ZeroError>(&read).unwrap();
                for (StateIndex { unit, kind }, range) in zero.restored_ranges() {
                    let own = zero.state_partition(unit, kind).unwrap().unwrap();
                    let expected = &flat(&layouts[unit], kind)[range];
                    assert_eq!(to_vec::<f32>(&own).unwrap(), expected, "{saving:?} to {loading:?}");
                }
            });
        }
    }
}
