"""Restricts the layouts inside a layer for roles that fix more than the types at its border: tensor parallelism on grids of devices (2D,
2.5D, 3D), and expert parallelism.

Without restriction, the optimum on one axis is Megatron's layout if that is legal. On a grid, each axis splits one dim of every product
``y = x w``, the sum over ``k`` of ``x[rows, k] w[k, columns]``, and leaves the other dims to the other axes. The roles do this as follows:

================== ============================== ========================================================================
tensor+weights     activations sharded by batch   a parameter is gathered where it is used, its gradient reduce-scattered
tensor+hidden      activations sharded by columns activations are gathered where they are multiplied, parameters sharded by columns
tensor+rows        activations sharded by columns a product over sharded columns gives partial sums, which are reduce-scattered over
                                                  rows (the sequence); rows are gathered for the next product
tensor+sequence    activations sharded by rows    Megatron's: rows are gathered, partial sums reduce-scattered, matrices never gathered
================== ============================== ========================================================================

* 2D (SUMMA; Xu et al. 2021, "An Efficient 2D Method for Training Super-Large Deep Learning Models"): tensor+hidden x tensor+weights;
* 2.5D (Wang et al. 2021, "Tesseract"): data x tensor+hidden x tensor+weights;
* 3D (Bian et al. 2021, "Maximizing Parallelism in Distributed Training for Huge Neural Networks"): tensor+rows x tensor+sequence x
  tensor+weights.

The tensor+weights axis is the innermost: other axes may shard the same dim of a parameter, and the inner slices are gathered first.

Roles that distribute experts over ranks with replicated parameters send rows to the ranks of their experts by an all-to-all; all other ops
run as under the role data, Ulysses or ring, with unsharded parameters.
"""

from __future__ import annotations

from autopar.plan import Role
from autopar.rules import Candidate
from autopar.types import P, S, SpmdType


def admits(role: Role, option: Candidate, weights: tuple[bool, ...]) -> bool:
    """Return whether the role allows an op to run with this option; ``weights`` says which of its operands are parameters."""
    on_weights = [t for t, weight in zip(option.operands, weights, strict=True) if weight]
    if role is Role.TENSOR_WEIGHTS:
        return not any(t.sharded for t in on_weights)
    if role is Role.TENSOR_HIDDEN:
        return not (option.result == P and any(t.sharded for t in on_weights))
    if role.distributes_experts and role.replicates_parameters:
        return option.kernel == "expert_exchange" or not any(t.sharded for t in on_weights)
    return True


def converts(role: Role, source: SpmdType, target: SpmdType, shape: tuple[int, ...]) -> bool:
    """Return whether the role allows this conversion of an activation. tensor+rows doesn't restrict 0-d and 1-d values, nor a norm's sums
    (last dim 1)."""
    if role is Role.TENSOR_WEIGHTS:
        return not source.sharded
    if role is not Role.TENSOR_ROWS or len(shape) < 2 or shape[-1] == 1:
        return True
    columns, rows = S(len(shape) - 1), S(1 if len(shape) > 2 else 0)
    if source == columns:
        return target.sharded
    if source == rows:
        return target != columns
    return source != P or target == rows


def gathers(role: Role, source: SpmdType, shape: tuple[int, ...]) -> bool:
    """Return whether the role allows converting a parameter from ``source``. tensor+hidden, tensor+rows and tensor+sequence never gather
    matrices, even if activations have few rows: that is what tensor+weights is for."""
    cuts = (Role.TENSOR_HIDDEN, Role.TENSOR_ROWS, Role.TENSOR_SEQUENCE)
    return role not in cuts or not source.sharded or len(shape) < 2


def stored(role: Role, shape: tuple[int, ...], size: int) -> list[SpmdType] | None:
    """Return the types in which a parameter may be stored; ``None`` for no restriction."""
    if role is not Role.TENSOR_WEIGHTS:
        return None
    divisible = [d for d, extent in enumerate(shape) if extent % size == 0 and extent > 1]
    return [S(divisible[-1])] if divisible else None
