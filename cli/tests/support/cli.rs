//! Runs the `ulysses` binary as a child process in its own directory.

use serde_json::{Value, json};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Much longer than any of these commands takes: a command that exceeds it hangs.
const TIMEOUT: Duration = Duration::from_secs(120);

/// Makes the start of any thread fail, by a stack size of 64 TiB. (Limits do not apply to root.)
pub const NO_THREADS: (&str, &str) = ("RUST_MIN_STACK", "70368744177664");

/// The result of a command.
#[derive(Debug)]
pub struct Outcome {
    /// The exit code; `None` for a signal.
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

/// A working directory with text to train on.
pub struct Workplace {
    dir: TempDir,
}

impl Workplace {
    pub fn new() -> Self {
        let place = Self { dir: tempfile::tempdir().unwrap() };
        place.write("text.txt", "the quick brown fox jumps over the lazy dog. ".repeat(100));
        place
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn write(&self, name: &str, content: impl AsRef<[u8]>) {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }

    pub fn read(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
    }

    pub fn read_json(&self, name: &str) -> Value {
        serde_json::from_str(&self.read(name)).unwrap()
    }

    /// Writes a valid config with `changes`: objects are merged, null removes a key.
    pub fn write_config(&self, name: &str, changes: Value) {
        let mut config = json!({
            "train_batch_size": 4,
            "optimizer": { "type": "AdamW", "params": { "lr": 3e-3 } },
            "ulysses": { "model": "nano", "data": "text.txt", "seq_len": 64, "steps": 4, "output": "out" },
        });
        merge(&mut config, changes);
        self.write(name, config.to_string());
    }

    /// Runs the binary here.
    ///
    /// # Panics
    /// If it does not end in time.
    #[track_caller]
    pub fn run(&self, arguments: &[&str]) -> Outcome {
        self.run_with(arguments, &[])
    }

    /// Like [`run`](Self::run), with environment variables.
    ///
    /// # Panics
    /// If it does not end in time.
    #[track_caller]
    pub fn run_with(&self, arguments: &[&str], variables: &[(&str, &str)]) -> Outcome {
        let mut command = self.command(arguments);
        command.envs(variables.iter().copied());
        self.run_command(command)
    }

    /// Runs any command here.
    ///
    /// # Panics
    /// If it does not end in time.
    #[track_caller]
    pub fn run_command(&self, mut command: Command) -> Outcome {
        // Files instead of pipes, which would block the command unless somebody reads them.
        let output = tempfile::tempdir().unwrap();
        let [stdout, stderr] = ["stdout", "stderr"].map(|name| output.path().join(name));
        command.current_dir(self.dir.path()).stdin(Stdio::null());
        command.stdout(File::create(&stdout).unwrap()).stderr(File::create(&stderr).unwrap());
        let code = wait(command);
        let text = |path: &Path| String::from_utf8(fs::read(path).unwrap()).unwrap();
        Outcome { code, stdout: text(&stdout), stderr: text(&stderr) }
    }

    /// Returns the binary with arguments, to be run here.
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ulysses"));
        command.args(arguments).current_dir(self.dir.path()).stdin(Stdio::null());
        command.env_remove("RUST_LOG").env("RUST_BACKTRACE", "1");
        command
    }

    /// Returns the lines of steps and evaluations in a metrics file.
    pub fn metrics(&self, name: &str) -> Vec<Value> {
        self.metrics_lines(name, false)
    }

    /// Returns the lines of restarts in a metrics file.
    pub fn restarts(&self, name: &str) -> Vec<Value> {
        self.metrics_lines(name, true)
    }

    fn metrics_lines(&self, name: &str, are_restarts: bool) -> Vec<Value> {
        let text = self.read(name);
        let lines = text.lines().map(|line| serde_json::from_str(line).unwrap());
        lines.filter(|line: &Value| line.get("restart").is_some() == are_restarts).collect()
    }

    /// Returns the losses of a metrics file.
    pub fn losses(&self, name: &str) -> Vec<f64> {
        self.metrics(name).iter().map(|step| step["loss"].as_f64().unwrap()).collect()
    }
}

impl Outcome {
    /// # Panics
    /// Unless the command succeeded.
    #[track_caller]
    pub fn assert_done(&self) -> &Self {
        assert_eq!(self.code, Some(0), "{self:?}");
        self
    }

    /// # Panics
    /// Unless the command ended with `code` and one error message that contains all of `expected`.
    #[track_caller]
    pub fn assert_refused(&self, code: i32, expected: &[&str]) {
        assert_eq!(self.code, Some(code), "{self:?}");
        let errors = self.stderr.lines().filter(|line| line.starts_with("error: ")).count();
        assert_eq!(errors, 1, "one message: {self:?}");
        for unwanted in ["panicked", "backtrace", "src/"] {
            assert!(!self.stderr.contains(unwanted), "{unwanted} in {self:?}");
        }
        for expected in expected {
            assert!(self.stderr.contains(expected), "no {expected:?} in {self:?}");
        }
    }
}

/// Returns the exit code of a command that ends in time.
#[track_caller]
fn wait(mut command: Command) -> Option<i32> {
    let mut child = command.spawn().unwrap();
    let deadline = Instant::now() + TIMEOUT;
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status.code();
        }
        if Instant::now() > deadline {
            child.kill().unwrap();
            child.wait().unwrap();
            panic!("{command:?} hangs");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn merge(target: &mut Value, changes: Value) {
    let Value::Object(changes) = changes else {
        *target = changes;
        return;
    };
    if !target.is_object() {
        *target = json!({});
    }
    for (key, change) in changes {
        if change.is_null() {
            target.as_object_mut().unwrap().remove(&key);
        } else {
            merge(&mut target[&key], change);
        }
    }
}
