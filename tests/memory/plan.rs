//! The plan's memory against the allocator's count.

mod cases;

#[cfg(feature = "nccl")]
use crate::support::device::is_cpu;
use crate::support::device::test_device;
use crate::support::mesh_run::{global_batch, micro_batches, on_mesh};
use crate::support::reference::{Batch, IGNORED};
use crate::support::run_case::RunCase;
use crate::support::sample::sampled_every;
use cases::cases;
#[cfg(feature = "nccl")]
use cases::cases_of_gpus;
use std::sync::Arc;
use ulysses::comm::ProcessGroupExt;
use ulysses::comm::thread::LaunchOptions;
use ulysses::config::{AttentionChoice, Config};
use ulysses::data::DataError;
use ulysses::device::DeviceKind;
#[cfg(feature = "nccl")]
use ulysses::device::{gpu_memory, reset_gpu_peak};
use ulysses::engine::Engine;
use ulysses::estimate::Workload;
use ulysses::kernels::attention::{AttentionKernels, FlashAttention};
use ulysses::memory::{ByCategory, Category, live_bytes, peak_by_category, peak_bytes, reset_peak};
use ulysses::model::{Model, ModelConfig, RandomWeights, preset};

/// Tolerance of the plan. It is exact except for bookkeeping, if reductions complete when they are waited
/// for. At stages 2 and 3, a wait for something else may complete them earlier and free a unit's whole
/// gradient by then; the plan assumes the later moment.
const TOLERANCE: f64 = 0.10;

impl RunCase {
    fn attention_kernels(config: &Config) -> FlashAttention {
        FlashAttention::new(match config.ulysses.attention {
            Some(AttentionChoice::Tiled) => AttentionKernels::Tiled,
            Some(AttentionChoice::Fused) | None => AttentionKernels::Auto,
        })
    }

    /// The peak of each rank in the second step, above its memory before the engine existed; and the memory
    /// of its thread at that time.
    fn measured(&self) -> Vec<(i64, ByCategory)> {
        self.measured_with(|batch| batch)
    }

    /// The same with masked labels.
    fn measured_with(&self, mask: impl FnOnce(Batch) -> Batch) -> Vec<(i64, ByCategory)> {
        let config = self.config();
        let batch = Batch::random(self.model.vocab_size, config.train_batch_size, self.seq_len, 3);
        let batch = global_batch(&mask(batch)).unwrap();
        let ranks = on_mesh(&config, &LaunchOptions::default(), |_, groups| {
            let before = live_bytes();
            let (attention, device) = (Arc::new(Self::attention_kernels(&config)), test_device());
            let weights = RandomWeights { seed: 1 };
            let model = Model::new(&self.model)?;
            let mut engine = Engine::with_attention(model, &weights, &config, groups, attention, &device)?;
            let (mut peak, mut by_category) = (0, ByCategory::default());
            for _ in 0..2 {
                engine.sp_group().barrier()?;
                engine.dp_group().barrier()?;
                let micro_batches = micro_batches(&batch, &engine)?;
                let held_by_test = live_bytes();
                let mut each = micro_batches.iter();
                reset_peak();
                engine.train_batch(|| Ok::<_, DataError>(each.next().unwrap().clone()))?;
                peak = peak_bytes() - before;
                by_category = peak_by_category();
                assert_eq!(by_category.total() as i64, peak_bytes());
                drop(each);
                let with = live_bytes();
                drop(micro_batches);
                // Memory of the batch that the test itself created.
                peak -= with - live_bytes();
                assert!(held_by_test >= before);
            }
            Ok((peak, by_category))
        });
        ranks.unwrap()
    }

    /// The peak of the pool of each rank's GPU in the second step, above what was in use before the engine existed.
    #[cfg(feature = "nccl")]
    fn measured_on_gpus(&self) -> Vec<u64> {
        let config = self.config();
        let batch = Batch::random(self.model.vocab_size, config.train_batch_size, self.seq_len, 3);
        let batch = global_batch(&batch).unwrap();
        let ranks = on_mesh(&config, &LaunchOptions::default(), |_, groups| {
            let (attention, device) = (Arc::new(Self::attention_kernels(&config)), test_device());
            let memory = || gpu_memory(&device).expect("a GPU");
            let before = memory().in_use;
            let model = Model::new(&self.model)?;
            let weights = RandomWeights { seed: 1 };
            let mut engine = Engine::with_attention(model, &weights, &config, groups, attention, &device)?;
            for _ in 0..2 {
                device.synchronize()?;
                reset_gpu_peak(&device)?;
                let mut micro_batches = micro_batches(&batch, &engine)?.into_iter();
                engine.train_batch(|| Ok::<_, DataError>(micro_batches.next().unwrap()))?;
            }
            Ok(memory().peak - before)
        });
        ranks.unwrap()
    }

    /// The peak that the plan predicts for a rank, by category.
    fn planned_peak(&self, rank: usize, device: DeviceKind) -> [u64; Category::ALL.len()] {
        let (config, model) = (self.config(), self.model.clone());
        let workload = Workload { config, model, document_len: None, ranks_per_node: 1, device };
        workload.plan_of(rank).unwrap().peak_by_category
    }

    /// The tolerance in terms of a unit's whole gradient or a gathered unit, as above.
    fn check_categories(&self, rank: usize, measured: i64, planned: &[u64], counted: &[u64]) {
        let label = self.label;
        for category in [Category::Parameters, Category::Gradients, Category::Optimizer] {
            let (planned, counted) = (planned[category as usize], counted[category as usize]);
            let off = planned.abs_diff(counted) as f64 / measured as f64;
            let name = category.name();
            assert!(
                off < TOLERANCE,
                "{label}, rank {rank}: {counted} of {measured} counted as {name}, {planned} planned"
            );
        }
        // Recycled storage counts as the category it was allocated for; in the plan it counts as other
        // while it is unused.
        let moving = [Category::Activations, Category::Exchange, Category::Other];
        let moves = moving.iter().all(|category| counted[*category as usize] > 0);
        assert!(moves || self.sp == 1, "{label}");
    }
}

/// Measures a peak once, because training takes minutes for all cases: the sum is compared, and every category.
#[test]
fn the_planned_peak_is_the_measured_one_in_total_and_by_category() {
    let mut off = Vec::new();
    for case in sampled_every(3, cases(), RunCase::axes) {
        for (rank, (measured, by_category)) in case.measured().into_iter().enumerate() {
            let planned = case.planned_peak(rank, DeviceKind::Cpu);
            let total: u64 = planned.iter().sum();
            let error = total as f64 / measured as f64 - 1.0;
            let line = format!(
                "{:30} rank {rank}: {measured:>10} measured, {total:>10} planned, {:+.1} %",
                case.label,
                100.0 * error
            );
            println!("{line}");
            if error.abs() > TOLERANCE {
                off.push(line);
            }
            case.check_categories(rank, measured, &planned, &by_category.values());
        }
    }
    assert!(off.is_empty(), "off by more than {TOLERANCE}:\n{}", off.join("\n"));
}

/// With a GPU per rank, whose pool has nothing else.
#[cfg(feature = "nccl")]
#[test]
fn the_planned_peak_is_that_of_the_pool_on_a_gpu() {
    assert!(
        !is_cpu(),
        "a test of GPUs: set ULYSSES_TEST_DEVICE=nccl, or leave it out with `--skip on_a_gpu`"
    );
    for case in cases_of_gpus() {
        for (rank, measured) in case.measured_on_gpus().into_iter().enumerate() {
            let planned: u64 = case.planned_peak(rank, DeviceKind::Cuda).iter().sum();
            let error = planned as f64 / measured as f64 - 1.0;
            let label = format!("{}, rank {rank}", case.label);
            println!("{label}: {measured} measured, {planned} planned, {:+.1} %", 100.0 * error);
            assert!(error.abs() <= TOLERANCE, "{label}: {measured} measured, {planned} planned");
        }
    }
}

#[test]
fn masked_tokens_need_no_more_memory_than_labels_everywhere() {
    let model = ModelConfig { vocab_size: 256, ..preset("nano").unwrap() };
    let case = |label, sp| RunCase::new(label, model.clone(), 400 * sp).sp(sp).accumulation(2);
    // The second micro batch is masked otherwise than the first.
    let every_other_of_the_first = |mut batch: Batch| {
        batch.labels[0].iter_mut().step_by(2).for_each(|label| *label = IGNORED);
        batch
    };
    type Mask = fn(Batch) -> Batch;
    let masks: [(&str, Mask); 3] = [
        ("one token masked", |batch| batch.mask_tokens(7..8)),
        ("every other token of the first sequence masked", every_other_of_the_first),
        ("a masked prompt, all of the first sequence", |batch| batch.mask_tokens(0..320).mask_rows(0..1)),
    ];
    let tiles = case("tiles, sp 2", 2).checkpointed().ulysses("loss_tile_tokens", 64);
    for case in [case("one tile", 1), tiles] {
        let unmasked = case.measured();
        for (name, mask) in masks {
            for (rank, ((masked, _), (unmasked, _))) in
                case.measured_with(mask).into_iter().zip(&unmasked).enumerate()
            {
                // The plan has two tables of u32, and labels everywhere do not. The other rank decides how
                // long a message lives, which moves this peak by 20 KB; a fault would cost a tile of logits.
                let (tables, logits_tile) = (400 * 8, 64 * 256 * 4);
                let allowed = unmasked + tables + logits_tile / 2;
                let what = format!("{}, {name}, rank {rank}", case.label);
                println!("{what}: {masked} masked, {unmasked} with labels everywhere");
                assert!(masked <= allowed, "{what}: {masked} bytes, at most {allowed}");
            }
        }
    }
}
