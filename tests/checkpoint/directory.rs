//! Output directories: pointer files, retention of checkpoints, and the lock.

use super::training::{on_mesh, setup};
use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use ulysses::checkpoint::{
    Checkpoint, LATEST, LocalStorage, OutputLock, Storage, StorageFile, newest, saved_steps, step_name,
};

/// A change that a user makes to `latest`.
type Change<'a> = &'a (dyn Fn(&Path) + Sync);

#[test]
fn resuming_ignores_latest() {
    let elsewhere = tempfile::tempdir().unwrap();
    let set: [(&str, Change<'_>); 8] = [
        ("missing", &|latest| fs::remove_file(latest).unwrap()),
        ("empty", &|latest| fs::write(latest, "").unwrap()),
        ("stale", &|latest| fs::write(latest, "step_00000001\n").unwrap()),
        ("of a step that never was", &|latest| fs::write(latest, "step_00000099\n").unwrap()),
        ("outside", &|latest| fs::write(latest, "../x\n").unwrap()),
        ("absolute", &|latest| fs::write(latest, "/etc\n").unwrap()),
        ("no text", &|latest| fs::write(latest, [0xff, 0xfe]).unwrap()),
        ("a link", &|latest| {
            fs::write(elsewhere.path().join("target"), "not ours").unwrap();
            fs::remove_file(latest).unwrap();
            symlink(elsewhere.path().join("target"), latest).unwrap();
        }),
    ];
    for (label, set) in set {
        let dir = tempfile::tempdir().unwrap();
        let latest = dir.path().join(LATEST);
        on_mesh(setup(1, 1, 0), |rank| {
            for _ in 0..2 {
                rank.train(1)?;
                rank.save(dir.path())?;
            }
            assert_eq!(fs::read_to_string(&latest)?, "step_00000002\n");
            set(&latest);
            let found = newest(dir.path(), &*rank.all)?.checkpoint.unwrap();
            assert_eq!(found.manifest().progress.step, 2, "{label}");
            rank.train(1)?;
            rank.save(dir.path())?;
            assert_eq!(fs::read_to_string(&latest)?, "step_00000003\n", "{label}");
            assert!(!latest.symlink_metadata()?.is_symlink(), "{label}");
            Ok(())
        });
    }
    assert_eq!(fs::read_to_string(elsewhere.path().join("target")).unwrap(), "not ours");
}

#[test]
fn a_directory_with_the_name_of_latest_is_moved_aside() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir_all(dir.path().join(LATEST).join("inside")).unwrap();
    on_mesh(setup(1, 1, 0), |rank| {
        let saved = rank.save(dir.path())?;
        assert!(saved.warnings.is_empty(), "{:?}", saved.warnings);
        Checkpoint::open(&saved.path)?.verify()?;
        Ok(())
    });
    assert_eq!(fs::read_to_string(dir.path().join(LATEST)).unwrap(), "step_00000000\n");
    assert!(dir.path().join("moved_latest/inside").is_dir());
}

#[test]
fn links_files_and_other_names_are_not_steps() {
    let dir = tempfile::tempdir().unwrap();
    on_mesh(setup(1, 1, 0), |rank| rank.save(dir.path()));
    symlink(dir.path().join(step_name(0)), dir.path().join(step_name(9))).unwrap();
    fs::write(dir.path().join(step_name(8)), "").unwrap();
    for name in ["step_7", "step_000000007", "step_-0000007", "step_00000007.old", "step_", ".step_00000007"]
    {
        fs::create_dir(dir.path().join(name)).unwrap();
    }
    assert_eq!(saved_steps(dir.path()).unwrap(), [0]);
    assert!(saved_steps(&dir.path().join("nowhere")).unwrap().is_empty());
}

/// A storage that corrupts written files once it is enabled.
#[derive(Debug, Default)]
struct BadDisk(Arc<AtomicBool>);

struct BadFile(Box<dyn StorageFile>, Arc<AtomicBool>);

impl Storage for BadDisk {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        LocalStorage.create_dir(path)
    }

    fn create(&self, path: &Path) -> io::Result<Box<dyn StorageFile>> {
        Ok(Box::new(BadFile(LocalStorage.create(path)?, self.0.clone())))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        LocalStorage.rename(from, to)
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        LocalStorage.sync_dir(path)
    }

    fn remove_dir_all(&self, path: &Path) -> io::Result<()> {
        LocalStorage.remove_dir_all(path)
    }
}

impl Write for BadFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut bytes = bytes.to_vec();
        if self.1.load(Ordering::Relaxed)
            && let Some(last) = bytes.last_mut()
        {
            *last ^= 1;
        }
        self.0.write_all(&bytes)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

impl StorageFile for BadFile {
    fn sync(&mut self) -> io::Result<()> {
        self.0.sync()
    }
}

#[test]
fn a_corrupt_write_does_not_remove_the_last_verified_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    on_mesh(setup(2, 1, 1), |rank| {
        let disk = BadDisk::default();
        let is_bad = disk.0.clone();
        let mut saver = rank.saver(dir.path(), Some(1), Arc::new(disk))?;
        for _ in 0..2 {
            rank.train(1)?;
            rank.save_with(&mut saver)?;
        }
        is_bad.store(true, Ordering::Relaxed);
        rank.train(1)?;
        let message = rank.save_with(&mut saver).unwrap_err().to_string();
        assert!(message.contains("step 3 was not saved: rank 0"), "{message}");
        Ok(())
    });
    assert_eq!(saved_steps(dir.path()).unwrap(), [2]);
    Checkpoint::open(&dir.path().join(step_name(2))).unwrap().verify().unwrap();
}

#[test]
fn keep_last_does_not_count_damaged_newer_checkpoints() {
    let dir = tempfile::tempdir().unwrap();
    on_mesh(setup(1, 1, 0), |rank| {
        let mut saver = rank.saver(dir.path(), Some(2), Arc::new(LocalStorage))?;
        for _ in 0..4 {
            rank.train(1)?;
            rank.save_with(&mut saver)?;
        }
        Ok(())
    });
    assert_eq!(saved_steps(dir.path()).unwrap(), [4, 3]);
    // Step 4 is lost; the run resumes from 3 and saves 4 again.
    fs::write(dir.path().join(step_name(4)).join("manifest.json"), "").unwrap();
    on_mesh(setup(1, 1, 0), |rank| {
        rank.resume(dir.path())?;
        assert_eq!(rank.engine.attempted_steps(), 3);
        let mut saver = rank.saver(dir.path(), Some(1), Arc::new(LocalStorage))?;
        rank.train(1)?;
        rank.save_with(&mut saver)
    });
    assert_eq!(saved_steps(dir.path()).unwrap(), [4]);
    Checkpoint::open(&dir.path().join(step_name(4))).unwrap().verify().unwrap();
}

#[test]
fn a_second_job_gets_an_error_with_the_lock_holder() {
    let dir = tempfile::tempdir().unwrap();
    let first = OutputLock::acquire(dir.path(), "job 17 on node-a").unwrap();
    let error = OutputLock::acquire(dir.path(), "job 18").unwrap_err().to_string();
    assert!(error.ends_with("is in use by job 17 on node-a"), "{error}");
    drop(first);
    let second = OutputLock::acquire(dir.path(), "job 18").unwrap();
    let error = OutputLock::acquire(dir.path(), "job 19").unwrap_err().to_string();
    assert!(error.ends_with("is in use by job 18"), "{error}");
    // The holder locks the file before it writes to it.
    fs::write(dir.path().join(".lock"), "").unwrap();
    let error = OutputLock::acquire(dir.path(), "job 19").unwrap_err().to_string();
    assert!(error.ends_with("is in use by a job that has just started"), "{error}");
    drop(second);
}
