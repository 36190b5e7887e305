//! Tensors that know where their elements lie: PyTorch's `DTensor`.
//!
//! `form.rs` compares the tensors of the ranks, `rules.rs` has the table of placements per operation, `ops.rs` and `views.rs`
//! the operations.

mod form;
mod ops;
mod rules;
#[cfg(test)]
mod tests;
mod views;

use super::execute::StartedPlan;
use super::{Layout, Placement, PlacementError, Plan, Step, StepKind, redistribute};
use crate::comm::{MeshGroups, ProcessGroup, ProcessGroupExt, ReduceOp};
use Placement::{Partial, Replicate, Shard};
use candle_core::{DType, Tensor};
use form::Form;
use std::fmt;
use std::sync::Arc;
use ulysses_kernels::tensor;

/// A logical tensor whose elements lie on the ranks of a mesh: PyTorch's `DTensor`.
///
/// Each rank has the [`local`](Self::local) tensor of its place in a [`Layout`]. Shards may be uneven or empty; lengths and
/// slices are exact. Operations compute on local tensors and propagate placements. They never communicate by themselves:
/// placements without a rule are an error with the [`redistribute`](Self::redistribute) calls that make the operation
/// possible. Only [`norm`](Self::norm) and [`equals`](Self::equals) reduce a value over the ranks.
///
/// Every rank makes the same calls in the same order. candle's gradients do not flow through a redistribution.
///
/// # Examples
///
/// ```
/// use std::sync::Arc;
/// use ulysses::placement::{Placement::*, ShardedTensor};
/// use ulysses::prelude::*;
///
/// let mesh = DeviceMesh::parse("2x2", None)?;
/// launch(4, &LaunchOptions::default(), |rank| {
///     let groups = Arc::new(MeshGroups::new(&mesh, rank.group.clone())?);
///     let x = Tensor::arange(0_f32, 21.0, &Device::Cpu)?.reshape((7, 3))?;
///     let w = Tensor::ones((3, 5), x.dtype(), x.device())?;
///     let sharded = ShardedTensor::distribute(&groups, &x, &[Shard(0), Shard(1)])?;
///     let weight = ShardedTensor::distribute(&groups, &w, &[Replicate, Shard(0)])?;
///     let product = sharded.matmul(&weight)?; // computed without communication
///     assert_eq!(product.placements(), [Shard(0), Partial]);
///     assert_eq!(product.full_tensor()?.to_vec2::<f32>()?, x.matmul(&w)?.to_vec2::<f32>()?);
///     Ok::<_, anyhow::Error>(())
/// })?;
/// # Ok::<(), anyhow::Error>(())
/// ```
#[derive(Clone)]
pub struct ShardedTensor {
    groups: Arc<MeshGroups>,
    coordinate: Vec<usize>,
    layout: Layout,
    local: Tensor,
}

impl ShardedTensor {
    /// Distributes the tensor of the first rank of the mesh: torch's `distribute_tensor`. Collective.
    ///
    /// All ranks pass a tensor of the same shape and dtype; the elements of the other ranks are not used. Along each axis in
    /// turn, the first rank sends the others their parts. So a rank receives once: what it keeps, and what it passes on along
    /// later axes. Along an axis with a `Partial` placement, the first rank keeps the elements and the others have zeros.
    ///
    /// # Shapes
    /// `whole`: the logical shape.
    ///
    /// # Errors
    /// Placements that do not fit the mesh or the shape, tensors that differ in shape or dtype, failed communication.
    pub fn distribute(
        groups: &Arc<MeshGroups>,
        whole: &Tensor,
        placements: &[Placement],
    ) -> Result<Self, PlacementError> {
        let along = groups.get_all_groups()?;
        let forms = Form::gather(&along, whole)?;
        let layout = Layout::on_mesh(&*forms[0].shape, groups.mesh(), placements)?;
        Form::check(&layout, &forms, |_| Ok(forms[0].clone()))?;
        let coordinate = coordinate(&along);
        let local = scatter(&along, &coordinate, &layout, whole)?;
        Ok(Self { groups: groups.clone(), coordinate, layout, local })
    }

    /// Takes the ranks' local tensors as the parts of one tensor: torch's `DTensor.from_local`.
    ///
    /// The elements are not compared or moved: along a `Replicate` axis the ranks must have the same. With `shape` there is
    /// no communication, and each rank checks its own part. Without, the ranks exchange their shapes, collectively, and
    /// shards that do not fit together are an error on all of them.
    ///
    /// # Shapes
    /// `local`: this rank's part by [`Layout::local_shape`]. `shape`: the logical shape.
    ///
    /// # Errors
    /// Placements that do not fit the mesh, or local tensors that are not the parts of one tensor.
    pub fn from_local(
        groups: &Arc<MeshGroups>,
        local: &Tensor,
        placements: &[Placement],
        shape: Option<&[usize]>,
    ) -> Result<Self, PlacementError> {
        let along = groups.get_all_groups()?;
        let layout = match shape {
            Some(shape) => Layout::on_mesh(shape, groups.mesh(), placements)?,
            None => form::common_layout(groups.mesh(), placements, &Form::gather(&along, local)?)?,
        };
        Self::new(groups.clone(), coordinate(&along), layout, local)
    }

    /// Zeros, without communication: torch's `distributed.tensor.zeros`. They are on the device of `groups`.
    ///
    /// # Errors
    /// Placements that do not fit the mesh or the shape, or a failed allocation.
    pub fn zeros(
        groups: &Arc<MeshGroups>,
        shape: &[usize],
        dtype: DType,
        placements: &[Placement],
    ) -> Result<Self, PlacementError> {
        let layout = Layout::on_mesh(shape, groups.mesh(), placements)?;
        let coordinate = coordinate(&groups.get_all_groups()?);
        let local = tensor::zeros(layout.local_shape(&coordinate)?, dtype, groups.device())?;
        Ok(Self { groups: groups.clone(), coordinate, layout, local })
    }

    /// Checks and keeps a local tensor.
    fn new(
        groups: Arc<MeshGroups>,
        coordinate: Vec<usize>,
        layout: Layout,
        local: &Tensor,
    ) -> Result<Self, PlacementError> {
        let expected = layout.local_shape(&coordinate)?;
        if local.dims() != expected {
            let (layout, got) = (layout.to_string(), local.dims().to_vec());
            return Err(PlacementError::Local { what: "the shape", layout, expected, got });
        }
        Ok(Self { groups, coordinate, layout, local: contiguous(local)? })
    }

    /// Another tensor on the same mesh.
    fn with(&self, layout: Layout, local: &Tensor) -> Result<Self, PlacementError> {
        Self::new(self.groups.clone(), self.coordinate.clone(), layout, local)
    }

    /// Shape of the logical tensor.
    pub fn shape(&self) -> &[usize] {
        self.layout.shape()
    }

    /// Dtype of the elements.
    pub fn dtype(&self) -> DType {
        self.local.dtype()
    }

    /// Shape, axes and placements.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The placements, one per axis of the mesh.
    pub fn placements(&self) -> Vec<Placement> {
        self.layout.placements()
    }

    /// The groups of the mesh.
    pub fn groups(&self) -> &Arc<MeshGroups> {
        &self.groups
    }

    /// This rank's coordinate in the mesh.
    pub fn coordinate(&self) -> &[usize] {
        &self.coordinate
    }

    /// This rank's part of the tensor, contiguous: torch's `to_local`.
    pub fn local(&self) -> &Tensor {
        &self.local
    }

    /// The steps to other placements.
    ///
    /// # Errors
    /// Placements that do not fit the mesh or the shape.
    pub fn plan(&self, placements: &[Placement]) -> Result<Plan, PlacementError> {
        redistribute(&self.layout, &self.layout.with_placements(placements)?)
    }

    /// Bytes that this rank sends in a redistribution to other placements.
    ///
    /// # Errors
    /// As [`plan`](Self::plan).
    pub fn sent_bytes(&self, placements: &[Placement]) -> Result<u64, PlacementError> {
        Ok(self.plan(placements)?.sent_elems(&self.coordinate)? * self.dtype().size_in_bytes() as u64)
    }

    /// The same tensor with other placements, by the steps of [`plan`](Self::plan). Collective.
    ///
    /// # Errors
    /// As [`plan`](Self::plan), or failed communication.
    pub fn redistribute(&self, placements: &[Placement]) -> Result<Self, PlacementError> {
        self.start_redistribute(placements)?.wait()
    }

    /// Starts a redistribution: torch's `redistribute(…, async_op=True)`. Collective.
    ///
    /// The first collective of [`plan`](Self::plan) runs while this rank computes. Those that need its result run in
    /// [`wait`](PendingTensor::wait). All ranks wait in the same order.
    ///
    /// # Errors
    /// As [`redistribute`](Self::redistribute).
    pub fn start_redistribute(&self, placements: &[Placement]) -> Result<PendingTensor, PlacementError> {
        let plan = self.plan(placements)?;
        let started = plan.start_on(self.groups.get_all_groups()?, &self.local)?;
        Ok(PendingTensor { tensor: Self { layout: plan.to().clone(), ..self.clone() }, started })
    }

    /// The whole tensor, on every rank. Collective.
    ///
    /// # Errors
    /// Failed communication.
    pub fn full_tensor(&self) -> Result<Tensor, PlacementError> {
        Ok(self.redistribute(&vec![Replicate; self.layout.axes().len()])?.local)
    }

    /// Whether two tensors have the same shape, dtype, mesh and elements, whatever their placements; the same answer on all
    /// ranks. Collective. As with floats, NaN equals nothing.
    ///
    /// # Errors
    /// Failed communication.
    pub fn equals(&self, other: &Self) -> Result<bool, PlacementError> {
        let is_alike = self.shape() == other.shape() && self.dtype() == other.dtype();
        if !is_alike || self.groups.mesh() != other.groups.mesh() {
            return Ok(false);
        }
        let summed = |placement: Placement| if placement == Partial { Replicate } else { placement };
        let placements: Vec<_> = self.placements().into_iter().map(summed).collect();
        let (one, other) = (self.redistribute(&placements)?.local, other.redistribute(&placements)?.local);
        let mut differing = match one.elem_count() {
            0 => 0,
            _ => one.ne(&other)?.to_dtype(DType::U32)?.max_all()?.to_scalar::<u32>()?,
        };
        for group in self.groups.get_all_groups()? {
            differing = group.all_reduce_values(&[differing], ReduceOp::Max)?[0];
        }
        Ok(differing == 0)
    }
}

/// A redistribution in progress. Dropping it completes its first collective only.
#[derive(Debug)]
#[must_use = "the tensor is valid only after `wait`"]
pub struct PendingTensor {
    /// The result, whose local tensor is still to come.
    tensor: ShardedTensor,
    started: StartedPlan,
}

impl PendingTensor {
    /// Whether [`wait`](Self::wait) would return without waiting.
    pub fn is_completed(&self) -> bool {
        self.started.is_completed()
    }

    /// Blocks until this rank has its part, and returns the tensor. Collective.
    ///
    /// # Errors
    /// Failed communication.
    pub fn wait(self) -> Result<ShardedTensor, PlacementError> {
        let Self { tensor, started } = self;
        tensor.with(tensor.layout.clone(), &started.wait()?)
    }
}

/// Sends each rank its part of the tensor that the first rank has.
fn scatter(
    along: &[Arc<dyn ProcessGroup>],
    coordinate: &[usize],
    layout: &Layout,
    whole: &Tensor,
) -> Result<Tensor, PlacementError> {
    let zeros = |shape: &[usize]| tensor::zeros(shape, whole.dtype(), whole.device());
    let placements = layout.placements();
    if placements.iter().zip(coordinate).any(|(placement, index)| *placement == Partial && *index > 0) {
        return Ok(zeros(&layout.local_shape(coordinate)?)?);
    }
    let mut local = contiguous(whole)?;
    let mut before = layout.with_placements(&vec![Replicate; placements.len()])?;
    for (axis, (group, placement)) in along.iter().zip(placements).enumerate() {
        let after = before.with(axis, placement);
        // Ranks further along later axes get their part from this one, when it has its own.
        let has_turn = coordinate[axis + 1..].iter().all(|index| *index == 0);
        match placement {
            Shard(dim) if has_turn => {
                let step = Step { axis, kind: StepKind::Slice { dim }, before, after: after.clone() };
                local = step.scatter(&**group, coordinate, &local)?;
            }
            Replicate if has_turn => {
                if group.rank() > 0 {
                    local = zeros(&before.local_shape(coordinate)?)?;
                }
                group.broadcast(&local, 0)?;
            }
            _ => {}
        }
        before = after;
    }
    Ok(local)
}

/// A contiguous tensor. A view without elements may begin beyond the end of its storage.
fn contiguous(tensor: &Tensor) -> candle_core::Result<Tensor> {
    match tensor.elem_count() {
        0 => tensor::zeros(tensor.shape(), tensor.dtype(), tensor.device()),
        _ => tensor.contiguous(),
    }
}

fn coordinate(along: &[Arc<dyn ProcessGroup>]) -> Vec<usize> {
    along.iter().map(|group| group.rank()).collect()
}

impl fmt::Debug for ShardedTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ShardedTensor")
            .field("layout", &format_args!("{}", self.layout))
            .field("coordinate", &self.coordinate)
            .field("local", &self.local)
            .finish_non_exhaustive()
    }
}

/// Writes the layout, then this rank's slices and elements.
impl fmt::Display for ShardedTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let slices = self.layout.local_slices(&self.coordinate).map_err(|_| fmt::Error)?;
        let dtype = self.dtype().as_str();
        writeln!(f, "ShardedTensor {}, {dtype}; {:?} has {slices:?}:", self.layout, self.coordinate)?;
        fmt::Display::fmt(&self.local, f)
    }
}
