//! The division of the backward pass's sums on a device.

use super::ELSEWHERE;

/// Maximum number of tokens that one block adds up. An id may belong to half of all tokens, and a single
/// block would take as long for it as all others together.
const SEGMENT_TOKENS: usize = 128;

/// The tokens of each id that is not elsewhere, and the segments in which their gradients are summed. A segment's sum goes to the
/// id's row of dweight, or to a row of partial sums if the id has several segments; these are then added in
/// order. All orders depend only on `ids`.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Plan {
    /// Token indices, grouped by id, in order.
    pub(super) tokens: Vec<u32>,
    /// {begin, end, row, is_partial} over `tokens`: `Segment` of `cuda/embedding.cu`.
    pub(super) segments: Vec<[u32; 4]>,
    /// {row, begin, end} of the partial sums of each id that has any.
    pub(super) sums: Vec<[u32; 3]>,
    /// Number of rows of partial sums.
    pub(super) partials: usize,
}

impl Plan {
    /// Creates the plan for `ids`, independent of the vocabulary's size.
    pub(super) fn new(ids: &[u32]) -> Self {
        let ends = ends_of_ids(ids);
        let mut plan = Self { tokens: sorted_tokens(ids, &ends), ..Self::default() };
        let mut begin = 0;
        for (id, &end) in ends.iter().enumerate() {
            plan.add(id as u32, begin, end);
            begin = end;
        }
        plan
    }

    fn add(&mut self, id: u32, begin: u32, end: u32) {
        let segments = ((end - begin) as usize).div_ceil(SEGMENT_TOKENS);
        let first_partial = self.partials as u32;
        for nth in 0..segments {
            let begin = begin + (nth * SEGMENT_TOKENS) as u32;
            let end = end.min(begin + SEGMENT_TOKENS as u32);
            let (row, is_partial) = if segments == 1 { (id, 0) } else { (first_partial + nth as u32, 1) };
            self.segments.push([begin, end, row, is_partial]);
        }
        if segments > 1 {
            self.partials += segments;
            self.sums.push([id, first_partial, self.partials as u32]);
        }
    }
}

/// The ids of a slice's own rows, each with its token.
fn own(ids: &[u32]) -> impl DoubleEndedIterator<Item = (usize, u32)> {
    ids.iter().copied().enumerate().filter(|(_, id)| *id != ELSEWHERE)
}

/// For each id up to the largest, the number of tokens with this id or a smaller one.
fn ends_of_ids(ids: &[u32]) -> Vec<u32> {
    let mut ends = vec![0; own(ids).map(|(_, id)| id as usize + 1).max().unwrap_or(0)];
    for (_, id) in own(ids) {
        ends[id as usize] += 1;
    }
    let mut total = 0;
    for end in &mut ends {
        total += *end;
        *end = total;
    }
    ends
}

/// Token indices sorted by id, in order within an id.
fn sorted_tokens(ids: &[u32], ends: &[u32]) -> Vec<u32> {
    let mut ends = ends.to_vec();
    let mut tokens = vec![0; ends.last().map_or(0, |&end| end as usize)];
    for (token, id) in own(ids).rev() {
        let place = &mut ends[id as usize];
        *place -= 1;
        tokens[*place as usize] = token as u32;
    }
    tokens
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_sorted_by_id_and_each_id_has_its_segment() {
        let plan = Plan::new(&[3, 0, 3, 1, 3]);
        assert_eq!(plan.tokens, [1, 3, 0, 2, 4]);
        assert_eq!(plan.segments, [[0, 1, 0, 0], [1, 2, 1, 0], [2, 5, 3, 0]]);
        assert_eq!((plan.sums.len(), plan.partials), (0, 0));
    }

    #[test]
    fn an_id_of_many_tokens_is_split_into_partial_sums() {
        let mut ids = vec![2; 300];
        ids.extend([1; 129]);
        ids.extend([0; 128]);
        let plan = Plan::new(&ids);
        let expected = [
            [0, 128, 0, 0],
            [128, 256, 0, 1],
            [256, 257, 1, 1],
            [257, 385, 2, 1],
            [385, 513, 3, 1],
            [513, 557, 4, 1],
        ];
        assert_eq!(plan.segments, expected);
        assert_eq!(plan.sums, [[1, 0, 2], [2, 2, 5]]);
        assert_eq!(plan.partials, 5);
    }

    #[test]
    fn no_tokens_need_no_plan() {
        assert_eq!(Plan::new(&[]), Plan::default());
    }
}
