//! The heads of one rank of tp.

use super::mixed::Mixed;
use super::{LinearAttention, LinearAttentionConfig};
use crate::nn::attention::scaled;
use crate::nn::tensor_parallel::are_shared;
use crate::nn::{HeadDivision, LayerError, Linear, ParameterList, TensorRank};
use std::ops::Range;

impl LinearAttentionConfig {
    /// The linear attention of one rank, with the heads of every rank: value heads with the key heads that they use.
    ///
    /// # Errors
    /// Heads that cannot be divided over so many ranks; `layer` is the name for the error. Ranks cannot share one of several norms
    /// over groups of heads.
    pub fn divided(self, layer: &str, tp: TensorRank) -> Result<(Self, HeadDivision), LayerError> {
        let (groups, size) = (self.num_key_heads, tp.size);
        if self.mamba2().is_some() && groups > 1 && size > groups {
            return Err(LayerError::TensorRanks { layer: layer.to_owned(), size, max_size: groups });
        }
        let heads = HeadDivision::of_layer(layer, [self.num_value_heads, self.num_key_heads], tp)?;
        let (num_value_heads, num_key_heads) = (heads.q[tp.rank].len(), heads.kv[tp.rank].len());
        Ok((Self { num_key_heads, num_value_heads, ..self }, heads))
    }
}

impl LinearAttention {
    /// Keeps the heads of one rank of tp; the output is then a partial sum. If ranks share key heads, the parameters of queries, keys and
    /// values stay whole, and each rank uses some of their rows and channels.
    ///
    /// # Errors
    /// Heads that cannot be divided over so many ranks.
    pub fn divide(&mut self, parameters: &mut ParameterList, tp: TensorRank) -> Result<(), LayerError> {
        let (shape, heads) = self.shape.divided(parameters.layer(), tp)?;
        let HeadDivision { q: values, kv: keys } = &heads;
        let (of_keys, of_values) = (scaled(keys, shape.key_head_dim), scaled(values, shape.value_head_dim));
        let (k, v, h) = (&of_keys[..], &of_values[..], &values[..]);
        let Mixed { qkv: [q_proj, k_proj, v_proj], b, a } = &mut self.mixed;
        // Those with one parameter in the order of its rows.
        match b {
            Some(b) => {
                let layers = [q_proj, k_proj, v_proj, b, a, &mut self.z];
                Linear::divide_outputs(parameters, layers, [k, k, v, h, h, v], tp.rank);
            }
            None => {
                let layers = [&mut self.z, v_proj, k_proj, q_proj, a];
                Linear::divide_outputs(parameters, layers, [v, v, k, k, h], tp.rank);
            }
        }
        self.out.divide_inputs(parameters, &of_values, tp.rank);

        let parts = [&of_keys, &of_keys, &of_values];
        let channels = |rank: usize| -> [Range<usize>; 3] {
            std::array::from_fn(|part| {
                let (first, own) = (self.channels[part].start, &parts[part][rank]);
                first + own.start..first + own.end
            })
        };
        let shares_keys = are_shared(keys);
        let own = channels(tp.rank);
        if !shares_keys {
            let ascending = |rank: usize| {
                let mut channels = channels(rank).to_vec();
                channels.sort_by_key(|part| part.start);
                channels
            };
            let of_ranks: Vec<_> = (0..tp.size).map(ascending).collect();
            self.conv.divide(parameters, &of_ranks, tp.rank);
        }
        self.channels = if shares_keys { own } else { adjacent(own) };
        for parameter in [self.dt_bias, self.a_log].into_iter().chain(self.skip) {
            let of_ranks = values.iter().map(|own| vec![own.clone()]).collect();
            parameters.shard(parameter, 0, of_ranks, tp.rank);
        }
        self.norm.divide(parameters, &heads, &of_values, tp)?;
        self.shape = shape;
        Ok(())
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
