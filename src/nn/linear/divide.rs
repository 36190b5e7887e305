//! The part of linear layers that one rank of tp has.

use super::{Bias, Linear, Outputs};
use crate::nn::heads::one_each;
use crate::nn::tensor_parallel::are_shared;
use crate::nn::{ParallelStyle, ParameterList};
use std::ops::Range;

impl Linear {
    /// Keeps the outputs of one rank of tp of layers with the same input. `outputs`: for each layer those of every rank. Outputs
    /// that several ranks compute keep their parameters whole, of which each rank then uses some rows; so do interleaved layers if
    /// ranks divide a run.
    pub(in crate::nn) fn divide_outputs<const N: usize>(
        parameters: &mut ParameterList,
        layers: [&mut Self; N],
        outputs: [&[Range<usize>]; N],
        rank: usize,
    ) {
        let mut layers: Vec<_> =
            layers.into_iter().zip(outputs).map(|(layer, outputs)| Divided { layer, outputs }).collect();
        for same in layers.chunk_by_mut(|a, b| a.layer.weight == b.layer.weight) {
            divide_rows(parameters, same, rank);
        }
    }

    /// Keeps the inputs of one rank of tp, whose outputs are then partial sums: one of the ranks adds the bias. `inputs`: those
    /// of every rank.
    pub(in crate::nn) fn divide_inputs(
        &mut self,
        parameters: &mut ParameterList,
        inputs: &[Range<usize>],
        rank: usize,
    ) {
        parameters.shard(self.weight, self.layout.transposed().output_dim(), one_each(inputs), rank);
        parameters.set_style(self.weight, ParallelStyle::Rowwise);
        self.bias = self.bias.filter(|_| rank == 0);
    }
}

/// A layer whose outputs are divided over ranks.
struct Divided<'a> {
    layer: &'a mut Linear,
    /// Those of every rank.
    outputs: &'a [Range<usize>],
}

impl Divided<'_> {
    /// Whether a rank's parameters are not those of its outputs alone.
    fn stays_whole(&self) -> bool {
        are_shared(self.outputs) || self.outputs.iter().any(|own| self.layer.outputs.cuts_run(own))
    }
}

/// [`Linear::divide_outputs`] of layers with one weight.
fn divide_rows(parameters: &mut ParameterList, layers: &mut [Divided<'_>], rank: usize) {
    let Some(Divided { layer: first, outputs }) = layers.first() else { return };
    let (weight, dim, size) = (first.weight, first.layout.output_dim(), outputs.len());
    let (is_interleaved, bias) = (first.outputs.is_interleaved(), first.bias.map(|bias| bias.parameter));
    parameters.set_style(weight, ParallelStyle::Colwise);
    if layers.iter().any(Divided::stays_whole) {
        for Divided { layer, outputs } in layers {
            layer.outputs = layer.outputs.part(&outputs[rank]);
            layer.bias = layer.bias.map(|bias| Bias { outputs: bias.outputs.part(&outputs[rank]), ..bias });
        }
        return;
    }
    let ranks: Vec<Vec<Range<usize>>> = (0..size)
        .map(|rank| {
            // Interleaved layers have the same heads, which are adjacent with all their outputs.
            let spans = layers.iter().map(|divided| divided.layer.outputs.span(&divided.outputs[rank]));
            spans.take(if is_interleaved { 1 } else { layers.len() }).collect()
        })
        .collect();
    let has_bias = |divided: &Divided<'_>| divided.layer.bias.map(|bias| bias.parameter) == bias;
    let shares_bias = layers.len() > 1 && layers.iter().all(has_bias);
    if let Some(bias) = bias.filter(|_| shares_bias) {
        parameters.shard(bias, 0, ranks.clone(), rank);
    }
    parameters.shard(weight, dim, ranks, rank);
    let mut start = 0;
    for Divided { layer, outputs } in layers {
        let len = outputs[rank].len();
        layer.outputs = match is_interleaved {
            true => layer.outputs.with_len(len),
            false => Outputs::adjacent(start..start + len),
        };
        start += len;
        if let Some(bias) = &mut layer.bias {
            bias.outputs = layer.outputs;
            if !shares_bias {
                parameters.shard(bias.parameter, 0, one_each(outputs), rank);
                bias.outputs = Outputs::adjacent(0..len);
            }
        }
    }
}
