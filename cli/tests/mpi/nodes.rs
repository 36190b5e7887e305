//! `ulysses launch` on hosts that are network namespaces of this machine, connected by a bridge: three hosts with two ranks
//! each. `cli/tests/cli/launch_nodes.rs` has the cases that need no network of their own.

use crate::job::{Job, Running};
use crate::support::cli::Workplace;
use crate::support::processes::{runs, wait_until};
use crate::training::{trained_metrics, wait_for_steps};
use crate::trial;
use libtest_mimic::Trial;
use parking_lot::{Mutex, MutexGuard};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// The trials, if this machine allows network namespaces: that needs root and kernel support.
pub(crate) fn trials() -> Vec<Trial> {
    let is_possible = crate::hosts::has_network_namespaces();
    let trials = [
        trial("launchers_on_three_hosts_start_their_ranks", launchers_on_three_hosts_start_their_ranks),
        trial("a_host_that_is_cut_off_is_lost_and_ends_its_ranks", || {
            a_host_that_is_cut_off_is_lost_and_ends_its_ranks();
        }),
        trial("hosts_of_mpirun_train_and_continue_without_a_lost_one", || {
            hosts_of_mpirun_train_and_continue_without_a_lost_one();
        }),
        trial("hosts_of_mpirun_start_without_one_that_is_lost_already", || {
            hosts_of_mpirun_start_without_one_that_is_lost_already();
        }),
        trial("a_host_whose_processes_are_all_killed_is_lost", a_host_whose_processes_are_all_killed_is_lost),
        trial("training_continues_on_a_host_whose_processes_were_all_killed", || {
            training_continues_on_a_host_whose_processes_were_all_killed();
        }),
        trial("a_short_interruption_loses_no_host", a_short_interruption_loses_no_host),
        trial("a_host_that_loses_node_0_ends_its_ranks", a_host_that_loses_node_0_ends_its_ranks),
    ];
    // Otherwise they are listed as ignored, with the reason in the name of the kind.
    let kind = if is_possible { "" } else { "needs network namespaces" };
    trials.into_iter().map(|trial| trial.with_kind(kind).with_ignored_flag(!is_possible)).collect()
}

/// Hosts with a common network. Their processes end with them.
struct Network {
    name: String,
    hosts: usize,
    place: TempDir,
    /// Two networks of this process would have the same names.
    _only: MutexGuard<'static, ()>,
}

static ONLY: Mutex<()> = Mutex::new(());

const RANKS_PER_HOST: usize = 2;
/// Writes the rank's process, and waits until the test ends it.
const SCRIPT: &str = "hostname > host-$RANK; echo $$ > rank-$RANK-of-$WORLD_SIZE; \
                      until [ -e enough ] || [ $WORLD_SIZE -lt 6 ]; do sleep 0.05; done";

fn ip(arguments: &[&str]) {
    let output = Command::new("ip").args(arguments).output().unwrap();
    assert!(output.status.success(), "ip {arguments:?}: {output:?}");
}

impl Network {
    fn new(hosts: usize) -> Self {
        let name = format!("ulysses-{}", std::process::id());
        let network = Self { name, hosts, place: tempfile::tempdir().unwrap(), _only: ONLY.lock() };
        let switch = network.switch();
        ip(&["netns", "add", &switch]);
        ip(&["-n", &switch, "link", "add", "bridge", "type", "bridge"]);
        ip(&["-n", &switch, "link", "set", "bridge", "up"]);
        for host in 0..hosts {
            let (name, port) = (network.host(host), format!("port{host}"));
            ip(&["netns", "add", &name]);
            let cable = ["link", "add", "cable", "type", "veth", "peer", "name", &port, "netns", &switch];
            ip(&[&["-n", &name], &cable[..]].concat());
            let address = format!("{}/24", network.address(host));
            ip(&["-n", &name, "addr", "add", &address, "dev", "cable"]);
            ip(&["-n", &name, "link", "set", "cable", "up"]);
            ip(&["-n", &name, "link", "set", "lo", "up"]);
            ip(&["-n", &switch, "link", "set", &port, "master", "bridge", "up"]);
        }
        network
    }

    fn switch(&self) -> String {
        format!("{}-switch", self.name)
    }

    fn host(&self, host: usize) -> String {
        format!("{}-n{host}", self.name)
    }

    fn address(&self, host: usize) -> String {
        format!("10.78.{}.{}", std::process::id() % 250, host + 1)
    }

    /// Disconnects a host.
    fn cut(&self, host: usize) {
        ip(&["-n", &self.switch(), "link", "set", &format!("port{host}"), "down"]);
    }

    /// Returns the processes of a host.
    fn processes(&self, host: usize) -> Vec<String> {
        let pids = Command::new("ip").args(["netns", "pids", &self.host(host)]).output().unwrap();
        String::from_utf8(pids.stdout).unwrap().split_whitespace().map(str::to_owned).collect()
    }

    /// Kills all processes of a host at once.
    #[track_caller]
    fn kill(&self, host: usize) {
        let processes = self.processes(host);
        assert!(!processes.is_empty());
        // Some may have ended with others.
        let _ = Command::new("kill").arg("-9").args(processes).output().unwrap();
        wait_until("a process of the host is left", || self.processes(host).is_empty());
    }

    fn connect(&self, host: usize) {
        ip(&["-n", &self.switch(), "link", "set", &format!("port{host}"), "up"]);
    }

    fn path(&self, name: &str) -> PathBuf {
        self.place.path().join(name)
    }

    /// Starts the launcher of a host.
    fn launch(&self, host: usize, flags: &[&str]) -> Running {
        let (own, name) = (self.host(host), format!("n{host}"));
        let within =
            ["netns", "exec", &own, "unshare", "--uts", "sh", "-c", "hostname \"$0\" && exec \"$@\"", &name];
        let (hosts, node, ranks) = (self.hosts.to_string(), host.to_string(), RANKS_PER_HOST.to_string());
        let endpoint = format!("{}:29400", self.address(0));
        let meeting = ["launch", "--nnodes", &hosts, "--node-rank", &node, "--rdzv-endpoint", &endpoint];
        let ranks = ["--nproc", &ranks, "--grace", "1", "--node-timeout", "5", "--program", "sh"];
        let words =
            [&within[..], &[env!("CARGO_BIN_EXE_ulysses")], &meeting, &ranks, flags, &["--", "-c", SCRIPT]];
        let job = Job::by("ip", &words.concat()).within(self.place.path());
        job.with("ULYSSES_JOB_SECRET", Path::new("0123456789abcdef")).start()
    }

    fn launch_all(&self, flags: &[&str]) -> Vec<Running> {
        (0..self.hosts).map(|host| self.launch(host, flags)).collect()
    }

    #[track_caller]
    fn wait_for_ranks(&self, world_size: usize) {
        let has_started = |rank| {
            let file = self.path(&format!("rank-{rank}-of-{world_size}"));
            std::fs::read_to_string(file).is_ok_and(|text| text.ends_with('\n'))
        };
        wait_until(&format!("not all of {world_size} ranks start"), || (0..world_size).all(&has_started));
    }

    /// Returns whether a rank of the first start runs.
    fn runs(&self, rank: usize) -> bool {
        runs(&std::fs::read_to_string(self.path(&format!("rank-{rank}-of-6"))).unwrap())
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        for host in (0..self.hosts).map(|host| self.host(host)).chain([self.switch()]) {
            // Errors mean that there is none.
            let pids = Command::new("ip").args(["netns", "pids", &host]).output().unwrap();
            for pid in String::from_utf8_lossy(&pids.stdout).split_whitespace() {
                let _ = Command::new("kill").args(["-9", pid]).output();
            }
            let _ = Command::new("ip").args(["netns", "del", &host]).output();
        }
    }
}

/// Runs a command in a network namespace, with a host name.
fn within<'a>(namespace: &'a str, host_name: &'a str) -> [&'a str; 9] {
    let named = "hostname \"$0\" && exec \"$@\"";
    ["netns", "exec", namespace, "unshare", "--uts", "sh", "-c", named, host_name]
}

fn launchers_on_three_hosts_start_their_ranks() {
    let network = Network::new(3);
    let running = network.launch_all(&[]);
    network.wait_for_ranks(6);
    std::fs::write(network.path("enough"), "").unwrap();
    for launcher in running {
        launcher.wait().assert_done();
    }
    for rank in 0..6 {
        let host = std::fs::read_to_string(network.path(&format!("host-{rank}"))).unwrap();
        assert_eq!(host, format!("n{}\n", rank / RANKS_PER_HOST));
    }
}

fn a_host_that_is_cut_off_is_lost_and_ends_its_ranks() {
    let network = Network::new(3);
    let running = network.launch_all(&["--max-restarts", "1", "--min-nodes", "2"]);
    network.wait_for_ranks(6);
    network.cut(2);
    let outcomes: Vec<_> = running.into_iter().map(Running::wait).collect();
    let named = "node 2 (n2, ranks 4 to 5) sent no heartbeat; restart 1 of 1 on 2 node(s)";
    for outcome in &outcomes[..2] {
        assert!(outcome.assert_done().stderr.contains(named), "{outcome:?}");
    }
    outcomes[2].assert_refused(1, &["node 2 lost the launcher of node 0", "no heartbeat from it in time"]);
    network.wait_for_ranks(4);
    assert!((0..6).all(|rank| !network.runs(rank)), "a rank of the first start is left");
}

/// Launcher, watchdog and ranks: nobody on the host can say anything.
fn a_host_whose_processes_are_all_killed_is_lost() {
    let network = Network::new(3);
    let running = network.launch_all(&["--max-restarts", "1", "--min-nodes", "2"]);
    network.wait_for_ranks(6);
    network.kill(1);
    let killed = Instant::now();
    let outcomes: Vec<_> = running.into_iter().map(Running::wait).collect();
    assert!(killed.elapsed() < Duration::from_secs(60), "took {:?}", killed.elapsed());
    let named = "node 1 (n1, ranks 2 to 3) left the job: its launcher ended; restart 1 of 1 on 2 node(s)";
    for node in [0, 2] {
        assert!(outcomes[node].assert_done().stderr.contains(named), "{outcomes:?}");
    }
    network.wait_for_ranks(4);
    wait_until("a process is left", || (0..3).all(|host| network.processes(host).is_empty()));
}

fn a_host_that_loses_node_0_ends_its_ranks() {
    let network = Network::new(3);
    let running = network.launch_all(&["--max-restarts", "1", "--min-nodes", "1"]);
    network.wait_for_ranks(6);
    network.cut(0);
    let outcomes: Vec<_> = running.into_iter().map(Running::wait).collect();
    for node in [1, 2] {
        let lost = format!("node {node} lost the launcher of node 0");
        outcomes[node].assert_refused(1, &[&lost]);
    }
    // Node 0 sees two lost nodes, and continues alone.
    assert!(outcomes[0].stderr.contains("sent no heartbeat; restart 1 of 1 on 1 node(s)"), "{outcomes:?}");
    assert!((0..6).all(|rank| !network.runs(rank)), "a rank of the first start is left");
}

fn a_short_interruption_loses_no_host() {
    let network = Network::new(3);
    let running = network.launch_all(&[]);
    network.wait_for_ranks(6);
    network.cut(1);
    std::thread::sleep(Duration::from_secs(2));
    network.connect(1);
    std::thread::sleep(Duration::from_secs(7));
    assert!((0..6).all(|rank| network.runs(rank)));
    std::fs::write(network.path("enough"), "").unwrap();
    for launcher in running {
        launcher.wait().assert_done();
    }
}

/// Training with the mesh 3x2 on three hosts, by `launch --hosts`.
struct HostsJob {
    network: Network,
    place: Workplace,
    running: Running,
}

const STEPS: usize = 30;

impl HostsJob {
    /// Starts it and waits until it has trained some steps.
    fn start() -> Self {
        let job = Self::on(Network::new(3));
        wait_for_steps(&job.running, &job.place.path("out/metrics.jsonl"), 6);
        job
    }

    /// Starts it. The directory `whole` has the same training without MPI.
    fn on(network: Network) -> Self {
        let place = Workplace::new();
        let config = json!({
            "train_batch_size": 6, "train_micro_batch_size_per_gpu": 1, "checkpoint": { "interval": 4 },
            "ulysses": { "steps": STEPS, "seq_len": 16, "comm": { "timeout_seconds": 5 } },
        });
        place.write_config("config.json", config);
        place.run(&["train", "config.json", "--mesh", "3x2", "--output", "whole"]).assert_done();
        let first = network.host(0);
        let hosts: Vec<String> =
            (0..3).map(|host| format!("{}:{RANKS_PER_HOST}", network.host(host))).collect();
        let hosts = hosts.join(",");
        let launch =
            ["launch", "--hosts", &hosts, "--max-restarts", "1", "--min-nodes", "2", "--grace", "2", "--"];
        let train = ["train", "config.json", "--mesh", "3x2", "--backend", "mpi"];
        let words = [&within(&first, &first)[..], &[env!("CARGO_BIN_EXE_ulysses")], &launch, &train].concat();
        let agent = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/mpi/hosts/agent"));
        let subnet = format!("{}/24", network.address(0));
        let mut job = Job::by("ip", &words).within(&place.path(".")).with("OMPI_MCA_plm_rsh_agent", agent);
        for (parameter, value) in [
            ("plm_rsh_no_tree_spawn", "1"),
            ("orte_keep_fqdn_hostnames", "1"),
            ("btl", "tcp,self"),
            ("pml", "ob1"),
            ("btl_tcp_if_include", &subnet),
            ("oob_tcp_if_include", &subnet),
        ] {
            job = job.with(&format!("OMPI_MCA_{parameter}"), Path::new(value));
        }
        let running = job.start();
        Self { network, place, running }
    }
}

/// The third host is cut off: the job continues on two, with the mesh 2x2 instead of 3x2 and the same data.
fn hosts_of_mpirun_train_and_continue_without_a_lost_one() {
    let HostsJob { network, place, running } = HostsJob::start();
    network.cut(2);
    let outcome = running.wait();
    let named = format!("cannot reach host {}; ", network.host(2));
    let restarted =
        |line: &str| line.contains(&named) && line.ends_with("restart 1 of 1 on 2 host(s) with mesh 2x2");
    assert!(outcome.assert_done().stderr.lines().any(restarted), "{outcome:?}");
    assert!(outcome.stderr.contains("[0] resumed from "), "{outcome:?}");
    let (restarts, lost) = (place.restarts("out/metrics.jsonl"), json!([network.host(2)]));
    assert_eq!(restarts.len(), 1, "{restarts:?}");
    let [before, after] = [["dp_size_before", "sp_size_before"], ["dp_size", "sp_size"]]
        .map(|keys| keys.map(|key| restarts[0][key].as_u64().unwrap()));
    assert_eq!((before, after, &restarts[0]["lost_hosts"]), ([3, 2], [2, 2], &lost), "{restarts:?}");
    let (whole, continued) = (place.metrics("whole/metrics.jsonl"), place.metrics("out/metrics.jsonl"));
    assert_eq!(continued.len(), STEPS);
    let sizes = |step: &Value| (step["dp_size"].as_u64().unwrap(), step["sp_size"].as_u64().unwrap());
    assert_eq!((sizes(&continued[0]), sizes(&continued[STEPS - 1])), ((3, 2), (2, 2)));
    for (one, other) in whole.iter().zip(&continued) {
        assert_eq!((&one["step"], &one["tokens"]), (&other["step"], &other["tokens"]));
        let [one, other] = [one, other].map(|step| step["loss"].as_f64().unwrap());
        // Another mesh adds in another order.
        assert!((one - other).abs() < 1e-3 * one.abs(), "{one} {other}");
    }
}

fn hosts_of_mpirun_start_without_one_that_is_lost_already() {
    let network = Network::new(3);
    network.cut(2);
    let HostsJob { network, place, running } = HostsJob::on(network);
    let outcome = running.wait();
    let started = format!("cannot reach host {}; the job starts on 2 host(s) with mesh 2x2", network.host(2));
    assert!(outcome.assert_done().stderr.contains(&started), "{outcome:?}");
    let [whole, smaller] = ["whole", "out"].map(|output| place.metrics(&format!("{output}/metrics.jsonl")));
    assert_eq!(
        (smaller.len(), &smaller[0]["dp_size"], &smaller[0]["sp_size"]),
        (STEPS, &json!(2), &json!(2))
    );
    let tokens = |steps: &[Value]| steps.iter().map(|step| step["tokens"].clone()).collect::<Vec<_>>();
    assert_eq!(tokens(&whole), tokens(&smaller), "the same batches");
}

/// The host still answers, so the job restarts on all three.
fn training_continues_on_a_host_whose_processes_were_all_killed() {
    let HostsJob { network, place, running } = HostsJob::start();
    network.kill(2);
    let killed = Instant::now();
    let outcome = running.wait();
    outcome.assert_done();
    assert!(killed.elapsed() < Duration::from_secs(120), "took {:?}", killed.elapsed());
    let restarted = |line: &str| line.starts_with("launch: ") && line.ends_with("restart 1 of 1");
    assert!(outcome.stderr.lines().any(restarted), "{outcome:?}");
    let [whole, continued] =
        ["whole", "out"].map(|output| trained_metrics(&place, &format!("{output}/metrics.jsonl")));
    assert_eq!(continued, whole, "the same as without the kill");
    wait_until("a process is left", || (0..3).all(|host| network.processes(host).is_empty()));
}
