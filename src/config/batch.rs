//! The batch sizes: `train_batch_size = micro × accumulation × dp`.

use crate::mesh::MeshShape;

/// The keys of the three batch sizes.
pub(super) const BATCH_KEYS: [&str; 3] =
    ["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"];

/// The three batch sizes; any two of them determine the third.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchSizes {
    /// Sequences per optimizer step, over all ranks.
    pub train: usize,
    /// Sequences per forward pass of one data-parallel rank.
    pub micro: usize,
    /// Forward passes per optimizer step.
    pub accumulation: usize,
}

/// The errors of batch sizes that do not agree.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BatchError {
    /// No batch size is set.
    #[error(
        "the batch size is not set: set `train_batch_size` or `train_micro_batch_size_per_gpu` \
         (`gradient_accumulation_steps` alone does not determine it)"
    )]
    Unset,
    /// All three are set and do not agree.
    #[error(
        "`train_batch_size` is {train}, but `train_micro_batch_size_per_gpu` {micro} × \
         `gradient_accumulation_steps` {accumulation} × dp {dp} = {}: {}", micro * accumulation * dp, remedy(mesh)
    )]
    Contradiction {
        /// `train_batch_size`.
        train: usize,
        /// `train_micro_batch_size_per_gpu`.
        micro: usize,
        /// `gradient_accumulation_steps`.
        accumulation: usize,
        /// Data-parallel ranks.
        dp: usize,
        /// The mesh that the sizes need, if neither the file nor a flag sets dp.
        mesh: Option<String>,
    },
    /// The train batch size is not divisible.
    #[error("`train_batch_size` {train} is not a multiple of {factors}: the nearest valid sizes are {}",
        nearest_multiples(*train, *divisor))]
    Indivisible {
        /// `train_batch_size`.
        train: usize,
        /// The required divisor.
        divisor: usize,
        /// The divisor as a product of keys, with its value if there are several.
        factors: String,
    },
    /// A product overflows.
    #[error("the batch size is too large: {factors} exceeds 2^{}", usize::BITS)]
    Overflow {
        /// The product.
        factors: String,
    },
}

impl BatchError {
    /// Adds the mesh whose dp the sizes need, on a mesh whose dp nothing sets.
    pub(super) fn with_unset_dp(self, mesh: MeshShape) -> Self {
        match self {
            Self::Contradiction { train, micro, accumulation, dp, .. }
                if train.is_multiple_of(micro * accumulation) =>
            {
                let mesh = MeshShape { dp: train / (micro * accumulation), ..mesh };
                Self::Contradiction { train, micro, accumulation, dp, mesh: Some(mesh.notation()) }
            }
            other => other,
        }
    }
}

impl BatchSizes {
    /// Completes and checks the given sizes as DeepSpeed does, but in integers: accumulation
    /// defaults to 1, and divisions must be exact.
    ///
    /// # Errors
    /// When no size is set, the sizes contradict each other, or they do not divide.
    pub fn resolve(
        train: Option<usize>,
        micro: Option<usize>,
        accumulation: Option<usize>,
        dp: usize,
    ) -> Result<Self, BatchError> {
        let dp_factor = Factor { name: "dp", size: dp };
        let micro_factor = |size| Factor { name: "`train_micro_batch_size_per_gpu`", size };
        let accumulation_factor = |size| Factor { name: "`gradient_accumulation_steps`", size };
        let (train, micro, accumulation) = match (train, micro, accumulation) {
            (None, None, _) => return Err(BatchError::Unset),
            (Some(train), None, None) => (train, exact_quotient(train, &[dp_factor])?, 1),
            (Some(train), None, Some(accumulation)) => {
                let factors = [accumulation_factor(accumulation), dp_factor];
                (train, exact_quotient(train, &factors)?, accumulation)
            }
            (Some(train), Some(micro), None) => {
                (train, micro, exact_quotient(train, &[micro_factor(micro), dp_factor])?)
            }
            (stated, Some(micro), accumulation) => {
                let accumulation = accumulation.unwrap_or(1);
                let total = product(&[micro_factor(micro), accumulation_factor(accumulation), dp_factor])?;
                if let Some(train) = stated.filter(|stated| *stated != total) {
                    return Err(BatchError::Contradiction { train, micro, accumulation, dp, mesh: None });
                }
                (total, micro, accumulation)
            }
        };
        Ok(Self { train, micro, accumulation })
    }
}

fn remedy(mesh: &Option<String>) -> String {
    match mesh {
        Some(mesh) => format!(
            "dp is 1 because neither the file nor --mesh sets it; pass --mesh {mesh}, or change one of the three sizes"
        ),
        None => "remove one of the three, or make them agree (sp does not count)".to_owned(),
    }
}

/// A factor of the train batch size.
#[derive(Clone, Copy)]
struct Factor {
    name: &'static str,
    size: usize,
}

fn product(factors: &[Factor]) -> Result<usize, BatchError> {
    let product = factors.iter().try_fold(1_usize, |product, factor| product.checked_mul(factor.size));
    product.ok_or_else(|| BatchError::Overflow { factors: spelled_out(factors) })
}

fn exact_quotient(train: usize, factors: &[Factor]) -> Result<usize, BatchError> {
    let divisor = product(factors)?;
    if train.is_multiple_of(divisor) {
        return Ok(train / divisor);
    }
    let value = if factors.len() > 1 { format!(" = {divisor}") } else { String::new() };
    Err(BatchError::Indivisible { train, divisor, factors: spelled_out(factors) + &value })
}

fn spelled_out(factors: &[Factor]) -> String {
    let factors = factors.iter().map(|Factor { name, size }| format!("{name} {size}"));
    factors.collect::<Vec<_>>().join(" × ")
}

fn nearest_multiples(size: usize, divisor: usize) -> String {
    let below = size / divisor * divisor;
    match below.checked_add(divisor) {
        Some(above) if below > 0 => format!("{below} and {above}"),
        Some(above) => format!("{above} and its multiples"),
        None => below.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_two_sizes_give_the_third() {
        // (train, micro, accumulation, dp) -> (train, micro, accumulation)
        let table = [
            ((Some(32), Some(4), Some(2), 4), (32, 4, 2)),
            ((Some(32), Some(4), None, 4), (32, 4, 2)),
            ((Some(32), None, Some(2), 4), (32, 4, 2)),
            ((None, Some(4), Some(2), 4), (32, 4, 2)),
            ((None, Some(4), None, 4), (16, 4, 1)),
            ((Some(32), None, None, 4), (32, 8, 1)),
            ((Some(1), None, None, 1), (1, 1, 1)),
            ((Some(6), Some(2), None, 1), (6, 2, 3)),
        ];
        for ((train, micro, accumulation, dp), (full_train, full_micro, full_accumulation)) in table {
            assert_eq!(
                BatchSizes::resolve(train, micro, accumulation, dp),
                Ok(BatchSizes { train: full_train, micro: full_micro, accumulation: full_accumulation }),
                "{train:?} {micro:?} {accumulation:?} dp {dp}"
            );
        }
    }

    #[test]
    fn sizes_that_do_not_fit_are_refused_with_the_arithmetic() {
        let message =
            |train, micro, accumulation, dp| match BatchSizes::resolve(train, micro, accumulation, dp) {
                Ok(sizes) => panic!("accepted: {sizes:?}"),
                Err(error) => error.to_string(),
            };
        assert_eq!(
            message(Some(30), None, None, 4),
            "`train_batch_size` 30 is not a multiple of dp 4: the nearest valid sizes are 28 and 32"
        );
        assert_eq!(
            message(Some(30), Some(4), None, 2),
            "`train_batch_size` 30 is not a multiple of `train_micro_batch_size_per_gpu` 4 × dp 2 = 8: \
             the nearest valid sizes are 24 and 32"
        );
        assert_eq!(
            message(Some(3), None, Some(2), 2),
            "`train_batch_size` 3 is not a multiple of `gradient_accumulation_steps` 2 × dp 2 = 4: \
             the nearest valid sizes are 4 and its multiples"
        );
        assert_eq!(
            message(Some(30), Some(4), Some(2), 2),
            "`train_batch_size` is 30, but `train_micro_batch_size_per_gpu` 4 × `gradient_accumulation_steps` 2 \
             × dp 2 = 16: remove one of the three, or make them agree (sp does not count)"
        );
        assert!(message(None, None, None, 2).starts_with("the batch size is not set"));
        assert!(message(None, None, Some(2), 2).starts_with("the batch size is not set"));
        assert!(message(None, Some(usize::MAX), Some(2), 2).contains("too large"));
        assert!(message(Some(1), Some(usize::MAX), None, 2).contains("too large"));
    }
}
