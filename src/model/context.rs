//! What the layers of one micro batch share.

use super::ModelError;
use crate::ops::Workspace;
use crate::ops::attention::{Attention, Geometry, grouped_heads};
use crate::ops::rope;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

/// The batch that a layer works on, and the services it may use.
///
/// Rotary tables and attention geometries depend on the micro batch only. They are made at
/// first use and shared by all layers.
pub struct LayerContext {
    batch: usize,
    seq_len_local: usize,
    position_ids: Vec<u32>,
    geometry: Geometry,
    attention: Arc<dyn Attention>,
    workspace: Arc<Workspace>,
    head_geometries: Mutex<HashMap<(usize, usize), Geometry>>,
    rope_tables: Mutex<HashMap<(usize, u64), Arc<rope::Table>>>,
}

impl LayerContext {
    /// Context of a micro batch of which this rank holds tokens `shard` of every row.
    ///
    /// # Shapes
    /// `position_ids`: `[batch, shard.len()]`, row-major; `cu_seqlens`: the document
    /// boundaries of every whole row.
    ///
    /// # Errors
    /// Boundaries that do not cover the rows.
    pub fn new(
        shard: Range<usize>,
        position_ids: Vec<u32>,
        cu_seqlens: Arc<Vec<Vec<u32>>>,
        attention: Arc<dyn Attention>,
        workspace: Arc<Workspace>,
    ) -> Result<Self, ModelError> {
        let positions: Arc<[u32]> = (shard.start as u32..shard.end as u32).collect();
        let batch = cu_seqlens.len();
        let geometry = Geometry::new(positions.clone(), positions, cu_seqlens, Vec::new(), None)?;
        Ok(Self {
            batch,
            seq_len_local: shard.len(),
            position_ids,
            geometry,
            attention,
            workspace,
            head_geometries: Mutex::default(),
            rope_tables: Mutex::default(),
        })
    }

    /// Rows of the micro batch.
    pub fn batch(&self) -> usize {
        self.batch
    }

    /// This rank's tokens of every row.
    pub fn seq_len_local(&self) -> usize {
        self.seq_len_local
    }

    /// Positions of this rank's tokens within their documents, `[batch, seq_local]`.
    pub fn position_ids(&self) -> &[u32] {
        &self.position_ids
    }

    /// The attention, sequence-parallel where the mesh is.
    pub fn attention(&self) -> &Arc<dyn Attention> {
        &self.attention
    }

    /// Recycled storage, shared by the layers of this rank.
    pub fn workspace(&self) -> &Workspace {
        &self.workspace
    }

    /// Which keys each query sees, for `num_heads` query heads in groups of
    /// `num_heads / num_kv_heads` to a KV head.
    pub fn geometry(&self, num_heads: usize, num_kv_heads: usize) -> Geometry {
        let mut geometries = self.head_geometries.lock().unwrap_or_else(PoisonError::into_inner);
        let make = || self.geometry.with_heads(grouped_heads(num_heads, num_kv_heads));
        geometries.entry((num_heads, num_kv_heads)).or_insert_with(make).clone()
    }

    /// Rotary tables for this rank's tokens.
    ///
    /// # Errors
    /// A head dimension that rotary embedding cannot pair up.
    pub fn rope(&self, head_dim: usize, theta: f64) -> Result<Arc<rope::Table>, ModelError> {
        let mut tables = self.rope_tables.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (head_dim, theta.to_bits());
        if let Some(table) = tables.get(&key) {
            return Ok(table.clone());
        }
        let table = Arc::new(rope::Table::new(&self.position_ids, head_dim, theta)?);
        tables.insert(key, table.clone());
        Ok(table)
    }
}
