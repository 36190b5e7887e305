//! send and recv. A message is a header with dtype and count, then the elements; the receiver
//! acknowledges them.

use super::operation::Step;
use crate::comm::diagnostics::{OpLabel, compare_message};
use crate::comm::{CommError, Elements};
use candle_core::Tensor;

/// Completes when the receiver has received the elements.
pub(super) fn send(tensor: Tensor, to: usize) -> Step {
    Step::new(move |transfers, members| {
        let header = serde_json::to_vec(&Elements::of(&tensor));
        let header = header.map_err(|error| CommError::Tensor(error.to_string()))?;
        transfers.send_text(members, header, to)?;
        transfers.next_phase();
        transfers.send(members, &tensor, to)?;
        transfers.next_phase();
        transfers.expect_text(to);
        Ok(None)
    })
}

pub(super) fn receive(tensor: Tensor, from: usize) -> Step {
    Step::new(move |transfers, _| {
        transfers.expect_text(from);
        Ok(Some(Step::new(move |transfers, members| {
            let header = transfers.text_from(from);
            check_header(&header, from, members.rank(), &tensor, transfers.label())?;
            transfers.next_phase();
            transfers.receive(members, &tensor, from)?;
            Ok(Some(Step::new(move |transfers, members| {
                transfers.next_phase();
                transfers.send_text(members, Vec::new(), from)?;
                Ok(None)
            })))
        })))
    })
}

fn check_header(
    text: &[u8],
    from: usize,
    to: usize,
    output: &Tensor,
    label: &OpLabel,
) -> Result<(), CommError> {
    let sent: Elements =
        serde_json::from_slice(text).map_err(|error| CommError::Tensor(error.to_string()))?;
    compare_message(from, sent, to, Elements::of(output)).map_err(|divergence| divergence.error_in(label))
}
