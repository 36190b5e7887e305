//! Jobs of several processes.

use crate::support::cli::Outcome;
use std::fs::File;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Far more than any job takes; a job that takes longer hangs.
const TIMEOUT: Duration = Duration::from_secs(300);

/// A command under `mpirun`.
pub(crate) struct Job {
    command: Command,
}

/// A running job.
pub(crate) struct Running {
    pub(crate) child: Child,
    output: tempfile::TempDir,
    started: Instant,
}

impl Job {
    /// Runs `program` with `arguments` on a number of processes.
    pub(crate) fn new(processes: usize, program: &Path, arguments: &[&str]) -> Self {
        let mut command = Command::new("mpirun");
        command.args(["-np", &processes.to_string(), "--oversubscribe", "--bind-to", "none"]);
        command.arg(program).args(arguments).stdin(Stdio::null());
        Self { command: in_container(command) }
    }

    /// Runs `ulysses launch` with MPI on a number of processes.
    pub(crate) fn launched(processes: usize, arguments: &[&str]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ulysses"));
        command.args(["launch", "--nproc", &processes.to_string()]).args(arguments);
        command.args(["--backend", "mpi"]).stdin(Stdio::null());
        Self { command: in_container(command) }
    }

    /// Runs a script that starts `mpirun` itself.
    pub(crate) fn by(script: &str, arguments: &[&str]) -> Self {
        let mut command = Command::new(script);
        command.args(arguments).stdin(Stdio::null());
        Self { command: in_container(command) }
    }

    /// Sets an environment variable of the job.
    pub(crate) fn with(mut self, variable: &str, value: &Path) -> Self {
        self.command.env(variable, value);
        self
    }

    pub(crate) fn of_this_binary(processes: usize, arguments: &[&str]) -> Self {
        Self::new(processes, &std::env::current_exe().unwrap(), arguments)
    }

    /// Sets the working directory of the job.
    pub(crate) fn within(mut self, dir: &Path) -> Self {
        self.command.current_dir(dir);
        self
    }

    pub(crate) fn start(mut self) -> Running {
        let output = tempfile::tempdir().unwrap();
        let [stdout, stderr] =
            ["stdout", "stderr"].map(|name| File::create(output.path().join(name)).unwrap());
        let child = self.command.stdout(stdout).stderr(stderr).spawn();
        let child = child.expect("tests of the feature `mpi` need Open MPI's mpirun");
        Running { child, output, started: Instant::now() }
    }

    pub(crate) fn run(self) -> Outcome {
        self.start().wait()
    }
}

/// Allows root, since containers run as root.
fn in_container(mut command: Command) -> Command {
    command.envs([("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")]);
    command.env_remove("RUST_LOG").env("RUST_BACKTRACE", "1");
    command
}

impl Running {
    /// # Panics
    /// If the job does not end in time.
    pub(crate) fn wait(mut self) -> Outcome {
        let code = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status.code();
            }
            if self.started.elapsed() > TIMEOUT {
                self.child.kill().unwrap();
                self.child.wait().unwrap();
                panic!("the job hangs: {}", self.text("stderr"));
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        Outcome { code, stdout: self.text("stdout"), stderr: self.text("stderr") }
    }

    pub(crate) fn text(&self, name: &str) -> String {
        std::fs::read_to_string(self.output.path().join(name)).unwrap()
    }
}
