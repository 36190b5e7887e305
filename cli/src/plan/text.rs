//! The plan as text.

use super::choices::Choices;
use super::table::{bytes, flops, parameters, row, seconds, write_table};
use super::{Budget, Features, Report, choices};
use std::fmt::{self, Display, Formatter};
use ulysses::engine::Moment;
use ulysses::estimate::{MomentMemory, SentBytes};
use ulysses::memory::Category;

/// What people read.
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
        writeln!(
            f,
            "model   {}: {}, {} layers, {} wide, {} query heads over {} KV heads",
            model.name,
            parameters(model.parameters),
            model.num_layers,
            model.hidden_size,
            model.num_heads,
            model.num_kv_heads
        )?;
        writeln!(
            f,
            "mesh    dp {} × sp {}, {} ranks per node, ZeRO stage {}, {}{}",
            mesh.dp,
            mesh.sp,
            mesh.ranks_per_node,
            self.0.zero_stage,
            self.0.dtype,
            self.features()
        )?;
        writeln!(
            f,
            "batch   {micro_batch_size} row(s) of {seq_len} tokens × {gradient_accumulation_steps} micro batch(es) \
             × dp {}: {} tokens per step",
            mesh.dp, self.0.tokens_per_step
        )?;
        self.0.zero_note.as_ref().map_or(Ok(()), |note| writeln!(f, "note    {note}"))
    }

    /// What bounds the memory of a step, each after a comma.
    fn features(&self) -> String {
        let Features { activation_checkpointing_interval: interval, tile_tokens, head_chunks, .. } =
            self.0.features;
        let mut features = Vec::new();
        if self.0.activation_checkpointing {
            let layers = if interval == 1 { String::new() } else { format!(" of 1 layer in {interval}") };
            let place = match (self.0.features.offload_checkpoints, self.0.device) {
                (false, _) => "",
                (true, "cuda") => " to the host's memory",
                (true, _) => " to a file",
            };
            features.push(format!("activation checkpointing{layers}{place}"));
        }
        features.extend(tile_tokens.map(|tokens| format!("tiles of {tokens} tokens")));
        if head_chunks > 1 {
            features.push(format!("{head_chunks} chunks of heads"));
        }
        for (what, device) in [
            ("optimizer state", self.0.features.offload_optimizer),
            ("parameters", self.0.features.offload_param),
        ] {
            let place = match device {
                "nvme" => Some("a file"),
                "cpu" if self.0.device == "cuda" => Some("the host's memory"),
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
            "\nmemory of rank {}, which needs most: {} at its peak ({}), {} throughout",
            plan.rank,
            bytes(plan.peak_bytes as f64),
            plan.peak_at,
            bytes(plan.persistent_bytes as f64)
        )?;
        if plan.offloaded_bytes > 0 {
            let place = if self.0.device == "cuda" { "the host's memory" } else { "files" };
            writeln!(f, "beside that up to {} in {place}", bytes(plan.offloaded_bytes as f64))?;
        }
        let mut rows = vec![row(["during"])];
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

    /// First and last layer, and what is no layer; and the peak.
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
            "\narithmetic of that rank per step: {} (causal, each pair of tokens once), and {} recomputed; \
             about {} per token",
            flops(plan.model_flops),
            flops(plan.recompute_flops),
            flops(plan.model_flops * ranks / self.0.tokens_per_step as f64)
        )
    }

    fn communication(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let plan = &self.0.rank;
        writeln!(f, "\nbytes that it sends per step")?;
        let mut rows = vec![row(["for", "within the node", "between nodes"])];
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
            "\npredicted time of a step on {}: {}, {:.0} tokens/s, {:.1} % of the peak (MFU)",
            time.machine,
            seconds(time.total_seconds),
            time.tokens_per_second,
            100.0 * time.mfu
        )?;
        let mut rows = vec![row(["part", "time", "share"])];
        rows.extend(time.parts.named().map(|(part, of_part)| {
            let share = 100.0 * of_part / time.total_seconds;
            vec![part.to_owned(), seconds(of_part), format!("{share:.1} %")]
        }));
        write_table(f, &rows)?;
        writeln!(
            f,
            "  {} of it is arithmetic that is done twice; communication beside arithmetic, not in it: {}",
            seconds(time.recompute_seconds),
            seconds(time.hidden_seconds)
        )
    }

    fn budget(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Some(Budget { bytes: budget, fits, max_seq_len }) = &self.0.budget else {
            return writeln!(
                f,
                "\n--memory-gib N tells whether this fits, and the longest sequence that does"
            );
        };
        let longest = match max_seq_len {
            Some(longest) => format!("the longest sequence that does has {longest} tokens"),
            None => "no sequence does".to_owned(),
        };
        let (needed, budget) = (self.0.rank.peak_bytes, *budget);
        if *fits {
            return writeln!(f, "\nthis fits into {} per rank; {longest}", bytes(budget as f64));
        }
        let lacking = needed.saturating_sub(budget);
        writeln!(
            f,
            "\nTHIS DOES NOT FIT: rank {} needs {}, {} more than the {} of a rank; {longest}",
            self.0.rank.rank,
            bytes(needed as f64),
            bytes(lacking as f64),
            bytes(budget as f64)
        )
    }

    fn alternatives(&self, f: &mut Formatter<'_>) -> fmt::Result {
        writeln!(f, "\nwhat one change would make of it")?;
        write_choices(f, choices::alternatives(self.0))
    }

    fn meshes(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let shards = self.0.shard_size.map(|size| format!(", dp in multiples of {size} partitions"));
        writeln!(f, "\nmeshes of as many ranks for the same batch{}", shards.unwrap_or_default())?;
        write_choices(f, choices::meshes(self.0))
    }
}

fn write_choices(f: &mut Formatter<'_>, Choices { head, rows, remarks, note }: Choices) -> fmt::Result {
    let head = head.into_iter().map(str::to_owned).collect();
    let rows = rows.into_iter().zip(remarks).map(|(mut row, remark)| {
        row.extend(remark.map(|remark| format!("◄ {remark}")));
        row
    });
    write_table(f, &std::iter::once(head).chain(rows).collect::<Vec<_>>())?;
    note.map_or(Ok(()), |note| writeln!(f, "  {note}"))
}
