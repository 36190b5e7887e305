//! Test cases: a child process fails, and the next one resumes.

use crate::child::{Run, STEPS};
use crate::sample::{axes, sampled};
use crate::storage::Fault;
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Output};
use tempfile::TempDir;
use ulysses::checkpoint::{Checkpoint, Comparison, diff, saved_steps, step_name};

pub(crate) const ALL: [(&str, fn()); 6] = [
    ("a_run_killed_at_any_operation_of_a_save_goes_on_as_if_it_had_not_been", killed_anywhere),
    ("what_was_not_synced_may_be_lost_at_any_operation_of_a_save", power_cut_anywhere),
    ("a_background_save_killed_at_any_operation_loses_nothing_that_was_saved", background_killed_anywhere),
    ("a_rank_that_dies_while_it_saves_publishes_nothing", rank_dies),
    ("without_space_nothing_is_left_behind_and_the_run_stops", full_and_stops),
    ("without_space_training_goes_on_if_asked_to", full_and_goes_on),
];

pub(crate) const SIGKILL: i32 = 9;

/// The output of a child process.
#[derive(Debug)]
pub(crate) struct Outcome {
    resumed: u64,
    /// Bits of loss and norm, by step.
    steps: BTreeMap<u64, String>,
    pub(crate) saved: Vec<u64>,
    not_saved: usize,
    pub(crate) operations: Vec<String>,
    pub(crate) output: Output,
}

fn run(dir: &Path, run: Run) -> Outcome {
    let words = run.words();
    let words = words.iter().map(OsStr::new);
    child(&[OsStr::new("--child"), dir.as_os_str()].into_iter().chain(words).collect::<Vec<_>>())
}

/// Runs this binary as a child process with the given words.
pub(crate) fn child(words: &[&OsStr]) -> Outcome {
    outcome(Command::new(std::env::current_exe().unwrap()).args(words).output().unwrap())
}

fn outcome(output: Output) -> Outcome {
    let text = String::from_utf8(output.stdout.clone()).unwrap();
    let (resumed, steps, saved, operations) = (u64::MAX, BTreeMap::new(), Vec::new(), Vec::new());
    let mut outcome = Outcome { resumed, steps, saved, not_saved: 0, operations, output };
    for line in text.lines() {
        match line.split(' ').collect::<Vec<_>>()[..] {
            ["resumed", step] => outcome.resumed = step.parse().unwrap(),
            ["step", step, loss, norm] => {
                outcome.steps.insert(step.parse().unwrap(), format!("{loss} {norm}"));
            }
            ["saved", step] => outcome.saved.push(step.parse().unwrap()),
            ["not", "saved"] => outcome.not_saved += 1,
            ["operations", ref names @ ..] => {
                outcome.operations = names.iter().map(|&name| name.into()).collect()
            }
            _ => panic!("a child said {line:?}"),
        }
    }
    outcome
}

/// The output of an uninterrupted run, and its directory.
fn reference() -> (TempDir, Outcome) {
    let dir = tempfile::tempdir().unwrap();
    let outcome = run(dir.path(), Run::without_fault());
    assert!(outcome.output.status.success(), "{outcome:?}");
    assert_eq!((outcome.resumed, outcome.saved.as_slice()), (0, &[2, STEPS][..]));
    assert_eq!(saved_steps(dir.path()).unwrap(), [STEPS], "one checkpoint is kept");
    (dir, outcome)
}

/// Resumes in `dir` and compares steps and final state with the uninterrupted run.
fn assert_recovers(
    dir: &Path,
    failed: &Outcome,
    (reference_dir, reference): &(TempDir, Outcome),
    label: &str,
) {
    let outcome = run(dir, Run::without_fault());
    assert!(outcome.output.status.success(), "{label}: {outcome:?}");
    let last_saved = failed.saved.last().copied().unwrap_or(0);
    assert!(outcome.resumed >= last_saved, "{label}: {last_saved} was saved, {} resumed", outcome.resumed);
    let expected: BTreeMap<_, _> = reference.steps.clone().split_off(&(outcome.resumed + 1));
    assert_eq!(outcome.steps, expected, "{label}: steps after {}", outcome.resumed);
    // If the last step is already saved, the child neither saves nor removes anything.
    let kept: &[u64] = if outcome.resumed == STEPS { &[STEPS, 2] } else { &[STEPS] };
    assert!([kept, &[STEPS]].contains(&saved_steps(dir).unwrap().as_slice()), "{label}");
    assert_no_leftovers(dir, label);
    let open = |dir: &Path| {
        let checkpoint = Checkpoint::open(&dir.join(step_name(STEPS))).unwrap();
        checkpoint.verify().unwrap();
        checkpoint
    };
    let comparisons = diff(&open(dir), &open(reference_dir.path())).unwrap();
    assert!(comparisons.values().all(|comparison| *comparison == Comparison::Equal), "{label}");
    assert!(comparisons.len() > 20, "{label}: parameters and momenta");
}

fn assert_no_leftovers(dir: &Path, label: &str) {
    let names = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name());
    let hidden: Vec<_> = names.filter(|name| name.to_string_lossy().starts_with(".step")).collect();
    assert!(hidden.is_empty(), "{label}: {hidden:?}");
}

/// Injects a fault at a sample of all operations, with all operations by name in both saves, and resumes with another
/// child. Ranks write at the same time, so a name may be that of the operation beside it.
fn fail_everywhere(fault: Fault, background: bool) {
    let reference = reference();
    let operations = reference.1.operations.len();
    assert!(operations > 50, "two saves of four files are more than {operations} operations");
    for at in sampled(0..operations, |at| {
        let (operation, is_second_save) = (&reference.1.operations[*at], *at >= operations / 2);
        axes![operation, is_second_save]
    }) {
        let dir = tempfile::tempdir().unwrap();
        let label = format!("{fault:?} at operation {at} of {operations}");
        let failed = run(dir.path(), Run { fault, at, background, goes_on: false });
        assert_eq!(failed.output.status.signal(), Some(SIGKILL), "{label}: {failed:?}");
        assert_recovers(dir.path(), &failed, &reference, &label);
    }
}

fn killed_anywhere() {
    fail_everywhere(Fault::Kill, false);
}

fn power_cut_anywhere() {
    fail_everywhere(Fault::PowerCut, false);
}

fn background_killed_anywhere() {
    fail_everywhere(Fault::Kill, true);
}

fn rank_dies() {
    let reference = reference();
    // Both saves have the same number of operations; these are those of the second.
    let operations = reference.1.operations.len();
    for at in (operations / 2..operations).step_by(7) {
        let dir = tempfile::tempdir().unwrap();
        let label = format!("panic at operation {at}");
        let failed = run(dir.path(), Run { fault: Fault::Panic, at, ..Run::without_fault() });
        assert_eq!(failed.output.status.code(), Some(1), "{label}: {failed:?}");
        let stderr = String::from_utf8_lossy(&failed.output.stderr);
        assert!(stderr.contains("the storage panics"), "{label}: {stderr}");
        for step in saved_steps(dir.path()).unwrap() {
            Checkpoint::open(&dir.path().join(step_name(step))).unwrap().verify().unwrap();
        }
        assert_recovers(dir.path(), &failed, &reference, &label);
    }
}

fn full_and_stops() {
    let reference = reference();
    let first_save = reference.1.operations.len() / 2;
    for at in [first_save + 2, first_save + 9, first_save + 20] {
        let dir = tempfile::tempdir().unwrap();
        let label = format!("full at operation {at}");
        let failed = run(dir.path(), Run { fault: Fault::Full, at, ..Run::without_fault() });
        assert_eq!(failed.output.status.code(), Some(1), "{label}: {failed:?}");
        let stderr = String::from_utf8_lossy(&failed.output.stderr);
        assert!(stderr.contains("step 4 was not saved") && stderr.contains("No space left"), "{stderr}");
        assert_eq!(saved_steps(dir.path()).unwrap(), [2], "{label}");
        assert_no_leftovers(dir.path(), &label);
        assert_recovers(dir.path(), &failed, &reference, &label);
    }
}

fn full_and_goes_on() {
    let reference = reference();
    for background in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let failed = run(dir.path(), Run { fault: Fault::Full, at: 3, background, goes_on: true });
        assert!(failed.output.status.success(), "{failed:?}");
        assert_eq!((failed.saved.len(), failed.not_saved), (0, 2), "{failed:?}");
        assert_eq!(failed.steps, reference.1.steps, "training is not touched");
        assert!(saved_steps(dir.path()).unwrap().is_empty());
        assert_no_leftovers(dir.path(), "full");
    }
}

/// Runs a command on a small temporary file system, and copies the remaining files to another directory.
const ON_A_SMALL_DISK: &str = r#"
    bytes=$1 disk=$2 kept=$3
    shift 3
    mount -t tmpfs -o "size=$bytes" none "$disk" || exit 99
    "$@"
    code=$?
    cp -R "$disk/." "$kept"
    exit $code
"#;

fn on_a_small_disk(bytes: u64, disk: &Path, kept: &Path) -> Command {
    let mut command = Command::new("unshare");
    command.args(["--map-root-user", "--mount", "sh", "-c", ON_A_SMALL_DISK, "sh", &bytes.to_string()]);
    command.args([disk, kept]);
    command
}

/// Returns why this process cannot mount a file system, if it cannot.
pub(crate) fn cannot_mount() -> Option<String> {
    let (disk, kept) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    match on_a_small_disk(1 << 16, disk.path(), kept.path()).arg("true").output() {
        Err(error) => Some(format!("cannot run unshare: {error}")),
        Ok(output) if output.status.success() => None,
        Ok(output) => Some(String::from_utf8_lossy(&output.stderr).lines().collect::<Vec<_>>().join(" ")),
    }
}

/// The disk has space for one checkpoint but not for two.
pub(crate) fn small_disk() {
    const PAGE: u64 = 4096;
    let reference = reference();
    let checkpoint = std::fs::read_dir(reference.0.path().join(step_name(STEPS))).unwrap();
    let pages = checkpoint.map(|file| file.unwrap().metadata().unwrap().len().div_ceil(PAGE)).sum::<u64>();
    let (disk, kept) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    // `latest` and its replacement use one page each.
    let mut command = on_a_small_disk((pages + 3) * PAGE, disk.path(), kept.path());
    command.arg(std::env::current_exe().unwrap()).arg("--child").arg(disk.path());
    let failed = outcome(command.args(Run::without_fault().words()).output().unwrap());
    assert_eq!(failed.output.status.code(), Some(1), "{failed:?}");
    assert_eq!(failed.saved, [2], "{failed:?}");
    let stderr = String::from_utf8_lossy(&failed.output.stderr);
    assert!(stderr.contains("step 4 was not saved") && stderr.contains("No space left"), "{stderr}");
    assert_eq!(saved_steps(kept.path()).unwrap(), [2]);
    assert_no_leftovers(kept.path(), "a small disk");
    assert_recovers(kept.path(), &failed, &reference, "a small disk");
}
