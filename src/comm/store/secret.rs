//! The secret that the processes of a job share.

use crate::comm::Launcher;
use std::fmt;

/// The environment variable with the path of a file that contains the secret.
const SECRET_FILE: &str = "ULYSSES_JOB_SECRET_FILE";
/// The largest file that is read as a secret.
const MAX_FILE_BYTES: u64 = 4096;
/// The environment variable with the secret.
pub(super) const SECRET: &str = "ULYSSES_JOB_SECRET";
/// Minimum length; a shorter secret could be guessed.
const MIN_BYTES: usize = 16;

/// The key with which the processes of a job authenticate each other.
#[derive(Clone, PartialEq, Eq)]
pub(in crate::comm) struct JobSecret {
    key: [u8; 32],
    is_secret: bool,
}

impl JobSecret {
    /// Reads `ULYSSES_JOB_SECRET`, or the file that `ULYSSES_JOB_SECRET_FILE` names, or else the launcher's job id. A job id is public: it separates two jobs on
    /// one port, but does not keep other programs out.
    ///
    /// # Errors
    /// A message without the secret, if the secret is too short, or its file cannot be read or is open to other users.
    pub(in crate::comm) fn read(
        launcher: Launcher,
        lookup: impl Fn(&str) -> Option<String>,
    ) -> Result<Self, String> {
        let from_file = || lookup(SECRET_FILE).map(|path| read_file(&path).map(|text| (SECRET_FILE, text)));
        let given = lookup(SECRET).map(|text| Ok((SECRET, text))).or_else(from_file).transpose()?;
        if let Some((name, secret)) = given {
            let secret = secret.trim();
            if secret.len() < MIN_BYTES {
                return Err(format!(
                    "{name} has {} bytes, expected at least {MIN_BYTES} random ones, such as `openssl rand -hex 32` \
                     prints",
                    secret.len()
                ));
            }
            return Ok(Self::new(secret, true));
        }
        let names: &[&str] = match launcher {
            Launcher::Slurm => &["SLURM_JOB_ID", "SLURM_STEP_ID"],
            Launcher::Torchrun => &["TORCHELASTIC_RUN_ID"],
            _ => &[],
        };
        let id: Vec<String> = names.iter().map(|name| lookup(name).unwrap_or_default()).collect();
        Ok(Self::new(&id.join("."), false))
    }

    pub(in crate::comm) fn new(text: &str, is_secret: bool) -> Self {
        let context = if is_secret { "ulysses rendezvous, job secret" } else { "ulysses rendezvous, job id" };
        Self { key: blake3::derive_key(context, text.as_bytes()), is_secret }
    }

    pub(in crate::comm) fn key(&self) -> &[u8; 32] {
        &self.key
    }

    /// Returns whether the key is secret, and not just a job id.
    pub(in crate::comm) fn is_secret(&self) -> bool {
        self.is_secret
    }
}

/// Reads a file with a secret, which only its owner may access.
fn read_file(path: &str) -> Result<String, String> {
    let cannot_read = |error: std::io::Error| format!("{SECRET_FILE}: cannot read {path}: {error}");
    let file = std::fs::metadata(path).map_err(cannot_read)?;
    if !file.is_file() || file.len() > MAX_FILE_BYTES {
        return Err(format!("{SECRET_FILE}: expected {path} to be a file of at most {MAX_FILE_BYTES} bytes"));
    }
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        let mode = file.permissions().mode() & 0o777;
        if mode & 0o077 != 0 {
            return Err(format!(
                "{SECRET_FILE}: {path} has mode {mode:04o}, so other users may access it; run `chmod 600 {path}`, and \
                 make a new secret if others may have read it"
            ));
        }
    }
    crate::regular_file::read_to_string(path.as_ref()).map_err(cannot_read)
}

/// Keeps the key out of logs.
impl fmt::Debug for JobSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JobSecret").field("is_secret", &self.is_secret).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(launcher: Launcher, variables: &[(&str, &str)]) -> Result<JobSecret, String> {
        let find = |name: &str| variables.iter().find(|(known, _)| *known == name);
        JobSecret::read(launcher, |name| find(name).map(|(_, value)| (*value).to_owned()))
    }

    #[test]
    fn a_secret_takes_precedence_over_the_job_id() {
        let secret = ("ULYSSES_JOB_SECRET", "0123456789abcdef");
        let slurm = [("SLURM_JOB_ID", "7"), ("SLURM_STEP_ID", "0"), ("TORCHELASTIC_RUN_ID", "a")];
        let with_secret = read(Launcher::Slurm, &[&slurm[..], &[secret]].concat()).unwrap();
        assert!(with_secret.is_secret());
        assert_eq!(with_secret, read(Launcher::Torchrun, &[secret]).unwrap());
        let without = read(Launcher::Slurm, &slurm).unwrap();
        assert!(!without.is_secret() && without != with_secret);
        assert_ne!(without, read(Launcher::Slurm, &[("SLURM_JOB_ID", "8"), slurm[1]]).unwrap());
        assert_ne!(without, read(Launcher::Torchrun, &slurm).unwrap());
    }

    #[test]
    fn a_secret_may_be_in_a_file() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let path = file.path().to_str().unwrap();
        let of_file = |text: &str| {
            std::fs::write(path, text).unwrap();
            read(Launcher::Torchrun, &[("ULYSSES_JOB_SECRET_FILE", path)])
        };
        let given = read(Launcher::Torchrun, &[("ULYSSES_JOB_SECRET", "0123456789abcdef")]).unwrap();
        assert_eq!(of_file("0123456789abcdef\n").unwrap(), given);
        assert!(of_file("hunter2").unwrap_err().starts_with("ULYSSES_JOB_SECRET_FILE has 7 bytes"));
        assert!(of_file(&"x".repeat(5000)).unwrap_err().contains("at most 4096 bytes"));
        let nowhere = read(Launcher::Torchrun, &[("ULYSSES_JOB_SECRET_FILE", "/nowhere/secret")]);
        assert!(nowhere.unwrap_err().contains("cannot read /nowhere/secret"));
        let both = [("ULYSSES_JOB_SECRET", "0123456789abcdef"), ("ULYSSES_JOB_SECRET_FILE", "/nowhere")];
        assert_eq!(read(Launcher::Torchrun, &both).unwrap(), given);
    }

    #[cfg(unix)]
    #[test]
    fn a_secret_file_that_other_users_can_access_is_refused() {
        use std::os::unix::fs::PermissionsExt;
        let file = tempfile::NamedTempFile::new().unwrap();
        let path = file.path().to_str().unwrap();
        std::fs::write(path, "0123456789abcdef").unwrap();
        let with_mode = |mode| {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
            read(Launcher::Torchrun, &[("ULYSSES_JOB_SECRET_FILE", path)])
        };
        for mode in [0o644, 0o640, 0o604, 0o620] {
            let error = with_mode(mode).unwrap_err();
            let expected = format!("ULYSSES_JOB_SECRET_FILE: {path} has mode {mode:04o}");
            assert!(
                error.starts_with(&expected) && error.contains(&format!("`chmod 600 {path}`")),
                "{error}"
            );
        }
        assert!([0o600, 0o400].into_iter().all(|mode| with_mode(mode).is_ok()));
    }

    #[test]
    fn a_secret_that_is_too_short_is_refused_and_not_shown() {
        let error = read(Launcher::Torchrun, &[("ULYSSES_JOB_SECRET", " hunter2 ")]).unwrap_err();
        assert!(error.starts_with("ULYSSES_JOB_SECRET has 7 bytes") && !error.contains("hunter2"), "{error}");
        let shown = format!("{:?}", read(Launcher::Torchrun, &[("ULYSSES_JOB_SECRET", "0123456789abcdef")]));
        assert_eq!(shown, "Ok(JobSecret { is_secret: true, .. })");
    }
}
