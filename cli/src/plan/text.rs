//! The plan as text.

use super::budget::per_rank;
use super::choices::Choices;
use super::table::{bytes, flops, parameters, row, seconds, write_table, write_table_with_notes};
use super::{Budget, Features, MeshReport, Report, choices};
use std::fmt::{self, Display, Formatter};
use ulysses::engine::Moment;
use ulysses::estimate::{CopiedBytes, MomentMemory, SentBytes};
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
        let Report { model, mesh, seq_len, micro_batch_size, gradient_accumulation_steps, .. } = self.0;
        if let Some(assumed) = &self.0.assumed {
            writeln!(f, "assumed {assumed}; --set KEY=VALUE or a config changes them")?;
        }
        writeln!(
            f,
            "model   {}: {}, {} layers, hidden size {}, {} query heads, {} KV heads",
            model.name,
            parameters(model.parameters),
            model.num_layers,
            model.hidden_size,
            model.num_heads,
            model.num_kv_heads
        )?;
        let ring = match mesh.ring_size {
            1 => String::new(),
            ring_size => format!(" (ring {ring_size} × ulysses {})", mesh.sp / ring_size),
        };
        writeln!(
            f,
            "mesh    dp {} × sp {}{ring}, {} ranks per node on {}, ZeRO stage {}, {}{}",
            mesh.dp,
            mesh.sp,
            mesh.ranks_per_node,
            if self.0.device == "cuda" { "GPUs" } else { "CPUs" },
            self.0.zero_partition_axes.with_stage(self.0.zero_stage),
            self.0.dtype,
            self.features()
        )?;
        writeln!(
            f,
            "batch   {} of {seq_len} tokens × {} × dp {}: {} tokens per step",
            counted(*micro_batch_size, "sequence"),
            counted(*gradient_accumulation_steps, "micro batch"),
            mesh.dp,
            self.0.tokens_per_step
        )?;
        self.0.zero_note.as_ref().map_or(Ok(()), |note| writeln!(f, "note    {note}"))
    }

    /// Returns the memory-saving features, each after a comma.
    fn features(&self) -> String {
        let Features { activation_checkpointing_interval: interval, tile_tokens, head_chunks, .. } =
            self.0.features;
        let mut features = Vec::new();
        if self.0.activation_checkpointing {
            let layers = if interval == 1 { String::new() } else { format!(" (1 layer in {interval})") };
            let place = match (self.0.features.offload_checkpoints, self.0.device) {
                (false, _) => "",
                (true, "cuda") => " with offload to host memory",
                (true, _) => " with offload to a file",
            };
            features.push(format!("activation checkpointing{layers}{place}"));
            let attention = match self.0.features.save_attention_output {
                true => "attention output saved",
                false => "attention recomputed",
            };
            let auto = if self.0.features.is_save_decided { " (auto)" } else { "" };
            features.push(format!("{attention}{auto}"));
        }
        features.extend(tile_tokens.map(|tokens| format!("tiles of {tokens} tokens")));
        if head_chunks > 1 {
            features.push(format!("{head_chunks} head chunks"));
        }
        for (what, device) in [
            ("optimizer state", self.0.features.offload_optimizer),
            ("parameters", self.0.features.offload_param),
        ] {
            let place = match device {
                "nvme" => Some("a file"),
                "cpu" if self.0.device == "cuda" => Some("host memory"),
                _ => None,
            };
            features.extend(place.map(|place| format!("{what} in {place}")));
        }
        if self.0.features.frozen_parameters > 0 {
            let trained = self.0.model.parameters - self.0.features.frozen_parameters;
            features.push(format!("{} trained", parameters(trained)));
        }
        features.into_iter().map(|feature| format!(", {feature}")).collect()
    }

    fn memory(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let plan = &self.0.rank;
        writeln!(
            f,
            "\nmemory per rank: {} peak (rank {}, {}), {} persistent",
            bytes(plan.peak_bytes as f64),
            plan.rank,
            plan.peak_at,
            bytes(plan.persistent_bytes as f64)
        )?;
        if plan.offloaded_bytes > 0 {
            let place = if self.0.device == "cuda" { "host memory" } else { "files" };
            let MeshReport { dp, sp, ranks_per_node, .. } = self.0.mesh;
            let per_node = plan.offloaded_bytes as f64 * ranks_per_node.min(dp * sp) as f64;
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
        let mut rows = vec![row(["part of the step"])];
        rows[0].extend(Category::ALL.map(|category| category.name().to_owned()));
        rows[0].push("total".to_owned());
        for moment in self.shown_moments() {
            let mut cells = vec![moment.at.to_string()];
            cells.extend(moment.by_category.iter().map(|held| bytes(*held as f64)));
            cells.push(bytes(moment.bytes as f64));
            rows.push(cells);
        }
        write_table(f, &rows)
    }

    /// Returns the parts to print: first and last layer, everything outside of layers, and the peak.
    fn shown_moments(&self) -> impl Iterator<Item = &MomentMemory> {
        let last = self.0.model.num_layers.saturating_sub(1);
        let peak = self.0.rank.peak_at;
        self.0.rank.timeline.iter().filter(move |moment| match moment.at {
            at if at == peak => true,
            Moment::Forward { layer } | Moment::Backward { layer } => layer == 0 || layer == last,
            _ => true,
        })
    }

    fn work(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let plan = &self.0.rank;
        let ranks = (self.0.mesh.dp * self.0.mesh.sp) as f64;
        writeln!(
            f,
            "\nFLOPs per rank and step: {} (causal attention counts visible pairs only), plus {} recomputed; about {} \
             per token",
            flops(plan.model_flops),
            flops(plan.recompute_flops),
            flops(plan.model_flops * ranks / self.0.tokens_per_step as f64)
        )
    }

    fn communication(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let plan = &self.0.rank;
        writeln!(f, "\nbytes sent per rank and step")?;
        let mut rows = vec![row(["purpose", "within node", "between nodes"])];
        let cells = |name: String, sent: SentBytes| {
            vec![name, bytes(sent.intra_node_bytes as f64), bytes(sent.inter_node_bytes as f64)]
        };
        rows.extend(plan.sent_by_purpose.iter().map(|(purpose, sent)| cells(purpose.to_string(), *sent)));
        rows.push(cells("total".to_owned(), plan.sent));
        write_table(f, &rows)
    }

    fn time(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Some(time) = &self.0.step_time else { return Ok(()) };
        writeln!(
            f,
            "\npredicted step time on {}: {}, {:.0} tokens/s on all ranks, {:.1} % MFU",
            time.machine,
            seconds(time.total_seconds),
            time.tokens_per_second,
            100.0 * time.mfu
        )?;
        let mut rows = vec![row(["part", "time", "share"])];
        rows.extend(time.parts.named().map(|(part, part_seconds)| {
            let share = 100.0 * part_seconds / time.total_seconds;
            vec![part.to_owned(), seconds(part_seconds), format!("{share:.1} %")]
        }));
        write_table(f, &rows)?;
        writeln!(
            f,
            "  recomputation, included: {}; communication overlapped with compute, not included: {}\n  rates of the machine: {}",
            seconds(time.recompute_seconds),
            seconds(time.hidden_seconds),
            time.origin
        )
    }

    fn budget(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Some(Budget { bytes: budget, reserve_bytes, host_bytes_per_node: host, fits, max_seq_len }) =
            &self.0.budget
        else {
            return writeln!(
                f,
                "\nuse --memory-gib N to check whether this fits, and how long a sequence fits"
            );
        };
        let longest = match max_seq_len {
            Some(longest) => format!("{longest} tokens"),
            None => "none".to_owned(),
        };
        let (needed, budget) = (self.0.rank.peak_bytes, *budget);
        let (needed_host, size) = (self.0.host_bytes_per_node, |amount: u64| bytes(amount as f64));
        if *fits {
            let host = match host {
                Some(host) => format!(" and {} of host memory per node", size(*host)),
                None if needed_host > 0 => " (host memory not checked; set --host-memory-gib)".to_owned(),
                None => String::new(),
            };
            let budget = per_rank(budget, *reserve_bytes);
            return writeln!(f, "\nfits into {budget}{host}; longest sequence that fits: {longest}");
        }
        let of_rank = (needed > budget).then(|| {
            let (rank, lacking) = (self.0.rank.rank, size(needed - budget));
            let budget = per_rank(budget, *reserve_bytes);
            format!("rank {rank} needs {}, {lacking} more than {budget}", size(needed))
        });
        let of_host = host.filter(|host| needed_host > *host).map(|host| {
            let lacking = size(needed_host - host);
            format!(
                "a node needs {} of host memory, {lacking} more than {} per node",
                size(needed_host),
                size(host)
            )
        });
        let lacking = [of_rank, of_host].into_iter().flatten().collect::<Vec<_>>().join("; ");
        writeln!(f, "\nDOES NOT FIT: {lacking}; longest sequence that fits: {longest}")
    }

    fn alternatives(&self, f: &mut Formatter<'_>) -> fmt::Result {
        writeln!(f, "\neffect of single changes")?;
        write_choices(f, choices::alternatives(self.0))
    }

    fn meshes(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let shards = self.0.shard_size.map(|size| format!(" (dp a multiple of the shard size {size})"));
        writeln!(
            f,
            "\nmeshes with the same number of ranks and the same batch{}",
            shards.unwrap_or_default()
        )?;
        write_choices(f, choices::meshes(self.0))
    }
}

fn write_choices(f: &mut Formatter<'_>, choices: Choices) -> fmt::Result {
    let Choices { head, rows, row_notes, row_notes_head, footnotes } = choices;
    let num_columns = head.len();
    let head_of_notes = (!row_notes_head.is_empty()).then_some(row_notes_head);
    let head = head.into_iter().chain(head_of_notes).map(str::to_owned).collect();
    let rows = rows.into_iter().zip(row_notes).map(|(mut row, note)| {
        row.extend(note);
        row
    });
    write_table_with_notes(f, &std::iter::once(head).chain(rows).collect::<Vec<_>>(), num_columns)?;
    footnotes.iter().try_for_each(|note| writeln!(f, "  {note}"))
}
