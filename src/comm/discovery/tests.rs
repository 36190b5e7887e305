use super::slurm::{first_host, tasks_on_node};
use super::*;

type Variables<'a> = &'a [(&'a str, &'a str)];

const TORCHRUN: Variables<'_> = &[
    ("RANK", "5"),
    ("WORLD_SIZE", "8"),
    ("LOCAL_RANK", "1"),
    ("LOCAL_WORLD_SIZE", "4"),
    ("MASTER_ADDR", "n0"),
    ("MASTER_PORT", "29500"),
];
const OPEN_MPI: Variables<'_> = &[
    ("OMPI_COMM_WORLD_RANK", "5"),
    ("OMPI_COMM_WORLD_SIZE", "8"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "4"),
];
const PMI: Variables<'_> =
    &[("PMI_RANK", "5"), ("PMI_SIZE", "8"), ("MPI_LOCALRANKID", "1"), ("MPI_LOCALNRANKS", "4")];
const SLURM: Variables<'_> = &[
    ("SLURM_PROCID", "5"),
    ("SLURM_NTASKS", "8"),
    ("SLURM_LOCALID", "1"),
    ("SLURM_NODEID", "1"),
    ("SLURM_STEP_NODELIST", "n[0-1]"),
    ("SLURM_STEP_NUM_TASKS", "8"),
    ("SLURM_STEP_TASKS_PER_NODE", "4(x2)"),
];
/// `srun` has started one process on each of two nodes.
const SLURM_AGENTS: Variables<'_> = &[
    ("SLURM_PROCID", "1"),
    ("SLURM_LOCALID", "0"),
    ("SLURM_NODEID", "1"),
    ("SLURM_STEP_NODELIST", "n[0-1]"),
    ("SLURM_STEP_NUM_TASKS", "2"),
    ("SLURM_STEP_TASKS_PER_NODE", "1(x2)"),
];

fn discover(flags: ProcessFlags, variables: &[Variables<'_>]) -> Result<ProcessInfo, DiscoveryError> {
    let all: Vec<_> = variables.concat();
    ProcessInfo::discover(&flags, |name| {
        all.iter().find(|(set, _)| *set == name).map(|(_, value)| (*value).to_owned())
    })
}

fn of(variables: &[Variables<'_>]) -> Result<ProcessInfo, DiscoveryError> {
    discover(ProcessFlags::default(), variables)
}

#[test]
fn the_variables_of_every_launcher_are_read() {
    for (variables, launcher) in [
        (TORCHRUN, Launcher::Torchrun),
        (OPEN_MPI, Launcher::OpenMpi),
        (PMI, Launcher::Pmi),
        (SLURM, Launcher::Slurm),
    ] {
        let world =
            ProcessInfo { rank: 5, world_size: 8, local_rank: Some(1), local_world_size: Some(4), launcher };
        assert_eq!(of(&[variables]), Ok(world));
    }
    assert_eq!(of(&[]), Ok(ProcessInfo::alone()));
}

#[test]
fn agreeing_sources_give_the_innermost_launcher() {
    let world = of(&[SLURM, PMI, TORCHRUN, OPEN_MPI]).unwrap();
    assert_eq!((world.rank, world.launcher), (5, Launcher::Torchrun));
    assert_eq!(of(&[SLURM, PMI]).unwrap().launcher, Launcher::Pmi);
}

#[test]
fn sources_that_disagree_are_both_shown() {
    for (other, shown) in [
        (
            &[("OMPI_COMM_WORLD_RANK", "4"), ("OMPI_COMM_WORLD_SIZE", "8")],
            "OMPI_COMM_WORLD_RANK=4 (Open MPI)",
        ),
        (
            &[("OMPI_COMM_WORLD_RANK", "5"), ("OMPI_COMM_WORLD_SIZE", "6")],
            "OMPI_COMM_WORLD_SIZE=6 (Open MPI)",
        ),
        (&[("PMI_RANK", "7"), ("PMI_SIZE", "8")], "PMI_RANK=7 (PMI)"),
    ] {
        let message = of(&[TORCHRUN, other]).unwrap_err().to_string();
        assert!(message.contains(shown) && message.contains("(torchrun)"), "{message}");
    }
    let local = [("PMI_RANK", "5"), ("PMI_SIZE", "8"), ("MPI_LOCALRANKID", "2")];
    let error = of(&[OPEN_MPI, &local]).unwrap_err();
    assert!(matches!(error, DiscoveryError::Disagreement { what: "local rank", .. }), "{error}");
}

#[test]
fn the_agents_of_a_launcher_are_not_the_ranks() {
    for inner in [TORCHRUN, OPEN_MPI, PMI] {
        let world = of(&[SLURM_AGENTS, inner]).unwrap();
        assert_eq!((world.rank, world.world_size, world.local_rank), (5, 8, Some(1)));
    }
    assert_eq!(of(&[SLURM_AGENTS]).unwrap().world_size, 2, "without an inner launcher, they are the job");
    let two_on_a_node = [&SLURM_AGENTS[..5], &[("SLURM_STEP_TASKS_PER_NODE", "2")]].concat();
    let two_on_a_node: Vec<_> = two_on_a_node
        .iter()
        .map(|&(name, value)| (name, if name == "SLURM_NODEID" { "0" } else { value }))
        .collect();
    let error = of(&[&two_on_a_node, TORCHRUN]).unwrap_err();
    assert!(matches!(error, DiscoveryError::Disagreement { what: "world size", .. }), "{error}");
}

#[test]
fn a_batch_script_is_not_a_task_of_its_job() {
    let script =
        [("SLURM_PROCID", "0"), ("SLURM_NTASKS", "8"), ("SLURM_LOCALID", "0"), ("SLURM_JOB_ID", "7")];
    assert_eq!(of(&[&script]), Ok(ProcessInfo::alone()));
}

#[test]
fn flags_fill_in_missing_values_and_must_not_contradict() {
    let flags = ProcessFlags { rank: Some(1), world_size: Some(2), local_rank: Some(0) };
    let world = discover(flags, &[]).unwrap();
    assert_eq!((world.rank, world.world_size, world.local_rank), (1, 2, Some(0)));
    assert_eq!(world.launcher, Launcher::Flags);
    let local = ProcessFlags { local_rank: Some(3), ..ProcessFlags::default() };
    let world = discover(local, &[&TORCHRUN[..2]]).unwrap();
    assert_eq!((world.rank, world.local_rank, world.launcher), (5, Some(3), Launcher::Torchrun));
    let message = discover(flags, &[TORCHRUN]).unwrap_err().to_string();
    assert!(message.contains("--world-size=2 (command line) and WORLD_SIZE=8 (torchrun)"), "{message}");
    let half = ProcessFlags { rank: Some(1), ..ProcessFlags::default() };
    assert!(discover(half, &[]).unwrap_err().to_string().starts_with("--world-size is not set"));
}

#[test]
fn missing_and_invalid_numbers_are_named() {
    let refuse = |variables: Variables<'_>, expected: &str| {
        let message = of(&[variables]).unwrap_err().to_string();
        assert!(message.contains(expected), "{message}");
    };
    refuse(&[("RANK", "1")], "WORLD_SIZE is not set, but RANK=1 is; torchrun sets both");
    refuse(&[("OMPI_COMM_WORLD_SIZE", "4")], "OMPI_COMM_WORLD_RANK is not set");
    refuse(&[("RANK", "-1"), ("WORLD_SIZE", "4")], "RANK is `-1`, expected a non-negative integer");
    refuse(&[("RANK", "4"), ("WORLD_SIZE", "4")], "RANK is 4, must be less than WORLD_SIZE (4)");
    let local = [("RANK", "0"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "2"), ("LOCAL_WORLD_SIZE", "2")];
    refuse(&local, "LOCAL_RANK is 2, must be less than LOCAL_WORLD_SIZE (2)");
}

#[test]
fn the_hosts_of_all_ranks_can_be_stated() {
    let stated = |text: Option<&str>, ranks| stated_hosts(ranks, |_| text.map(str::to_owned));
    assert_eq!(stated(None, Some(2)), Ok(None));
    assert_eq!(stated(Some("a, b"), Some(2)), Ok(Some(vec!["a".to_owned(), "b".to_owned()])));
    assert_eq!(stated(Some("a,b"), Some(3)), Err(DiscoveryError::HostCount { hosts: 2, ranks: 3 }));
    assert!(host_name().is_some());
}

#[test]
fn slurm_compact_lists_are_parsed() {
    assert_eq!([0, 1, 2, 3].map(|node| tasks_on_node("4(x2),3", node)), [Some(4), Some(4), Some(3), None]);
    assert_eq!(tasks_on_node("4(y2)", 0), None);
    for (list, first) in
        [("n1", "n1"), ("n[007-012,15],m1", "n007"), ("m1,n[0-3]", "m1"), ("r[1,3]n2,x", "r1n2")]
    {
        assert_eq!(first_host(list).as_deref(), Some(first));
    }
    assert_eq!((first_host(""), first_host("n[1")), (None, None));
}
