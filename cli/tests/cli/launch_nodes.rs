//! `ulysses launch` on several nodes, which are launchers on this machine, with shells as ranks. `cli/tests/mpi/nodes.rs`
//! has nodes with their own networks.

use crate::support::cli::{Outcome, Workplace};
use crate::support::processes::{runs, wait_until};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::time::Duration;

const SECRET: (&str, &str) = ("ULYSSES_JOB_SECRET", "0123456789abcdef");

/// A job on several nodes.
struct Nodes {
    place: Workplace,
    endpoint: String,
    num_nodes: usize,
}

impl Nodes {
    fn new(num_nodes: usize) -> Self {
        let free = TcpListener::bind("127.0.0.1:0").unwrap();
        Self { place: Workplace::new(), endpoint: free.local_addr().unwrap().to_string(), num_nodes }
    }

    /// Runs the launcher of a node, with two ranks unless the flags state another number.
    fn launch(&self, node: usize, flags: &[&str], secret: (&str, &str), script: &str) -> Outcome {
        let (num_nodes, node) = (self.num_nodes.to_string(), node.to_string());
        let meeting = ["--nnodes", &num_nodes, "--node-rank", &node, "--rdzv-endpoint", &self.endpoint];
        let has_number = flags.contains(&"--nproc-per-node");
        let program = ["--grace", "1", "--program", "sh", "--nproc", "2"];
        let program = &program[..if has_number { 4 } else { 6 }];
        let words = [&["launch"], &meeting[..], program, flags, &["--", "-c", script]].concat();
        self.place.run_with(&words, &[secret])
    }

    /// Runs all launchers and meanwhile something else. Returns their outcomes in the order of the nodes.
    fn run_while(&self, flags: &[&str], script: &str, meanwhile: impl FnOnce()) -> Vec<Outcome> {
        std::thread::scope(|scope| {
            let launchers: Vec<_> = (0..self.num_nodes)
                .map(|node| scope.spawn(move || self.launch(node, flags, SECRET, script)))
                .collect();
            meanwhile();
            launchers.into_iter().map(|launcher| launcher.join().unwrap()).collect()
        })
    }

    fn run(&self, flags: &[&str], script: &str) -> Vec<Outcome> {
        self.run_while(flags, script, || {})
    }

    #[track_caller]
    fn wait_for(&self, names: &[&str]) {
        let has_text = |name: &&str| {
            std::fs::read_to_string(self.place.path(name)).is_ok_and(|text| text.ends_with('\n'))
        };
        wait_until(&format!("{names:?} are not written"), || names.iter().all(has_text));
    }

    fn signal(&self, signal: &str, file: &str) {
        let process = self.place.read(file);
        assert!(Command::new("kill").args([signal, process.trim()]).status().unwrap().success());
    }
}

#[test]
fn every_rank_gets_torchruns_variables_and_a_log() {
    let nodes = Nodes::new(3);
    let script = "echo $RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE, node $GROUP_RANK of $GROUP_WORLD_SIZE, \
                  start $TORCHELASTIC_RESTART_COUNT; echo $MASTER_ADDR:$MASTER_PORT:$ULYSSES_MASTER_PORT > at-$RANK";
    for (node, outcome) in nodes.run(&["--log-dir", "logs"], script).iter().enumerate() {
        let mut lines: Vec<&str> = outcome.assert_done().stdout.lines().collect();
        lines.sort_unstable();
        let line = |local| {
            let rank = 2 * node + local;
            format!("[{rank}] {rank} of 6, {local} of 2, node {node} of 3, start 0")
        };
        assert_eq!(lines, [line(0), line(1)]);
    }
    assert!(nodes.place.read("at-0").starts_with("127.0.0.1:"));
    for rank in 0..6 {
        assert_eq!(nodes.place.read(&format!("at-{rank}")), nodes.place.read("at-0"));
        let log = nodes.place.read(&format!("logs/rank_{rank}.log"));
        assert!(log.starts_with(&format!("{rank} of 6")), "{log}");
    }
}

#[test]
fn the_first_failed_rank_is_named_with_its_host_on_all_nodes() {
    let script = "if [ $RANK = 3 ]; then sleep 0.3; echo out of luck >&2; exit 3; fi; echo $$ > rank-$RANK; sleep 1000";
    let nodes = Nodes::new(3);
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
    let named = format!("error: rank 3 on {} ended with exit code 3; last line: out of luck", host.trim());
    for outcome in nodes.run(&[], script) {
        outcome.assert_refused(1, &[&named]);
    }
    for rank in [0, 1, 2, 4, 5] {
        assert!(!runs(&nodes.place.read(&format!("rank-{rank}"))), "rank {rank} is left");
    }
}

#[test]
fn a_failure_restarts_the_ranks_of_all_nodes() {
    // Rank 1 fails at its first start only.
    let script =
        "echo $TORCHELASTIC_RESTART_COUNT >> starts-$RANK; [ $RANK != 1 ] || [ $(wc -l < starts-1) = 2 ]";
    let nodes = Nodes::new(2);
    let outcomes = nodes.run(&["--max-restarts", "2"], script);
    for outcome in &outcomes {
        let restarted = "ended with exit code 1; restart 1 of 2";
        assert!(outcome.assert_done().stderr.contains(restarted), "{outcome:?}");
    }
    assert_eq!(nodes.place.read("starts-1"), "0\n1\n");
    assert!(nodes.place.read("starts-3").ends_with("1\n"));
    let outcomes = Nodes::new(2).run(&["--max-restarts", "1"], "exit 4");
    outcomes[1].assert_refused(1, &["ended with exit code 4, after 1 restart(s)"]);
    let outcomes = Nodes::new(2).run(&["--max-restarts", "5"], "exit 2");
    outcomes[0].assert_refused(2, &["ended with exit code 2"]);
    outcomes[1].assert_refused(2, &["ended with exit code 2"]);
}

#[test]
fn nodes_with_other_arguments_or_another_secret_are_refused_by_name() {
    let nodes = Nodes::new(2);
    std::thread::scope(|scope| {
        let first = scope.spawn(|| nodes.launch(0, &[], SECRET, "echo x > started"));
        let guess = nodes.launch(1, &[], ("ULYSSES_JOB_SECRET", "another secret 1"), "echo x > started");
        guess.assert_refused(1, &["node 0 at 127.0.0.1", "set the same ULYSSES_JOB_SECRET for all nodes"]);
        let second = nodes.launch(1, &[], SECRET, "echo y > started");
        second.assert_refused(2, &["node 1 (", "have different arguments"]);
        first.join().unwrap().assert_refused(2, &["node 1 (", "have different arguments"]);
    });
    assert!(!nodes.place.path("started").exists());
}

#[test]
fn a_missing_node_and_a_node_that_comes_twice_or_late_are_named() {
    let nodes = Nodes::new(2);
    let missing = nodes.launch(0, &["--join-timeout", "1"], SECRET, "true");
    missing.assert_refused(1, &["nodes {1} did not join the store at 127.0.0.1"]);
    // Node 1 comes late, and then once more.
    let script = "echo ready > ready-$RANK; until [ -e enough ]; do sleep 0.05; done";
    std::thread::scope(|scope| {
        let first = scope.spawn(|| nodes.launch(0, &[], SECRET, script));
        std::thread::sleep(Duration::from_secs(2));
        let second = scope.spawn(|| nodes.launch(1, &[], SECRET, script));
        nodes.wait_for(&["ready-0", "ready-3"]);
        let twice = nodes.launch(1, &[], SECRET, script);
        twice.assert_refused(
            1,
            &["the job has already started: node 1 has joined it before, or comes too late"],
        );
        nodes.place.write("enough", "");
        first.join().unwrap().assert_done();
        second.join().unwrap().assert_done();
    });
}

/// Every rank writes its launcher's process and its own.
const IDS: &str =
    "echo $PPID > launcher-$GROUP_RANK-of-$GROUP_WORLD_SIZE; echo $$ > rank-$RANK-of-$WORLD_SIZE";

#[test]
fn a_killed_launcher_ends_the_job_and_leaves_no_process() {
    let nodes = Nodes::new(3);
    let outcomes = nodes.run_while(&["--max-restarts", "3"], &format!("{IDS}; sleep 1000"), || {
        nodes.wait_for(
            &[0, 1, 2, 3, 4, 5].map(|rank| format!("rank-{rank}-of-6")).each_ref().map(String::as_str),
        );
        nodes.signal("-9", "launcher-1-of-3");
    });
    for node in [0, 2] {
        let expected = [
            "node 1 (",
            "ranks 2 to 3) left the job: its launcher ended; 2 node(s) are left, --min-nodes is 3",
        ];
        outcomes[node].assert_refused(1, &expected);
    }
    let is_left = || (0..6).any(|rank| runs(&nodes.place.read(&format!("rank-{rank}-of-6"))));
    wait_until("a rank is left", || !is_left());
}

#[test]
fn with_min_nodes_the_job_continues_on_the_nodes_that_are_left() {
    let nodes = Nodes::new(3);
    let script = format!("{IDS}; [ $WORLD_SIZE = 4 ] || sleep 1000");
    let outcomes = nodes.run_while(&["--max-restarts", "1", "--min-nodes", "2"], &script, || {
        nodes.wait_for(&["rank-0-of-6", "rank-3-of-6", "rank-5-of-6"]);
        nodes.signal("-9", "launcher-1-of-3");
    });
    for node in [0, 2] {
        let restarted = "its launcher ended; restart 1 of 1 on 2 node(s)";
        assert!(outcomes[node].assert_done().stderr.contains(restarted), "{:?}", outcomes[node]);
    }
    nodes.wait_for(&["rank-0-of-4", "rank-1-of-4", "rank-2-of-4", "rank-3-of-4", "launcher-1-of-2"]);
}

#[test]
fn with_min_nodes_a_job_starts_without_a_node_that_does_not_come() {
    let nodes = Nodes::new(3);
    let flags = |seconds| ["--max-restarts", "0", "--min-nodes", "2", "--join-timeout", seconds];
    let script = "echo $RANK of $WORLD_SIZE, node $GROUP_RANK of $GROUP_WORLD_SIZE; echo ready > ready-$RANK; \
                  until [ -e enough ]; do sleep 0.05; done";
    let launch = |node| nodes.launch(node, &flags("8"), SECRET, script);
    std::thread::scope(|scope| {
        let [first, third] = [0, 2].map(|node| scope.spawn(move || launch(node)));
        nodes.wait_for(&["ready-0", "ready-1", "ready-2", "ready-3"]);
        launch(1).assert_refused(
            1,
            &["the job has already started: node 1 has joined it before, or comes too late"],
        );
        nodes.place.write("enough", "");
        let [first, third] = [first, third].map(|launcher| launcher.join().unwrap());
        let told = "launch: nodes [1] did not join in time; the job starts on 2 node(s)";
        assert!(first.assert_done().stderr.contains(told), "{first:?}");
        assert!(third.assert_done().stdout.contains("[3] 3 of 4, node 1 of 2"), "{third:?}");
    });
    let alone = Nodes::new(3).launch(0, &flags("1"), SECRET, "true");
    alone.assert_refused(1, &["nodes {1, 2} did not join the store"]);
}

#[test]
fn a_stopped_launcher_is_lost_after_the_timeout_and_ends_its_ranks_when_it_continues() {
    let nodes = Nodes::new(2);
    let flags = ["--node-timeout", "4"];
    let outcomes = nodes.run_while(&flags, &format!("{IDS}; sleep 1000"), || {
        nodes.wait_for(&["rank-0-of-4", "rank-1-of-4", "rank-2-of-4", "rank-3-of-4"]);
        // Shorter than the timeout: nothing happens.
        nodes.signal("-STOP", "launcher-1-of-2");
        std::thread::sleep(Duration::from_secs(1));
        nodes.signal("-CONT", "launcher-1-of-2");
        std::thread::sleep(Duration::from_secs(2));
        assert!(runs(&nodes.place.read("rank-0-of-4")) && runs(&nodes.place.read("rank-3-of-4")));
        nodes.signal("-STOP", "launcher-1-of-2");
        wait_until("rank 0 is left", || !runs(&nodes.place.read("rank-0-of-4")));
        nodes.signal("-CONT", "launcher-1-of-2");
    });
    outcomes[0].assert_refused(1, &["node 1 (", "sent no heartbeat"]);
    outcomes[1].assert_refused(1, &["node 1 lost the launcher of node 0"]);
    assert!(!runs(&nodes.place.read("rank-3-of-4")));
}

#[test]
fn garbage_floods_and_half_open_connections_do_not_disturb_the_launchers() {
    let nodes = Nodes::new(2);
    let script = "echo ready > ready-$RANK; until [ -e enough ]; do sleep 0.05; done";
    let attack = |silent: &mut Vec<TcpStream>| {
        for index in 0..300 {
            let Ok(mut stream) = TcpStream::connect(&nodes.endpoint) else { continue };
            // Closed by the other side, perhaps before everything was sent.
            let _ = match index % 3 {
                0 => stream.write_all(b"GET / HTTP/1.1\r\n\r\n"),
                1 => stream.write_all(&[0xff; 4000]),
                _ => Ok(()),
            };
            silent.push(stream);
        }
    };
    std::thread::scope(|scope| {
        let first = scope.spawn(|| nodes.launch(0, &[], SECRET, script));
        wait_until("node 0 does not listen", || TcpStream::connect(&nodes.endpoint).is_ok());
        let mut connections = Vec::new();
        attack(&mut connections);
        let second = scope.spawn(|| nodes.launch(1, &[], SECRET, script));
        nodes.wait_for(&["ready-0", "ready-1", "ready-2", "ready-3"]);
        attack(&mut connections);
        nodes.place.write("enough", "");
        first.join().unwrap().assert_done();
        second.join().unwrap().assert_done();
        for stream in &mut connections {
            assert!(!matches!(stream.read(&mut [0]), Ok(1..)), "no data is sent to strangers");
        }
    });
}

#[test]
fn a_signal_to_one_launcher_ends_the_job_with_its_exit_code() {
    let nodes = Nodes::new(2);
    // Ranks agree on a stop, as those of `train` do.
    let script = format!("trap 'touch stop' TERM; {IDS}; until [ -e stop ]; do sleep 0.05; done; exit 75");
    let outcomes = nodes.run_while(&["--max-restarts", "3"], &script, || {
        nodes.wait_for(&["rank-0-of-4", "rank-1-of-4", "rank-2-of-4", "rank-3-of-4"]);
        nodes.signal("-TERM", "launcher-1-of-2");
    });
    assert_eq!([outcomes[0].code, outcomes[1].code], [Some(75), Some(75)], "{outcomes:?}");
}

#[test]
fn invalid_meetings_are_refused_before_anything_starts() {
    let place = Workplace::new();
    let launch = |flags: &[&str]| {
        place.run(&[&["launch", "--program", "sh"], flags, &["--", "-c", "touch started"]].concat())
    };
    let at = ["--rdzv-endpoint", "127.0.0.1:1", "--nproc", "1"];
    launch(&[&at[..], &["--nnodes", "2"]].concat()).assert_refused(2, &["--nnodes 2 needs --node-rank"]);
    let outside = launch(&[&at[..], &["--nnodes", "2", "--node-rank", "2"]].concat());
    outside.assert_refused(2, &["--node-rank 2 must be less than --nnodes 2"]);
    let few = launch(&[&at[..], &["--max-restarts", "1", "--min-nodes", "3"]].concat());
    few.assert_refused(2, &["--min-nodes 3: the job has 1 machine(s)"]);
    launch(&["--rdzv-endpoint", "n0:x", "--nproc", "1"]).assert_refused(2, &["expected HOST:PORT"]);
    launch(&["--nproc", "0"]).assert_refused(2, &["expected `auto` or a number from 1 to 1024"]);
    launch(&["--nnodes", "2", "--nproc", "1"]).assert_refused(2, &["--rdzv-endpoint"]);
    let short = place.run_with(
        &[&["launch", "--program", "sh"], &at[..], &["--", "-c", "touch started"]].concat(),
        &[("ULYSSES_JOB_SECRET", "hunter2")],
    );
    short.assert_refused(1, &["ULYSSES_JOB_SECRET has 7 bytes"]);
    assert!(!place.path("started").exists());
}

#[test]
fn sixty_four_ranks_start_on_one_machine() {
    let count = |outcome: &Outcome| outcome.assert_done().stdout.lines().count();
    let nodes = Nodes::new(4);
    let outcomes = nodes.run(&["--nproc-per-node", "16"], "echo $RANK of $WORLD_SIZE");
    assert_eq!(outcomes.iter().map(count).collect::<Vec<_>>(), [16; 4]);
    assert!(outcomes[3].stdout.contains("[63] 63 of 64"), "{outcomes:?}");
    let alone =
        Workplace::new().run(&["launch", "--nproc", "64", "--program", "sh", "--", "-c", "echo $RANK"]);
    assert_eq!(count(&alone), 64);
}
