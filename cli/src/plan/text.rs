//! The plan as text.

use super::budget::{Available, per_rank};
use super::choices::ring;
use super::table::{Table, bytes, flops, parameters, seconds};
use super::{Report, choices};
use std::fmt::{self, Display, Formatter};
use ulysses::config::ParameterGroup;
use ulysses::device::DeviceKind;
use ulysses::engine::Moment;
use ulysses::estimate::{Candidate, CopiedBytes, MomentMemory, Workload};
use ulysses::memory::Category;
use ulysses::monitor::counted;

/// Formats a plan as text.
pub(super) struct Text<'a>(pub(super) &'a Report);

impl Display for Text<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        self.head(f)?;
        self.memory(f)?;
        self.work(f)?;
        self.communication(f)?;
        self.time(f)?;
        self.budget(f)?;
        self.alternatives(f)?;
        self.meshes(f)
    }
}

impl Text<'_> {
    fn head(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Report { name, planned, seq_len, assumed, .. } = self.0;
        let Workload { config, model, ranks_per_node, device, .. } = &planned.workload;
        if let Some(assumed) = assumed {
            writeln!(f, "assumed {assumed}; --set KEY=VALUE or a config changes them")?;
        }
        writeln!(
            f,
            "model   {name}: {}, {} layers, hidden size {}, {} query heads, {} KV heads",
            parameters(model.num_parameters()),
            model.num_layers,
            model.hidden_size,
            model.num_heads,
            model.num_kv_heads
        )?;
        let (dp, sp) = (config.mesh.dp_size, config.mesh.sp_size);
        writeln!(
            f,
            "mesh    dp {dp} × sp {sp}{}, {ranks_per_node} ranks per node on {}, ZeRO stage {}, {}{}",
            ring(sp, config.seq_sharding().ring_size),
            if *device == DeviceKind::Cuda { "GPUs" } else { "CPUs" },
            config.zero_axes().with_stage(config.zero.stage),
            config.precision.dtype().as_str(),
            features(planned)
        )?;
        writeln!(
            f,
            "batch   {} of {seq_len} tokens × {} × dp {dp}: {} tokens per step",
            counted(config.micro_batch_size, "sequence"),
            counted(config.gradient_accumulation_steps, "micro batch"),
            config.train_batch_size * seq_len
        )?;
        config.zero_partition_note().map_or(Ok(()), |note| writeln!(f, "note    {note}"))
    }

    fn memory(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Candidate { workload, plan, .. } = &self.0.planned;
        writeln!(
            f,
            "\nmemory per rank: {} peak (rank {}, {}), {} persistent",
            bytes(plan.peak_bytes as f64),
            plan.rank,
            plan.peak_at,
            bytes(plan.persistent_bytes as f64)
        )?;
        if plan.offloaded_bytes > 0 {
            let place = if workload.device == DeviceKind::Cuda { "host memory" } else { "files" };
            let ranks = workload.ranks_per_node.min(workload.config.world_size());
            let per_node = plan.offloaded_bytes as f64 * ranks as f64;
            let per_rank = bytes(plan.offloaded_bytes as f64);
            writeln!(f, "{place}: {per_rank} per rank, {} per node", bytes(per_node))?;
        }
        if let Some(copies) = self.0.copies_in_memory {
            let CopiedBytes { per_node, of_node_before, peak_per_node, .. } = copies;
            let [per_node, before, peak] =
                [per_node, of_node_before, peak_per_node].map(|amount| bytes(amount as f64));
            writeln!(
                f,
                "host memory of copies (checkpoint.memory_interval): {per_node} per node, {before} of it for the node before; \
                 {peak} while a copy is made"
            )?;
        }
        let parts = self.shown_moments().map(|moment| (moment, [moment.at.to_string()]));
        let mut table = Table::new(["part of the step"], parts);
        for (index, category) in Category::ALL.into_iter().enumerate() {
            table.push_bytes(category.name(), |moment| moment.by_category[index]);
        }
        table.push_bytes("total", |moment| moment.bytes);
        table.write(f)
    }

    /// Returns the parts to print: first and last layer, everything outside of layers, and the peak.
    fn shown_moments(&self) -> impl Iterator<Item = &MomentMemory> {
        let Candidate { workload, plan, .. } = &self.0.planned;
        let last = workload.model.num_layers.saturating_sub(1);
        let peak = plan.peak_at;
        plan.timeline.iter().filter(move |moment| match moment.at {
            at if at == peak => true,
            Moment::Forward { layer } | Moment::Backward { layer } => layer == 0 || layer == last,
            _ => true,
        })
    }

    fn work(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Candidate { workload: Workload { config, .. }, plan, .. } = &self.0.planned;
        let (ranks, tokens) = (config.world_size() as f64, config.train_batch_size * self.0.seq_len);
        writeln!(
            f,
            "\nFLOPs per rank and step: {} (causal attention counts visible pairs only), plus {} recomputed; about {} \
             per token",
            flops(plan.model_flops),
            flops(plan.recompute_flops),
            flops(plan.model_flops * ranks / tokens as f64)
        )
    }

    fn communication(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let plan = &self.0.planned.plan;
        writeln!(f, "\nbytes sent per rank and step")?;
        let purposes = plan.sent_by_purpose.iter().map(|(purpose, sent)| (sent, [purpose.to_string()]));
        let mut table =
            Table::new(["purpose"], purposes.chain(std::iter::once((&plan.sent, ["total".to_owned()]))));
        table.push_bytes("within node", |sent| sent.intra_node_bytes);
        table.push_bytes("between nodes", |sent| sent.inter_node_bytes);
        table.write(f)
    }

    fn time(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Some(time) = &self.0.planned.time else { return Ok(()) };
        writeln!(
            f,
            "\npredicted step time on {}: {}, {:.0} tokens/s on all ranks, {:.1} % MFU",
            time.machine,
            seconds(time.total_seconds),
            time.tokens_per_second,
            100.0 * time.mfu
        )?;
        let parts = time.parts.named();
        let mut table =
            Table::new(["part"], parts.iter().map(|(part, seconds)| (seconds, [(*part).to_owned()])));
        table.push("time", |part| seconds(*part));
        table.push("share", |part| format!("{:.1} %", 100.0 * part / time.total_seconds));
        table.write(f)?;
        writeln!(
            f,
            "  recomputation, included: {}; communication overlapped with compute, not included: {}\n  rates of the machine: {}",
            seconds(time.recompute_seconds),
            seconds(time.hidden_seconds),
            time.origin
        )
    }

    fn budget(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Some(Available { budget, reserve_bytes }) = self.0.available else {
            return writeln!(
                f,
                "\nuse --memory-gib N to check whether this fits, and how long a sequence fits"
            );
        };
        let Candidate { plan, excess, host_bytes_per_node: needed_host, max_seq_len, .. } = &self.0.planned;
        let longest = max_seq_len.map_or("none".to_owned(), |longest| format!("{longest} tokens"));
        let size = |amount: u64| bytes(amount as f64);
        let (per_rank, host) = (per_rank(budget.rank_bytes, reserve_bytes), budget.host_bytes_per_node);
        let Some(excess) = excess else {
            let host = match host {
                Some(host) => format!(" and {} of host memory per node", size(host)),
                None if *needed_host > 0 => " (host memory not checked; set --host-memory-gib)".to_owned(),
                None => String::new(),
            };
            return writeln!(f, "\nfits into {per_rank}{host}; longest sequence that fits: {longest}");
        };
        let of_rank = (excess.rank_bytes > 0).then(|| {
            let (needed, lacking) = (size(plan.peak_bytes), size(excess.rank_bytes));
            format!("rank {} needs {needed}, {lacking} more than {per_rank}", plan.rank)
        });
        let of_host = host.filter(|_| excess.host_bytes_per_node > 0).map(|host| {
            let [needed, lacking, host] = [*needed_host, excess.host_bytes_per_node, host].map(size);
            format!("a node needs {needed} of host memory, {lacking} more than {host} per node")
        });
        let lacking = [of_rank, of_host].into_iter().flatten().collect::<Vec<_>>().join("; ");
        writeln!(f, "\nDOES NOT FIT: {lacking}; longest sequence that fits: {longest}")
    }

    fn alternatives(&self, f: &mut Formatter<'_>) -> fmt::Result {
        writeln!(f, "\neffect of single changes")?;
        choices::alternatives(self.0).write(f)
    }

    fn meshes(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let shard_size = self.0.planned.workload.config.zero.mics_shard_size;
        let shards = shard_size.map(|size| format!(" (dp a multiple of the shard size {size})"));
        writeln!(
            f,
            "\nmeshes with the same number of ranks and the same batch{}",
            shards.unwrap_or_default()
        )?;
        choices::meshes(self.0).write(f)
    }
}

/// Returns the memory-saving features, each after a comma.
fn features(Candidate { workload, decided, .. }: &Candidate) -> String {
    let Workload { config, model, device, .. } = workload;
    let mut features = Vec::new();
    if config.ulysses.activation_checkpointing {
        let layers = match config.ulysses.activation_checkpointing_interval {
            1 => String::new(),
            interval => format!(" (1 layer in {interval})"),
        };
        let place = match (config.activation_checkpointing.cpu_checkpointing, device) {
            (false, _) => "",
            (true, DeviceKind::Cuda) => " with offload to host memory",
            (true, DeviceKind::Cpu) => " with offload to a file",
        };
        features.push(format!("activation checkpointing{layers}{place}"));
        let attention = match decided.config.saves_attention_output() {
            true => "attention output saved",
            false => "attention recomputed",
        };
        let auto = if config.ulysses.save_attention_output.is_none() { " (auto)" } else { "" };
        features.push(format!("{attention}{auto}"));
    }
    features.extend(config.ulysses.tile_tokens.map(|tokens| format!("tiles of {tokens} tokens")));
    if config.ulysses.head_chunks > 1 {
        features.push(format!("{} head chunks", config.ulysses.head_chunks));
    }
    for (what, offload) in
        [("optimizer state", &config.zero.offload_optimizer), ("parameters", &config.zero.offload_param)]
    {
        if offload.is_moved_from(*device) {
            let place = if offload.is_in_file() { "a file" } else { "host memory" };
            features.push(format!("{what} in {place}"));
        }
    }
    let is_frozen = |name: &str| ParameterGroup::is_frozen(&config.ulysses.parameter_groups, name);
    let frozen = model.num_parameters_where(is_frozen);
    if frozen > 0 {
        features.push(format!("{} trained", parameters(model.num_parameters() - frozen)));
    }
    features.into_iter().map(|feature| format!(", {feature}")).collect()
}
