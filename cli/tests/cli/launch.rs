//! `ulysses launch` with shells as ranks; `cli/tests/mpi` launches real ranks.

use crate::support::cli::{NO_THREADS, Outcome, Workplace};
#[cfg(target_os = "linux")]
use crate::support::processes::runs;
use crate::support::processes::wait_until;
use serde_json::json;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

/// Launches shells as ranks, each with this script.
fn launch(place: &Workplace, flags: &[&str], script: &str) -> Outcome {
    place.run(&[&["launch", "--program", "sh"], flags, &["--", "-c", script]].concat())
}

fn sorted(lines: &str) -> Vec<&str> {
    let mut lines: Vec<&str> = lines.lines().collect();
    lines.sort_unstable();
    lines
}

#[test]
fn every_rank_gets_its_environment_and_a_prefix_on_its_lines() {
    let script =
        "echo $RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE at $MASTER_ADDR; echo to be read >&2";
    let outcome = launch(&Workplace::new(), &["--nproc", "3"], script);
    let lines = [0, 1, 2].map(|rank| format!("[{rank}] {rank} of 3, {rank} of 3 at 127.0.0.1"));
    assert_eq!(sorted(&outcome.assert_done().stdout), lines);
    assert_eq!(sorted(&outcome.stderr), [0, 1, 2].map(|rank| format!("[{rank}] to be read")));
}

#[test]
fn the_ranks_share_free_ports() {
    let script = "test $MASTER_PORT != $ULYSSES_MASTER_PORT && echo $MASTER_PORT $ULYSSES_MASTER_PORT";
    let outcome = launch(&Workplace::new(), &["--nproc", "2"], script);
    let ports: Vec<&str> =
        outcome.assert_done().stdout.lines().map(|line| line.split_once(' ').unwrap().1).collect();
    assert_eq!((ports.len(), ports[0]), (2, ports[1]));
}

#[test]
fn a_rank_that_fails_is_named_and_the_others_are_stopped() {
    let script = "if [ $RANK = 1 ]; then echo out of luck >&2; exit 3; fi; sleep 1000";
    let outcome = launch(&Workplace::new(), &["--nproc", "3"], script);
    let named = "rank 1 ended with exit code 3; last line: out of luck";
    outcome.assert_refused(1, &[&format!("error: {named}"), "stopping 2 other process(es)"]);
}

#[test]
fn a_rank_killed_by_a_signal_is_named_with_the_signal() {
    let outcome = launch(&Workplace::new(), &["--nproc", "2"], "[ $RANK = 1 ] || kill -9 $$; sleep 1000");
    outcome.assert_refused(1, &["rank 0 was killed by signal 9 (SIGKILL)"]);
}

#[test]
fn ranks_that_ignore_sigterm_are_killed() {
    let script = "[ $RANK = 1 ] && exit 3; trap '' TERM; while :; do sleep 1; done";
    let outcome = launch(&Workplace::new(), &["--nproc", "2", "--grace", "1"], script);
    outcome.assert_refused(1, &["rank 1 ended with exit code 3"]);
}

#[test]
fn all_ranks_are_restarted_as_often_as_allowed() {
    // Rank 0 fails only after rank 1 has started; otherwise rank 1 would be stopped before it prints.
    let script = "echo $RANK >> tries-$RANK; [ $RANK = 1 ] && exit; \
                  for i in $(seq 3000); do [ $(cat tries-1 | wc -l) -ge $(wc -l < tries-0) ] && break; sleep 0.01; done; \
                  [ $(wc -l < tries-0) -ge 3 ]";
    let place = Workplace::new();
    let outcome = launch(&place, &["--nproc", "2", "--max-restarts", "2"], script);
    assert!(
        outcome.assert_done().stderr.contains("rank 0 ended with exit code 1; restart 2 of 2"),
        "{outcome:?}"
    );
    assert_eq!((place.read("tries-0"), place.read("tries-1")), ("0\n".repeat(3), "1\n".repeat(3)));
    let outcome = launch(&Workplace::new(), &["--nproc", "2", "--max-restarts", "1"], script);
    outcome.assert_refused(1, &["rank 0 ended with exit code 1", "after 1 restart(s)"]);
}

#[test]
fn bad_arguments_are_not_restarted() {
    let place = Workplace::new();
    let outcome = launch(&place, &["--nproc", "1", "--max-restarts", "5"], "echo x >> tries; exit 2");
    outcome.assert_refused(2, &["rank 0 ended with exit code 2"]);
    assert_eq!(place.read("tries"), "x\n");
}

#[test]
fn signals_reach_every_rank_and_end_the_job_with_their_exit_code() {
    // Signals to the launcher, or to its process group as on Ctrl-C, reach each rank once.
    for (signal, code, trap, group) in [
        ("TERM", 75, "exit 75", ""),
        ("USR1", 75, "exit 75", ""),
        ("INT", 75, "exit 75", "-"),
        ("INT", 130, "exit 1", ""),
    ] {
        let place = Workplace::new();
        let script =
            format!("trap 'echo asked; {trap}' {signal}; touch ready-$RANK; while :; do sleep 0.1; done");
        let arguments =
            ["launch", "--nproc", "2", "--max-restarts", "3", "--program", "sh", "--", "-c", &script];
        let mut command = place.command(&arguments);
        let child = command.process_group(0).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let are_ready = || ["ready-0", "ready-1"].iter().all(|name| place.path(name).exists());
        wait_until("the ranks do not start", are_ready);
        let target = format!("{group}{}", child.id());
        let kill = Command::new("kill").args([&format!("-{signal}"), "--", &target]).status();
        assert!(kill.unwrap().success());
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(code), "{signal}: {output:?}");
        assert_eq!(sorted(&String::from_utf8(output.stdout).unwrap()), ["[0] asked", "[1] asked"]);
    }
}

#[test]
fn invalid_launches_are_refused_before_anything_starts() {
    let place = Workplace::new();
    place.write_config("c.json", json!({}));
    let launch = |words: &[&str]| place.run(&[&["launch", "--nproc", "2"], words].concat());
    launch(&["--", "train", "c.json", "--speed", "11"]).assert_refused(2, &["after `--`", "--speed"]);
    launch(&["--", "train", "nowhere.json"]).assert_refused(2, &["nowhere.json"]);
    launch(&["--", "launch", "--nproc", "2", "--", "mesh"]).assert_refused(2, &["`launch` cannot start"]);
    let threads = launch(&["--", "train", "c.json", "--backend", "thread"]);
    threads.assert_refused(2, &["runs all ranks in one process", "without `launch`"]);
    let restarts = launch(&["--max-restarts", "1", "--", "train", "c.json", "--backend", "mpi"]);
    restarts.assert_refused(2, &["--max-restarts", "`checkpoint`"]);
    #[cfg(not(any(feature = "mpi", feature = "nccl")))]
    launch(&["--", "train", "c.json"]).assert_refused(2, &["lacks the features `mpi` and `nccl`"]);
    #[cfg(not(feature = "mpi"))]
    launch(&["--", "train", "c.json", "--backend", "mpi"]).assert_refused(2, &["lacks the feature `mpi`"]);
    launch(&["--program", "./nothing", "--", "x"]).assert_refused(1, &["cannot start ./nothing"]);
    launch(&[]).assert_refused(2, &["ARGUMENTS"]);
    assert!(!place.path("out").exists());
}

#[cfg(target_os = "linux")]
#[test]
fn a_killed_launcher_leaves_no_processes() {
    let place = Workplace::new();
    // A child that the rank waits for, and a background child in its own process group.
    let script = "sh -c 'echo $$ > child-'$RANK'; exec sleep 1000' & setsid sleep 1000 & echo $! > apart-$RANK; \
                  echo $$ > rank-$RANK; touch ready-$RANK; wait";
    let arguments = ["launch", "--nproc", "2", "--grace", "1", "--program", "sh", "--", "-c", script];
    let mut child = place.command(&arguments).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let names = ["rank-0", "rank-1", "child-0", "child-1", "apart-0", "apart-1"];
    let has_pid =
        |name: &&str| std::fs::read_to_string(place.path(name)).is_ok_and(|pid| pid.ends_with('\n'));
    wait_until("the ranks do not start", || names.iter().all(&has_pid));
    let processes = names.map(|name| place.read(name));
    assert!(processes.iter().all(|process| runs(process)), "{processes:?}");
    child.kill().unwrap();
    child.wait().unwrap();
    wait_until("processes are left", || !processes.iter().any(|process| runs(process)));
}

#[cfg(target_os = "linux")]
#[test]
fn background_processes_of_a_failed_job_are_killed() {
    let place = Workplace::new();
    let script = "sleep 1000 & echo $! > child; exit 3";
    let outcome = place.run(&["launch", "--nproc", "1", "--program", "sh", "--", "-c", script]);
    outcome.assert_refused(1, &["rank 0 ended with exit code 3"]);
    wait_until("a process is left", || !runs(&place.read("child")));
}

/// An `mpirun` that hangs after its rank is killed.
#[cfg(target_os = "linux")]
#[test]
fn an_mpirun_that_outlives_its_ranks_is_killed() {
    use std::os::unix::fs::PermissionsExt;
    let place = Workplace::new();
    place.write(
        "bin/mpirun",
        "#!/bin/sh\nmkfifo never\nsleep 2 &\nwait\necho mpirun noticed >&2\nread line < never\n",
    );
    std::fs::set_permissions(place.path("bin/mpirun"), std::fs::Permissions::from_mode(0o755)).unwrap();
    let path = format!("{}:{}", place.path("bin").display(), std::env::var("PATH").unwrap());
    let arguments =
        ["launch", "--nproc", "2", "--grace", "1", "--", "bench", "collectives", "--backend", "mpi"];
    let outcome = place.run_with(&arguments, &[("PATH", &path)]);
    let expected =
        ["killing mpirun, which still runs 1 s after its ranks ended", "mpirun was killed by signal 9"];
    outcome.assert_refused(1, &expected);
}

#[test]
fn every_start_of_a_job_has_its_own_secret() {
    let place = Workplace::new();
    let secret = || {
        let outcome = launch(&place, &["--nproc", "2"], "echo $ULYSSES_JOB_SECRET");
        let secrets = outcome.assert_done().stdout.replace("[0] ", "").replace("[1] ", "");
        let secrets: Vec<String> = secrets.lines().map(str::to_owned).collect();
        assert_eq!((secrets.len(), secrets[0].len()), (2, 64));
        assert_eq!(secrets[0], secrets[1]);
        secrets[0].clone()
    };
    assert_ne!(secret(), secret());
}

#[cfg(target_os = "linux")]
#[test]
fn a_launcher_without_threads_fails_and_leaves_no_processes() {
    let place = Workplace::new();
    let arguments =
        ["launch", "--nproc", "1", "--program", "sh", "--", "-c", "echo $$ > rank; exec sleep 1000"];
    let outcome = place.run_with(&arguments, &[NO_THREADS]);
    outcome.assert_refused(1, &["cannot start a thread to read the output of a process"]);
    assert!(!place.path("rank").exists() || !runs(&place.read("rank")));
}

/// A place with an `mpirun` that states this version.
fn with_mpirun(version: &str) -> (Workplace, String) {
    use std::os::unix::fs::PermissionsExt;
    let place = Workplace::new();
    place.write("bin/mpirun", format!("#!/bin/sh\necho '{version}'\n"));
    std::fs::set_permissions(place.path("bin/mpirun"), std::fs::Permissions::from_mode(0o755)).unwrap();
    let path = format!("{}:{}", place.path("bin").display(), std::env::var("PATH").unwrap());
    (place, path)
}

#[test]
fn a_dry_run_prints_the_command_of_the_installed_mpirun() {
    let program = ["--dry-run", "--program", "echo", "--", "a b"];
    for (version, command) in [
        (
            "mpirun (Open MPI) 4.1.4",
            "mpirun -np 5 --tag-output --bind-to none --host n0:2,n1:3 --map-by slot --wdir DIR \
             --mca oob_tcp_keepalive_time 5 --mca oob_tcp_keepalive_intvl 2 --mca oob_tcp_keepalive_probes 3 \
             -x NCCL_DEBUG echo 'a b'",
        ),
        (
            "HYDRA build details:",
            "mpirun -n 5 -prepend-rank -bind-to none -hosts n0:2,n1:3 -wdir DIR -genvlist NCCL_DEBUG echo 'a b'",
        ),
    ] {
        let (place, path) = with_mpirun(version);
        place.write("hosts", "n0 slots=2 # the first\nn1 slots=3\n");
        for hosts in [["--hosts", "n0:2,n1:3"], ["--hostfile", "hosts"]] {
            let mut ulysses = place.command(&[&["launch"], &hosts[..], &program].concat());
            ulysses.env_clear().env("PATH", &path).env("NCCL_DEBUG", "WARN");
            let outcome = place.run_command(ulysses);
            let directory = place.path("bin").parent().unwrap().display().to_string();
            let printed = outcome.assert_done().stdout.replace(&directory, "DIR");
            assert_eq!(printed.trim_end(), command);
        }
    }
}

#[test]
fn malformed_host_files_are_refused_with_their_line() {
    let place = Workplace::new();
    place.write("hosts", "n0 slots=2\nn1 slot=2\n");
    let launch =
        |flags: &[&str]| place.run(&[&["launch"], flags, &["--program", "true", "--", "x"]].concat());
    launch(&["--hostfile", "hosts"]).assert_refused(2, &["hosts:2: `n1 slot=2`: expected `HOST slots=N`"]);
    launch(&["--hostfile", "nowhere"]).assert_refused(2, &["cannot read nowhere"]);
    launch(&["--hosts", "n0:x"]).assert_refused(2, &["--hosts n0:x: slots are `x`"]);
    launch(&["--hosts", "n0", "--nproc", "2"]).assert_refused(2, &["--nproc"]);
    launch(&["--hosts", "n0", "--rdzv-endpoint", "n0"]).assert_refused(2, &["--hosts"]);
    let shows = "--dry-run shows the command of mpirun";
    launch(&["--nproc", "1", "--dry-run"]).assert_refused(2, &[shows]);
    launch(&["--rdzv-endpoint", "n0", "--node-rank", "0", "--dry-run"]).assert_refused(2, &[shows]);
}
