//! Environment variables set by launchers of one process per GPU (torchrun, `srun`).

use crate::comm::store::StoreEndpoint;
use crate::comm::{CommError, Launcher, ProcessInfo};

/// The first NCCL version that allows two ranks on one GPU, as from `ncclGetVersion`.
const MULTI_RANK_VERSION: i32 = 23_000;

/// A process of a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Environment {
    pub(super) rank: usize,
    pub(super) world_size: usize,
    /// Index of the process on this machine.
    pub(super) local_rank: usize,
    pub(super) meeting: Rendezvous,
}

/// Source of the communicator id.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Rendezvous {
    /// NCCL itself reads `NCCL_COMM_ID`.
    Nccl,
    /// Rank 0 sets it in the job's store.
    At(StoreEndpoint),
}

impl Environment {
    /// Reads the launcher's variables that `info` does not cover; `lookup` returns their values.
    ///
    /// # Errors
    /// [`CommError::Start`] naming the variable that is missing or invalid.
    pub(super) fn read(
        info: &ProcessInfo,
        lookup: impl Fn(&str) -> Option<String>,
    ) -> Result<Self, CommError> {
        let refuse = |reason: String| CommError::Start { library: "NCCL", rank: None, reason };
        let ProcessInfo { rank, world_size, local_rank, launcher, .. } = *info;
        if launcher == Launcher::None {
            return Err(refuse(
                "RANK is not set; a launcher sets RANK, WORLD_SIZE and LOCAL_RANK".to_owned(),
            ));
        }
        let local_rank = local_rank.ok_or_else(|| {
            refuse(format!("no GPU for rank {rank}: {launcher} sets no local rank; set LOCAL_RANK"))
        })?;
        let meeting = if lookup("NCCL_COMM_ID").is_some() {
            Rendezvous::Nccl
        } else {
            match StoreEndpoint::read(info, lookup).map_err(refuse)? {
                Some(point) => Rendezvous::At(point),
                None if world_size == 1 => Rendezvous::Nccl,
                None => {
                    return Err(refuse("neither NCCL_COMM_ID (host:port) nor MASTER_ADDR is set".to_owned()));
                }
            }
        };
        Ok(Self { rank, world_size, local_rank, meeting })
    }
}

/// Returns the GPU of a process, by ordinal. A process that sees a single GPU uses it: launchers such as
/// `srun --gpus-per-task=1` show every process only its own. `visible` is `CUDA_VISIBLE_DEVICES`.
///
/// # Errors
/// A local rank without a GPU.
pub(super) fn process_gpu(local_rank: usize, gpus: usize, visible: Option<&str>) -> Result<usize, String> {
    if gpus == 1 {
        return Ok(0);
    }
    if local_rank < gpus {
        return Ok(local_rank);
    }
    let visible = visible.map_or_else(|| "is not set".to_owned(), |visible| format!("is `{visible}`"));
    Err(format!(
        "no GPU for local rank {local_rank}: this process sees {gpus} GPUs (CUDA_VISIBLE_DEVICES {visible}); start at most \
         {gpus} processes on this machine, or show every process its own GPU"
    ))
}

/// Returns whether the user allows several ranks per GPU (`NCCL_MULTI_RANK_GPU_ENABLE=1`), which needs NCCL 2.30.
pub fn may_share_gpus() -> bool {
    std::env::var("NCCL_MULTI_RANK_GPU_ENABLE").is_ok_and(|value| value == "1")
}

/// Rejects two ranks on one GPU if NCCL does. `gpus[rank]` identifies the GPU; `may_share` is [`may_share_gpus`].
///
/// # Errors
/// [`CommError::Start`] naming the ranks.
pub(super) fn check_gpus<P: PartialEq>(
    gpus: &[P],
    nccl_version: i32,
    may_share: bool,
) -> Result<(), CommError> {
    if nccl_version >= MULTI_RANK_VERSION && may_share {
        return Ok(());
    }
    for (rank, gpu) in gpus.iter().enumerate() {
        if let Some(other) = gpus[..rank].iter().position(|other| other == gpu) {
            let (major, minor) = (nccl_version / 10_000, nccl_version / 100 % 100);
            let reason = format!(
                "ranks {other} and {rank} are on the same GPU; NCCL {major}.{minor} allows one rank per GPU (2.30 and \
                 later allow more with NCCL_MULTI_RANK_GPU_ENABLE=1; the thread backend always does)"
            );
            return Err(CommError::Start { library: "NCCL", rank: Some(rank), reason });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::ProcessFlags;
    use crate::comm::store::{JobSecret, Member};

    fn read(variables: &[(&str, &str)]) -> Result<Environment, CommError> {
        let find = |name: &str| variables.iter().find(|(known, _)| *known == name);
        let lookup = |name: &str| find(name).map(|(_, value)| (*value).to_owned());
        let refuse = |error: crate::comm::DiscoveryError| CommError::Start {
            library: "NCCL",
            rank: None,
            reason: error.to_string(),
        };
        Environment::read(&ProcessInfo::discover(&ProcessFlags::default(), lookup).map_err(refuse)?, lookup)
    }

    fn point(host: &str, port: u16) -> StoreEndpoint {
        let secret = JobSecret::new("", false);
        StoreEndpoint {
            host: host.into(),
            port,
            bind: None,
            world_size: 4,
            is_one_node: false,
            is_hosted: false,
            members: Member::Rank,
            secret,
        }
    }

    const RANK_1_OF_4: [(&str, &str); 3] = [("RANK", "1"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "1")];

    #[test]
    fn launcher_variables_give_rank_and_endpoint() {
        let with =
            |more: &[(&'static str, &'static str)]| read(&[&RANK_1_OF_4[..], more].concat()).unwrap().meeting;
        let at = |port| Rendezvous::At(point("n0", port));
        assert_eq!(with(&[("MASTER_ADDR", "n0")]), at(29_501));
        assert_eq!(with(&[("MASTER_ADDR", "n0"), ("MASTER_PORT", "7")]), at(8), "the launcher uses the port");
        let own = [("MASTER_ADDR", "n0"), ("MASTER_PORT", "65535"), ("ULYSSES_MASTER_PORT", "9")];
        assert_eq!(with(&own), at(9));
        assert_eq!(with(&[("MASTER_ADDR", "n0"), ("NCCL_COMM_ID", "n1:5")]), Rendezvous::Nccl);
        let reported = [
            ("MASTER_ADDR", "n0"),
            ("ULYSSES_MASTER_BIND", "10.0.0.7"),
            ("LOCAL_WORLD_SIZE", "4"),
            ("ULYSSES_JOB_SECRET", "0123456789abcdef"),
        ];
        let secret = JobSecret::new("0123456789abcdef", true);
        let bind = Some([10, 0, 0, 7].into());
        assert_eq!(
            with(&reported),
            Rendezvous::At(StoreEndpoint { bind, is_one_node: true, secret, ..point("n0", 29_501) })
        );
        let alone = read(&[("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "3")]).unwrap();
        assert_eq!((alone.rank, alone.world_size, alone.local_rank), (0, 1, 3));
    }

    #[test]
    fn slurm_tasks_use_the_store_on_the_first_node() {
        let task = [
            ("SLURM_PROCID", "5"),
            ("SLURM_NTASKS", "8"),
            ("SLURM_LOCALID", "1"),
            ("SLURM_STEP_NODELIST", "gpu[017-018]"),
        ];
        let environment = read(&task).unwrap();
        assert_eq!((environment.rank, environment.world_size, environment.local_rank), (5, 8, 1));
        let secret = JobSecret::new(".", false);
        assert_eq!(
            environment.meeting,
            Rendezvous::At(StoreEndpoint { world_size: 8, secret, ..point("gpu017", 29_501) })
        );
    }

    #[test]
    fn missing_and_invalid_variables_are_named() {
        let refuse = |variables: &[(&str, &str)], expected: &str| {
            let error = read(variables).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        };
        refuse(&[("WORLD_SIZE", "4"), ("LOCAL_RANK", "1")], "RANK is not set");
        refuse(&[("RANK", "x"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "1")], "RANK is `x`");
        refuse(&[("RANK", "4"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "0")], "less than WORLD_SIZE (4)");
        refuse(&RANK_1_OF_4, "neither NCCL_COMM_ID");
        let port = |name, port| [&RANK_1_OF_4[..], &[("MASTER_ADDR", "n0"), (name, port)]].concat();
        refuse(&port("MASTER_PORT", "70000"), "MASTER_PORT is `70000`");
        refuse(&RANK_1_OF_4[..2], "set LOCAL_RANK");
        refuse(&[], "RANK is not set");
        refuse(&port("ULYSSES_MASTER_PORT", "0"), "ULYSSES_MASTER_PORT is `0`");
        refuse(&port("MASTER_PORT", "65535"), "set ULYSSES_MASTER_PORT");
        refuse(&port("ULYSSES_MASTER_BIND", "n0"), "ULYSSES_MASTER_BIND is `n0`, expected an IP address");
        refuse(&port("ULYSSES_JOB_SECRET", "short"), "ULYSSES_JOB_SECRET has 5 bytes");
    }

    #[test]
    fn a_process_uses_the_gpu_of_its_local_rank_or_the_only_one_that_it_sees() {
        assert_eq!(process_gpu(3, 8, None), Ok(3));
        assert_eq!(process_gpu(3, 1, Some("3")), Ok(0), "srun --gpus-per-task=1");
        let refused = process_gpu(2, 2, Some("0,1")).unwrap_err();
        let expected = "no GPU for local rank 2: this process sees 2 GPUs (CUDA_VISIBLE_DEVICES is `0,1`)";
        assert!(refused.starts_with(expected), "{refused}");
        assert!(process_gpu(9, 8, None).unwrap_err().contains("CUDA_VISIBLE_DEVICES is not set"));
    }

    #[test]
    fn two_ranks_on_one_gpu_are_named_unless_nccl_allows_them() {
        let error = check_gpus(&[0, 1, 0], 22_803, true).unwrap_err();
        assert!(matches!(error, CommError::Start { rank: Some(2), .. }), "{error}");
        assert!(error.to_string().contains("ranks 0 and 2 are on the same GPU; NCCL 2.28 "), "{error}");
        assert!(check_gpus(&[0, 0], 23_004, false).is_err());
        check_gpus(&[0, 0], 23_004, true).unwrap();
        check_gpus(&[0, 1, 2], 22_803, false).unwrap();
    }
}
