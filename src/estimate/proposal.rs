//! Proposes a mesh for a cluster, a model, a sequence length and a memory size.

use super::{Candidate, Criteria, MemoryBudget, Workload};
use crate::config::PartitionAxes;
use crate::engine::EngineError;
use crate::mesh::{Cluster, MeshShape, SeqSharding, UlyssesLimits};

/// The longest ring that is tried: a plan of a ring runs all of its steps.
const MAX_PROPOSED_RING: usize = 64;

/// The proposed mesh for a cluster, and the meshes that were tried, with one micro batch per data-parallel rank.
#[derive(Debug, Clone, PartialEq)]
pub struct Proposal {
    /// The meshes that were tried, by ascending pp, then sp.
    pub tried: Vec<Candidate>,
    /// The proposed mesh: the smallest pp and sp that fit or, if none does, the one that needs least memory, with the longest
    /// sequence that fits on it.
    pub chosen: Candidate,
}

impl Workload {
    /// Proposes the mesh with the smallest sp whose ranks stay within `budget`. Sizes within a node come first, then
    /// whole nodes; the remaining ranks are data-parallel. sp is no larger than necessary, because it trades activation
    /// memory for communication; tp is the workload's, and so is pp if any sp fits with it. If none does, pipelines with more stages,
    /// of whole nodes, are tried, because stages are idle for a part of a step. Its ring is that of [`SeqSharding::auto`](crate::mesh::SeqSharding::auto), so sp may
    /// exceed the number of heads. The rest of the workload's mesh and its batch size are ignored: each data-parallel rank has one micro
    /// batch, in a pipeline one per stage.
    ///
    /// # Errors
    /// As [`plan`](Self::plan).
    pub fn propose(
        &self,
        cluster: Cluster,
        budget: impl Into<MemoryBudget>,
    ) -> Result<Proposal, EngineError> {
        let budget = Some(budget.into());
        let mut tried: Vec<Candidate> = Vec::new();
        for pp in self.sizes_of_pp(cluster) {
            for sp in self.sizes_of_sp(cluster, pp)? {
                let workload = self.on_cluster(cluster, pp, sp);
                let mut trial = workload.candidate(budget)?;
                for partitioned in workload.with_more_partitions() {
                    if trial.fits() {
                        break;
                    }
                    trial = partitioned.candidate(budget)?;
                }
                tried.push(trial.clone());
                if trial.fits() {
                    return Ok(Proposal { tried, chosen: trial });
                }
            }
        }
        let smallest = tried.iter().min_by_key(|trial| trial.plan.peak_bytes).cloned();
        let smallest = smallest.unwrap_or_else(|| unreachable!("sp 1 is always tried"));
        let chosen = smallest.rated(Criteria { budget, machine: None })?;
        Ok(Proposal { tried, chosen })
    }

    /// Returns the number of nodes of the ranks that share a sequence.
    pub fn nodes_per_sequence(&self) -> usize {
        self.config.mesh.ranks_per_sequence().div_ceil(self.ranks_per_node.max(1))
    }

    /// Returns the sizes of pp to try: the configured one, then larger ones with which a stage is whole nodes.
    fn sizes_of_pp(&self, cluster: Cluster) -> impl Iterator<Item = usize> + use<> {
        let configured = self.config.mesh.pp_size;
        let most = if self.may_have_stages() { cluster.nodes.min(self.model.num_layers()) } else { 0 };
        let larger = (configured + 1..=most).filter(move |pp| cluster.nodes.is_multiple_of(*pp));
        std::iter::once(configured).chain(larger)
    }

    /// Returns the sizes of sp to try: divisors of a node's ranks, then whole nodes, up to the number of tokens and without
    /// rings that are too long to plan.
    fn sizes_of_sp(
        &self,
        cluster: Cluster,
        pp: usize,
    ) -> Result<impl Iterator<Item = usize> + use<>, EngineError> {
        let tp_size = self.config.mesh.tp_size;
        let of_stage = cluster.world_size() / (pp * tp_size);
        // Neighbors are one tp rank each.
        let (nodes, ranks_per_node) = (cluster.nodes, (cluster.ranks_per_node / tp_size).max(1));
        let max_sp = self.config.require_seq_len()? / tp_size;
        let within = (1..=ranks_per_node).filter(move |sp| ranks_per_node.is_multiple_of(*sp));
        let across = (2..=nodes).filter(move |count| nodes.is_multiple_of(*count));
        let across = across.map(move |count| count * ranks_per_node);
        let limits = UlyssesLimits { ranks_per_node, ..self.ulysses_limits() };
        let is_short_ring = move |sp: &usize| SeqSharding::auto(*sp, limits).ring_size <= MAX_PROPOSED_RING;
        Ok(within
            .chain(across)
            .filter(move |sp| *sp <= max_sp && of_stage.is_multiple_of(*sp) && is_short_ring(sp)))
    }

    fn on_cluster(&self, cluster: Cluster, pp: usize, sp: usize) -> Self {
        let mut workload = Self { ranks_per_node: cluster.ranks_per_node, ..self.clone() };
        let sharding = SeqSharding::auto(sp, workload.ulysses_limits());
        let others = MeshShape { pp, dp: 1, sp, tp: workload.config.mesh.tp_size };
        workload.set_mesh(MeshShape { dp: cluster.world_size() / others.num_ranks(), ..others }, sharding);
        let config = &mut workload.config;
        if others.divides_model() {
            // Training refuses other partitions.
            config.ulysses.zero_partition_axes = PartitionAxes::Dp;
            config.zero.mics_shard_size = None;
        }
        // A pipeline with fewer micro batches than stages is mostly idle.
        config.gradient_accumulation_steps = others.pp;
        config.train_batch_size = config.micro_batch_size * others.pp * config.mesh.dp_size;
        workload
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::model::shape;
    use ulysses_kernels::device::DeviceKind;

    const TWO_OF_8: Cluster = Cluster { nodes: 2, ranks_per_node: 8 };
    const GIB: u64 = 1 << 30;

    fn workload(seq_len: usize) -> Workload {
        let config = r#"{"train_batch_size": 1, "bf16": {"enabled": true}, "zero_optimization": {"stage": 3},
            "ulysses": {"activation_checkpointing": true, "save_attention_output": false}}"#;
        let config = Config::from_json_str(config, "c.json").unwrap();
        let model = shape("llama3-8b").unwrap();
        Workload { config, model, document_len: None, ranks_per_node: 1, device: DeviceKind::Cpu }
            .with_seq_len(seq_len)
    }

    fn sp(trial: &Candidate) -> usize {
        trial.workload.config.mesh.sp_size
    }

    fn over_sp(seq_len: usize) -> Workload {
        let mut workload = workload(seq_len);
        workload.config.ulysses.zero_partition_axes = PartitionAxes::DpSp;
        workload
    }

    #[test]
    fn the_smallest_sp_that_fits_is_chosen_within_a_node_first() {
        let proposal = workload(262_144).propose(TWO_OF_8, 80 * GIB).unwrap();
        let workload_of_chosen = &proposal.chosen.workload;
        assert!(proposal.chosen.fits() && workload_of_chosen.config.world_size() == 16, "{proposal:?}");
        assert_eq!(workload_of_chosen.nodes_per_sequence(), 1, "{proposal:?}");
        let sizes: Vec<usize> = proposal.tried.iter().map(sp).collect();
        assert_eq!(sizes, [1, 2, 4, 8, 16][..sizes.len()]);
        let (last, before) = proposal.tried.split_last().unwrap();
        assert_eq!(*last, proposal.chosen);
        assert!(!before.is_empty() && before.iter().all(|trial| !trial.fits()), "{proposal:?}");
        assert_eq!(sp(&workload(1024).propose(TWO_OF_8, 80 * GIB).unwrap().chosen), 1);
    }

    #[test]
    fn a_sequence_goes_across_nodes_only_when_one_node_is_too_small() {
        let whole_node = over_sp(1 << 22).on_cluster(TWO_OF_8, 1, 8).plan().unwrap().peak_bytes;
        let proposal = workload(1 << 22).propose(TWO_OF_8, whole_node - 1).unwrap();
        assert_eq!((sp(&proposal.chosen), proposal.chosen.workload.nodes_per_sequence()), (16, 2));
        assert!(proposal.chosen.fits());
        assert_eq!(sp(&workload(1 << 22).propose(TWO_OF_8, whole_node).unwrap().chosen), 8);
    }

    #[test]
    fn a_model_with_few_heads_gets_a_ring_across_nodes() {
        let four_of_8 = Cluster { nodes: 4, ranks_per_node: 8 };
        let mut few = workload(1 << 22);
        few.model = few.model.with_attention(|layer| {
            (layer.num_heads, layer.num_kv_heads, layer.head_dim) = (16, 2, 256);
        });
        few.config.ulysses.zero_partition_axes = PartitionAxes::DpSp;
        let of_two_nodes = few.on_cluster(four_of_8, 1, 16).plan().unwrap().peak_bytes;
        let proposal = few.propose(four_of_8, of_two_nodes - 1).unwrap();
        let ring_size = |trial: &Candidate| trial.workload.config.ulysses.ring_size;
        let Candidate { workload, .. } = &proposal.chosen;
        // Sixteen heads, but 32 ranks: each group of eight divides the heads on its node.
        assert_eq!(workload.config.mesh, MeshShape::dp_sp(1, 32).into(), "{proposal:?}");
        assert_eq!((ring_size(&proposal.chosen), workload.nodes_per_sequence()), (4, 4), "{proposal:?}");
        assert!(proposal.chosen.fits() && proposal.tried[..4].iter().all(|trial| ring_size(trial) == 1));
    }

    #[test]
    fn tp_stays_and_its_ranks_count_as_one() {
        let mut divided = workload(327_680);
        divided.config.mesh.tp_size = 2;
        let proposal = divided.propose(TWO_OF_8, 80 * GIB).unwrap();
        let chosen = &proposal.chosen.workload.config;
        assert_eq!((chosen.mesh.tp_size, chosen.world_size()), (2, 16), "{proposal:?}");
        assert!(proposal.chosen.fits() && proposal.chosen.workload.nodes_per_sequence() == 1, "{proposal:?}");
        let sizes: Vec<usize> = proposal.tried.iter().map(sp).collect();
        assert_eq!(sizes, [1, 2], "{proposal:?}");
    }

    #[test]
    fn partitions_span_sp_only_where_they_must() {
        let fits = |size, axes| {
            move |trial: &Candidate| {
                trial.fits() && (sp(trial), trial.workload.config.zero_axes()) == (size, axes)
            }
        };
        let short = workload(1024).propose(TWO_OF_8, 80 * GIB).unwrap();
        assert!(fits(1, PartitionAxes::Dp)(&short.chosen), "{short:?}");
        let over_dp = workload(1 << 22).on_cluster(TWO_OF_8, 1, 8).plan().unwrap().peak_bytes;
        let proposal = workload(1 << 22).propose(TWO_OF_8, over_dp).unwrap();
        assert!(fits(8, PartitionAxes::Dp)(&proposal.chosen), "{proposal:?}");
        let proposal = workload(1 << 22).propose(TWO_OF_8, over_dp - 1).unwrap();
        assert!(fits(8, PartitionAxes::DpSp)(&proposal.chosen), "{proposal:?}");
    }

    #[test]
    fn an_undecided_attention_output_is_saved_only_if_it_fits() {
        let peak = |saves: Option<bool>| {
            let mut workload = workload(1 << 22).on_cluster(TWO_OF_8, 1, 8);
            workload.config.ulysses.save_attention_output = saves;
            (workload.plan().unwrap().peak_bytes, workload)
        };
        let [(saved, _), (recomputed, _), (undecided, workload)] = [Some(true), Some(false), None].map(peak);
        assert!(saved > recomputed && undecided == saved);
        for (budget, saves) in [(None, true), (Some(saved), true), (Some(saved - 1), false), (Some(1), false)]
        {
            let decided = workload.candidate(budget.map(MemoryBudget::from)).unwrap().decided;
            assert_eq!(decided.config.ulysses.save_attention_output, Some(saves), "{budget:?}");
        }
        let alone = Workload { config: workload.config.clone(), ..workload.clone() };
        let proposal = alone.propose(TWO_OF_8, recomputed).unwrap();
        assert_eq!((sp(&proposal.chosen), proposal.chosen.plan.peak_bytes), (8, recomputed), "{proposal:?}");
    }

    #[test]
    fn if_nothing_fits_the_longest_sequence_that_would_is_reported() {
        let proposal = workload(1 << 22).propose(TWO_OF_8, 100 * GIB).unwrap();
        // Also two stages, with up to the ranks of a node each.
        assert!(!proposal.chosen.fits() && proposal.tried.len() == 9, "{proposal:?}");
        let longest = proposal.chosen.max_seq_len.unwrap();
        let chosen = sp(&proposal.chosen);
        let peak = |seq_len| over_sp(seq_len).on_cluster(TWO_OF_8, 1, chosen).plan().unwrap().peak_bytes;
        assert!(longest.is_multiple_of(chosen), "{longest} tokens over {chosen} ranks");
        assert!(peak(longest) <= 100 * GIB && peak(longest + chosen) > 100 * GIB);
    }
}
