//! The completion order of a group's operations.

/// A channel whose operations complete in the order in which they were issued; different channels are
/// independent. A group has one channel for its collectives and two for each peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct OrderedChannel {
    /// Address of the state that the members share, or of a rank's member list; it identifies the group.
    pub(super) group: usize,
    pub(super) kind: ChannelKind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ChannelKind {
    Collectives,
    SendTo(usize),
    RecvFrom(usize),
}

/// The next sequence number of each channel of a group.
#[derive(Debug)]
pub(super) struct Sequences {
    pub(super) collective: u64,
    /// By peer.
    sends: Vec<u64>,
    recvs: Vec<u64>,
}

impl Sequences {
    pub(super) fn new(world_size: usize) -> Self {
        Self { collective: 0, sends: vec![0; world_size], recvs: vec![0; world_size] }
    }

    /// Returns the sequence number for an operation issued now.
    pub(super) fn next(&mut self, kind: ChannelKind) -> u64 {
        let counter = match kind {
            ChannelKind::Collectives => &mut self.collective,
            ChannelKind::SendTo(peer) => &mut self.sends[peer],
            ChannelKind::RecvFrom(peer) => &mut self.recvs[peer],
        };
        *counter += 1;
        *counter - 1
    }
}
