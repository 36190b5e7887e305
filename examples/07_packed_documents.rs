//! Documents of different lengths, packed into sequences of equal length without cross-attention.
//!
//! Padding every document wastes most of the compute. Concatenating documents without their bounds
//! trains on the wrong task: a document attends to others in the sequence, and its last token
//! predicts the first of the next. Here sequences are packed, and each document is computed as if
//! it were alone, even if it is sharded over sequence-parallel ranks. This example prints a packed
//! sequence, and then compares the losses.
//!
//! ```text
//! cargo run --release --example 07_packed_documents
//! ```

use anyhow::Result;
use ulysses::comm::{LaunchOptions, MeshGroups, RankContext, launch};
use ulysses::config::Config;
use ulysses::data::{Corpus, GlobalBatch, IGNORED_LABEL, PackedSequences};
use ulysses::engine::initialize;
use ulysses::mesh::{DeviceMesh, shard_range};
use ulysses::model::{Model, RandomWeights, preset};

const SEQ_LEN: usize = 64;
const SP: usize = 3;

fn main() -> Result<()> {
    // Ten documents of 5 to 44 bytes.
    let text = b"it was the best of times, it was the worst of times, it was the age of wisdom";
    let lengths = [40, 5, 23, 31, 12, 44, 8, 19, 27, 36];
    let documents = || lengths.map(|len| text[..len].iter().copied().map(u32::from).collect::<Vec<u32>>());

    let sequences = PackedSequences::new(Corpus::from_documents(documents())?, SEQ_LEN)?;
    let alone = 1.0 - lengths.iter().sum::<usize>() as f64 / (lengths.len() * SEQ_LEN) as f64;
    println!("one document per sequence: {} sequences, {:.0} % padding", lengths.len(), 100.0 * alone);
    println!(
        "packed by best fit:        {:2} sequences, {:.0} % padding",
        sequences.num_sequences(),
        100.0 * sequences.padding_share()
    );

    let sequence = sequences.sequence(1)?;
    let letters: String =
        sequence.input_ids.iter().map(|&id| if id == 0 { '·' } else { id as u8 as char }).collect();
    let digits: String = sequence.position_ids.iter().map(|position| (position % 10).to_string()).collect();
    let labels: String = sequence
        .shift_labels
        .iter()
        .map(|&id| if id == IGNORED_LABEL { '–' } else { id as u8 as char })
        .collect();
    let shards: String = (0..SP)
        .map(|rank| format!("{:<1$}", format!("│ sp rank {rank}"), shard_range(SEQ_LEN, SP, rank).len()))
        .collect();
    println!("\nthe second sequence, sharded over three ranks; positions restart with each document:");
    println!("  tokens     {letters}\n  positions  {digits}\n  labels     {labels}\n             {shards}");
    println!("documents start at {:?}, which every shard knows", sequence.cu_seqlens);

    // All documents packed, compared with one document per sequence.
    let packed: Vec<GlobalBatch> =
        (0..sequences.num_sequences()).map(|index| batch_of(&sequences, index)).collect::<Result<_>>()?;
    let alone = documents().map(|document| GlobalBatch::new(1, document.len(), document, None, None));
    let alone = alone.into_iter().collect::<Result<Vec<_>, _>>()?;
    let [packed, alone] = [packed, alone].map(|batches| loss(&batches));
    let (packed, alone) = (packed?, alone?);
    println!("\nloss over all documents, {SP} ranks per sequence: packed {packed:.6}, each alone {alone:.6}");
    println!("relative difference {:.1e}", (packed - alone).abs() / alone);
    Ok(())
}

fn batch_of(sequences: &PackedSequences, index: usize) -> Result<GlobalBatch> {
    let sequence = sequences.sequence(index)?;
    let (positions, labels) = (Some(sequence.position_ids), Some(sequence.shift_labels));
    Ok(GlobalBatch::new(1, SEQ_LEN, sequence.input_ids, positions, labels)?)
}

/// Returns the mean token loss of an untrained model over some batches, with sequences sharded over
/// three ranks.
fn loss(batches: &[GlobalBatch]) -> Result<f64> {
    let config = r#"{ "train_batch_size": 1, "mesh_param": [1, 3] }"#;
    let config = Config::from_json_str(config, "the example's config")?;
    let mesh = DeviceMesh::dp_sp(config.mesh.dp_size, config.mesh.sp_size)?;
    let losses = launch(mesh.world_size(), &LaunchOptions::default(), |rank: RankContext| -> Result<f64> {
        let groups = MeshGroups::new(&mesh, rank.group.clone())?;
        let model = Model::new(&preset("nano")?)?;
        let mut engine = initialize(model, &RandomWeights { seed: 7 }, &config, &groups)?;
        let (mut sum, mut tokens) = (0.0, 0);
        for batch in batches {
            // Summed over the mesh: every rank gets the same values.
            let evaluated = engine.evaluate(&batch.micro_batch(0..1, SP, rank.rank)?)?;
            sum += evaluated.sum;
            tokens += evaluated.valid_tokens;
        }
        Ok(sum / tokens as f64)
    })?;
    Ok(losses[0])
}
