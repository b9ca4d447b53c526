"""Several layers as one activation checkpoint: the first layer's arguments are saved, and the backward pass recomputes all of them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def as_one(layers: Sequence[nn.Module], hidden: Tensor, *others: Tensor | int) -> Tensor:
    """``hidden`` after all ``layers``, each of which also takes ``others``."""
    result: Tensor = checkpoint(_in_turn, layers, hidden, *others, use_reentrant=False, preserve_rng_state=False)
    return result


def _in_turn(layers: Sequence[nn.Module], hidden: Tensor, *others: Tensor | int) -> Tensor:
    for layer in layers:
        hidden = layer(hidden, *others)
    return hidden
