"""Mixtures of experts as ops: the body that a model gives its experts, as a graph.

An ``Experts`` is the target of a graph's node, as ``aten.linear`` is of another: the node's operands are the tokens ``[..., h]``, the
router's choices ``[..., k]`` and their weights ``[..., k]``, and the experts' parameters, each with the experts as dim 0. The body is a
graph of ``(rows, counts, *parameters)`` over all chosen rows, sorted by expert; it treats rows alike, which is what lets tokens be sharded,
permuted and sent to other ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, fx

from autopar.ops.facts import op_name
from autopar.ops.meta import meta
from autopar.program import kernels_experts


class Experts:
    """A mixture's op. Two are equal if their bodies are the same graph at the same shapes."""

    def __init__(self, body: fx.GraphModule, count: int) -> None:
        self.__name__ = self.__qualname__ = "experts"  # what fx calls the node, and the table the op
        self.__module__ = kernels_experts.__name__
        self.body, self.count = body, count
        self._text = tuple(_described(body))

    def __call__(self, x: Tensor, index: Tensor, weights: Tensor, *parameters: Tensor, **axes: Any) -> Tensor:
        return kernels_experts.experts(x, index, weights, parameters, self.body, self.count, **axes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Experts) and (self.count, self._text) == (other.count, other._text)

    def __hash__(self) -> int:
        return hash((self.count, self._text))

    def __deepcopy__(self, memo: Any) -> Experts:
        return self  # nothing changes it

    def __repr__(self) -> str:
        return (
            f"experts({self.count}, {', '.join(op_name(n) for n in self.body.graph.nodes if n.op == 'call_function')})"
        )

    @property
    def parameters(self) -> list[fx.Node]:
        """The body's placeholders for the experts' parameters."""
        return [node for node in self.body.graph.nodes if node.op == "placeholder"][2:]


def _described(body: fx.GraphModule) -> Iterator[tuple[Any, ...]]:
    """The body's nodes: what equal bodies have equal."""
    for node in body.graph.nodes:
        value = meta(node).get("val")
        shape = (tuple(value.shape), str(value.dtype)) if isinstance(value, Tensor) else None
        yield node.op, str(node.target), str(node.args), str(node.kwargs), shape
