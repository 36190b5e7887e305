//! The part of linear layers that one rank of tp has.

use super::{Bias, Linear, Outputs};
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
        let mut layers: Vec<_> = layers.into_iter().zip(outputs).collect();
        while let Some((first, _)) = layers.first() {
            let weight = first.weight;
            let same = layers.partition_point(|(layer, _)| layer.weight == weight);
            let rest = layers.split_off(same);
            divide_rows(parameters, std::mem::replace(&mut layers, rest), rank);
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
        let ranks = inputs.iter().map(|inputs| vec![inputs.clone()]).collect();
        parameters.shard(self.weight, self.layout.transposed().output_dim(), ranks, rank);
        parameters.set_style(self.weight, ParallelStyle::Rowwise);
        self.bias = self.bias.filter(|_| rank == 0);
    }
}

/// [`Linear::divide_outputs`] of layers with one weight.
fn divide_rows(parameters: &mut ParameterList, mut layers: Vec<(&mut Linear, &[Range<usize>])>, rank: usize) {
    layers.iter().for_each(|(layer, _)| parameters.set_style(layer.weight, ParallelStyle::Colwise));
    let cuts_run =
        |layer: &Linear, ranks: &[Range<usize>]| ranks.iter().any(|own| layer.outputs.cuts_run(own));
    if layers.iter().any(|(layer, ranks)| are_shared(ranks) || cuts_run(layer, ranks)) {
        for (layer, outputs) in layers {
            layer.outputs = layer.outputs.part(&outputs[rank]);
            layer.bias = layer.bias.map(|bias| Bias { outputs: bias.outputs.part(&outputs[rank]), ..bias });
        }
        return;
    }
    let Some((first, outputs)) = layers.first() else { return };
    let (weight, dim, size) = (first.weight, first.layout.output_dim(), outputs.len());
    let is_interleaved = first.outputs.is_interleaved();
    let ranks: Vec<Vec<Range<usize>>> = (0..size)
        .map(|rank| {
            // Interleaved layers have the same heads, which are adjacent with all their outputs.
            let spans = layers.iter().map(|(layer, outputs)| layer.outputs.span(&outputs[rank]));
            spans.take(if is_interleaved { 1 } else { layers.len() }).collect()
        })
        .collect();
    let bias = first.bias.map(|bias| bias.parameter);
    let shares_bias =
        layers.len() > 1 && layers.iter().all(|(layer, _)| layer.bias.map(|bias| bias.parameter) == bias);
    if let Some(bias) = bias.filter(|_| shares_bias) {
        parameters.shard(bias, 0, ranks.clone(), rank);
    }
    parameters.shard(weight, dim, ranks, rank);
    let mut start = 0;
    for (layer, outputs) in &mut layers {
        let len = outputs[rank].len();
        layer.outputs = match is_interleaved {
            true => layer.outputs.with_len(len),
            false => Outputs::adjacent(start..start + len),
        };
        start += len;
        if let Some(bias) = &mut layer.bias {
            bias.outputs = layer.outputs;
            if !shares_bias {
                let own = outputs.iter().map(|own| vec![own.clone()]).collect();
                parameters.shard(bias.parameter, 0, own, rank);
                bias.outputs = Outputs::adjacent(0..len);
            }
        }
    }
}
