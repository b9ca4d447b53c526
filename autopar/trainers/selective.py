"""Models selective recomputation as published runs use it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import fx

from autopar.devices.measured import Floats
from autopar.ops import cost
from autopar.ops.operands import operands, shape_of
from autopar.price.collective_pairs import CollectivePair
from autopar.price.fusion import heavy
from autopar.price.selective import Selected, Selection
from autopar.price.trace import INTERNAL, OUTPUT, Saved, Trace
from autopar.sharding import AxisTypes
from autopar.trainers.experts import fused_rows


class PublishedSelection(Selection):
    """A selection that doesn't depend on SPMD types and repeats no collectives. As in published figures, its memory is that of the selected
    tensors, also while ops run again: at least the layer's input, at most all tensors saved without recomputation."""

    def under(
        self,
        types: tuple[AxisTypes, ...],
        ops: Sequence[fx.Node],
        saved: Sequence[Saved],
        pairs: tuple[CollectivePair, ...],
    ) -> Selected:
        return Selected(self.may_save, self.recomputed, ())

    def memory(
        self,
        entries: Sequence[Saved],
        entry_bytes: Floats,
        plain: list[int],
        selected: list[int],
        saver: NDArray[np.intp],
        ops: int,
        input_bytes: float,
    ) -> tuple[float, float]:
        found = min(float(entry_bytes[plain].sum()), max(float(entry_bytes[selected].sum()), input_bytes))
        return found, found


def up_projections(ops: Sequence[fx.Node], width: int) -> set[str]:
    """Return the products that make queries, keys and values of latents narrower than the layer's ``width`` (latent attention)."""
    found, seen = set(), set()
    waiting = [operand for node in ops if cost.is_attention(node) for operand in operands(node)[:3]]
    while waiting:
        node = waiting.pop()
        if node.op != "call_function" or node in seen:
            continue
        seen.add(node)
        if not cost.model_flops(node):
            waiting += operands(node)
        elif shape_of(operands(node)[0])[-1] < width:
            found.add(node.name)
    return found


def select_modules(
    ops: Sequence[fx.Node], run: Trace, plain: Sequence[Saved], width: int
) -> tuple[tuple[Saved, ...], Selection]:
    """Return what Megatron-Core saves if it recomputes norms, activations and latent attention's up-projections (recompute_modules
    layernorm, moe_act and mla_up_proj): each op that isn't heavy, and whose operands are at hand."""
    saved, latent = {entry.storage for entry in plain}, up_projections(ops, width)
    at_hand: set[fx.Node] = set()
    recomputed = []
    for node in ops:
        ready = all(operand in at_hand or operand.op != "call_function" for operand in operands(node))
        recomputed.append(ready and (not heavy(node) or node.name in latent))
        if recomputed[-1] or run.storage.get(node.name) in saved:
            at_hand.add(node)
    again = {run.storage.get(node.name) for node, is_recomputed in zip(ops, recomputed, strict=True) if is_recomputed}
    made_once = {run.storage.get(n.name) for n, again_ in zip(ops, recomputed, strict=True) if not again_}
    kept = {entry.storage for entry in fused_rows(dataclasses.replace(run, saved=tuple(plain)), ops, True).saved}
    may_save = [e.storage in kept and (e.storage not in again or e.storage in made_once) for e in plain]
    return tuple(plain), _fixed(may_save, recomputed)


def _fixed(may_save: Sequence[bool], recomputed: Sequence[bool]) -> PublishedSelection:
    """Return a selection of these entries and ops."""
    return PublishedSelection(
        np.array(may_save, dtype=bool),
        np.array(recomputed, dtype=bool),
        np.full(len(may_save), -1, dtype=np.intp),
        np.zeros(len(may_save), dtype=bool),
    )


def select_published(
    ops: Sequence[fx.Node], run: Trace, plain: Sequence[Saved], flash: bool
) -> tuple[tuple[Saved, ...], Selection]:
    """Return the tensors (``Saved``) that published runs may save for the backward pass, and which of them they do save.

    ``plain`` are those that a run without recomputation saves. Without flash attention, the scores are recomputed and everything else is
    saved (arXiv:2205.05198). With flash attention, the selection is torchtitan's per-op policy: attention and every second matrix product
    save their results, and the rest is recomputed.
    """
    attention = {node.name for node in ops if cost.is_attention(node)}
    found = list(plain)
    if attention and not flash:
        may_save = [not (entry.node in attention and entry.operand == INTERNAL) for entry in plain]
        recomputed = [node.name in attention for node in ops]
    else:
        products = [node for node in ops if cost.model_flops(node) and node.name not in attention]
        every_second = products[::2]
        found += [Saved(run.storage[n.name], n.name, OUTPUT, *run.extent[run.storage[n.name]]) for n in every_second]
        results = {run.storage[n.name] for n in (*every_second, *(n for n in ops if n.name in attention))}
        may_save = [e.storage in results or (e.operand == INTERNAL and e.node in attention) for e in found]
        not_recomputed = attention | {n.name for n in every_second}
        recomputed = [node.name not in not_recomputed for node in ops]
    return tuple(found), _fixed(may_save, recomputed)
