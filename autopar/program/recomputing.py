"""Activation checkpointing: the backward pass recomputes the values that the forward pass did not save.

*Selective*: results of matmuls, convolutions, attention, all-reduces and reduce-scatters are saved, all else is recomputed. ``selectively``
runs a layer's ``compute``, which calls these functions through ``keep``. Both use the selective checkpointing of
``torch.utils.checkpoint``: inside ``keep``, the results of the ops listed below are saved. If ``torch.compile`` compiles the layer, it
compiles only the ops between calls of ``keep`` (matmuls are separate kernels in any case), so the same values are saved.

*Several layers as one* (``as_one``): the first layer's arguments are saved, and the backward pass recomputes all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

Result = TypeVar("Result")
Contexts = Iterator[AbstractContextManager[Any]]

# The ops inside products, convolutions, all-reduces and reduce-scatters, except views and a wait that returns at once.
_SAVED_OPS = frozenset(
    (
        *(f"aten.{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_mm", "_scaled_mm_v2")),
        *(f"_c10d_functional.{name}" for name in ("all_reduce", "reduce_scatter_tensor")),
    )
)

_running: ContextVar[Contexts | None] = ContextVar("contexts of the next calls of keep", default=None)


@torch.compiler.disable
def keep(function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    """Return ``function(*args, **kwargs)``, and save this result for the backward pass instead of recomputing it."""
    contexts = _running.get()
    if contexts is None:
        return function(*args, **kwargs)
    with next(contexts):
        return function(*args, **kwargs)


def selectively(compute: Callable[..., Any], *args: Any) -> Any:
    """Return ``compute(*args)``. The arguments and the results of ``keep`` are saved; the backward pass recomputes the rest."""
    return checkpoint(compute, *args, use_reentrant=False, preserve_rng_state=False, context_fn=_contexts)


def _contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the context of the forward pass, in which ``keep`` saves results, and that of the recomputation, in which it returns them."""
    saved: list[AbstractContextManager[Any]] = []

    def saving() -> Contexts:
        while True:
            # a pair for each call: outside of these calls no op is intercepted, so that torch.compile can run there
            first, again = create_selective_checkpoint_contexts(_policy)
            saved.append(again)
            yield first

    return _Running(saving), _Running(lambda: iter(saved))


class _Running(AbstractContextManager[None]):
    """A context in which each call of ``keep`` runs in the next of the contexts that ``make`` returns."""

    def __init__(self, make: Callable[[], Contexts]) -> None:
        self.make = make
        self.tokens: list[Token[Contexts | None]] = []

    def __enter__(self) -> None:
        self.tokens.append(_running.set(self.make()))

    def __exit__(self, *exception: object) -> None:
        _running.reset(self.tokens.pop())


def _policy(context: object, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = str(op).rpartition(".")[0]  # without its overload
    # every backend has an attention op of its own, with the output and the logsumexp of each row as results
    kept = name in _SAVED_OPS or ("attention" in name and "backward" not in name)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def as_one(layers: Sequence[nn.Module], hidden: Tensor, *others: Tensor | int) -> Tensor:
    """Apply ``layers`` one after the other to ``hidden``; each also takes ``others``. The backward pass recomputes all of them."""
    result: Tensor = checkpoint(_in_turn, layers, hidden, *others, use_reentrant=False, preserve_rng_state=False)
    return result


def _in_turn(layers: Sequence[nn.Module], hidden: Tensor, *others: Tensor | int) -> Tensor:
    for layer in layers:
        hidden = layer(hidden, *others)
    return hidden
