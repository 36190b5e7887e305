//! Runs the Python scripts of this directory.

use crate::support::cli::Workplace;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::{Mutex, OnceLock};

/// A Python, and its process that runs the scripts, one after the other.
pub(crate) struct Python {
    program: String,
    process: OnceLock<Mutex<Process>>,
}

struct Process {
    process: Child,
    stdout: BufReader<ChildStdout>,
}

impl Python {
    /// Returns the Python that `ULYSSES_PYTHON` names, or else `python3`.
    pub(crate) fn from_env() -> Self {
        let program = std::env::var("ULYSSES_PYTHON").unwrap_or_else(|_| "python3".into());
        Self { program, process: OnceLock::new() }
    }

    /// Returns why it cannot import modules, or `None` if it can.
    pub(crate) fn missing(&self, modules: &str) -> Option<String> {
        let python = &self.program;
        match Command::new(python).args(["-c", &format!("import {modules}")]).output() {
            Err(error) => Some(format!("cannot run {python}: {error}")),
            Ok(output) if !output.status.success() => {
                let (stderr, cannot) =
                    (String::from_utf8_lossy(&output.stderr), format!("cannot import {modules}"));
                Some(format!("{python}: {}", stderr.lines().last().unwrap_or(&cannot)))
            }
            Ok(_) => None,
        }
    }

    /// Runs a script in the workplace. Returns its output.
    pub(crate) fn run(&self, place: &Workplace, script_and_arguments: &[&str]) -> String {
        let directory = place.path("").display().to_string();
        let request = json!([&[directory.as_str()], script_and_arguments].concat());
        let mut answer = String::new();
        {
            let Process { process, stdout } = &mut *self.process.get_or_init(|| self.start()).lock().unwrap();
            writeln!(process.stdin.as_mut().unwrap(), "{request}").unwrap();
            stdout.read_line(&mut answer).unwrap();
        }
        let answer: Value = serde_json::from_str(&answer).unwrap();
        assert!(answer["error"].is_null(), "{request}: {}", answer["error"].as_str().unwrap());
        answer["output"].as_str().unwrap().to_owned()
    }

    fn start(&self) -> Mutex<Process> {
        let scripts = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/interop/run_scripts.py");
        // Threads of its own would compete with the ranks.
        let mut command = Command::new(&self.program);
        command.arg(scripts).env("OMP_NUM_THREADS", "1").stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = command.spawn().unwrap();
        let stdout = BufReader::new(process.stdout.take().unwrap());
        Mutex::new(Process { process, stdout })
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        drop(self.process.stdin.take());
        let _ = self.process.wait();
    }
}
