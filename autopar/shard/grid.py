"""What a role may do inside a layer, beyond what its border says: roles on grids of devices, and that of experts.

Several axes together are 2D, 2.5D or 3D tensor parallelism.

One axis's optimum is Megatron's wherever it may be. A grid needs each of its axes to take one part of every product ``y = x w``, the
sum over ``k`` of ``x[rows, k] w[k, columns]``, and to leave the other parts to the other axes. That is a restriction per role:

================== ============================= =========================================================================
tensor+weights     activations cut along batch   a parameter is gathered where it is used, its gradient scattered
tensor+hidden      activations cut along columns activations are gathered where they are multiplied, parameters cut by columns
tensor+rows        activations cut along columns a product over cut columns leaves terms of a sum, which are scattered over rows
                                                 (the sequence); rows are gathered for the next product
tensor+sequence    activations cut along rows    Megatron's, which is free: rows gathered, terms scattered over rows
================== ============================= =========================================================================

* 2D (SUMMA; Xu et al. 2021, "An Efficient 2D Method for Training Super-Large Deep Learning Models"): tensor+hidden x tensor+weights;
* 2.5D (Wang et al. 2021, "Tesseract"): data x tensor+hidden x tensor+weights;
* 3D (Bian et al. 2021, "Maximizing Parallelism in Distributed Training for Huge Neural Networks"): tensor+rows x tensor+sequence x
  tensor+weights.

The axis of gathered parameters is the innermost: other axes may cut the same dim of a parameter, and the inner slice is gathered first.

Under expert the rows of a mixture travel to the owners of their experts, and all else is done as under data, with whole parameters.
"""

from __future__ import annotations

from autopar.plan import Role
from autopar.rules import Candidate
from autopar.types import I, P, S, SpmdType


def admits(role: Role, option: Candidate, weights: tuple[bool, ...]) -> bool:
    """Whether an op may run so; ``weights`` says which of its operands are parameters."""
    on_weights = [t for t, weight in zip(option.operands, weights, strict=True) if weight]
    if role is Role.TENSOR_WEIGHTS:
        return not any(t.sharded for t in on_weights)
    if role is Role.TENSOR_HIDDEN:
        return not (option.result == P and any(t.sharded for t in on_weights))
    if role is Role.EXPERT:
        return option.kernel == "expert_exchange" or not any(t.sharded for t in on_weights)
    return True


def converts(role: Role, source: SpmdType, target: SpmdType, shape: tuple[int, ...]) -> bool:
    """Whether an activation of that shape may be converted so. What a norm sums up (a last dim of one) is free."""
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
    """Whether a parameter of that shape may be gathered. Where a role cuts activations and multiplies with slices, a gathered matrix is
    another role's business (tensor+weights), however few rows the activations have."""
    cuts = (Role.TENSOR_HIDDEN, Role.TENSOR_ROWS, Role.TENSOR_SEQUENCE)
    return role not in cuts or not source.sharded or len(shape) < 2


def stored(role: Role, shape: tuple[int, ...], size: int, of_experts: bool) -> list[SpmdType] | None:
    """The types in which a parameter may be stored; ``None`` where the role leaves that open. ``of_experts``: dim 0 are experts."""
    if role is Role.EXPERT:
        return [S(0)] if of_experts and shape[0] % size == 0 else [I]
    if role is not Role.TENSOR_WEIGHTS:
        return None
    whole = [d for d, extent in enumerate(shape) if extent % size == 0 and extent > 1]
    return [S(whole[-1])] if whole else None
