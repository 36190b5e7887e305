//! The heads of one rank of tp.

use super::mixed::Mixed;
use super::{LinearAttention, LinearAttentionConfig};
use crate::nn::heads::{even_ranges, one_each, scaled};
use crate::nn::projection::Projection;
use crate::nn::tensor_parallel::are_shared;
use crate::nn::{HeadDivision, Heads, LayerError, Linear, NumHeads, ParameterList, TensorRank};
use std::ops::Range;

impl LinearAttentionConfig {
    /// The linear attention of one rank, with the heads of every rank: value heads with the key heads that they use.
    ///
    /// # Errors
    /// Heads that cannot be divided over so many ranks; `layer` is the name for the error. Ranks cannot share one of several norms
    /// over groups of heads.
    pub fn divided(self, layer: &str, tp: TensorRank) -> Result<(Self, HeadDivision), LayerError> {
        if self.mamba2().is_some() && self.num_key_heads > 1 {
            // Only for its error: of several norms over groups, which are those of key heads, ranks share none.
            even_ranges(layer, self.num_key_heads, tp)?;
        }
        let division = self.heads().divide(layer, tp)?;
        let NumHeads { q: num_value_heads, kv: num_key_heads } = division.num_heads(tp.rank);
        Ok((Self { num_key_heads, num_value_heads, ..self }, division))
    }
}

impl LinearAttention {
    /// Keeps the heads of one rank of tp; the output is then a partial sum. If ranks share key heads, the parameters of queries, keys and
    /// values stay whole, and those that have the others by key head; each rank uses some of their rows and channels.
    ///
    /// # Errors
    /// Heads that cannot be divided over so many ranks.
    pub fn divide(&mut self, parameters: &mut ParameterList, tp: TensorRank) -> Result<(), LayerError> {
        let (shape, heads) = self.shape.divided(parameters.layer(), tp)?;
        let Heads { q: values, kv: keys } = &heads;
        let (of_keys, of_values) = (scaled(keys, shape.key_head_dim), scaled(values, shape.value_head_dim));
        let of_decays = scaled(values, shape.decays_per_head());
        let Mixed { qkv: [q, k, v], b, a } = &mut self.mixed;
        let [q, k, v, a, z] = [q, k, v, a, &mut self.z].map(Projection::last_mut);
        let (keys_of, values_of, heads_of, decays_of) =
            (&of_keys[..], &of_values[..], &values[..], &of_decays[..]);
        // Those with one parameter in the order of its rows.
        match b.as_mut().map(Projection::last_mut) {
            Some(b) => {
                let outputs = [keys_of, keys_of, values_of, values_of, heads_of, decays_of];
                Linear::divide_outputs(parameters, [q, k, v, z, b, a], outputs, tp.rank);
            }
            None => {
                let outputs = [values_of, values_of, keys_of, keys_of, decays_of];
                Linear::divide_outputs(parameters, [z, v, k, q, a], outputs, tp.rank);
            }
        }
        self.out.divide_inputs(parameters, &of_values, tp.rank);

        self.divide_convolutions(parameters, [&of_keys, &of_keys, &of_values], tp);
        parameters.shard(self.dt_bias, 0, one_each(&of_decays), tp.rank);
        parameters.shard(self.a_log, self.a_log_dim(), one_each(values), tp.rank);
        self.rule.skip().into_iter().for_each(|skip| parameters.shard(skip, 0, one_each(values), tp.rank));
        self.norm.divide(parameters, keys, &of_values, tp)?;
        self.shape = shape;
        Ok(())
    }

    /// Keeps the channels of one rank: `parts` are those of queries, keys and values of every rank.
    fn divide_convolutions(
        &mut self,
        parameters: &mut ParameterList,
        parts: [&Vec<Range<usize>>; 3],
        tp: TensorRank,
    ) {
        let channels = |rank: usize| -> [Range<usize>; 3] {
            std::array::from_fn(|part| {
                let (first, own) = (self.channels[part].start, &parts[part][rank]);
                first + own.start..first + own.end
            })
        };
        let own = channels(tp.rank);
        if !self.convs[0].is_same(&self.convs[1]) {
            for (conv, of_ranks) in self.convs.iter().zip(parts) {
                conv.divide(parameters, &one_each(of_ranks), tp.rank);
            }
            self.channels = own.map(|own| 0..own.len());
        } else if are_shared(parts[0]) {
            self.channels = own;
        } else {
            let ascending = |rank: usize| {
                let mut channels = channels(rank).to_vec();
                channels.sort_by_key(|part| part.start);
                channels
            };
            let of_ranks: Vec<_> = (0..tp.size).map(ascending).collect();
            self.convs[0].divide(parameters, &of_ranks, tp.rank);
            self.channels = adjacent(own);
        }
    }

    /// The dimension of `A_log` that is the heads.
    fn a_log_dim(&self) -> usize {
        if self.shape.has_channel_decays() { 2 } else { 0 }
    }
}

/// Ranges of the same lengths and in the same order, one after the other from 0.
fn adjacent(ranges: [Range<usize>; 3]) -> [Range<usize>; 3] {
    std::array::from_fn(|part| {
        let before = ranges.iter().filter(|range| range.start < ranges[part].start);
        let start = before.map(ExactSizeIterator::len).sum();
        start..start + ranges[part].len()
    })
}
