//! Documents of all lengths in rows of one length, without seeing each other.
//!
//! Padding every document to the longest wastes most of the work; laying them end to end and
//! forgetting the borders trains on the wrong task: a document attends to its neighbors in the row,
//! and its last token has to predict the next one's first. Here rows are packed *and* each
//! document is computed as if it were alone, also where the sequence-parallel cut goes through
//! the middle of one. This example shows a packed row, and then proves the claim.
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

    let rows = PackedSequences::new(Corpus::from_documents(documents())?, SEQ_LEN)?;
    let alone = 1.0 - lengths.iter().sum::<usize>() as f64 / (lengths.len() * SEQ_LEN) as f64;
    println!("a row for each document: {} rows, {:.0} % padding", lengths.len(), 100.0 * alone);
    println!(
        "packed by best fit:      {:2} rows, {:.0} % padding",
        rows.num_sequences(),
        100.0 * rows.padding_share()
    );

    let row = rows.sequence(1)?;
    let letters: String =
        row.input_ids.iter().map(|&id| if id == 0 { '·' } else { id as u8 as char }).collect();
    let digits: String = row.position_ids.iter().map(|position| (position % 10).to_string()).collect();
    let labels: String =
        row.shift_labels.iter().map(|&id| if id == IGNORED_LABEL { '–' } else { id as u8 as char }).collect();
    let shards: String = (0..SP)
        .map(|rank| format!("{:<1$}", format!("│ sp rank {rank}"), shard_range(SEQ_LEN, SP, rank).len()))
        .collect();
    println!("\nthe second row, cut over three ranks; a position starts again with each document:");
    println!("  tokens     {letters}\n  positions  {digits}\n  labels     {labels}\n             {shards}");
    println!("documents begin at {:?}, which every shard knows", row.cu_seqlens);

    // All documents packed, against each one alone in a row of its own.
    let packed: Vec<GlobalBatch> =
        (0..rows.num_sequences()).map(|index| batch_of(&rows, index)).collect::<Result<_>>()?;
    let alone = documents().map(|document| GlobalBatch::new(1, document.len(), document, None, None));
    let alone = alone.into_iter().collect::<Result<Vec<_>, _>>()?;
    let [packed, alone] = [packed, alone].map(|batches| loss(&batches));
    let (packed, alone) = (packed?, alone?);
    println!("\nloss over all documents, {SP} ranks per row: packed {packed:.6}, each alone {alone:.6}");
    println!("relative difference {:.1e}", (packed - alone).abs() / alone);
    Ok(())
}

fn batch_of(rows: &PackedSequences, index: usize) -> Result<GlobalBatch> {
    let row = rows.sequence(index)?;
    let (positions, labels) = (Some(row.position_ids), Some(row.shift_labels));
    Ok(GlobalBatch::new(1, SEQ_LEN, row.input_ids, positions, labels)?)
}

/// The mean token loss of an untrained model over some batches, on a mesh that cuts sequences in
/// three.
fn loss(batches: &[GlobalBatch]) -> Result<f64> {
    let config = r#"{ "train_batch_size": 1, "mesh_param": [1, 3] }"#;
    let config = Config::from_json_str(config, "the example's config")?;
    let mesh = DeviceMesh::dp_sp(config.mesh.dp_size, config.mesh.sp_size)?;
    let losses = launch(mesh.world_size(), &LaunchOptions::default(), |rank: RankContext| -> Result<f64> {
        let groups = MeshGroups::new(&mesh, rank.group.clone())?;
        let model = Model::llama(&preset("nano")?)?;
        let mut engine = initialize(model, &RandomWeights { seed: 7 }, &config, &groups)?;
        let (mut sum, mut tokens) = (0.0, 0);
        for batch in batches {
            // Over the whole mesh: every rank gets the same numbers.
            let evaluated = engine.evaluate(&batch.micro_batch(0..1, SP, rank.rank)?)?;
            sum += evaluated.sum;
            tokens += evaluated.valid_tokens;
        }
        Ok(sum / tokens as f64)
    })?;
    Ok(losses[0])
}
