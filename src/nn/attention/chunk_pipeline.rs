//! The order in which head chunks are sent, attended and returned.

/// Runs three steps for each chunk: `start` sends its operands, `attend` computes and starts to return the
/// results, `finish` waits for these. Each step sees the chunks in order.
///
/// With `overlaps`, the next chunk's operands and the previous chunk's results travel while a chunk is attended:
///
/// ```text
/// start 0 │ start 1  attend 0 │ start 2  attend 1  finish 0 │ attend 2  finish 1 │ finish 2
/// ```
///
/// So up to three chunks are in memory. Collectives are issued in the order in which they are waited for.
pub(super) fn run_chunks<C, Started, Attended, E>(
    chunks: &[C],
    overlaps: bool,
    mut start: impl FnMut(&C) -> Result<Started, E>,
    mut attend: impl FnMut(&C, Started) -> Result<Attended, E>,
    mut finish: impl FnMut(&C, Attended) -> Result<(), E>,
) -> Result<(), E> {
    if !overlaps {
        return chunks.iter().try_for_each(|chunk| {
            let started = start(chunk)?;
            let attended = attend(chunk, started)?;
            finish(chunk, attended)
        });
    }
    let (mut sent, mut returning) = (None, None);
    for next in chunks.iter().map(Some).chain([None]) {
        let started = next.map(|chunk| Ok((chunk, start(chunk)?))).transpose()?;
        let Some((chunk, current)) = std::mem::replace(&mut sent, started) else { continue };
        let attended = attend(chunk, current)?;
        if let Some((previous, results)) = returning.replace((chunk, attended)) {
            finish(previous, results)?;
        }
    }
    returning.map_or(Ok(()), |(last, results)| finish(last, results))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    /// The steps of each chunk, in order, as `s0 a0 f0`.
    fn order(chunks: usize, overlaps: bool) -> String {
        let log = RefCell::new(Vec::new());
        let note = |step: &str, chunk: usize| {
            log.borrow_mut().push(format!("{step}{chunk}"));
            Ok::<_, ()>(chunk)
        };
        let chunks: Vec<usize> = (0..chunks).collect();
        let attend = |&chunk: &usize, started: usize| {
            assert_eq!(chunk, started);
            note("a", chunk)
        };
        let finish = |&chunk: &usize, attended: usize| {
            assert_eq!(chunk, attended);
            note("f", chunk).map(drop)
        };
        run_chunks(&chunks, overlaps, |&chunk| note("s", chunk), attend, finish).unwrap();
        log.into_inner().join(" ")
    }

    #[test]
    fn the_next_chunk_is_sent_before_and_the_previous_one_returned_after_the_attention() {
        assert_eq!(order(4, true), "s0 s1 a0 s2 a1 f0 s3 a2 f1 a3 f2 f3");
        assert_eq!(order(1, true), "s0 a0 f0");
        assert_eq!(order(0, true), "");
    }

    #[test]
    fn without_overlap_a_chunk_is_finished_before_the_next() {
        assert_eq!(order(3, false), "s0 a0 f0 s1 a1 f1 s2 a2 f2");
    }
}
