"""Selective activation checkpointing: the backward pass recomputes cheap ops; results of products and all-reduces are saved.

In a layer's ``compute``, ``keep`` wraps the calls whose results are saved; ``selectively`` runs ``compute`` with them. Both use the
selective checkpointing of ``torch.utils.checkpoint`` with a policy by place: inside ``keep``, the results of the ops listed below are
saved; everything else is recomputed.

This file is copied into every emitted program; it needs torch alone.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar

from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

Result = TypeVar("Result")

_keeping: ContextVar[bool] = ContextVar("keeping", default=False)

# The ops that products, convolutions and all-reduces consist of, besides views and a wait that returns at once.
_KEPT = frozenset(
    (
        *(f"aten.{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "convolution")),
        *(f"_c10d_functional.{name}" for name in ("all_reduce", "reduce_scatter_tensor")),
    )
)


def keep(compute: Callable[[], Result]) -> Result:
    """``compute()``, with a result that is saved for the backward pass instead of recomputed."""
    token = _keeping.set(True)
    try:
        return compute()
    finally:
        _keeping.reset(token)


def selectively(compute: Callable[..., Any], *args: Any) -> Any:
    """``compute(*args)``; its arguments and the results inside ``keep`` are saved, the rest is recomputed in the backward pass."""
    contexts = partial(create_selective_checkpoint_contexts, _policy)
    return checkpoint(compute, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)


def _policy(context: object, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if not _keeping.get():
        return CheckpointPolicy.PREFER_RECOMPUTE
    name = str(op).rpartition(".")[0]  # without its overload
    # every backend has an attention op of its own, with the output and the logsumexp of each row as results
    kept = name in _KEPT or ("attention" in name and "backward" not in name)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
