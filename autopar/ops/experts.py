"""Mixtures of experts as ops: the experts' body, which the model defines, as a graph.

An ``Experts`` is the target of a graph's node, as ``aten.linear`` is of another: the node's operands are the tokens ``[..., h]``, the
router's choices ``[..., k]`` and their weights ``[..., k]``, and the experts' parameters, each with the experts as dim 0. The body is a
graph of ``(rows, counts, *parameters)`` over all chosen rows, sorted by expert. It treats rows alike, so tokens can be sharded,
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
    """The op of a mixture. Two are equal if their bodies are the same graph at the same shapes."""

    def __init__(self, body: fx.GraphModule, count: int) -> None:
        self.__name__ = self.__qualname__ = "experts"  # fx's name for the node, and the table's for the op
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
        return self  # immutable

    def __repr__(self) -> str:
        return (
            f"experts({self.count}, {', '.join(op_name(n) for n in self.body.graph.nodes if n.op == 'call_function')})"
        )

    @property
    def parameters(self) -> list[fx.Node]:
        """The body's placeholders for the experts' parameters."""
        return [node for node in self.body.graph.nodes if node.op == "placeholder"][2:]


def _described(body: fx.GraphModule) -> Iterator[tuple[Any, ...]]:
    """Descriptions of the body's nodes; equal bodies have equal descriptions."""
    for node in body.graph.nodes:
        value = meta(node).get("val")
        shape = (tuple(value.shape), str(value.dtype)) if isinstance(value, Tensor) else None
        yield node.op, str(node.target), str(node.args), str(node.kwargs), shape
