//! Restoring a copy: the ranks agree on the newest complete one, and each node gets the files that its ranks load.

use super::MemoryCopies;
use super::choose::{Choice, CopyId, Holders, Listed, choose};
use super::transfer::{Transfer, send_files};
use crate::checkpoint::directory::saved_steps;
use crate::checkpoint::manifest::read_text;
use crate::checkpoint::state_file::StateFile;
use crate::checkpoint::stored_layouts::StoredLayouts;
use crate::checkpoint::{Checkpoint, CheckpointError, MANIFEST, Manifest};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// The result of [`MemoryCopies::newest`].
#[derive(Debug)]
pub struct NewestCopy {
    /// The newest copy of which every file is on some node.
    pub checkpoint: Option<MemoryCheckpoint>,
    /// Why newer copies, or damaged files, are ignored.
    pub refused: Vec<String>,
}

/// A complete copy, whose files may be on several nodes.
#[derive(Debug)]
pub struct MemoryCheckpoint {
    manifest: Manifest,
    /// The bytes that all nodes have, with their hash.
    text: String,
    holders: Holders,
}

impl MemoryCheckpoint {
    /// Returns the manifest.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }
}

/// A rank's part of the description of the copies.
#[derive(Serialize, Deserialize, Default)]
struct Described {
    /// Text of the manifest of the complete copy, from the first rank that has it.
    manifest: Option<String>,
    refused: Vec<String>,
}

impl MemoryCopies {
    /// Finds the newest complete copy, after verifying every file of every node. Collective.
    ///
    /// # Errors
    /// Fails if a directory cannot be listed, or communication fails.
    pub fn newest(&self) -> Result<NewestCopy, CheckpointError> {
        let mut own = Vec::new();
        let listed = self.list(&mut own).map_err(|error| error.to_string());
        let Choice { complete, incomplete } = choose(&self.all(listed)?, |rank| self.node_of(rank));
        let is_described_here = |holders: &Holders| holders.first_rank == self.group.rank();
        let mut described = Described { manifest: None, refused: own };
        for (holders, missing) in incomplete.iter().filter(|(holders, _)| is_described_here(holders)) {
            let step = holders.copy.step;
            // Unreadable since it was listed: nothing to name.
            if let Ok(manifest) = Manifest::read(&self.directories.of(step)) {
                let file = manifest.files.get(*missing).map_or("a file", |file| &file.name);
                described.refused.push(format!("the copy of step {step} is incomplete: no node has {file}"));
            }
        }
        let manifest = match &complete {
            Some(holders) if is_described_here(holders) => {
                read_text(&self.directories.of(holders.copy.step).join(MANIFEST)).map(Some)
            }
            _ => Ok(None),
        };
        let described = manifest.map(|manifest| Described { manifest, ..described });
        let all = self.all(described.map_err(|error| error.to_string()))?;
        let (manifests, refused): (Vec<_>, Vec<_>) =
            all.into_iter().map(|described| (described.manifest, described.refused)).unzip();
        let checkpoint = match (manifests.into_iter().flatten().next(), complete) {
            (Some(text), Some(holders)) => {
                let path = self.directories.of(holders.copy.step).join(MANIFEST);
                let manifest = Manifest::parse(&text, &path)?;
                Some(MemoryCheckpoint { manifest, text, holders })
            }
            _ => None,
        };
        Ok(NewestCopy { checkpoint, refused: refused.concat() })
    }

    /// Lists the copies in this node's directory, with this rank's share of their valid files.
    fn list(&self, refused: &mut Vec<String>) -> Result<Vec<Listed>, CheckpointError> {
        let ranks = self.ranks_of(self.node_of(self.group.rank()));
        let position = ranks.iter().take_while(|rank| **rank < self.group.rank()).count();
        let mut listed = Vec::new();
        for step in saved_steps(&self.directories.path)? {
            let dir = self.directories.of(step);
            let text = read_text(&dir.join(MANIFEST));
            let parsed = text.and_then(|text| Ok((Manifest::parse(&text, &dir.join(MANIFEST))?, text)));
            let (manifest, text) = match parsed {
                Ok(parsed) => parsed,
                Err(error) => {
                    refused.extend((position == 0).then(|| error.to_string()));
                    continue;
                }
            };
            let (layouts, mut valid) = (StoredLayouts::new(&manifest), Vec::new());
            for (index, entry) in manifest.files.iter().enumerate().skip(position).step_by(ranks.len()) {
                // Most files are on other nodes.
                if dir.join(&entry.name).symlink_metadata().is_err() {
                    continue;
                }
                let opened = StateFile::open(&dir, &manifest, &layouts, entry);
                match opened.and_then(|mut file| file.verify(entry.bytes, &entry.blake3)) {
                    Ok(()) => valid.push(index),
                    Err(error) => refused.push(error.to_string()),
                }
            }
            let hash = blake3::hash(text.as_bytes()).to_hex().to_string();
            listed.push(Listed { copy: CopyId { step, hash }, num_files: manifest.files.len(), valid });
        }
        Ok(listed)
    }

    /// Sends the files that ranks load to the nodes that lack them, and opens the copy in this node's directory.
    /// Collective. `needed` are the indices of the files that this rank will read.
    ///
    /// # Errors
    /// Returns [`CheckpointError::Refused`] with the first rank that failed. Also fails if communication fails.
    pub fn gather(
        &self,
        found: MemoryCheckpoint,
        needed: &BTreeSet<usize>,
    ) -> Result<Checkpoint, CheckpointError> {
        let MemoryCheckpoint { manifest, text, holders } = found;
        let (step, own) = (holders.copy.step, self.group.rank());
        let needed = self.all(Ok(needed.clone()))?;
        let mut of_nodes = vec![BTreeSet::new(); self.num_nodes()];
        needed.into_iter().enumerate().for_each(|(rank, files)| of_nodes[self.node_of(rank)].extend(files));
        let transfers = self.transfers(&manifest, &holders, &of_nodes);
        self.all(self.on_node(|directories| {
            if holders.manifest.contains(&self.node_of(own)) {
                return Ok(());
            }
            directories.begin(step)?;
            directories.publish(step, &text)
        }))?;
        let dir = self.directories.of(step);
        self.all(send_files(&*self.group, &*self.directories.storage, &dir, &transfers)?)?;
        let layouts = StoredLayouts::new(&manifest);
        let verify = |transfer: &Transfer| {
            StateFile::open(&dir, &manifest, &layouts, &transfer.file)?
                .verify(transfer.file.bytes, &transfer.file.blake3)
        };
        let verified = transfers.iter().filter(|transfer| transfer.to == own).try_for_each(verify);
        let opened = verified.and_then(|()| Checkpoint::open(&dir));
        self.all(opened.as_ref().map(|_| ()).map_err(ToString::to_string))?;
        opened
    }

    /// Returns who sends which file to whom, with the files of a node spread over its ranks.
    fn transfers(&self, manifest: &Manifest, holders: &Holders, needed: &[BTreeSet<usize>]) -> Vec<Transfer> {
        let one_of = |ranks: &[usize], file: usize| ranks[file % ranks.len()];
        let to_node = |node: usize| {
            let missing = needed[node]
                .iter()
                .filter(move |file| holders.files.get(**file).is_some_and(|nodes| !nodes.contains(&node)));
            missing.map(move |&file| {
                let sources: Vec<usize> = holders.files[file].iter().copied().collect();
                let source = one_of(&sources, node);
                let from = one_of(&self.ranks_of(source), file);
                let to = one_of(&self.ranks_of(node), file);
                Transfer { file: manifest.files[file].clone(), from, to }
            })
        };
        (0..self.num_nodes()).flat_map(to_node).collect()
    }
}
