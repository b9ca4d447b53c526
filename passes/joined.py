"""Joined calls: calls in a rank's graph that convert their input themselves, and compute one or several products of it.

The first argument is the value, the second a weight or a list of weights, the third a bias or a list; ``axis`` and ``src`` say on which
axes and from which type the value is converted to R. A call with a list of weights has one result for each; its last result is the
converted value if that has other readers.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

from torch import fx

from autopar.ops.meta import meta
from autopar.types import SpmdType


def is_joined(node: fx.Node) -> bool:
    """Return whether the node is a joined call."""
    return meta(node).get("joined", False)


def converted_types(call: fx.Node) -> tuple[fx.Node, tuple[str, ...], SpmdType]:
    """Return the value that a joined call converts to R, the axes (outermost first), and the type on them that it converts from."""
    value: Any = call.args[0]
    axis: Any = call.kwargs["axis"]
    return value, (axis,) if isinstance(axis, str) else tuple(axis), SpmdType.parse(str(call.kwargs["src"]))


def weights_of(call: fx.Node) -> list[fx.Node]:
    """Return the weights of a joined call."""
    return [node for node in _listed(call.args[1]) if node is not None]


@dataclass(frozen=True, slots=True)
class JoinedResult:
    """A result of a joined call: its node, and the name of its product, the weight and the bias (all ``None`` for the converted input)."""

    node: fx.Node
    product: str | None = None
    weight: fx.Node | None = None
    bias: fx.Node | None = None


def results_of(call: fx.Node) -> list[JoinedResult]:
    """Return the results of a joined call, in order."""
    weights = weights_of(call)
    biases = _listed(call.args[2]) if len(call.args) > 2 else [None] * len(weights)
    users = sorted(call.users, key=_index) if isinstance(call.args[1], list | tuple) else [call]
    found = [
        JoinedResult(node, meta(node).get("product", node.name), weight, bias)
        for node, weight, bias in zip(users, weights, biases, strict=False)
    ]
    return found + [JoinedResult(node) for node in users[len(weights) :]]


def passed_on(node: fx.Node) -> fx.Node | None:
    """Return the unconverted value if ``node`` is the converted value among the results of a joined call, else ``None``."""
    call = node.args[0] if node.target is operator.getitem else None
    if not isinstance(call, fx.Node) or not is_joined(call) or _index(node) < len(weights_of(call)):
        return None
    return converted_types(call)[0]


def _listed(given: Any) -> list[Any]:
    return list(given) if isinstance(given, list | tuple) else [given]


def _index(node: fx.Node) -> int:
    """Return the index of the result that ``node`` takes from a call."""
    index = node.args[1]
    assert isinstance(index, int)
    return index
