"""A mixture of experts as one op, with the experts' computation (the body) as a graph.

An ``Experts`` is a node's target, like ``aten.linear``: the node's operands are the tokens ``[..., h]``, the router's choices
``[..., k]`` and their weights ``[..., k]``, and the experts' parameters with the experts as dim 0. The body is a graph of ``(rows, counts,
*parameters)``, where ``rows`` has a row for each token and each of its experts, sorted by expert. It computes each row independently, so
that tokens can be sharded, permuted and sent to other ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autopar.ops.facts import op_name
from autopar.ops.meta import meta
from autopar.ops.operands import operands
from autopar.program import kernels_experts, kernels_fp8

FIRST_PARAMETER = 3
"""The index of a mixture's first operand that is a parameter of the experts, after tokens, choices and their weights."""


class Experts:
    """The op of a mixture. Two ops are equal if they have the same number of experts and bodies with equal graphs and shapes, and both
    weight a token's row either before its experts (``weights_first``) or after them. The last ``padding`` of ``count`` experts are zeros
    that no token chooses, so that ranks have equally many. With ``fp8_dispatch`` the rows, and the gradients of results, that are sent to
    the owners of their experts are rounded to 8 bits."""

    def __init__(
        self,
        body: fx.GraphModule,
        count: int,
        *,
        weights_first: bool = False,
        padding: int = 0,
        fp8_dispatch: bool = False,
    ) -> None:
        self.__name__ = self.__qualname__ = "experts"  # fx names the node, and ``op_name`` the op, by these
        self.__module__ = kernels_experts.__name__
        self.body, self.count, self.weights_first, self.padding = body, count, weights_first, padding
        self.fp8_dispatch = fp8_dispatch
        self._text = tuple(_node_descriptions(body))

    def __call__(self, x: Tensor, index: Tensor, weights: Tensor, *parameters: Tensor, **axes: Any) -> Tensor:
        if self.weights_first:
            axes = axes | {"weights_first": True}
        if self.fp8_dispatch:
            axes = axes | {"dispatch": kernels_fp8.TILED_ROWS}
        return kernels_experts.experts(x, index, weights, parameters, self.body, self.count, **axes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Experts) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[Any, ...]:
        return self.count, self.weights_first, self.padding, self.fp8_dispatch, self._text

    def with_body(self, body: fx.GraphModule) -> Experts:
        """Return the mixture with another body."""
        return self._with(body=body)

    def padded(self, count: int) -> Experts:
        """Return the mixture with ``count`` experts: those that it lacks are zeros."""
        padding = self.padding + count - self.count
        return self._with(count=count, padding=padding)

    def with_fp8_dispatch(self) -> Experts:
        """Return the mixture with ``fp8_dispatch``."""
        return self._with(fp8_dispatch=True)

    def _with(self, **changes: Any) -> Experts:
        names = ("body", "count", "weights_first", "padding", "fp8_dispatch")
        return Experts(**({name: getattr(self, name) for name in names} | changes))

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


def of_experts(parameter: fx.Node) -> bool:
    """Return whether a placeholder is a parameter of a mixture's experts, with the experts as dim 0."""
    return any(
        isinstance(user.target, Experts) and parameter in operands(user)[FIRST_PARAMETER:] for user in parameter.users
    )


def misaligned_products(op: Experts, shapes: Sequence[tuple[int, ...]]) -> dict[str, tuple[int, int]]:
    """Return the body's grouped products (grouped GEMMs) that CUDA refuses at these local parameter ``shapes``, because rows of the operand
    or the result aren't a multiple of 16 bytes: their widths in elements, by node name. Only bfloat16 uses grouped products."""
    rows, counts, *parameters = (meta(node)["val"] for node in op.body.graph.nodes if node.op == "placeholder")
    if parameters[0].dtype != torch.bfloat16:
        return {}
    local = (torch.empty(shape, dtype=p.dtype, device="meta") for shape, p in zip(shapes, parameters, strict=True))
    products = _ProductWidths(op.body)
    products.run(torch.empty_like(rows, device="meta"), counts.new_empty(shapes[0][0], device="meta"), *local)
    return {name: widths for name, widths in products.widths.items() if any(n % WIDTH_MULTIPLE for n in widths)}


WIDTH_MULTIPLE = 8
"""bfloat16 elements in 16 bytes, the alignment of rows in CUDA's grouped product."""


class _ProductWidths(fx.Interpreter):
    """Runs a body and records the widths of its grouped products."""

    def __init__(self, body: fx.GraphModule) -> None:
        super().__init__(body)
        self.widths: dict[str, tuple[int, int]] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.target is kernels_experts.grouped_linear:
            rows = self.fetch_args_kwargs_from_env(n)[0][0]
            self.widths[n.name] = rows.shape[-1], result.shape[-1]
        return result


def expert_by_expert(op: Experts, names: Collection[str]) -> Experts:
    """Return the mixture with one product per expert in place of each grouped product in ``names``."""
    body = copy.deepcopy(op.body)
    for node in body.graph.nodes:
        if node.name in names:
            node.target = kernels_experts.looped_linear
    return op.with_body(body)


def _node_descriptions(body: fx.GraphModule) -> Iterator[tuple[Any, ...]]:
    """Yield a description of each node of the body; equal bodies have equal descriptions."""
    for node in body.graph.nodes:
        value = meta(node).get("val")
        shape = (tuple(value.shape), str(value.dtype)) if isinstance(value, Tensor) else None
        yield node.op, str(node.target), str(node.args), str(node.kwargs), shape
