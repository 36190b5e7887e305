//! The `train` command that `launch` starts: its backend, its restarts and its meshes.

use super::restart::{RESTART_VARIABLE, Restart};
use crate::failure::{Failure, OrFail};
use crate::train::TrainArgs;
use crate::{Command, arguments};
use anyhow::anyhow;
use std::fmt;
use std::path::Path;
use ulysses::checkpoint::step_directories;
use ulysses::config::{Backend, Config, MeshShape};
use ulysses::mesh::{Cluster, SeqSharding, TrainingShape};

/// A `train` command to launch.
pub(super) struct Training {
    words: Vec<String>,
    args: TrainArgs,
    /// The config of the first start.
    pub(super) config: Config,
    /// Whether MPI connects the ranks; otherwise NCCL does.
    pub(super) uses_mpi: bool,
    /// The newest step in the output directory before the first start.
    newest_before: Option<u64>,
}

/// The part of a `train` command that differs between the starts of a job.
#[derive(Debug, Clone, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
pub(super) struct Variation {
    /// The restart, if it is one: it resumes.
    pub(super) restart: Option<Restart>,
    /// The job has saved a step: it resumes from its own output and no longer from the user's `--resume DIR`.
    pub(super) has_saved: bool,
    /// A smaller mesh than at the first start.
    pub(super) smaller: Option<SmallerMesh>,
}

/// A mesh for the nodes that are left, with the batch sizes of the first start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(super) struct SmallerMesh {
    /// Axes that divide the layers are as at the first start.
    pub(super) sizes: MeshShape,
    /// Ranks of the ring within sp, if the first start has a ring.
    pub(super) ring_size: Option<usize>,
    /// Ranks along dp that ZeRO partitions over, if the first start has a shard size.
    pub(super) shard_size: Option<usize>,
    /// Whether it also replaces the key `ulysses.mesh` of the config.
    pub(super) replaces_key: bool,
    pub(super) batch_size: usize,
    pub(super) micro_batch_size: usize,
}

impl Variation {
    /// Returns the number of restarts before.
    pub(super) fn restarts(&self) -> u32 {
        self.restart.as_ref().map_or(0, |restart| restart.number)
    }

    /// Tells a process about the restart, if it is one.
    pub(super) fn set_restart(&self, command: &mut std::process::Command) {
        // Strings and numbers only, which cannot fail.
        if let Some(Ok(restart)) = self.restart.as_ref().map(serde_json::to_string) {
            command.env(RESTART_VARIABLE, restart);
        }
    }
}

impl SmallerMesh {
    /// Returns the number of ranks of each machine, given how many each may run: the last ones perhaps run none.
    pub(super) fn fill(&self, slots: impl Iterator<Item = usize>) -> impl Iterator<Item = usize> {
        slots.scan(self.sizes.num_ranks(), |left, slots| {
            let ranks = slots.min(*left);
            *left -= ranks;
            Some(ranks)
        })
    }
}

/// Writes the value of `--mesh`.
impl fmt::Display for SmallerMesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { sizes, shard_size, .. } = *self;
        f.write_str(&TrainingShape { sizes, ring_size: None, shard_size }.notation())
    }
}

impl Training {
    /// Parses the arguments as `ulysses` would; `None` if the command is not `train`.
    pub(super) fn parse(
        words: &[String],
        cluster: Cluster,
        max_restarts: u32,
    ) -> Result<Option<Self>, Failure> {
        let args = match command(words)? {
            Command::Train(args) => args,
            Command::Launch(_) => return Err(Failure::Usage(anyhow!("`launch` cannot start `launch`"))),
            _ => return Ok(None),
        };
        let (config, backend) = args.for_launch(cluster)?;
        if max_restarts > 0 && (config.checkpoint.is_none() || config.ulysses.output.is_none()) {
            return Err(Failure::Usage(anyhow!(
                "--max-restarts needs checkpoints: add a `checkpoint` section to the config, and `ulysses.output` or \
                 --output"
            )));
        }
        let uses_mpi = uses_mpi(backend).map_err(anyhow::Error::msg).or_usage()?;
        let newest_before = config.ulysses.output.as_deref().and_then(newest_step);
        Ok(Some(Self { words: words.to_vec(), args, config, uses_mpi, newest_before }))
    }

    /// Returns the bytes of the config file, to be compared between nodes.
    pub(super) fn config_bytes(&self) -> Vec<u8> {
        ulysses::regular_file::read(Path::new(self.args.config())).unwrap_or_default()
    }

    /// Returns the arguments of a start.
    pub(super) fn arguments(&self, variation: &Variation) -> Vec<String> {
        let mut words = self.words.clone();
        if let Some(mesh) = variation.smaller {
            let SmallerMesh { ring_size, batch_size, micro_batch_size, .. } = mesh;
            remove_flag(&mut words, "--mesh");
            remove_flag(&mut words, "--batch-size");
            words.extend([
                format!("--mesh={mesh}"),
                format!("--batch-size={batch_size}"),
                format!("--set=train_micro_batch_size_per_gpu={micro_batch_size}"),
            ]);
            words.extend(mesh.replaces_key.then(|| format!("--set=ulysses.mesh={mesh}")));
            words.extend(ring_size.map(|ring_size| format!("--set=ulysses.ring_size={ring_size}")));
        }
        if variation.has_saved {
            // The first start read the other checkpoint, and has replaced the data.
            words.retain(|word| word != "--reset-data");
            if self.args.resumes_from_dir() {
                remove_flag(&mut words, "--resume");
                words.push("--resume".to_owned());
            }
        }
        if variation.restart.is_some() && !self.args.resumes() {
            words.push("--resume".to_owned());
        }
        words
    }

    /// Returns whether the ranks copy their state into host memory.
    pub(super) fn keeps_copies(&self) -> bool {
        self.config.checkpoint.as_ref().is_some_and(|checkpoint| checkpoint.memory_interval.is_some())
    }

    /// Returns whether the job has saved a step.
    pub(super) fn has_saved(&self) -> bool {
        self.config.ulysses.output.as_deref().and_then(newest_step) > self.newest_before
    }

    /// Returns the largest mesh of at most `num_ranks` ranks that keeps the batch size, the micro batch size and, if they
    /// fit, sp and the shard size of ZeRO. pp and tp stay.
    ///
    /// # Errors
    /// A message: no mesh keeps the batch size.
    pub(super) fn smaller_mesh(&self, num_ranks: usize) -> Result<SmallerMesh, String> {
        let Config { train_batch_size, micro_batch_size, .. } = self.config;
        self.largest_mesh(num_ranks).ok_or_else(|| {
            format!(
                "no mesh of at most {num_ranks} ranks keeps train_batch_size {train_batch_size} with micro batches of \
                 {micro_batch_size}; give the mesh by --mesh, not in the config"
            )
        })
    }

    fn largest_mesh(&self, num_ranks: usize) -> Option<SmallerMesh> {
        let first = &self.config;
        // The ranks that divide the layers count as one.
        let num_ranks = num_ranks / MeshShape { dp: 1, sp: 1, ..first.mesh.shape() }.num_ranks();
        let divides = |sp: &usize| first.mesh.sp_size.is_multiple_of(*sp);
        let sizes = (1..=first.mesh.sp_size.min(num_ranks)).rev().filter(divides);
        let first_shard = first.zero.mics_shard_size;
        // A smaller shard size takes more memory per rank, so multiples of the first one come before larger meshes.
        let keeps_shard = move |dp: &usize| first_shard.is_none_or(|shard| dp.is_multiple_of(shard));
        let mut meshes = sizes.flat_map(|sp| {
            let dp_sizes = || (1..=num_ranks / sp).rev();
            let others = dp_sizes().filter(move |dp| !keeps_shard(dp));
            dp_sizes().filter(keeps_shard).chain(others).map(move |dp| (dp, sp))
        });
        meshes.find_map(|(dp, sp)| {
            let (batch_size, micro_batch_size) = (first.train_batch_size, first.micro_batch_size);
            // No Ulysses group needs more heads than before.
            let before = first.seq_sharding();
            let ring_size = SeqSharding::for_heads(sp, before.ulysses_size).ring_size;
            let ring_size = (before.ring_size > 1).then_some(ring_size);
            let shard_size = first_shard.map(|shard| common_divisor(shard, dp));
            let mesh = |replaces_key| SmallerMesh {
                sizes: MeshShape { dp, sp, ..first.mesh.shape() },
                ring_size,
                shard_size,
                replaces_key,
                batch_size,
                micro_batch_size,
            };
            // The key of the first mesh may be that of a rule, which the flag replaces.
            let mut meshes = [true, false]
                .map(mesh)
                .into_iter()
                .filter(|mesh| first.ulysses.mesh.is_some() || !mesh.replaces_key);
            meshes.find(|mesh| self.allows(*mesh))
        })
    }

    /// Returns whether the config is valid with this mesh, and keeps the micro batch size.
    fn allows(&self, mesh: SmallerMesh) -> bool {
        let variation = Variation { smaller: Some(mesh), ..Variation::default() };
        let Ok(Command::Train(args)) = command(&self.arguments(&variation)) else { return false };
        let resolved = args.for_launch(Cluster { nodes: 1, ranks_per_node: mesh.sizes.num_ranks() });
        resolved.is_ok_and(|(config, _)| config.micro_batch_size == mesh.micro_batch_size)
    }
}

/// Returns the newest step in an output directory, if this machine sees one.
fn newest_step(output: &str) -> Option<u64> {
    step_directories(Path::new(output)).ok()?.first().map(|directory| directory.step)
}

/// Returns whether MPI connects the ranks, with this backend of the config or the flag; otherwise NCCL does.
///
/// # Errors
/// A backend that connects no processes, or that this build lacks.
fn uses_mpi(backend: Option<Backend>) -> Result<bool, String> {
    let (has_mpi, has_nccl) = (cfg!(feature = "mpi"), cfg!(feature = "nccl"));
    let lacks = |name| format!("this build lacks the feature `{name}` of the backend {name}");
    match backend {
        Some(Backend::Thread) => Err("the backend thread runs all ranks in one process: use `ulysses train` without \
                                      `launch`, or --backend mpi or nccl"
            .to_owned()),
        Some(Backend::Mpi) => has_mpi.then_some(true).ok_or_else(|| lacks("mpi")),
        Some(_) => has_nccl.then_some(false).ok_or_else(|| lacks("nccl")),
        None if has_mpi || has_nccl => Ok(!has_nccl),
        None => Err("this build lacks the features `mpi` and `nccl` that connect processes: build with one of them, or \
                     use `ulysses train` without `launch`"
            .to_owned()),
    }
}

fn common_divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { common_divisor(b, a % b) }
}

fn command(words: &[String]) -> Result<Command, Failure> {
    let words = std::iter::once("ulysses").chain(words.iter().map(String::as_str));
    let cli = arguments::parse_from(words).map_err(|error| {
        let error = error.to_string();
        Failure::Usage(anyhow!("after `--`: {}", error.trim_start_matches("error: ").trim_end()))
    })?;
    Ok(cli.command)
}

/// Removes a flag with its value, in both notations.
fn remove_flag(words: &mut Vec<String>, flag: &str) {
    while let Some(index) = words.iter().position(|word| word == flag) {
        words.drain(index..words.len().min(index + 2));
    }
    words.retain(|word| word.strip_prefix(flag).is_none_or(|rest| !rest.starts_with('=')));
}

/// Returns whether the arguments of a command other than `train` select MPI.
pub(super) fn names_mpi(words: &[String]) -> bool {
    let pairs = words.windows(2).any(|pair| pair[0] == "--backend" && pair[1] == "mpi");
    pairs || words.iter().any(|word| word == "--backend=mpi")
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::restart::Cause;
    use super::*;
    use serde_json::json;

    /// A `train` command with this config and these flags, on six ranks.
    pub(in crate::launch) fn training(
        place: &tempfile::TempDir,
        changes: serde_json::Value,
        flags: &[&str],
    ) -> Training {
        let path = place.path().join("c.json");
        let mut config =
            json!({ "train_batch_size": 6, "ulysses": { "model": "nano", "data": "d", "seq_len": 64 } });
        config.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        std::fs::write(&path, config.to_string()).unwrap();
        let words = [&["train", path.to_str().unwrap()], flags].concat();
        let words: Vec<String> = words.into_iter().map(str::to_owned).collect();
        let Ok(Command::Train(args)) = command(&words) else { panic!("{words:?} is no training") };
        let Ok((config, _)) = args.for_launch(Cluster { nodes: 3, ranks_per_node: 2 }) else {
            panic!("{words:?} is refused")
        };
        Training { words, args, config, uses_mpi: false, newest_before: None }
    }

    fn smaller(changes: serde_json::Value, flags: &[&str], num_ranks: usize) -> Option<(usize, usize)> {
        let place = tempfile::tempdir().unwrap();
        let mesh = training(&place, changes, flags).smaller_mesh(num_ranks).ok()?;
        Some((mesh.sizes.dp, mesh.sizes.sp))
    }

    /// The value of `--mesh` on fewer ranks.
    fn smaller_text(changes: serde_json::Value, flags: &[&str], num_ranks: usize) -> Option<String> {
        let place = tempfile::tempdir().unwrap();
        Some(training(&place, changes, flags).smaller_mesh(num_ranks).ok()?.to_string())
    }

    const MESH: SmallerMesh = SmallerMesh {
        sizes: MeshShape { sp: 2, ..MeshShape::ONE_RANK },
        ring_size: None,
        shard_size: None,
        replaces_key: false,
        batch_size: 6,
        micro_batch_size: 2,
    };

    #[test]
    fn a_smaller_mesh_keeps_the_shard_size() {
        let micro = json!({ "train_micro_batch_size_per_gpu": 1, "zero_optimization": { "stage": 3 } });
        for flags in [["--mesh", "hsdp"], ["--mesh", "dp_replicate=3,dp_shard=2"]] {
            let text = |num_ranks| smaller_text(micro.clone(), &flags, num_ranks);
            assert_eq!(text(5).as_deref(), Some("dp_replicate=1,dp_shard=2,sp=1"), "4 does not divide 6");
            assert_eq!(text(2).as_deref(), Some("dp_replicate=1,dp_shard=2,sp=1"));
            assert_eq!(text(1).as_deref(), Some("dp_replicate=1,dp_shard=1,sp=1"));
        }
        let mut twelve = micro;
        twelve["train_batch_size"] = json!(12);
        let text = smaller_text(twelve, &["--mesh", "dp_replicate=3,dp_shard=2"], 5);
        assert_eq!(text.as_deref(), Some("dp_replicate=2,dp_shard=2,sp=1"));
    }

    #[test]
    fn a_smaller_mesh_replaces_the_mesh_of_the_config() {
        let with = |mesh: serde_json::Value| {
            json!({ "train_micro_batch_size_per_gpu": 1, "zero_optimization": { "stage": 3 },
                "ulysses": { "model": "nano", "data": "d", "seq_len": 64, "mesh": mesh } })
        };
        let hybrid = with(json!({ "intra": { "sp": 2 }, "inter": { "dp": 3 } }));
        assert_eq!(smaller(hybrid, &[], 4), Some((2, 2)));
        let sharded = with(json!({ "intra": { "dp_shard": 2 }, "inter": { "dp_replicate": 3 } }));
        let text = smaller_text(sharded, &[], 3);
        assert_eq!(text.as_deref(), Some("dp_replicate=1,dp_shard=2,sp=1"));
    }

    fn restart() -> Option<Restart> {
        let text = "rank 1 was killed".to_owned();
        let reason = format!("{text}; restart 1 of 1");
        let cause = Cause { text, failed_rank: Some(1), lost_hosts: Vec::new() };
        Some(Restart { number: 1, reason, cause, mesh_before: None })
    }

    #[test]
    fn a_restart_resumes_from_the_output_as_soon_as_it_has_a_newer_step() {
        let place = tempfile::tempdir().unwrap();
        let output = place.path().join("out").display().to_string();
        let warm = place.path().join("warm").display().to_string();
        for flags in [
            vec!["--output", &output, "--resume", &warm, "--reset-data", "--seed", "7"],
            vec!["--output", &output, &format!("--resume={warm}"), "--reset-data", "--seed", "7"],
        ] {
            let training = training(&place, json!({}), &flags);
            assert!(!training.has_saved());
            let arguments = |has_saved| {
                training.arguments(&Variation { restart: restart(), has_saved, smaller: None })[2..].join(" ")
            };
            assert_eq!(arguments(false), flags.join(" "), "nothing to resume from but the other checkpoint");
            assert_eq!(arguments(true), format!("--output {output} --seed 7 --resume"));
        }
        let mut training = training(&place, json!({}), &["--output", &output, "--resume", "--reset-data"]);
        training.newest_before = Some(4);
        std::fs::create_dir_all(place.path().join("out/step_00000004")).unwrap();
        assert!(!training.has_saved(), "it is there since before the first start");
        std::fs::create_dir_all(place.path().join("out/step_00000006")).unwrap();
        assert!(training.has_saved());
        let words = training.arguments(&Variation { restart: restart(), has_saved: true, smaller: None });
        assert_eq!(words[2..].join(" "), format!("--output {output} --resume"));
    }

    #[test]
    fn a_smaller_mesh_keeps_batch_micro_batch_and_sp() {
        let micro = json!({ "train_micro_batch_size_per_gpu": 1 });
        assert_eq!(smaller(micro.clone(), &["--mesh", "3x2"], 4), Some((2, 2)));
        assert_eq!(smaller(micro.clone(), &["--mesh", "3x2"], 5), Some((2, 2)));
        assert_eq!(smaller(micro.clone(), &["--mesh", "ulysses"], 3), Some((1, 2)));
        assert_eq!(smaller(micro.clone(), &["--mesh", "3x2"], 1), Some((1, 1)), "sp does not fit");
        assert_eq!(smaller(micro, &[], 4), Some((3, 1)), "dp 4 does not divide the batch");
        // Micro batches of 2: dp 2 would need one and a half.
        assert_eq!(smaller(json!({}), &["--mesh", "3x2"], 4), Some((1, 2)));
        let fixed = json!({ "train_micro_batch_size_per_gpu": 1, "mesh_param": [3, 2] });
        assert_eq!(smaller(fixed, &[], 4), Some((2, 2)), "the flag replaces the config's sizes");
        let divided = json!({ "train_micro_batch_size_per_gpu": 1, "tensor_parallel_size": 2 });
        assert_eq!(smaller_text(divided.clone(), &[], 5).as_deref(), Some("2x1x2"), "tp stays");
        assert_eq!(smaller(divided, &[], 1), None);
    }

    #[test]
    fn a_smaller_mesh_fills_the_first_machines() {
        let ranks = |dp, sp, slots: &[usize]| {
            let mesh = SmallerMesh { sizes: MeshShape::dp_sp(dp, sp), ..MESH };
            mesh.fill(slots.iter().copied()).collect::<Vec<_>>()
        };
        assert_eq!(ranks(2, 2, &[2, 2, 2]), [2, 2, 0]);
        assert_eq!(ranks(1, 3, &[2, 2, 2]), [2, 1, 0]);
        assert_eq!(ranks(3, 2, &[2, 2, 2]), [2, 2, 2]);
    }

    #[test]
    fn a_restart_resumes_and_replaces_the_mesh() {
        let place = tempfile::tempdir().unwrap();
        let flags = ["--mesh", "3x2", "--batch-size=6", "--seed", "7"];
        let training = training(&place, json!({}), &flags);
        let path = place.path().join("c.json").display().to_string();
        let arguments = |restart, smaller| {
            training.arguments(&Variation { restart, has_saved: false, smaller })[1..].join(" ")
        };
        assert_eq!(arguments(None, None), format!("{path} --mesh 3x2 --batch-size=6 --seed 7"));
        assert_eq!(
            arguments(restart(), Some(MESH)),
            format!(
                "{path} --seed 7 --mesh=1x2 --batch-size=6 --set=train_micro_batch_size_per_gpu=2 --resume"
            )
        );
        let ring = arguments(restart(), Some(SmallerMesh { ring_size: Some(2), ..MESH }));
        assert!(ring.ends_with("--set=ulysses.ring_size=2 --resume"), "{ring}");
    }
}
