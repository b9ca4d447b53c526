"""Recognise attention masks that attention can express by itself, without materialising them.

transformers builds an explicit mask of ``[batch, 1, sequence, sequence]`` from positions and hands it to
``scaled_dot_product_attention``, and the fast kernels are lost. A constant mask is evaluated at a shrunken size: batch 2 and, for a long
sequence, a short one. Shrinking the sequence is sound only if the mask's rule does not change in between, which holds when no
number written in its expression lies between the two sizes (a sliding window is such a number).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.capture.constants import Evaluator
from passes.clean.nodes import add, arguments, aten, calls, replace, shape

# Sequences longer than this are shrunk to it, where that is sound.
SHORT = 64
# A mask that cannot be shrunk is evaluated up to this sequence length.
LONG = 16384


def recognise_masks(gm: fx.GraphModule, evaluator: Evaluator, batch_size: int) -> None:
    """Drop constant masks that allow everything; replace triangular ones by ``is_causal=True``."""
    kinds: dict[fx.Node, str | None] = {}
    for node in calls(gm, aten.scaled_dot_product_attention.default):
        mask = arguments(node)[3] if len(node.args) > 3 else None
        if not isinstance(mask, fx.Node) or mask not in evaluator.constant:
            continue
        if mask not in kinds:
            kinds[mask] = classify_mask(evaluator, mask, batch_size)
        if kinds[mask] is None:
            continue
        kwargs: dict[str, Any] = dict(node.kwargs)
        if kinds[mask] == "causal":
            kwargs["is_causal"] = True
        replace(node, add(node, aten.scaled_dot_product_attention.default, tuple(arguments(node)[:3]), kwargs))
    evaluator.forget()


def classify_mask(evaluator: Evaluator, mask: fx.Node, batch_size: int) -> str | None:
    """``"causal"`` if query i sees keys 0..i, ``"full"`` if everything is seen, ``None`` for any other mask."""
    *_, queries, keys = shape(mask)
    if queries != keys:
        return _kind(evaluator, mask, _extents(batch_size, (queries, keys)), causal=False)
    numbers = evaluator.literals(mask) - {batch_size}
    if queries > SHORT and not any(SHORT // 2 < abs(n) < queries for n in numbers):
        results = {
            _kind(evaluator, mask, {**_extents(batch_size, ()), queries: size}, causal=True)
            for size in (SHORT, SHORT - 3)
        }
        kind = results.pop()
        if not results and kind is not None:
            return kind
    if queries > LONG:
        return None
    return _kind(evaluator, mask, _extents(batch_size, (queries,)), causal=True)


def _extents(batch_size: int, others: tuple[int, ...]) -> dict[int, int]:
    """Shrink the batch to 2, unless another extent has the same size and cannot be told apart."""
    return {batch_size: 2} if batch_size > 2 and batch_size not in others else {}


def _kind(evaluator: Evaluator, mask: fx.Node, extents: dict[int, int], *, causal: bool) -> str | None:
    if (
        max(extents.get(size, size) for size in shape(mask)[-2:]) ** 2 * extents.get(shape(mask)[0], shape(mask)[0])
        > 2**30
    ):
        return None
    try:
        value = evaluator(mask, extents)
    except (RuntimeError, IndexError):
        return None
    finally:
        if sum(shape(mask)[-2:]) > 4 * SHORT:
            evaluator.forget()
    seen = _allowed(value)
    expected = tuple(extents.get(size, size) for size in shape(mask)[-2:])
    if seen is None or tuple(seen.shape[-2:]) != expected:
        return None
    if bool(seen.all()):
        return "full"
    if causal and torch.equal(seen, torch.ones(expected, dtype=torch.bool).tril().expand(seen.shape)):
        return "causal"
    return None


def _allowed(mask: torch.Tensor) -> torch.Tensor | None:
    """Which keys each query sees; ``None`` for an additive mask that is more than a mask."""
    if mask.dtype == torch.bool:
        return mask
    allowed = mask == 0
    forbidden = mask <= torch.finfo(mask.dtype).min / 2
    return allowed if bool((allowed | forbidden).all()) else None
