"""Selective recomputation: what costs little is computed again in the backward pass, products and sums over devices are kept.

``keep`` stands around the calls whose results are kept, in a layer's ``compute``; ``selectively`` runs it so. Both are
``torch.utils.checkpoint``'s selective checkpointing with a policy by place: of what is called inside ``keep``, the results of the ops
below are kept; everything else runs again.

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

# What a product, a convolution or a sum over devices comes down to. Their other steps are views, and a wait that returns at once.
_KEPT = frozenset(
    (
        *(f"aten.{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "convolution")),
        *(f"_c10d_functional.{name}" for name in ("all_reduce", "reduce_scatter_tensor")),
    )
)


def keep(compute: Callable[[], Result]) -> Result:
    """``compute()``, whose result a recomputation finds instead of computing it."""
    token = _keeping.set(True)
    try:
        return compute()
    finally:
        _keeping.reset(token)


def selectively(compute: Callable[..., Any], *args: Any) -> Any:
    """``compute(*args)``; its arguments and what it calls inside ``keep`` are kept, the rest is computed again in the backward pass."""
    contexts = partial(create_selective_checkpoint_contexts, _policy)
    return checkpoint(compute, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)


def _policy(context: object, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if not _keeping.get():
        return CheckpointPolicy.PREFER_RECOMPUTE
    name = str(op).rpartition(".")[0]  # without its overload
    # every backend has an attention of its own, which gives its result and the logarithm of each row's sum
    kept = name in _KEPT or ("attention" in name and "backward" not in name)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
