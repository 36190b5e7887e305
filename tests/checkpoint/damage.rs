//! Damaged, foreign and malicious files: each is an error with its name, and the run resumes from the
//! previous checkpoint.

use super::training::{on_mesh, setup};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::sync::LazyLock;
use tempfile::TempDir;
use ulysses::checkpoint::{Checkpoint, CheckpointError, MANIFEST, Manifest, newest, step_name};

/// Checkpoints of steps 1 and 2 of a run on two ranks.
static INTACT: LazyLock<TempDir> = LazyLock::new(|| {
    let dir = tempfile::tempdir().unwrap();
    on_mesh(setup(2, 1, 2), |rank| {
        for _ in 0..2 {
            rank.train(1)?;
            rank.save(dir.path())?;
        }
        Ok(())
    });
    dir
});

const STATE_FILE: &str = "exp_avg.00001-of-00002.safetensors";
const UNIT: &str = "model.layers.0";

fn copy_dir(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.path().is_dir() {
            copy_dir(&entry.path(), &target);
        } else {
            fs::copy(entry.path(), target).unwrap();
        }
    }
}

/// Damages step 2. Checks that the error contains all of `expected`, and that a run would resume
/// from step 1.
#[track_caller]
fn assert_refused(label: &str, expected: &[&str], damage: impl FnOnce(&Path)) {
    let copy = tempfile::tempdir().unwrap();
    copy_dir(INTACT.path(), copy.path());
    let dir = copy.path().join(step_name(2));
    damage(&dir);
    let error = Checkpoint::open(&dir).and_then(|checkpoint| checkpoint.verify()).unwrap_err().to_string();
    for expected in expected {
        assert!(error.contains(expected), "{label}: no {expected:?} in {error:?}");
    }
    on_mesh(setup(2, 1, 0), |rank| {
        let found = newest(copy.path(), &*rank.all)?;
        assert_eq!(found.checkpoint.unwrap().manifest().progress.step, 1, "{label}");
        assert_eq!(found.refused.join("\n"), error, "{label}");
        Ok(())
    });
}

/// Replaces a file's bytes.
fn edit(path: &Path, change: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = fs::read(path).unwrap();
    change(&mut bytes);
    fs::write(path, bytes).unwrap();
}

/// Updates the manifest to the edited state file, so that only the header reveals the edit.
fn update_manifest(dir: &Path) {
    let bytes = fs::read(dir.join(STATE_FILE)).unwrap();
    let mut manifest = Manifest::read(dir).unwrap();
    let entry = manifest.files.iter_mut().find(|file| file.name == STATE_FILE).unwrap();
    (entry.bytes, entry.blake3) = (bytes.len() as u64, blake3::hash(&bytes).to_hex().to_string());
    fs::write(dir.join(MANIFEST), manifest.to_text().unwrap()).unwrap();
}

/// Edits the header of the state file as text, and updates the manifest.
fn edit_header(dir: &Path, change: impl FnOnce(String) -> String) {
    edit(&dir.join(STATE_FILE), |bytes| {
        let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let header = change(String::from_utf8(bytes[8..8 + length].to_vec()).unwrap());
        let data = bytes.split_off(8 + length);
        bytes.clear();
        bytes.extend((header.len() as u64).to_le_bytes());
        bytes.extend(header.into_bytes());
        bytes.extend(data);
    });
    update_manifest(dir);
}

/// Edits the header of the state file as JSON, and updates the manifest.
fn edit_header_json(dir: &Path, change: impl FnOnce(&mut Value)) {
    edit_header(dir, |text| {
        let mut header: Value = serde_json::from_str(&text).unwrap();
        change(&mut header);
        header.to_string()
    });
}

/// Edits the manifest's fields and updates its hash.
fn edit_manifest(dir: &Path, change: impl FnOnce(&mut Manifest)) {
    let mut manifest = Manifest::read(dir).unwrap();
    change(&mut manifest);
    fs::write(dir.join(MANIFEST), manifest.to_text().unwrap()).unwrap();
}

#[test]
fn damaged_files_are_errors_with_the_file_name() {
    assert_refused("one byte fewer", &[STATE_FILE, "bytes, but the manifest states"], |dir| {
        edit(&dir.join(STATE_FILE), |bytes| bytes.truncate(bytes.len() - 1));
    });
    assert_refused("one byte more", &[STATE_FILE, "bytes, but the manifest states"], |dir| {
        edit(&dir.join(STATE_FILE), |bytes| bytes.push(0));
    });
    assert_refused("a flipped bit in the data", &[STATE_FILE, "damaged", "BLAKE3"], |dir| {
        edit(&dir.join(STATE_FILE), |bytes| *bytes.last_mut().unwrap() ^= 1);
    });
    assert_refused("a missing file", &[STATE_FILE, "cannot open"], |dir| {
        fs::remove_file(dir.join(STATE_FILE)).unwrap();
    });
    assert_refused("an empty file", &[STATE_FILE], |dir| fs::write(dir.join(STATE_FILE), "").unwrap());
    assert_refused("a directory instead of a file", &[STATE_FILE], |dir| {
        fs::remove_file(dir.join(STATE_FILE)).unwrap();
        fs::create_dir(dir.join(STATE_FILE)).unwrap();
    });
    assert_refused("the file of another step", &[STATE_FILE, "its `step` is 1, expected 2"], |dir| {
        fs::copy(dir.with_file_name(step_name(1)).join(STATE_FILE), dir.join(STATE_FILE)).unwrap();
        update_manifest(dir);
    });
    assert_refused("the file of another partition", &[STATE_FILE, "its `partition` is 0 of 2"], |dir| {
        fs::copy(dir.join(STATE_FILE.replace("00001-", "00000-")), dir.join(STATE_FILE)).unwrap();
        update_manifest(dir);
    });
    assert_refused("the file of another run", &[STATE_FILE, "its `run_id` is other, expected"], |dir| {
        edit_header(dir, |header| header.replace("a-run", "other"));
    });
}

#[test]
fn malformed_headers_are_errors_with_the_tensor_name() {
    for claimed in [1 << 63, u64::MAX, 1 << 40, 99_000_000] {
        assert_refused("a false header length", &[STATE_FILE, &claimed.to_string()], |dir| {
            edit(&dir.join(STATE_FILE), |bytes| bytes[..8].copy_from_slice(&claimed.to_le_bytes()));
            update_manifest(dir);
        });
    }
    assert_refused("no JSON", &[STATE_FILE, "not a safetensors header"], |dir| {
        edit_header(dir, |header| header.replace('{', "["));
    });
    let tensor = |expected: &'static str| vec![STATE_FILE, UNIT, expected];
    assert_refused("a wrong dtype", &tensor("dtype is I32, expected F32"), |dir| {
        edit_header_json(dir, |header| header[UNIT]["dtype"] = json!("I32"));
    });
    assert_refused("a wrong shape", &tensor("shape is [2, 2]"), |dir| {
        edit_header_json(dir, |header| header[UNIT]["shape"] = json!([2, 2]));
    });
    assert_refused("a shape that overflows", &tensor("expected"), |dir| {
        edit_header_json(dir, |header| header[UNIT]["shape"] = json!([u64::MAX, u64::MAX]));
    });
    assert_refused("overlapping tensors", &tensor("byte range is"), |dir| {
        edit_header_json(dir, |header| header[UNIT]["data_offsets"][0] = json!(0));
    });
    assert_refused("a tensor beyond the file", &tensor("byte range is"), |dir| {
        edit_header_json(dir, |header| header[UNIT]["data_offsets"][1] = json!(1_u64 << 62));
    });
    assert_refused("an extra tensor", &[STATE_FILE, "extra", "not in the manifest"], |dir| {
        edit_header_json(dir, |header| header["extra"] = header[UNIT].clone());
    });
    assert_refused("a missing tensor", &tensor("missing"), |dir| {
        edit_header_json(dir, |header| {
            header.as_object_mut().unwrap().remove(UNIT);
        });
    });
    assert_refused("a tensor listed twice", &tensor("listed twice"), |dir| {
        edit_header(dir, |header| {
            let value: Value = serde_json::from_str(&header).unwrap();
            format!("{{\"{UNIT}\":{},{}", value[UNIT], header.trim_start_matches('{'))
        });
    });
}

#[test]
fn damaged_manifests_are_errors() {
    let damaged = |text: &str| text.replacen("\"step\": 2", "\"step\": 3", 1);
    assert_refused("a changed number", &[MANIFEST, "the hash does not match"], |dir| {
        let text = fs::read_to_string(dir.join(MANIFEST)).unwrap();
        assert_ne!(damaged(&text), text);
        fs::write(dir.join(MANIFEST), damaged(&text)).unwrap();
    });
    assert_refused("a truncated manifest", &[MANIFEST, "not a manifest"], |dir| {
        edit(&dir.join(MANIFEST), |bytes| bytes.truncate(bytes.len() / 2));
    });
    assert_refused("no hash", &[MANIFEST, "the last line is not the hash"], |dir| {
        fs::write(dir.join(MANIFEST), r#"{ "format_version": 1 }"#).unwrap();
    });
    assert_refused("no manifest", &[MANIFEST, "cannot open"], |dir| {
        fs::remove_file(dir.join(MANIFEST)).unwrap();
    });
    assert_refused("a file outside", &["../x", "unexpected file"], |dir| {
        edit_manifest(dir, |manifest| manifest.files[0].name = "../x".into());
    });
    assert_refused("a missing file entry", &["no file for parameters of partition 0"], |dir| {
        edit_manifest(dir, |manifest| drop(manifest.files.remove(0)));
    });
    assert_refused("a duplicate file entry", &["duplicate file"], |dir| {
        edit_manifest(dir, |manifest| manifest.files.push(manifest.files[0].clone()));
    });
    assert_refused("more partitions than files", &["no file for parameters of partition 2"], |dir| {
        edit_manifest(dir, |manifest| manifest.num_partitions = 1 << 20);
    });
    assert_refused("no partitions", &["num_partitions is 0"], |dir| {
        edit_manifest(dir, |manifest| manifest.num_partitions = 0);
    });
    assert_refused("a shape that overflows", &["is too large"], |dir| {
        edit_manifest(dir, |manifest| manifest.units[1].parameters[0].shape = vec![1 << 40, 1 << 40]);
    });
    assert_refused("an offset that leaves a gap", &["has offset 7, expected 0"], |dir| {
        edit_manifest(dir, |manifest| manifest.units[0].parameters[0].offset = 7);
    });
    assert_refused("a kind that leaves the directory", &["kinds are"], |dir| {
        edit_manifest(dir, |manifest| manifest.kinds[1] = "../exp_avg".into());
    });
}

#[test]
fn newest_fails_if_the_newest_checkpoint_may_be_intact() {
    let copy = tempfile::tempdir().unwrap();
    copy_dir(INTACT.path(), copy.path());
    edit_manifest(&copy.path().join(step_name(2)), |manifest| manifest.format_version = 4);
    on_mesh(setup(2, 1, 0), |rank| {
        let error = newest(copy.path(), &*rank.all).unwrap_err();
        assert!(matches!(error, CheckpointError::Unreadable { rank: 0, .. }), "{error}");
        let message = error.to_string();
        assert!(message.contains("format version 4 is too new; this version reads up to 3"), "{message}");
        Ok(())
    });
}

#[test]
fn newest_fails_if_all_checkpoints_are_damaged() {
    let copy = tempfile::tempdir().unwrap();
    copy_dir(INTACT.path(), copy.path());
    for step in [1, 2] {
        edit(&copy.path().join(step_name(step)).join(STATE_FILE), |bytes| bytes.truncate(3));
    }
    on_mesh(setup(2, 1, 0), |rank| {
        let message = newest(copy.path(), &*rank.all).unwrap_err().to_string();
        assert!(message.contains("no valid checkpoint") && message.contains(&step_name(2)), "{message}");
        Ok(())
    });
}
