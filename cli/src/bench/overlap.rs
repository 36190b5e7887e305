//! `ulysses bench overlap`.

use super::case::{Case, Figure, median};
use super::report::{FLOPS, Report};
use super::slow_link::SlowLink;
use super::{BackendArgs, BenchRank, BenchRanks, Benchmark, DeviceArg, Failure, JobRanks, OrFail};
use anyhow::{Result, anyhow};
use candle_core::{DType, Tensor};
use serde_json::json;
use std::cell::RefCell;
use std::sync::Arc;
use ulysses::comm::{ProcessGroup, ProcessGroupExt, ReduceOp};
use ulysses::kernels::Workspace;
use ulysses::kernels::attention::{Attention, AttentionLayout, FlashAttention, grouped_heads};
use ulysses::mesh::SeqSharding;
use ulysses::model::{DecoderLayer, ModelConfig, RandomWeights, WeightSource, preset};
use ulysses::nn::{Layer, LayerContext, Tiling, TokenLayout};
use ulysses::sequence_parallel::{RingAttention, UlyssesAttention};

const NUM_HEADS: usize = 8;
const HEAD_DIM: usize = 64;
/// So small that attention takes most of the layer's time.
const HIDDEN: usize = 64;

#[derive(clap::Args)]
pub(super) struct Overlap {
    /// Number of ranks, at most 8 divided by the head chunks [default: 2, or all processes of a job].
    #[arg(long, value_parser = clap::value_parser!(u16).range(2..=NUM_HEADS as i64))]
    ranks: Option<u16>,
    #[command(flatten)]
    backend: BackendArgs,
    /// CPU threads per rank [default: an equal share of the cores].
    #[arg(long)]
    threads_per_rank: Option<usize>,
    /// Tokens per sequence, over all ranks.
    #[arg(long, default_value_t = 2048, value_parser = clap::value_parser!(u32).range(16..=1 << 20))]
    seq_len: u32,
    /// Number of head chunks.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u16).range(2..=NUM_HEADS as i64))]
    head_chunks: u16,
    /// Measure a ring of all ranks instead: keys and values travel while a block is attended.
    #[arg(long, conflicts_with = "head_chunks")]
    ring: bool,
    /// Time of the exchanges on the slowed link, as a share of the layer's time without it.
    #[arg(long, default_value_t = 0.3)]
    link_share: f64,
}

impl Benchmark for Overlap {
    fn report<'a>(&self, repeats: u32, ranks: &'a mut JobRanks) -> Result<Report<'a>, Failure> {
        self.backend.join(None, ranks)?;
        let count = self.ranks.map(usize::from).or(ranks.num_processes()).unwrap_or(2);
        let chunks = self.head_chunks();
        if count < 2 || (count > NUM_HEADS / chunks && !self.ring) {
            let expected = NUM_HEADS / chunks;
            return Err(Failure::Usage(anyhow!(
                "{count} rank(s) with {chunks} head chunk(s): expected 2 to {expected}, one head each per chunk"
            )));
        }
        if !(self.link_share > 0.0 && self.link_share <= 10.0) {
            return Err(Failure::Usage(anyhow!(
                "--link-share {}: expected a number above 0, up to 10",
                self.link_share
            )));
        }
        let mut ranks = BenchRanks::place(ranks, DeviceArg::Cpu, count, self.threads_per_rank)?;
        // q, k, v, o and their gradients, before and after the exchange.
        ranks.check_tensors((16 * self.seq_len as usize * NUM_HEADS * HEAD_DIM) as f64)?;
        let layout =
            AttentionLayout::causal(1, self.seq_len, grouped_heads(NUM_HEADS, NUM_HEADS)).or_usage()?;
        let flops = 12.0 * layout.num_visible_pairs() as f64 * (NUM_HEADS * HEAD_DIM) as f64;
        let figures = ranks.run(repeats, |bench| SlowLayer::new(bench, self)?.measure(self, flops))?;
        let exposed = if self.ring { "the last gradients' transfer" } else { "one chunk's transfers" };
        Ok(Report {
            bench: "overlap",
            settings: json!({
                "seq_len": self.seq_len, "ring": self.ring, "head_chunks": chunks, "link_share": self.link_share,
            }),
            method: format!(
                "forward and backward of one layer in f32, 8 heads of 64, over a link that is slowed on purpose; \
                 alternating with and without overlap; exposed: transfer time that is left when a rank starts to wait; \
                 hidden share: share of the transfer time that overlap hides, without {exposed}, which cannot be hidden; \
                 FLOPs are those of attention; slowest rank, median"
            ),
            unit: FLOPS,
            figures,
            ranks,
        })
    }
}

impl Overlap {
    fn head_chunks(&self) -> usize {
        if self.ring { 1 } else { self.head_chunks.into() }
    }

    fn sharding(&self, ranks: usize) -> SeqSharding {
        if self.ring { SeqSharding { ring_size: ranks, ulysses_size: 1 } } else { ranks.into() }
    }

    /// The part of the transfers that can be hidden: all chunks but one, or all transfers of a ring but the last, of
    /// gradients.
    fn hideable(&self, ranks: usize) -> f64 {
        // A ring passes keys and values forward, and these and their gradients backward.
        let num_transfers = if self.ring { 3 * (ranks - 1) } else { self.head_chunks() };
        1.0 - 1.0 / num_transfers as f64
    }
}

/// A layer on one rank, behind a slowed link.
struct SlowLayer<'a> {
    bench: &'a BenchRank<'a>,
    link: SlowLink,
    layer: DecoderLayer,
    params: Vec<Tensor>,
    grads: Vec<Option<Tensor>>,
    x: Tensor,
    apart: LayerContext,
    overlapped: LayerContext,
}

impl<'a> SlowLayer<'a> {
    fn new(bench: &'a BenchRank<'a>, args: &Overlap) -> Result<Self> {
        let BenchRank { rank, device, .. } = bench;
        let one_layer = preset("nano")?.with_num_layers(1).with_attention(|layer| {
            (layer.num_heads, layer.num_kv_heads, layer.head_dim) = (NUM_HEADS, NUM_HEADS, HEAD_DIM);
        });
        let config = ModelConfig { hidden_size: HIDDEN, intermediate_size: HIDDEN, ..one_layer };
        let layer = DecoderLayer::new(&config, 0);
        let (mut params, mut grads) = (Vec::new(), Vec::new());
        for spec in layer.parameters() {
            let mut values = vec![0.0; spec.numel()];
            RandomWeights { seed: 1 }.read(spec, 0..spec.numel(), &mut values)?;
            params.push(Tensor::from_vec(values, spec.shape.as_slice(), device)?);
            grads.push(Some(Tensor::zeros(spec.shape.as_slice(), DType::F32, device)?));
        }
        let seq_len = args.seq_len as usize;
        let sharding = args.sharding(rank.world_size);
        let shard = sharding.tokens(seq_len, rank.rank);
        let x = Tensor::randn(0_f32, 1.0, (1, shard.len(), HIDDEN), device)?;
        let positions = shard.positions().map(|position| position as u32).collect();
        let documents = Arc::new(vec![vec![0, args.seq_len]]);
        let tokens = Arc::new(TokenLayout::new(shard.ranges(), positions, documents)?);
        let link = SlowLink::new(rank.group.clone());
        link.progress_in_background();
        let attention = |link: SlowLink| -> Arc<dyn Attention> {
            let (local, group) = (Arc::new(FlashAttention::default()), Arc::new(link));
            match args.ring {
                true => Arc::new(RingAttention::new(local, group, sharding)),
                false => Arc::new(UlyssesAttention::new(local, group)),
            }
        };
        let tiling = Tiling { head_chunks: args.head_chunks(), ..Tiling::default() };
        let context = |overlaps, link| {
            LayerContext::new(tokens.clone(), attention(link), Arc::new(Workspace::new()))
                .with_tiling(tiling)
                .with_overlapped_exchange(overlaps)
        };
        let apart = context(false, if args.ring { link.awaited() } else { link.clone() });
        let overlapped = context(true, link.clone());
        Ok(Self { bench, link, layer, params, grads, x, apart, overlapped })
    }

    /// Runs the layer forward and backward. Returns the seconds that transfers were exposed.
    fn pass(&self, context: &LayerContext) -> Result<f64> {
        let before = self.link.exposed_seconds();
        let (y, saved) = self.layer.forward(&self.params, &self.x, context)?;
        let dx = self.layer.backward(&self.params, saved, y, &self.grads, context)?;
        context.workspace().recycle(dx);
        Ok(self.link.exposed_seconds() - before)
    }

    /// Measures the layer without and with overlap.
    fn measure(&self, args: &Overlap, flops: f64) -> Result<Vec<Figure>> {
        let BenchRank { rank, device, .. } = self.bench;
        let group = self.bench.group();
        let calibration = BenchRank { rank, device: device.clone(), repeats: 2 };
        let free = Case::new("free", flops, || self.pass(&self.apart).map(drop));
        let free = calibration.take_turns(vec![free])?;
        let before = self.link.sent_bytes();
        self.pass(&self.apart)?;
        let bytes = (self.link.sent_bytes() - before) as f64;
        self.link.set_rate(bytes / (args.link_share * free[0].seconds()));
        let exposed = [(); 2].map(|()| RefCell::new(Vec::new()));
        let record = |context, exposed: &RefCell<Vec<f64>>| -> Result<()> {
            exposed.borrow_mut().push(self.pass(context)?);
            Ok(())
        };
        let mut figures = self.bench.take_turns(vec![
            Case::new("apart", flops, || record(&self.apart, &exposed[0])),
            Case::new("overlapped", flops, || record(&self.overlapped, &exposed[1])).against("apart"),
        ])?;
        // The first repetition is a warm-up.
        let exposed = exposed.map(|seconds| seconds.into_inner().split_off(1));
        // Seconds left of transfers when their waits begin, on the rank with the most.
        for (figure, seconds) in figures.iter_mut().zip(&exposed) {
            let seconds = median(&group.all_reduce_values(seconds, ReduceOp::Max)?);
            figure.values.push(("exposed_ms", 1e3 * seconds));
        }
        // The part of them that the overlap removes, of what it can remove; on the rank with the least.
        let hideable = args.hideable(rank.world_size);
        let share = |(apart, overlapped): (&f64, &f64)| (apart - overlapped) / (apart * hideable);
        let shares: Vec<f64> = exposed[0].iter().zip(&exposed[1]).map(share).collect();
        let hidden_share = median(&group.all_reduce_values(&shares, ReduceOp::Min)?);
        figures[1].values.push(("hidden_share", hidden_share));
        Ok(figures)
    }
}
