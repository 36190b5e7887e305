//! The errors of the ledger.

use std::fmt;

/// A fault of a tensor along an axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// It is used without the sum along the axis.
    NotSummed,
    /// It is summed again, or its replicas are.
    SummedTwice,
    /// It is reduced, but not to the sum.
    NotASum,
    /// It is summed, but holds nothing.
    NothingToSum,
    /// It is used before a collective along the axis is complete.
    Incomplete,
    /// A backward pass adds to what is summed.
    AddedAfterSum,
    /// It is combined with a tensor that is placed differently.
    Mixed,
    /// It is used without the gather along the axis.
    NotGathered,
    /// It is gathered along an axis that does not shard it.
    NotSharded,
    /// Its shards are compared, which differ.
    ShardsCompared,
    /// Its replicas are not compared.
    NotCompared,
    /// A backward pass adds to it, but its parameter is frozen.
    Frozen,
    /// Its squares are not in the norm.
    NotCounted,
    /// Its squares are in the norm twice.
    CountedTwice,
    /// Its squares are in the norm of several ranks that have it.
    CountedByReplicas,
}

/// A reduction, gather or comparison that is missing, or one too many.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub struct LedgerError {
    /// The tensor, with its parameters.
    pub tensor: String,
    /// The axis of the mesh; `None` of a fault along no axis.
    pub axis: Option<String>,
    /// The fault.
    pub fault: Fault,
}

impl fmt::Display for LedgerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (before, after) = match self.fault {
            Fault::NotSummed => ("used without its sum over", ""),
            Fault::SummedTwice => ("summed over", " twice"),
            Fault::NotASum => ("reduced over", ", but not to the sum"),
            Fault::NothingToSum => ("summed over", ", but no backward pass has added to it"),
            Fault::Incomplete => ("used before the collective over", " is complete"),
            Fault::AddedAfterSum => ("added to by a backward pass after its sum over", ""),
            Fault::Mixed => ("combined with a tensor that is placed differently over", ""),
            Fault::NotGathered => ("used without its gather over", ""),
            Fault::NotSharded => ("gathered over", ", but not sharded over it"),
            Fault::ShardsCompared => ("compared over", ", but sharded over it"),
            Fault::NotCompared => ("not compared over", ", but replicated over it"),
            Fault::Frozen => ("computed, but the parameter is frozen", ""),
            Fault::NotCounted => ("not counted in the norm", ""),
            Fault::CountedTwice => ("counted twice in the norm", ""),
            Fault::CountedByReplicas => ("counted in the norm by several ranks along", ", which all have it"),
        };
        write!(f, "{} is {before}", self.tensor)?;
        self.axis.as_ref().map_or(Ok(()), |axis| write!(f, " `{axis}`{after}"))
    }
}
