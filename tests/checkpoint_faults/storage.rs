//! A file system that fails at a chosen operation.

use std::collections::HashSet;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use ulysses::checkpoint::{LocalStorage, Storage, StorageFile};

/// The fault at the chosen operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// No fault; operations are only counted.
    None,
    /// The process is killed by SIGKILL, in the middle of a write.
    Kill,
    /// Like `Kill`, and all unsynced file contents and directory entries are lost.
    PowerCut,
    /// The calling rank's thread panics.
    Panic,
    /// The disk is full: this operation fails, and so do all later ones that need space.
    Full,
}

impl Fault {
    pub(crate) const ALL: [(&str, Self); 5] = [
        ("none", Self::None),
        ("kill", Self::Kill),
        ("power-cut", Self::PowerCut),
        ("panic", Self::Panic),
        ("full", Self::Full),
    ];
}

/// The local file system with a fault at operation number `at` of the process.
#[derive(Debug, Clone)]
pub(crate) struct FaultyStorage(Arc<State>);

#[derive(Debug)]
struct State {
    fault: Fault,
    at: usize,
    /// Names of the operations so far.
    operations: Mutex<Vec<&'static str>>,
    volatile: Mutex<Volatile>,
}

/// Operations that a power loss would undo.
#[derive(Debug, Default)]
struct Volatile {
    /// Files with unsynced content.
    content: HashSet<PathBuf>,
    /// Unsynced new directory entries.
    names: Vec<PathBuf>,
    /// Unsynced renames: from, to.
    renames: Vec<(PathBuf, PathBuf)>,
}

impl FaultyStorage {
    pub(crate) fn new(fault: Fault, at: usize) -> Self {
        Self(Arc::new(State { fault, at, operations: Mutex::default(), volatile: Mutex::default() }))
    }

    /// Names of the operations so far.
    pub(crate) fn operations(&self) -> Vec<&'static str> {
        self.0.operations.lock().unwrap().clone()
    }
}

impl State {
    /// Counts an operation, and injects the fault if it is the chosen one. `half` performs the first half of the
    /// operation.
    fn reach(&self, name: &'static str, takes_space: bool, half: impl FnOnce()) -> io::Result<()> {
        let number = {
            let mut operations = self.operations.lock().unwrap();
            operations.push(name);
            operations.len() - 1
        };
        let is_full = self.fault == Fault::Full && number >= self.at && takes_space;
        if number != self.at && !is_full {
            return Ok(());
        }
        match self.fault {
            Fault::None => Ok(()),
            Fault::Full if takes_space => Err(io::Error::from_raw_os_error(28)), // ENOSPC
            Fault::Full => Ok(()),
            Fault::Panic => panic!("the storage panics at operation {number}"),
            Fault::Kill => {
                half();
                kill()
            }
            Fault::PowerCut => {
                half();
                self.lose();
                kill()
            }
        }
    }

    /// Undoes all unsynced operations.
    fn lose(&self) {
        let volatile = self.lock();
        for path in &volatile.content {
            let file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
            let length = file.metadata().unwrap().len();
            file.set_len(length / 2).unwrap();
        }
        // An entry may already be gone with its directory.
        for path in volatile.names.iter().rev() {
            let _ = std::fs::remove_file(path);
            let _ = std::fs::remove_dir_all(path);
        }
        for (from, to) in volatile.renames.iter().rev() {
            let _ = std::fs::rename(to, from);
        }
    }

    /// Renames unsynced entries, which stay unsynced.
    fn follow(&self, from: &Path, to: &Path) {
        let renamed = |path: PathBuf| match path.strip_prefix(from) {
            Ok(rest) if rest.as_os_str().is_empty() => to.to_owned(),
            Ok(rest) => to.join(rest),
            Err(_) => path,
        };
        let mut volatile = self.lock();
        volatile.content = volatile.content.drain().map(renamed).collect();
        volatile.names = volatile.names.drain(..).map(renamed).collect();
    }

    fn lock(&self) -> MutexGuard<'_, Volatile> {
        self.volatile.lock().unwrap()
    }
}

/// Kills the process with SIGKILL, which may arrive after `raise` returns.
fn kill() -> ! {
    signal_hook::low_level::raise(signal_hook::consts::SIGKILL).unwrap();
    loop {
        std::thread::park();
    }
}

impl Storage for FaultyStorage {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        self.0.reach("create_dir", true, || ())?;
        LocalStorage.create_dir(path)?;
        self.0.lock().names.push(path.to_owned());
        Ok(())
    }

    fn create(&self, path: &Path) -> io::Result<Box<dyn StorageFile>> {
        self.0.reach("create", true, || ())?;
        let inner = LocalStorage.create(path)?;
        self.0.lock().names.push(path.to_owned());
        self.0.lock().content.insert(path.to_owned());
        Ok(Box::new(FaultyFile { inner, path: path.to_owned(), state: self.0.clone() }))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.0.reach("rename", false, || ())?;
        let replaces = to.exists();
        LocalStorage.rename(from, to)?;
        self.0.follow(from, to);
        // A replaced file cannot be restored, so such a rename counts as synced.
        if !replaces {
            self.0.lock().renames.push((from.to_owned(), to.to_owned()));
        }
        Ok(())
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        self.0.reach("sync_dir", false, || ())?;
        let mut volatile = self.0.lock();
        volatile.names.retain(|name| name.parent() != Some(path));
        volatile.renames.retain(|(_, to)| to.parent() != Some(path));
        LocalStorage.sync_dir(path)
    }

    fn remove_dir_all(&self, path: &Path) -> io::Result<()> {
        self.0.reach("remove_dir_all", false, || ())?;
        LocalStorage.remove_dir_all(path)?;
        let mut volatile = self.0.lock();
        volatile.names.retain(|name| !name.starts_with(path));
        volatile.content.retain(|file| !file.starts_with(path));
        volatile.renames.retain(|(_, to)| !to.starts_with(path));
        Ok(())
    }
}

struct FaultyFile {
    inner: Box<dyn StorageFile>,
    path: PathBuf,
    state: Arc<State>,
}

impl Write for FaultyFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let inner = &mut self.inner;
        self.state.reach("write", true, || inner.write_all(&bytes[..bytes.len() / 2]).unwrap())?;
        self.inner.write_all(bytes)?;
        self.state.lock().content.insert(self.path.clone());
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

impl StorageFile for FaultyFile {
    fn sync(&mut self) -> io::Result<()> {
        self.state.reach("sync", false, || ())?;
        self.inner.sync()?;
        self.state.lock().content.remove(&self.path);
        Ok(())
    }
}
