//! The handshake in which a rank and the host prove to each other that they belong to the same job.
//!
//! The rank sends a hello with a nonce, the host a nonce of its own. Each side then sends a BLAKE3 hash, keyed with the
//! job's secret, of both nonces and its statement: the rank its number, the host its verdict. So neither side sends or
//! accepts data before the other has proved that it knows the secret, and recorded messages cannot be replayed. Every
//! later frame carries such a hash, which includes its number. Nothing is encrypted: anyone who can read the network can
//! read the store.

use super::endpoint::{Member, StoreEndpoint};
use super::secret::JobSecret;
use std::io;

/// Random bytes, new for each connection and each side.
pub(super) type Nonce = [u8; 32];

/// The first bytes of a hello in every version of the protocol.
pub(super) const PROTOCOL: &[u8; 7] = b"ulysses";
/// The first bytes of a hello, including the protocol version. The host sends them instead of a nonce to a process with
/// another version.
pub(super) const MAGIC: [u8; 8] = *b"ulysses3";
/// Magic and nonce.
pub(super) const HELLO_BYTES: usize = MAGIC.len() + size_of::<Nonce>();
/// Rank, world size and proof.
pub(super) const CLAIM_BYTES: usize = 8 + 8 + PROOF_BYTES;
/// Verdict, the host's world size and proof.
pub(super) const REPLY_BYTES: usize = 1 + 8 + PROOF_BYTES;

const PROOF_BYTES: usize = 32;

/// Generates a nonce from the system's randomness.
pub(super) fn nonce() -> io::Result<Nonce> {
    use rand::TryRngCore;
    let mut nonce = Nonce::default();
    rand::rngs::OsRng.try_fill_bytes(&mut nonce).map_err(io::Error::other)?;
    Ok(nonce)
}

/// Secret and nonces of a connection, after both sides have exchanged nonces.
pub(super) struct Session<'a> {
    pub(super) secret: &'a JobSecret,
    pub(super) root: Nonce,
    pub(super) peer: Nonce,
}

/// The rank and world size that a process claims.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Claim {
    pub(super) rank: u64,
    pub(super) world_size: u64,
}

/// The host's answer to a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Reply {
    pub(super) verdict: Verdict,
    /// The host's own.
    pub(super) world_size: u64,
}

/// The host's decision about a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    Accepted,
    /// The rank is not below the host's world size.
    OutOfRange,
    /// The process has a different world size than the host.
    OtherWorldSize,
    /// Another process has this rank.
    Taken,
    /// The job has started before.
    Started,
}

impl Verdict {
    const ALL: [Self; 5] =
        [Self::Accepted, Self::OutOfRange, Self::OtherWorldSize, Self::Taken, Self::Started];
}

impl Reply {
    /// Returns why the host of `point` refuses `claim`.
    pub(super) fn reason(self, claim: Claim, point: &StoreEndpoint) -> String {
        let Claim { rank, world_size: claimed } = claim;
        let (member, host, size) = (point.members, point.host_name(), self.world_size);
        match self.verdict {
            Verdict::Accepted => format!("{member} {rank} is accepted"),
            Verdict::OutOfRange => {
                format!("{member} {rank} is out of range: the job has {member}s 0 to {}", size - 1)
            }
            Verdict::OtherWorldSize => {
                let what = if member == Member::Node { "--nnodes" } else { "world size" };
                format!("{member} {rank} has {what} {claimed}, but {host} has {size}")
            }
            Verdict::Taken => format!("{member} {rank} is taken: two processes have the same {member}"),
            Verdict::Started => {
                format!(
                    "the job has already started: {member} {rank} has joined it before, or comes too late"
                )
            }
        }
    }
}

/// The host's answer to a peer with a different secret. It contains no hash, so it reveals nothing about the secret.
pub(super) const OTHER_SECRET: [u8; REPLY_BYTES] = [0; REPLY_BYTES];

/// Encodes the first message of a rank.
pub(super) fn hello(nonce: &Nonce) -> Vec<u8> {
    [&MAGIC[..], nonce].concat()
}

/// Describes the version of another process, from the first bytes that it sent.
pub(super) fn other_version(magic: &[u8]) -> String {
    let version = |magic: &[u8]| magic[PROTOCOL.len()..].escape_ascii().to_string();
    format!(
        "it has version {} of the store's protocol, and this process version {}: use the same build of ulysses everywhere",
        version(magic),
        version(&MAGIC)
    )
}

impl Session<'_> {
    /// Encodes the second message of a rank.
    pub(super) fn claim(&self, Claim { rank, world_size }: Claim) -> Vec<u8> {
        self.seal(b"rank", &[rank.to_le_bytes(), world_size.to_le_bytes()].concat())
    }

    /// Decodes a claim of [`CLAIM_BYTES`], if its sender knows the secret.
    pub(super) fn read_claim(&self, message: &[u8]) -> Option<Claim> {
        let (rank, world_size) = self.unseal(b"rank", message)?.split_first_chunk()?;
        let (rank, world_size) = (u64::from_le_bytes(*rank), u64::from_le_bytes(world_size.try_into().ok()?));
        Some(Claim { rank, world_size })
    }

    /// Encodes the host's answer to a claim.
    pub(super) fn reply(&self, Reply { verdict, world_size }: Reply) -> Vec<u8> {
        self.seal(b"root", &[&[verdict as u8][..], &world_size.to_le_bytes()].concat())
    }

    /// Decodes an answer of [`REPLY_BYTES`], if the host knows the secret.
    pub(super) fn read_reply(&self, message: &[u8]) -> Option<Reply> {
        let (verdict, world_size) = self.unseal(b"root", message)?.split_first()?;
        let verdict = *Verdict::ALL.get(usize::from(*verdict))?;
        Some(Reply { verdict, world_size: u64::from_le_bytes(world_size.try_into().ok()?) })
    }

    /// Appends a side's proof to its statement.
    fn seal(&self, side: &[u8; 4], stated: &[u8]) -> Vec<u8> {
        [stated, self.prove(side, stated).as_bytes()].concat()
    }

    /// Returns a side's statement without its proof, if the proof is right.
    fn unseal<'m>(&self, side: &[u8; 4], message: &'m [u8]) -> Option<&'m [u8]> {
        let (stated, proof) = message.split_last_chunk()?;
        (self.prove(side, stated) == blake3::Hash::from_bytes(*proof)).then_some(stated)
    }

    /// Returns the key for the frames of one side.
    pub(super) fn frame_key(&self, is_host: bool) -> FrameKey {
        FrameKey { key: *self.prove(b"keys", &[]).as_bytes(), is_host }
    }

    /// `blake3::Hash` compares in constant time.
    fn prove(&self, side: &[u8; 4], stated: &[u8]) -> blake3::Hash {
        let text = [&side[..], &self.root, &self.peer, stated].concat();
        blake3::keyed_hash(self.secret.key(), &text)
    }
}

/// The key for the frames of one connection, on one side of it.
pub(in crate::comm) struct FrameKey {
    key: [u8; 32],
    is_host: bool,
}

impl FrameKey {
    /// Returns the proof of frame `number` of this side.
    pub(super) fn prove_own(&self, number: u64, body: &[u8]) -> blake3::Hash {
        self.prove(self.is_host, number, body)
    }

    /// Returns whether `proof` is the other side's proof of such a frame.
    pub(super) fn is_proof(&self, number: u64, body: &[u8], proof: &[u8]) -> bool {
        self.prove(!self.is_host, number, body) == *proof
    }

    fn prove(&self, by_host: bool, number: u64, body: &[u8]) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new_keyed(&self.key);
        hasher.update(&[u8::from(by_host)]).update(&number.to_le_bytes()).update(body);
        hasher.finalize()
    }
}

/// Keeps the key out of logs.
impl std::fmt::Debug for FrameKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FrameKey").field("is_host", &self.is_host).finish_non_exhaustive()
    }
}
