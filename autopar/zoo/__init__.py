"""The zoo: published models at their published sizes, for planning without a line of code.

``models()`` lists the entries, plain data that needs neither torch nor transformers. ``build(name, ...)`` builds one on the
meta device, where 405 billion parameters take no memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autopar.zoo.catalogue import CATALOGUE, ZooModel, find

if TYPE_CHECKING:
    from torch import nn

__all__ = ["CATALOGUE", "ZooModel", "build", "find", "models"]


def models() -> tuple[str, ...]:
    """The names of the zoo, grouped by family, small before large."""
    return tuple(entry.name for entry in CATALOGUE)


def build(
    name: str,
    seq: int | None = None,
    global_batch: int | None = None,
    precision: str = "bfloat16",
    device: str = "meta",
) -> tuple[nn.Module, dict[str, Any]]:
    """The model ``name`` and one global batch for it, with labels, so that the module returns the loss.

    ``seq`` is the sequence length in tokens (image models have none) and ``global_batch`` the number of sequences or images;
    both default to the published training setting. On a device other than meta the parameters are random and real.

    Raises:
        ModelError: no such model, or transformers is not installed.
        BatchError: a length or a batch that the model cannot take.
    """
    from autopar.zoo.hf import build_config

    entry = find(name)
    return build_config(entry.config, seq or entry.seq, global_batch or entry.global_batch, precision, device)
