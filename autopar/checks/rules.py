"""Checks a rule by execution: compares its candidates (the combinations of operand and result types that it allows) with the unsharded op,
forward and gradient, on 2 and 3 shards.

Ranks are simulated in one process. Operands are distributed by their types (slices, copies, random partial sums), every rank makes its
local call in float64, and results and gradients are combined by their types: a gradient has the dual type. Candidates with a kernel
communicate, and are tested on real process groups instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from autopar.errors import RuleError
from autopar.measure import largest_difference, largest_finite
from autopar.ops.facts import OpKind, facts, op_name, op_of
from autopar.ops.meta import meta
from autopar.rules.candidates import Candidate, candidates
from autopar.types import SpmdType
from passes.localise import apply, local_call

SHARDS = (2, 3)
TOLERANCE = 1e-10
"""Maximum difference, relative to the largest value, for reordered float64 sums of a few hundred terms."""

Value = Tensor | tuple[Tensor, ...]


@dataclass(frozen=True)
class Sample:
    """A call to check a rule on: a target and its arguments; floating tensors become float64."""

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    without_gradient: tuple[int, ...] = ()
    """Floating operands without a gradient: running statistics, class weights."""

    @property
    def name(self) -> str:
        """The full name of the op, such as ``"aten.linear"``."""
        return op_of(self.target).name


@dataclass(frozen=True, slots=True)
class RuleReport:
    """The number of candidates, of executions (one per candidate and number of shards), and the largest relative difference."""

    candidates: int
    executions: int
    difference: float


def sample(target: Callable[..., Any], *args: Any, **kwargs: Any) -> Sample:
    """Return a ``Sample`` of a call."""
    return Sample(target, args, kwargs)


def without_gradient(given: Sample, *indices: int) -> Sample:
    """Return the sample with the tensor operands at these indices as constants."""
    return replace(given, without_gradient=indices)


def build(given: Sample) -> tuple[fx.Node, list[Value]]:
    """Return a graph node for the call, with meta values, and the values of ``operands(node)`` in order.

    A tuple of tensors that is indexed (``operator.getitem``) becomes one operand; equal tensors become one placeholder.
    """
    graph = fx.Graph()
    values: list[Value] = []
    known: dict[int, fx.Node] = {}

    def operand(item: Any, value: Value) -> fx.Node:
        values.append(value)
        if id(item) not in known:
            known[id(item)] = graph.placeholder(f"x{len(known)}")
            meta(known[id(item)])["val"] = _map(lambda t: t.to("meta"), value)
        return known[id(item)]

    def place(item: Any) -> Any:
        if isinstance(item, Tensor):
            return operand(item, _double(item))
        if isinstance(item, tuple) and item and all(isinstance(part, Tensor) for part in item):
            return operand(item, tuple(_double(part) for part in item))
        return type(item)(map(place, item)) if isinstance(item, list | tuple) else item

    args = tuple(place(item) for item in given.args)
    kwargs = {key: place(value) for key, value in given.kwargs.items()}
    node = graph.call_function(given.target, args, kwargs)
    result = apply((given.target, args, kwargs, None), node, values)
    meta(node)["val"] = _map(lambda t: t.to("meta"), result)
    return node, values


def check(given: Sample, shards: Sequence[int] = SHARDS) -> RuleReport:
    """Execute the candidates of the call's rule without a kernel. Raises ``RuleError`` with op, candidate, shapes and difference."""
    node, values = build(given)
    worst, executions = 0.0, 0
    found = [candidate for candidate in candidates(node) if candidate.kernel is None]
    for candidate in found:
        for n in shards:
            if candidate.extent % n == 0:
                worst = max(worst, check_candidate(node, values, candidate, n, given.without_gradient))
                executions += 1
    return RuleReport(len(found), executions, worst)


def check_candidate(
    node: fx.Node, values: Sequence[Value], candidate: Candidate, n: int, constants: Sequence[int] = ()
) -> float:
    """Execute a candidate on ``n`` ranks; return the largest relative difference or raise like ``check``. ``constants`` get no gradient."""
    torch.manual_seed(0)
    leaf = [_constant if i in constants else _leaf for i in range(len(values))]
    unsharded = [_map(make, value) for make, value in zip(leaf, values, strict=True)]
    expected = _tensors(apply((node.target, node.args, dict(node.kwargs), None), node, unsharded))  # type: ignore[arg-type]
    shards = [_split(value, t, n) for value, t in zip(values, candidate.operands, strict=True)]
    ranks = [[_map(make, shard[rank]) for make, shard in zip(leaf, shards, strict=True)] for rank in range(n)]
    results = [_on_rank(node, operands, candidate, n, expected[0]) for operands in ranks]
    if facts(node).kind is OpKind.VALUE_INDEPENDENT:  # shapes are checked, values are not
        return 0.0
    what = f"{op_name(node)} as {_text(candidate)} on {n} shards"
    shapes = ", ".join(str(tuple(tensor.shape)) for value in values for tensor in _tensors(value))
    worst = 0.0
    for i, tensor in enumerate(expected):
        got = _combine([result[i] for result in results], candidate.result, what)
        worst = max(worst, _difference(got, tensor, f"{what}, operands {shapes}: the result"))
    flowing = [i for i, tensor in enumerate(expected) if tensor.requires_grad]
    if not flowing:
        return worst
    cotangents = [torch.randn_like(expected[i]) for i in flowing]
    reference = _gradients([expected[i] for i in flowing], unsharded, cotangents)
    parts = [_split(cotangent, candidate.result.dual, n) for cotangent in cotangents]
    local = [
        _gradients([results[rank][i] for i in flowing], ranks[rank], [part[rank] for part in parts])  # type: ignore[misc]
        for rank in range(n)
    ]
    types = [t for value, t in zip(values, candidate.operands, strict=True) for _ in _tensors(value)]
    for i, (t, gradient) in enumerate(zip(types, reference, strict=True)):
        if gradient is not None:
            got = _combine([gradients[i] for gradients in local], t.dual, what)  # type: ignore[misc]
            worst = max(worst, _difference(got, gradient, f"{what}, operands {shapes}: the gradient of tensor {i}"))
    return worst


def _on_rank(node: fx.Node, values: Sequence[Value], candidate: Candidate, n: int, expected: Tensor) -> list[Tensor]:
    """Make the local call on a rank's operands, and check the result's shape against the candidate's type."""
    shape = list(expected.shape)
    if candidate.result.dim is not None:
        shape[candidate.result.dim] //= n
    call = local_call(node, [tuple(_tensors(value)[0].shape) for value in values], tuple(shape))
    try:
        result = _tensors(apply(call, node, values))
    except RuntimeError as error:
        raise RuleError(f"{op_name(node)} as {_text(candidate)} on {n} shards cannot run on a rank: {error}") from error
    if list(result[0].shape) != shape:
        raise RuleError(
            f"{op_name(node)} as {_text(candidate)} on {n} shards: a rank's result has shape {tuple(result[0].shape)}, "
            f"its type says {tuple(shape)}"
        )
    return result


def _gradients(results: list[Tensor], values: Sequence[Value], cotangents: list[Tensor]) -> list[Tensor | None]:
    leaves = [tensor for value in values for tensor in _tensors(value)]
    wanted = [tensor for tensor in leaves if tensor.requires_grad]
    found = iter(torch.autograd.grad(results, wanted, cotangents, allow_unused=True))
    gradients = [next(found) if tensor.requires_grad else None for tensor in leaves]
    return [
        torch.zeros_like(tensor) if gradient is None and tensor.requires_grad else gradient
        for tensor, gradient in zip(leaves, gradients, strict=True)
    ]


def _split(value: Value, t: SpmdType, n: int) -> list[Value]:
    """Return a value's local parts of type ``t`` on ``n`` ranks."""
    if isinstance(value, tuple):
        return list(zip(*(_split(part, t, n) for part in value), strict=True))
    if t.kind == "S":
        assert t.dim is not None and value.shape[t.dim] % n == 0, (tuple(value.shape), t, n)
        return list(value.chunk(n, t.dim))
    if t.kind == "P":
        terms = [torch.randn_like(value) if _continuous(value) else torch.ones_like(value) for _ in range(n - 1)]
        rest = [torch.zeros_like(value)] * (n - 1) if value.dtype == torch.bool else terms
        last: Value = value if value.dtype == torch.bool else value - sum(rest)
        return [*rest, last]
    return [value for _ in range(n)]


def _combine(parts: Sequence[Tensor], t: SpmdType, what: str) -> Tensor:
    """Combine the ranks' parts to the global value."""
    if t.kind == "S":
        assert t.dim is not None
        return torch.cat(list(parts), t.dim)
    if t.kind == "P":
        return torch.stack(list(parts)).sum(0)
    for part in parts[1:]:
        if not torch.equal(part, parts[0]):
            _difference(part, parts[0], f"{what}: ranks that should agree")
    return parts[0]


def _difference(got: Tensor, expected: Tensor, what: str) -> float:
    """Return the largest difference relative to the largest value. Raises ``RuleError`` if it exceeds ``TOLERANCE``."""
    if got.shape != expected.shape:
        raise RuleError(f"{what} has shape {tuple(got.shape)}, not {tuple(expected.shape)}")
    difference = largest_difference(got, expected) / max(largest_finite(expected), 1e-3)
    if not difference <= TOLERANCE:  # or NaN
        raise RuleError(
            f"{what} differs by {difference:.3g} from the unsharded op's",
            hint="mark dims that may not be sharded with '!', and check which letters the result sums over",
        )
    return difference


def _text(candidate: Candidate) -> str:
    return f"{', '.join(map(str, candidate.operands))} -> {candidate.result}"


def _tensors(value: Any) -> list[Tensor]:
    return [t for t in value if isinstance(t, Tensor)] if isinstance(value, tuple | list) else [value]


def _map(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    return tuple(map(function, value)) if isinstance(value, tuple | list) else function(value)


def _double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(_continuous(tensor))


def _continuous(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _constant(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()
