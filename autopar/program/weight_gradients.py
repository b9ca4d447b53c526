"""Backward passes in two parts: gradients of inputs first, gradients of weights later.

Zero-bubble schedules (Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024) run the second part when a pipeline rank would otherwise
wait. ``linear`` is a product whose backward computes the gradient of its input; inside ``deferred`` the product for the weight's gradient
is added to a list, for the second part. All other gradients (of biases, norms, embeddings) belong to the first part: they cost little.
Outside of ``deferred`` the backward pass is the usual one.

Between the two parts, memory has the input of every product and the gradient of its result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import spmd_types as spmd
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  torch's own convention
from torch import Tensor, nn

from autopar.program.collectives import Work, reduce_scatter
from autopar.program.tracing import TracedStage

Adder = Callable[[Tensor], None]
"""Adds one microbatch's gradient of a parameter to the parameter's gradient."""


@dataclass(frozen=True, slots=True)
class Product:
    """The second part of the backward pass of a ``linear``: ``gradient`` is the gradient of its result."""

    weight: Tensor
    input: Tensor
    gradient: Tensor

    def weight_gradient(self) -> Tensor:
        """The gradient of the weight, summed over all rows of the input; it has the weight's shape."""
        return self.gradient.flatten(0, -2).t() @ self.input.flatten(0, -2)


_products: list[Product] | None = None
"""The second part of the backward pass that runs, so far; ``None`` if the backward pass is whole."""


@contextmanager
def deferred() -> Iterator[list[Product]]:
    """A context in which a backward pass leaves the gradients of weights to its second part: the products of the returned list.

    The backward pass must run in this thread.
    """
    global _products
    assert _products is None, "one backward pass at a time"
    _products = []
    try:
        yield _products
    finally:
        _products = None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear(x, weight, bias)``, whose weight's gradient may be computed later; ``weight`` is a parameter that nothing else reads."""
    if spmd.is_type_checking() or not weight.requires_grad:
        return F.linear(x, weight, bias)
    result: Tensor = _Linear.apply(x, weight, bias)
    return result


class _Linear(torch.autograd.Function):
    """The product, and both parts of its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.parameter = weight  # the saved tensor is another object
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        product = Product(ctx.parameter, x, gradient)
        if _products is not None:
            _products.append(product)
        return (
            gradient @ weight if ctx.needs_input_grad[0] else None,
            product.weight_gradient() if _products is None else None,
            gradient.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None,
        )


class SplitStage(TracedStage):
    """A stage of torch's pipeline whose backward passes may run in two parts.

    ``place`` is the stage's module, its number, the number of stages and the device. ``adders`` map the identity of a parameter to the
    function that adds a microbatch's gradient to the parameter's. They are called for the gradients of the second part alone: autograd
    accumulates those of the first part.
    """

    def __init__(
        self,
        place: tuple[nn.Module, int, int, torch.device],
        *,
        adders: Sequence[Mapping[int, Adder]],
        turn: Turn,
        **options: Any,
    ) -> None:
        super().__init__(*place, **options, dw_builder=self._second_part)
        self._adders, self._turn = adders, turn
        self._products: list[Product] = []

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        if full_backward:
            super().backward_one_chunk(bwd_chunk_id, loss, True, last_backward)
            return
        with deferred() as self._products:
            super().backward_one_chunk(bwd_chunk_id, loss, False, last_backward)

    def _second_part(self) -> Callable[[], None]:
        """What torch calls for the second part of the backward pass that has just ended; nothing is left of a whole one."""
        products, self._products = self._products, []
        return functools.partial(self._add, products)

    @torch.no_grad()
    def _add(self, products: list[Product]) -> None:
        """Compute the gradients, in the order of the backward pass, and free each product's operands."""
        while products:
            product = products.pop(0)
            (add,) = [found for adders in self._adders if (found := adders.get(id(product.weight)))]
            add(product.weight_gradient())
        self._turn.finish()  # else a whole gradient would stay in memory


@dataclass(frozen=True, slots=True)
class _Reduction:
    """A reduce-scatter that runs: ``piece`` is its result, to be added to that of ``name`` in ``pieces``; ``whole`` its operand."""

    work: Work | None
    pieces: dict[str, Tensor]
    name: str
    piece: Tensor
    whole: Tensor


class Turn:
    """The reductions of a rank's late gradients take turns: one runs while the next gradient is computed, because each keeps a whole
    gradient in memory."""

    def __init__(self) -> None:
        self.running: _Reduction | None = None

    def finish(self) -> None:
        """Wait for the reduction that runs."""
        if (last := self.running) is not None:
            if last.work is not None:
                last.work.wait()
            sums = last.pieces
            sums[last.name] = sums[last.name].add_(last.piece) if last.name in sums else last.piece
            self.running = None


class LateGradients:
    """Gradients of an FSDP layer's weights from the second parts of backward passes, summed over microbatches and ranks.

    FSDP2 reduces the gradients that autograd computes. These are reduce-scattered one by one, in ``dtype``, into pieces as large as FSDP2's
    shards: rows divided as by ``torch.chunk``, padded to equal pieces. ``shards`` is the group that shards the layer; ``copies`` is the
    group over its copies under hybrid sharding, over which the pieces are summed once a step. With ``once``, whole gradients are summed
    over the microbatches first.
    """

    def __init__(
        self, shards: dist.ProcessGroup, copies: dist.ProcessGroup | None, dtype: torch.dtype, turn: Turn, once: bool
    ) -> None:
        self._shards, self._copies, self._dtype, self._turn, self._once = shards, copies, dtype, turn, once
        self._whole: dict[str, Tensor] = {}
        self._pieces: dict[str, Tensor] = {}

    def clear(self) -> None:
        """Before a step: forget the last one's gradients."""
        self._pieces = {}

    def add(self, name: str, gradient: Tensor) -> None:
        """Add one microbatch's gradient of the parameter ``name``, in the parameter's shape: start its reduction, unless gradients are
        reduced once a step."""
        if not self._once:
            self._reduce(name, gradient)
        elif name in self._whole:
            self._whole[name] += gradient
        else:
            self._whole[name] = gradient.to(self._dtype)

    def _reduce(self, name: str, gradient: Tensor) -> None:
        size, rows = dist.get_world_size(self._shards), gradient.shape[0]
        share = -(-rows // size)
        whole = gradient.to(self._dtype)
        if share * size > rows:
            whole = F.pad(whole, [0, 0] * (gradient.dim() - 1) + [0, share * size - rows])
        self._turn.finish()
        piece = whole.new_empty(share, *gradient.shape[1:])
        work = reduce_scatter(piece, whole, group=self._shards, async_op=True)
        self._turn.running = _Reduction(work, self._pieces, name, piece, whole)

    def finish(self) -> dict[str, Tensor]:
        """Wait for all sums; returns this rank's piece of each parameter's gradient, padding included, by the parameter's name."""
        for name in list(self._whole):
            self._reduce(name, self._whole.pop(name))
        self._turn.finish()
        if self._copies is not None:
            for piece in self._pieces.values():
                dist.all_reduce(piece, group=self._copies)
        return self._pieces


def start_gradients(layer: nn.Module, ignored: set[nn.Parameter]) -> None:
    """Give every gathered parameter of the layer a gradient of zeros, except those that FSDP ignores.

    A parameter whose first gradient comes in the last microbatch would otherwise have it in 16 bits beside the others' sums in float32,
    and FSDP reduces gradients of one dtype only.
    """
    for param in layer.parameters():
        if param.requires_grad and param.grad is None and param not in ignored:
            param.grad = torch.zeros_like(param)
