//! Operations on sharded tensors: by element, products, and reductions. Their placements follow `rules.rs`.

use super::ShardedTensor;
use super::rules::{PRODUCT, QUOTIENT, SUM, Sums, by_element, matmul, propagate};
use crate::placement::{Layout, Placement, PlacementError};
use Placement::{Partial, Replicate, Shard};
use candle_core::{DType, Shape, Tensor};
use ulysses_kernels::tensor;

impl ShardedTensor {
    /// Sum by element, with candle's broadcasting. Both operands may be pending sums.
    ///
    /// # Shapes
    /// As [`Tensor::broadcast_add`].
    ///
    /// # Errors
    /// Shapes that cannot be broadcast, or placements without a rule; so for all operations.
    pub fn add(&self, other: &Self) -> Result<Self, PlacementError> {
        self.by_element("a.add(&b)", other, SUM, Tensor::broadcast_add)
    }

    /// Difference by element, as [`add`](Self::add).
    ///
    /// # Errors
    /// As [`add`](Self::add).
    pub fn sub(&self, other: &Self) -> Result<Self, PlacementError> {
        self.by_element("a.sub(&b)", other, SUM, Tensor::broadcast_sub)
    }

    /// Product by element, with broadcasting. One operand may be a pending sum along an axis on which the other is replicated.
    ///
    /// # Errors
    /// As [`add`](Self::add).
    pub fn mul(&self, other: &Self) -> Result<Self, PlacementError> {
        self.by_element("a.mul(&b)", other, PRODUCT, Tensor::broadcast_mul)
    }

    /// Quotient by element, with broadcasting. Of floats, the dividend may be a pending sum.
    ///
    /// # Errors
    /// As [`add`](Self::add).
    pub fn div(&self, other: &Self) -> Result<Self, PlacementError> {
        // The rounding of integers is not linear.
        let sums: Sums = if self.dtype().is_float() { QUOTIENT } else { &[] };
        self.by_element("a.div(&b)", other, sums, Tensor::broadcast_div)
    }

    /// Product with a number. A pending sum stays one.
    ///
    /// # Errors
    /// Elements that are not floats.
    pub fn scale(&self, factor: f64) -> Result<Self, PlacementError> {
        self.require_float("scale")?;
        self.with(self.layout.clone(), &self.local.affine(factor, 0.0)?)
    }

    /// Any function of each element by itself, such as `Tensor::relu` or `|x| x + 1.0`. It gets the local tensor.
    ///
    /// # Errors
    /// A pending sum, since a function of the summands is none of the sum; a function that changes the shape or fails.
    pub fn map(
        &self,
        run: impl FnOnce(&Tensor) -> candle_core::Result<Tensor>,
    ) -> Result<Self, PlacementError> {
        self.unary("a.map(f)", run)
    }

    fn unary(
        &self,
        call: &'static str,
        run: impl FnOnce(&Tensor) -> candle_core::Result<Tensor>,
    ) -> Result<Self, PlacementError> {
        let rule = |placements: &[Placement]| (placements[0] != Partial).then_some(placements[0]);
        let layout = propagate(call, &[&self.layout], self.shape().to_vec(), rule)?;
        self.with(layout, &run(&self.local)?)
    }

    fn by_element(
        &self,
        call: &'static str,
        other: &Self,
        sums: Sums,
        run: impl FnOnce(&Tensor, &Tensor) -> candle_core::Result<Tensor>,
    ) -> Result<Self, PlacementError> {
        self.require_same_mesh(call, other)?;
        let shapes = [self.shape(), other.shape()];
        let Ok(shape) = Shape::from(shapes[0]).broadcast_shape_binary_op(&Shape::from(shapes[1]), call)
        else {
            let expected = "equal lengths from the last dimension on, or 1, or none".to_owned();
            return Err(PlacementError::Shape { call, shapes: shapes.map(<[_]>::to_vec).to_vec(), expected });
        };
        let rule = by_element(sums, shapes, shape.dims());
        let layout = propagate(call, &[&self.layout, &other.layout], shape.dims().to_vec(), rule)?;
        self.with(layout, &run(&self.local, &other.local)?)
    }

    /// Product of two matrices. With shards of the inner dimension it is a pending sum.
    ///
    /// # Shapes
    /// `[m, k]` × `[k, n]` → `[m, n]`.
    ///
    /// # Errors
    /// As [`add`](Self::add).
    pub fn matmul(&self, other: &Self) -> Result<Self, PlacementError> {
        let call = "a.matmul(&b)";
        self.require_same_mesh(call, other)?;
        let (&[m, k], &[inner, n]) = (self.shape(), other.shape()) else {
            return Err(self.matmul_shapes(other));
        };
        if k != inner {
            return Err(self.matmul_shapes(other));
        }
        let layout = propagate(call, &[&self.layout, &other.layout], vec![m, n], matmul)?;
        let (a, b) = (&self.local, &other.local);
        let product = match a.elem_count() * b.elem_count() {
            // candle's product needs elements.
            0 => tensor::zeros((a.dim(0)?, b.dim(1)?), a.dtype(), a.device())?,
            _ => a.matmul(b)?,
        };
        self.with(layout, &product)
    }

    /// Sum over a dimension, which the result lacks. Over a sharded one it is a pending sum.
    ///
    /// # Errors
    /// A dimension that the shape lacks.
    pub fn sum(&self, dim: usize) -> Result<Self, PlacementError> {
        self.sum_over("a.sum(dim)", dim, false)
    }

    /// Sum over a dimension, which keeps the length 1; else as [`sum`](Self::sum).
    ///
    /// # Errors
    /// As [`sum`](Self::sum).
    pub fn sum_keepdim(&self, dim: usize) -> Result<Self, PlacementError> {
        self.sum_over("a.sum_keepdim(dim)", dim, true)
    }

    /// Mean over a dimension, as [`sum`](Self::sum): of all its elements, also with uneven shards.
    ///
    /// # Errors
    /// As [`sum`](Self::sum), or elements that are not floats.
    pub fn mean(&self, dim: usize) -> Result<Self, PlacementError> {
        let sum = self.sum_over("a.mean(dim)", dim, false)?;
        sum.scale(1.0 / self.shape()[dim] as f64)
    }

    /// Mean over a dimension, which keeps the length 1; else as [`mean`](Self::mean).
    ///
    /// # Errors
    /// As [`mean`](Self::mean).
    pub fn mean_keepdim(&self, dim: usize) -> Result<Self, PlacementError> {
        let sum = self.sum_over("a.mean_keepdim(dim)", dim, true)?;
        sum.scale(1.0 / self.shape()[dim] as f64)
    }

    /// Sum of all elements: a tensor without dimensions. It is pending along axes that shard the tensor.
    ///
    /// # Errors
    /// A failed tensor operation.
    pub fn sum_all(&self) -> Result<Self, PlacementError> {
        let rule = |placements: &[Placement]| match placements[0] {
            Shard(_) => Some(Partial),
            other => Some(other),
        };
        let layout = propagate("a.sum_all()", &[&self.layout], vec![], rule)?;
        self.with(layout, &sum(&self.local)?)
    }

    /// Mean of all elements, as [`sum_all`](Self::sum_all).
    ///
    /// # Errors
    /// Elements that are not floats.
    pub fn mean_all(&self) -> Result<Self, PlacementError> {
        self.sum_all()?.scale(1.0 / self.shape().iter().product::<usize>() as f64)
    }

    /// The L2 norm of all elements, on every rank: a tensor without dimensions, of the same dtype. Collective: the squares are
    /// summed over the axes that shard the tensor. Squares of 16-bit elements are summed in f32.
    ///
    /// # Errors
    /// A pending sum, elements that are not floats, or failed communication.
    pub fn norm(&self) -> Result<Self, PlacementError> {
        self.require_float("norm")?;
        let dtype = self.dtype();
        let wide = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
        let squares = self.unary("a.norm()", |local| local.to_dtype(wide)?.sqr())?.sum_all()?;
        let sum = squares.redistribute(&vec![Replicate; self.layout.axes().len()])?;
        sum.map(|sum| sum.sqrt()?.to_dtype(dtype))
    }

    fn sum_over(&self, call: &'static str, over: usize, keeps_dim: bool) -> Result<Self, PlacementError> {
        self.require_dims(call, &[over])?;
        let mut shape = self.shape().to_vec();
        if keeps_dim {
            shape[over] = 1;
        } else {
            shape.remove(over);
        }
        let rule = |placements: &[Placement]| match placements[0] {
            Shard(dim) if dim == over => Some(Partial),
            Shard(dim) if dim > over && !keeps_dim => Some(Shard(dim - 1)),
            other => Some(other),
        };
        let layout: Layout = propagate(call, &[&self.layout], shape, rule)?;
        let local = if keeps_dim { self.local.sum_keepdim(over)? } else { self.local.sum(over)? };
        self.with(layout, &local)
    }

    /// Checks that the shape has these dimensions.
    pub(super) fn require_dims(&self, call: &'static str, dims: &[usize]) -> Result<(), PlacementError> {
        let num_dims = self.shape().len();
        if dims.iter().all(|dim| *dim < num_dims) {
            return Ok(());
        }
        let expected = format!("dimensions below {num_dims}, got {dims:?}");
        Err(PlacementError::Shape { call, shapes: vec![self.shape().to_vec()], expected })
    }

    fn require_float(&self, op: &'static str) -> Result<(), PlacementError> {
        match self.dtype().is_float() {
            true => Ok(()),
            false => Err(candle_core::Error::UnsupportedDTypeForOp(self.dtype(), op).into()),
        }
    }

    fn require_same_mesh(&self, call: &'static str, other: &Self) -> Result<(), PlacementError> {
        let (first, second) = (self.groups.mesh(), other.groups.mesh());
        if first == second {
            return Ok(());
        }
        Err(PlacementError::Meshes { call, first: first.to_string(), second: second.to_string() })
    }

    fn matmul_shapes(&self, other: &Self) -> PlacementError {
        let shapes = vec![self.shape().to_vec(), other.shape().to_vec()];
        PlacementError::Shape { call: "a.matmul(&b)", shapes, expected: "[m, k] and [k, n]".to_owned() }
    }
}

/// Sum of a local tensor, which may be empty.
fn sum(local: &Tensor) -> candle_core::Result<Tensor> {
    match local.elem_count() {
        0 => tensor::zeros((), local.dtype(), local.device()),
        _ => local.sum_all(),
    }
}
