//! `ulysses plan --scaling`: the study as a table, as JSON and as charts.

use super::table::{Table, bytes};
use super::{pictures, write_file};
use crate::html::chart::{Chart, drawing};
use crate::{Failure, OrFail, print};
use std::fmt::{self, Display, Formatter};
use std::path::Path;
use ulysses::estimate::scaling::{ModelScaling, study};

pub(super) fn run(tokens_per_rank: usize, svg: Option<&Path>, json: bool) -> Result<(), Failure> {
    let models = study(tokens_per_rank).or_run()?;
    if let Some(path) = svg {
        let charts: Vec<Chart> = models.iter().map(pictures::scaling).collect();
        write_file(path, "--svg", drawing(&charts, 2))?;
    }
    if json {
        return print(format_args!("{}\n", serde_json::to_string_pretty(&models).or_run()?));
    }
    print(Study { models: &models, tokens_per_rank })
}

struct Study<'a> {
    models: &'a [ModelScaling],
    tokens_per_rank: usize,
}

impl Display for Study<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "bytes sent per rank and layer, forward and backward, 16-bit elements, {} tokens per rank\n\
             Ulysses: all-to-alls of Q, K, V and the output; K and V only: the part of K and V in it\n\
             paper: 8·N·h/P elements, constant when N and P grow together (arXiv 2309.14509)\n\
             Ulysses × ring: Ulysses in groups of 8 ranks, a ring over the groups",
            self.tokens_per_rank
        )?;
        for model in self.models {
            let ModelScaling { model: name, hidden_size, num_heads, num_kv_heads, .. } = model;
            writeln!(
                f,
                "\n{name}: hidden size {hidden_size}, {num_heads} query heads, {num_kv_heads} KV heads"
            )?;
            let mut table = Table::new([], model.points.iter().map(|point| (point, [])));
            let exchanged = |sent: Option<f64>| sent.map_or_else(|| "too few heads".to_owned(), bytes);
            table.push("ranks", |point| point.ranks.to_string());
            table.push("tokens", |point| point.seq_len.to_string());
            table.push("Ulysses", |point| exchanged(point.ulysses_bytes));
            table.push("K and V only", |point| exchanged(point.ulysses_kv_bytes));
            table.push("paper", |point| bytes(point.claimed_bytes));
            table.push("Megatron", |point| bytes(point.megatron_bytes));
            table.push("ring", |point| bytes(point.ring_bytes));
            table.push("Ulysses × ring", |point| {
                format!("{} (ring of {})", bytes(point.combined_bytes), point.combined_ring_size)
            });
            table.write(f)?;
        }
        Ok(())
    }
}
