"""Traces branches that skip an expert which no token chose: ``if row.numel() == 0: continue`` after ``row, k = torch.where(chosen == i)``,
or ``if mask.any():``.

Whether a mask has true values depends on the data. So the model is traced as if each such mask had true values. This is the graph of the
model if (1) the masks are those of a loop over experts that was lowered to a mixture, in which an expert without tokens adds nothing, and
(2) a skipped iteration does nothing else. For (2) the model is traced again with some of the experts skipped: each graph has to equal the
first one without the additions of these experts, and to have the same branches and constants. For any two experts, a trace skips the one
and not the other: the graphs tell which branch skips which expert with few traces.

A forward that counts its iterations differs in these traces if it reads the count, or compares it with 0, 1, or all experts but one. That
it doesn't compare the count with another number is left to the comparison with the model (``Graph.assumed``).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import has_side_effect, map_arg
from torch.overrides import TorchFunctionMode

from autopar.capture.backward import caller
from autopar.capture.clone import FakeModel
from autopar.capture.evaluate import same_bits
from autopar.capture.repeat import Lifted
from autopar.ops.facts import op_name
from autopar.ops.meta import meta
from autopar.torch_private import assume, is_fake
from passes.clean.expert_builder import is_check, is_mutable
from passes.clean.expert_loops import BRANCH, branches, use_index_add

Decision = Callable[[int], bool]
"""Whether a trace takes tokens to choose the expert with a number."""

_COMPARISONS: tuple[Any, ...] = (Tensor.__eq__, Tensor.eq, torch.eq)
_POSITIONS: tuple[Any, ...] = (torch.where, Tensor.nonzero, torch.nonzero)
_SIZES: tuple[Any, ...] = (Tensor.numel, Tensor.nelement, Tensor.size, Tensor.__len__, Tensor.shape.__get__)  # type: ignore[attr-defined]
_ANY: tuple[Any, ...] = (Tensor.any, torch.any)
_BOOLS: tuple[Any, ...] = (Tensor.__bool__, Tensor.item)


@torch.library.custom_op(f"autopar::{BRANCH}", mutates_args=())
def _branch(mask: Tensor, line: str) -> None:
    raise AssertionError("markers are never run")


_branch.register_fake(lambda mask, line: None)
has_side_effect(torch.ops.autopar.branch_on_mask.default)


class TraceBranches(TorchFunctionMode):
    """A context in which a branch on whether ``chosen == number`` has true values is traced as ``decide(number)``. A marker in the graph
    has the mask and the line of its first branch."""

    def __init__(self, decide: Decision) -> None:
        super().__init__()
        self._decide = decide
        # by the id of a tensor, which is kept alive: the tensor, and
        self._numbers: dict[int, tuple[Tensor, int]] = {}  # the number that the mask compares
        self._positions: dict[int, tuple[Tensor, Tensor]] = {}  # the mask whose true values' positions it has
        self._any: dict[int, tuple[Tensor, Tensor]] = {}  # the mask for which it tells whether it has true values
        self._marked: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if id(first) in self._positions and func in _SIZES and first is not None:
            size = first.shape[0]
            assume(size > 0 if self._chosen(self._positions[id(first)][1]) else size == 0)
        if id(first) in self._any and func in _BOOLS and len(args) == 1:
            return self._chosen(self._any[id(first)][1])
        result = func(*args, **kwargs)
        if first is None or kwargs:
            return result
        if func in _COMPARISONS and len(args) == 2 and type(args[1]) is int:
            self._numbers[id(result)] = result, args[1]
        elif id(first) in self._numbers and len(args) == 1:
            if func in _POSITIONS and isinstance(result, tuple):
                self._positions |= {id(each): (each, first) for each in result}
            elif func in _ANY:
                self._any[id(result)] = result, first
        return result

    def _chosen(self, mask: Tensor) -> bool:
        if id(mask) not in self._marked:
            self._marked.add(id(mask))
            torch.ops.autopar.branch_on_mask(mask, caller())
        return self._decide(self._numbers[id(mask)][1])


@dataclass(frozen=True, slots=True)
class Traced:
    """An exported ``program``, its placeholders, and the fake ``copied`` model that it is of. ``assumed`` is ``Graph.assumed``."""

    program: Any
    lifted: Sequence[Lifted]
    copied: FakeModel
    notes: list[str]
    assumed: list[tuple[str, str]]

    @property
    def gm(self) -> fx.GraphModule:
        gm: fx.GraphModule = self.program.graph_module
        return gm

    @property
    def constants(self) -> dict[str, Tensor]:
        """The values of the tensors that forward made of Python numbers, by the name of their placeholder."""
        values = {n.name: self.program.constants.get(t) for kind, t, n in self.lifted if kind == "CONSTANT_TENSOR"}
        return {name: value for name, value in values.items() if isinstance(value, Tensor) and not is_fake(value)}


def lower_branches(
    traced: Traced, lower: Callable[[], Mapping[int, Mapping[fx.Node, fx.Node]]], trace: Callable[[Decision], Traced]
) -> bool:
    """Lower the loops over experts in ``traced``, a trace with all experts, by ``lower`` (it returns ``LoweredLoops.branched``), and
    return whether skipped iterations do nothing else: by the graphs that ``trace`` returns. Markers are erased."""
    use_index_add(traced.gm)
    unlowered, branched = _UnloweredTrace(traced), lower()
    for skipped in _skipped(branched):
        other = trace(lambda number, skipped=skipped: number not in skipped)  # type: ignore[misc]
        use_index_add(other.gm)
        if not unlowered.equals(other, [nodes for number, nodes in branched.items() if number in skipped]):
            return False
    for marker in branches(traced.gm):
        marker.graph.erase_node(marker)
    return bool(branched)


def _skipped(numbers: Collection[int]) -> list[frozenset[int]]:
    """Return the experts that each of the traces skips: all, only the first, all but the last, and others such that for any two experts a
    trace skips the one and not the other."""
    experts = sorted(numbers)
    sets, between = [experts, experts[:1], experts[:-1]], experts[1:-1]
    width = next(width for width in itertools.count(2) if math.comb(width, width // 2) >= len(between))
    # no code has all bits of another one; the traces of the bits skip the last expert and not the first
    codes = dict(zip(between, itertools.combinations(range(width), width // 2), strict=False))
    sets += [[*experts[-1:], *(n for n in between if bit in codes[n])] for bit in range(width)]
    return [each for each in dict.fromkeys(map(frozenset, sets)) if each]


class _UnloweredTrace:
    """A copy of a trace before its loops are lowered."""

    def __init__(self, trace: Traced) -> None:
        self._graph, self._copies = fx.Graph(), dict[fx.Node, fx.Node]()
        self._graph.output(self._graph.graph_copy(trace.gm.graph, self._copies))
        self._inner, self._constants = _inner_graphs(trace.gm), trace.constants

    def equals(self, other: Traced, left_out: Collection[Mapping[fx.Node, fx.Node]]) -> bool:
        """Return whether the trace without the nodes ``left_out``, each with the node that is read instead, equals ``other``."""
        replaced = {self._copies[node]: self._copies[before] for nodes in left_out for node, before in nodes.items()}
        equal = _computation(self._graph, replaced) == _computation(other.gm.graph, {})
        return equal and self._inner == _inner_graphs(other.gm) and _equal_values(self._constants, other.constants)


def _equal_values(ones: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> bool:
    pairs = [(one, others[name]) for name, one in ones.items() if name in others]
    return len(pairs) == len(ones) == len(others) and all(
        (one.dtype, one.shape) == (other.dtype, other.shape) and same_bits(one, other) for one, other in pairs
    )


def _inner_graphs(gm: fx.GraphModule) -> dict[str, list[Any]]:
    """Return the computations of the graphs inside of a module's graph."""
    inner = ((name, part) for name, part in gm.named_modules() if name and isinstance(part, fx.GraphModule))
    return {name: _computation(part.graph, {}) for name, part in inner}


def _computation(graph: fx.Graph, replaced: Mapping[fx.Node, fx.Node]) -> list[Any]:
    """Return a description of a graph's nodes, without checks and nodes that nothing reads. ``replaced`` maps nodes that are left out to
    the node that is read instead."""

    def source(node: fx.Node) -> fx.Node:
        while node in replaced:
            node = replaced[node]
        return node

    needed: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        kept = node.op in ("placeholder", "output") or op_name(node) == f"autopar.{BRANCH}"
        kept = kept or (is_mutable(node) and node not in replaced)
        if (kept or node in needed) and not is_check(node):
            needed |= {node, *map(source, node.all_input_nodes)}
    number: dict[fx.Node, int] = {}
    lines: list[Any] = []
    for node in graph.nodes:
        if node in needed and not is_check(node):
            args, kwargs = map_arg((node.args, dict(node.kwargs)), lambda n: number[source(n)])
            value = meta(node).get("val")
            # unknown sizes have other names in other traces
            sizes = [n if type(n) is int else None for n in value.shape] if isinstance(value, Tensor) else []
            kind = (sizes, value.dtype) if isinstance(value, Tensor) else type(value)
            lines.append((node.op, str(node.target), repr(args), repr(kwargs), kind))
            number[node] = len(number)
    return lines
