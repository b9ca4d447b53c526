"""Recognises causal and full attention masks without materialising them.

transformers builds an explicit mask of ``[batch, 1, sequence, sequence]`` from positions and passes it to
``scaled_dot_product_attention``, which then can't use its fast kernels. The mask's expression is evaluated at full size, block by block
(``bounds``): bounds of the positions prove that blocks off the diagonal are entirely visible or hidden; blocks on the diagonal are
computed. If neither a causal nor a full mask can be proved, the mask stays.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from autopar.capture.bounds import Block, Blocks
from autopar.capture.evaluate import Evaluator, TooLargeError
from autopar.ops.operands import args_of, shape_of, val
from passes.clean.nodes import add, aten, calls, replace

LEAF = 256
"""Maximum number of queries, and of keys, in a block that is computed; a larger block is split into four."""
MAX_BLOCKS = 20_000
"""Maximum number of blocks to examine; a causal mask of a million positions needs 16,000."""


def recognise_masks(gm: fx.GraphModule, evaluator: Evaluator) -> None:
    """Drop constant masks that allow everything, and replace causal ones by ``is_causal=True``."""
    kinds: dict[fx.Node, str | None] = {}
    for node in calls(gm, aten.scaled_dot_product_attention.default):
        mask = args_of(node)[3] if len(node.args) > 3 else None
        if not isinstance(mask, fx.Node) or mask not in evaluator.constant:
            continue
        if mask not in kinds:
            kinds[mask] = classify_mask(evaluator, mask)
        if kinds[mask] is None:
            continue
        kwargs: dict[str, Any] = dict(node.kwargs)
        if kinds[mask] == "causal":
            kwargs["is_causal"] = True
        replace(node, add(node, aten.scaled_dot_product_attention.default, tuple(args_of(node)[:3]), kwargs))


def classify_mask(evaluator: Evaluator, mask: fx.Node) -> str | None:
    """Return ``"causal"`` if query i is proved to see exactly keys 0..i, ``"full"`` if everything is visible, else ``None``."""
    *lead, queries, keys = shape_of(mask)
    if 0 in shape_of(mask) or not evaluator.has_values(mask):
        return None
    blocks = Blocks(evaluator)
    rest = tuple((0, size) for size in lead)
    try:
        seen = _visibility(blocks, mask, (*rest, (0, 1), (keys - 1, keys)))  # whether the first query sees the last key
        kind = "full" if seen or keys == 1 else "causal"
        if seen is None or (kind == "causal" and queries != keys):
            return None
        return kind if _is_proved(blocks, mask, rest, causal=kind == "causal") else None
    except TooLargeError:
        return None


def _is_proved(blocks: Blocks, mask: fx.Node, lead: Block, *, causal: bool) -> bool:
    """Return whether it is proved that every query sees every key, or with ``causal`` exactly the keys up to its position."""
    queries, keys = shape_of(mask)[-2:]
    open_blocks, examined = [((0, queries), (0, keys))], 0
    while open_blocks:
        (top, bottom), (left, right) = open_blocks.pop()
        examined += 1
        if examined > MAX_BLOCKS:
            return False
        block = (*lead, (top, bottom), (left, right))
        all_seen, all_hidden = not causal or right - 1 <= top, causal and left > bottom - 1
        found = _visibility(blocks, mask, block) if all_seen or all_hidden else None
        if found is not None:
            if found is not all_seen:
                return False
            continue
        if max(bottom - top, right - left) > LEAF:
            open_blocks += [(rows, columns) for rows in _halves(top, bottom) for columns in _halves(left, right)]
        elif not _matches(blocks, mask, block, causal=causal):
            return False
    return True


def _halves(start: int, stop: int) -> list[tuple[int, int]]:
    if stop - start <= LEAF:
        return [(start, stop)]
    middle = (start + stop) // 2
    return [(start, middle), (middle, stop)]


def _visibility(blocks: Blocks, mask: fx.Node, block: Block) -> bool | None:
    """Return true if the block is fully visible, false if it is fully hidden, and ``None`` if neither is proved."""
    blocks.clear_cache()
    ends = blocks.bounds(mask, block)
    if ends is None and math.prod(stop - start for start, stop in block[-2:]) == 1:
        allowed = _allowed(blocks.elements(mask, block))
        return None if allowed is None or bool(allowed.any()) is not bool(allowed.all()) else bool(allowed.all())
    if ends is None:
        return None
    allowed = _allowed(torch.stack(ends))
    if val(mask).dtype == torch.bool:
        return bool(ends[0]) if torch.equal(*ends) else None
    if allowed is None:
        return None
    # an additive mask: zero throughout, or low enough throughout to hide everything
    return None if bool(allowed.any()) is not bool(allowed.all()) else bool(allowed.all())


def _matches(blocks: Blocks, mask: fx.Node, block: Block, *, causal: bool) -> bool:
    blocks.clear_cache()
    seen = _allowed(blocks.elements(mask, block))
    if seen is None:
        return False
    if not causal:
        return bool(seen.all())
    (top, bottom), (left, right) = block[-2:]
    expected = torch.arange(left, right) <= torch.arange(top, bottom)[:, None]
    return torch.equal(
        seen.expand(*seen.shape[:-2], *expected.shape), expected.expand(*seen.shape[:-2], *expected.shape)
    )


def _allowed(mask: torch.Tensor) -> torch.Tensor | None:
    """Return a boolean mask of visible keys; ``None`` for an additive mask with values that are neither 0 nor at most ``finfo.min / 2``."""
    if mask.dtype == torch.bool:
        return mask
    allowed = mask == 0
    forbidden = mask <= torch.finfo(mask.dtype).min / 2
    return allowed if bool((allowed | forbidden).all()) else None
