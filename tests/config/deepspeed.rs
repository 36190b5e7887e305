//! Files as DeepSpeed's users have them: each trains two steps, or is refused for the reasons that
//! `docs/config.md` gives.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use ulysses::comm::{LaunchOptions, MeshGroups, launch};
use ulysses::config::{
    Config, ConfigError, ConfigFileError, DynamicLossScale, LossScale, Offload, OptimizerConfig, Overrides,
    Precision, RawConfig, Sgd, ZeroStage,
};
use ulysses::data::{Corpus, DataLoader, DataRank, LoaderOptions, PackedSequences};
use ulysses::engine::initialize;
use ulysses::mesh::DeviceMesh;
use ulysses::model::{Model, RandomWeights, preset};

fn directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/ds_configs")
}

fn resolve(name: &str) -> Result<Config, ConfigError> {
    let two_steps = Overrides { steps: Some(2), ..Overrides::default() };
    RawConfig::from_file(directory().join(name))?.resolve(&two_steps)
}

/// Loss and gradient norm of the two steps, the same on every rank.
fn train_two_steps(config: &Config) -> anyhow::Result<Vec<(f64, f64)>> {
    let text = b"the quick brown fox jumps over the lazy dog. ".repeat(40);
    let corpus = Corpus::from_documents([text.into_iter().map(u32::from).collect()])?;
    let rows = Arc::new(PackedSequences::new(corpus, 32)?);
    let mesh = DeviceMesh::dp_sp(config.mesh.dp_size, config.mesh.sp_size)?;
    let ranks = launch(mesh.world_size(), &LaunchOptions::default(), |rank| {
        let groups = MeshGroups::new(&mesh, rank.group.clone())?;
        let model = Model::new(&preset("nano")?)?;
        let mut engine = initialize(model, &RandomWeights { seed: config.seed }, config, &groups)?;
        let options = LoaderOptions {
            seed: config.seed,
            micro_batch: config.micro_batch_size,
            accumulation: config.gradient_accumulation_steps,
            rank: DataRank::on_mesh(&mesh, rank.rank)?,
        };
        let mut loader = DataLoader::new(rows.clone(), options)?;
        let mut steps = Vec::new();
        for _ in 0..2 {
            let report = engine.train_batch(|| loader.next_micro_batch())?;
            steps.push((report.loss, report.grad_norm));
        }
        Ok::<_, anyhow::Error>(steps)
    })?;
    assert!(ranks.iter().all(|steps| *steps == ranks[0]));
    Ok(ranks[0].clone())
}

const TRAINABLE: [&str; 7] = [
    "everything_off.json",
    "hf_auto_zero3.json",
    "old_names.json",
    "ulysses_mesh.json",
    "zero1_adam.json",
    "zero2_buckets.json",
    "zero3_tuned.json",
];

const SIXTEEN_BITS: [(&str, &str); 2] = [("bf16_zero2.json", "bf16"), ("fp16_dynamic.json", "fp16")];

/// Names a directory of its machine for what it offloads.
const OFFLOADING: &str = "offload_zero3.json";

/// Files with the keys that they are refused for.
const REFUSED: [(&str, &[&str]); 2] = [
    ("offload_wrong_stage.json", &["zero_optimization.stage"]),
    (
        "one_bit_and_monitors.json",
        &[
            "optimizer.type",
            "communication_data_type",
            "zero_optimization.zero_quantized_gradients",
            "wandb.enabled",
        ],
    ),
];

#[test]
fn every_file_has_its_outcome() {
    let files = std::fs::read_dir(directory()).unwrap().map(|entry| entry.unwrap().file_name());
    let files: BTreeSet<_> = files.map(|name| name.into_string().unwrap()).collect();
    let sixteen_bits = SIXTEEN_BITS.iter().map(|(name, _)| *name);
    let refused = REFUSED.iter().map(|(name, _)| *name);
    let tested: BTreeSet<_> = TRAINABLE
        .into_iter()
        .chain(sixteen_bits)
        .chain(refused)
        .chain([OFFLOADING])
        .map(String::from)
        .collect();
    assert_eq!(files, tested);
}

#[test]
fn supported_files_train_two_steps() {
    for name in TRAINABLE {
        let config = resolve(name).unwrap_or_else(|error| panic!("{error}"));
        let steps = train_two_steps(&config).unwrap_or_else(|error| panic!("{name}: {error:#}"));
        for (loss, norm) in steps {
            // A fresh model is about as good as guessing among its tokens.
            assert!((2.0..8.0).contains(&loss) && norm > 0.0 && norm.is_finite(), "{name}: {loss} {norm}");
        }
    }
}

#[test]
fn files_in_16_bits_train_two_steps() {
    for (name, section) in SIXTEEN_BITS {
        let config = resolve(name).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(config.precision.section(), Some(section));
        for (loss, norm) in train_two_steps(&config).unwrap_or_else(|error| panic!("{name}: {error:#}")) {
            assert!((2.0..8.0).contains(&loss) && norm > 0.0 && norm.is_finite(), "{name}: {loss} {norm}");
        }
    }
    let Precision::Fp16 { loss_scale: LossScale::Dynamic(scale) } =
        resolve("fp16_dynamic.json").unwrap().precision
    else {
        panic!("fp16_dynamic.json has a dynamic scale")
    };
    let expected = DynamicLossScale {
        initial_scale_power: 12,
        loss_scale_window: 500,
        hysteresis: 2,
        consecutive_hysteresis: false,
        min_loss_scale: 1,
    };
    assert_eq!(scale, expected);
}

#[test]
fn a_file_that_offloads_trains_where_its_directory_is_and_names_it_where_it_is_not() {
    let mut config = resolve(OFFLOADING).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(config.zero.offload_optimizer, Offload::Cpu);
    assert_eq!(config.zero.offload_param, Offload::Nvme(Some("/local_nvme".into())));
    let error = format!("{:#}", train_two_steps(&config).unwrap_err());
    assert!(error.contains("cannot offload parameters to a file in /local_nvme: "), "{error}");
    assert!(
        error.contains("set `zero_optimization.offload_param.nvme_path` to another directory"),
        "{error}"
    );

    let directory = tempfile::tempdir().unwrap();
    config.zero.offload_param = Offload::Nvme(directory.path().to_str().map(str::to_owned));
    let offloaded = train_two_steps(&config).unwrap();
    config.zero.offload_param = Offload::None;
    assert_eq!(offloaded, train_two_steps(&config).unwrap());
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0, "the file has no name");
}

#[test]
fn unsupported_files_are_refused_key_by_key() {
    for (name, keys) in REFUSED {
        let Err(ConfigError::File(ConfigFileError::Invalid { diagnostics, omitted: 0, .. })) = resolve(name)
        else {
            panic!("{name} is refused")
        };
        let refused: Vec<_> = diagnostics.iter().map(|diagnostic| diagnostic.key.as_str()).collect();
        assert_eq!(refused, keys, "{name}");
    }
}

#[test]
fn the_settings_of_a_file_reach_training() {
    let tuned = resolve("zero3_tuned.json").unwrap();
    assert_eq!(
        (tuned.zero.stage, tuned.mesh.dp_size, tuned.gradient_accumulation_steps),
        (ZeroStage::Parameters, 2, 2)
    );
    assert_eq!((tuned.gradient_clipping, tuned.train_batch_size), (0.5, 4));
    let mesh = resolve("ulysses_mesh.json").unwrap();
    assert_eq!((mesh.mesh.dp_size, mesh.mesh.sp_size, mesh.micro_batch_size), (2, 2, 1));
    assert!(matches!(mesh.optimizer, OptimizerConfig::Sgd(Sgd { lr: 0.1, momentum: 0.9, .. })));
    let auto = resolve("hf_auto_zero3.json").unwrap();
    assert_eq!((auto.optimizer.lr(), auto.gradient_clipping, auto.autos.len()), (5e-5, 1.0, 17));
    assert_eq!((auto.train_batch_size, auto.precision), (8, Precision::F32));
}
