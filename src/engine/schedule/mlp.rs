//! The MLP half of a layer, in tiles of tokens: the counterpart of `model::decoder_mlp`.

use super::dims::{Dims, Tile};
use super::event::{Pass, Piece};
use super::layer::LayerPass;
use super::ledger::Buffer;
use crate::model::Weights;

/// The MLP's two projections, of all tokens.
#[derive(Debug)]
pub(super) struct GateUp {
    gate: Buffer,
    up: Buffer,
}

impl LayerPass<'_> {
    /// The layer's output, and with `keep`, where tokens are not tiled, the projections.
    pub(super) fn forward_mlp(&mut self, keep: bool) -> (Buffer, Option<GateUp>) {
        let Dims { hidden, intermediate, tile_tokens, .. } = *self.dims;
        let keep = keep && tile_tokens.is_none();
        let x = self.elems(hidden);
        let y = self.take(x);
        self.ledger.sweep(&[x, x], 0, 1);
        let mut kept = None;
        for tile in self.dims.tiles() {
            let f = tile.tokens * intermediate;
            let GateUp { gate, up } = self.gate_up(tile);
            let product = self.take(f);
            self.ledger.sweep(&[f, f, f], 0, tile.times);
            self.product(tile, intermediate, hidden);
            self.ledger.give(product);
            if keep {
                kept = Some(GateUp { gate, up });
            } else {
                [gate, up].into_iter().for_each(|buffer| self.ledger.give(buffer));
            }
        }
        self.compute(Piece::Mlp, Pass::Forward);
        (y, kept)
    }

    /// What forward did not keep is computed again, tile by tile.
    pub(super) fn backward_mlp(&mut self, mid: Buffer, mut kept: Option<GateUp>, trained: &Weights<bool>) {
        for tile in self.dims.tiles() {
            let projections = match kept.take() {
                Some(kept) => kept,
                None => {
                    let projections = self.gate_up(tile);
                    self.compute(Piece::Mlp, Pass::Recompute);
                    projections
                }
            };
            self.backward_mlp_tile(tile, projections, trained);
        }
        self.ledger.give(mid);
    }

    fn backward_mlp_tile(&mut self, tile: Tile, GateUp { gate, up }: GateUp, trained: &Weights<bool>) {
        let Dims { hidden, intermediate, .. } = *self.dims;
        let f = tile.tokens * intermediate;
        let product = self.take(f);
        self.ledger.sweep(&[f, f, f], 0, tile.times);
        self.product_for_weight(tile, (intermediate, hidden), trained.down);
        self.product(tile, hidden, intermediate);
        let (dgate, dup) = (self.take(f), self.take(f));
        self.ledger.sweep(&[f; 5], 0, tile.times);
        [product, gate, up].into_iter().for_each(|buffer| self.ledger.give(buffer));
        let rstd = self.take_f32(tile.tokens);
        let normed = self.normalise(tile);
        for is_trained in [trained.gate, trained.up] {
            self.product_for_weight(tile, (hidden, intermediate), is_trained);
        }
        for _ in 0..2 {
            self.product(tile, intermediate, hidden);
        }
        self.backward_norm(tile);
        [dgate, dup, normed, rstd].into_iter().for_each(|buffer| self.ledger.give(buffer));
        self.compute(Piece::Mlp, Pass::Backward);
    }

    fn gate_up(&mut self, tile: Tile) -> GateUp {
        let Dims { hidden, intermediate, .. } = *self.dims;
        let rstd = self.take_f32(tile.tokens);
        let normed = self.normalise(tile);
        let f = tile.tokens * intermediate;
        let (gate, up) = (self.take(f), self.take(f));
        for _ in 0..2 {
            self.product(tile, hidden, intermediate);
        }
        [normed, rstd].into_iter().for_each(|buffer| self.ledger.give(buffer));
        GateUp { gate, up }
    }
}
