//! The `train` command that `launch` starts: its backend, its restarts and its meshes.

use crate::train::TrainArgs;
use crate::{Command, Failure, arguments};
use anyhow::anyhow;
use ulysses::config::{Backend, Config};
use ulysses::mesh::{Cluster, SeqSharding};

/// A `train` command to launch.
pub(super) struct Training {
    words: Vec<String>,
    args: TrainArgs,
}

/// The part of a `train` command that differs between the starts of a job.
#[derive(Debug, Clone, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
pub(super) struct Variation {
    pub(super) resumes: bool,
    /// A smaller mesh than at the first start.
    pub(super) smaller: Option<SmallerMesh>,
}

/// A mesh for the nodes that are left, with the batch sizes of the first start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(super) struct SmallerMesh {
    pub(super) dp: usize,
    pub(super) sp: usize,
    /// Ranks of the ring within sp, if the first start has a ring.
    pub(super) ring_size: Option<usize>,
    pub(super) batch_size: usize,
    pub(super) micro_batch_size: usize,
}

impl Training {
    /// Parses the arguments as `ulysses` would; `None` if the command is not `train`.
    pub(super) fn parse(words: &[String]) -> Result<Option<Self>, Failure> {
        match command(words)? {
            Command::Train(args) => Ok(Some(Self { words: words.to_vec(), args })),
            Command::Launch(_) => Err(Failure::Usage(anyhow!("`launch` cannot start `launch`"))),
            _ => Ok(None),
        }
    }

    /// Returns the config, and whether MPI connects the ranks; otherwise NCCL does.
    pub(super) fn check(&self, cluster: Cluster, max_restarts: u32) -> Result<(Config, bool), Failure> {
        let (config, backend) = self.args.for_launch(cluster)?;
        let refuse = |message: String| Err(Failure::Usage(anyhow!(message)));
        if max_restarts > 0 && (config.checkpoint.is_none() || config.ulysses.output.is_none()) {
            return refuse(
                "--max-restarts needs checkpoints: add a `checkpoint` section to the config, and `ulysses.output` or \
                 --output"
                    .to_owned(),
            );
        }
        match backend {
            Some(Backend::Thread) => refuse(
                "the backend thread runs all ranks in one process: use `ulysses train` without `launch`, or --backend \
                 mpi or nccl"
                    .to_owned(),
            ),
            Some(Backend::Mpi) if cfg!(feature = "mpi") => Ok((config, true)),
            Some(Backend::Nccl) if cfg!(feature = "nccl") => Ok((config, false)),
            Some(missing) => {
                let name = if missing == Backend::Mpi { "mpi" } else { "nccl" };
                refuse(format!("this build lacks the feature `{name}` of the backend {name}"))
            }
            None if cfg!(feature = "nccl") => Ok((config, false)),
            None if cfg!(feature = "mpi") => Ok((config, true)),
            None => refuse(
                "this build lacks the features `mpi` and `nccl` that connect processes: build with one of them, or use \
                 `ulysses train` without `launch`"
                    .to_owned(),
            ),
        }
    }

    /// Returns the bytes of the config file, to be compared between nodes.
    pub(super) fn config_bytes(&self) -> Vec<u8> {
        std::fs::read(self.args.config()).unwrap_or_default()
    }

    /// Returns the arguments of a start.
    pub(super) fn arguments(&self, variation: &Variation) -> Vec<String> {
        let mut words = self.words.clone();
        if let Some(SmallerMesh { dp, sp, ring_size, batch_size, micro_batch_size }) = variation.smaller {
            remove_flag(&mut words, "--mesh");
            remove_flag(&mut words, "--batch-size");
            words.extend([
                format!("--mesh={dp}x{sp}"),
                format!("--batch-size={batch_size}"),
                format!("--set=train_micro_batch_size_per_gpu={micro_batch_size}"),
            ]);
            words.extend(ring_size.map(|ring_size| format!("--set=ulysses.ring_size={ring_size}")));
        }
        if variation.resumes && !self.args.resumes() {
            words.push("--resume".to_owned());
        }
        words
    }

    /// Returns the largest mesh of at most `num_ranks` ranks that keeps the batch size, the micro batch size and, if it
    /// fits, sp. `first` is the config of the first start.
    pub(super) fn smaller_mesh(&self, first: &Config, num_ranks: usize) -> Option<SmallerMesh> {
        let divides = |sp: &usize| first.mesh.sp_size.is_multiple_of(*sp);
        let sizes = (1..=first.mesh.sp_size.min(num_ranks)).rev().filter(divides);
        let mut meshes = sizes.flat_map(|sp| (1..=num_ranks / sp).rev().map(move |dp| (dp, sp)));
        meshes.find_map(|(dp, sp)| {
            let (batch_size, micro_batch_size) = (first.train_batch_size, first.micro_batch_size);
            // No Ulysses group needs more heads than before.
            let before = first.seq_sharding();
            let ring_size = SeqSharding::for_heads(sp, before.ulysses_size).ring_size;
            let ring_size = (before.ring_size > 1).then_some(ring_size);
            let smaller = SmallerMesh { dp, sp, ring_size, batch_size, micro_batch_size };
            let variation = Variation { resumes: true, smaller: Some(smaller) };
            let Ok(Command::Train(args)) = command(&self.arguments(&variation)) else { return None };
            let (config, _) = args.for_launch(Cluster { nodes: 1, ranks_per_node: dp * sp }).ok()?;
            (config.micro_batch_size == micro_batch_size).then_some(smaller)
        })
    }
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
mod tests {
    use super::*;
    use serde_json::json;

    /// A `train` command with this config and these flags, and its config on six ranks.
    fn training(place: &tempfile::TempDir, changes: serde_json::Value, flags: &[&str]) -> (Training, Config) {
        let path = place.path().join("c.json");
        let mut config =
            json!({ "train_batch_size": 6, "ulysses": { "model": "nano", "data": "d", "seq_len": 64 } });
        config.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        std::fs::write(&path, config.to_string()).unwrap();
        let words = [&["train", path.to_str().unwrap()], flags].concat();
        let words: Vec<String> = words.into_iter().map(str::to_owned).collect();
        let Ok(Some(training)) = Training::parse(&words) else { panic!("{words:?} is no training") };
        let Ok((config, _)) = training.args.for_launch(Cluster { nodes: 3, ranks_per_node: 2 }) else {
            panic!("{words:?} is refused")
        };
        (training, config)
    }

    fn smaller(changes: serde_json::Value, flags: &[&str], num_ranks: usize) -> Option<(usize, usize)> {
        let place = tempfile::tempdir().unwrap();
        let (training, config) = training(&place, changes, flags);
        training.smaller_mesh(&config, num_ranks).map(|mesh| (mesh.dp, mesh.sp))
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
        assert_eq!(smaller(fixed, &[], 4), None, "sizes in the config are fixed");
    }

    #[test]
    fn a_restart_resumes_and_replaces_the_mesh() {
        let place = tempfile::tempdir().unwrap();
        let flags = ["--mesh", "3x2", "--batch-size=6", "--seed", "7"];
        let (training, _) = training(&place, json!({}), &flags);
        let path = place.path().join("c.json").display().to_string();
        let arguments = |resumes, smaller| training.arguments(&Variation { resumes, smaller })[1..].join(" ");
        assert_eq!(arguments(false, None), format!("{path} --mesh 3x2 --batch-size=6 --seed 7"));
        let mesh = SmallerMesh { dp: 1, sp: 2, ring_size: None, batch_size: 6, micro_batch_size: 2 };
        assert_eq!(
            arguments(true, Some(mesh)),
            format!(
                "{path} --seed 7 --mesh=1x2 --batch-size=6 --set=train_micro_batch_size_per_gpu=2 --resume"
            )
        );
        let ring = arguments(true, Some(SmallerMesh { ring_size: Some(2), ..mesh }));
        assert!(ring.ends_with("--set=ulysses.ring_size=2 --resume"), "{ring}");
    }
}
