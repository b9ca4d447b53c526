"""The zoo: published models at their published sizes, for planning without writing code.

``models()`` lists the models' names; the entries are plain data, which need neither torch nor transformers. ``build(name, ...)`` builds a
model on the meta device, where 405 billion parameters take no memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autopar.zoo.catalogue import CATALOGUE, ZooModel, few_blocks, find

if TYPE_CHECKING:
    from torch import nn

__all__ = ["CATALOGUE", "ZooModel", "build", "few_blocks", "find", "models"]


def models() -> tuple[str, ...]:
    """Return the names of the zoo's models, grouped by family, small before large."""
    return tuple(entry.name for entry in CATALOGUE)


def build(
    name: str | ZooModel,
    seq: int | None = None,
    global_batch: int | None = None,
    precision: str = "bfloat16",
    device: str = "meta",
) -> tuple[nn.Module, dict[str, Any]]:
    """Return the model ``name``, or that of an entry, and one global batch for it; the batch has labels, so the module returns the loss.

    ``seq`` is the sequence length in tokens (image models have none) and ``global_batch`` the number of sequences or images;
    both default to the published training setting. On a device other than meta, the parameters have random values.

    Raises:
        ModelError: the zoo has no such model, or transformers isn't installed.
        BatchError: the model doesn't support the length or the batch.
    """
    from autopar.zoo.hf import build_config

    entry = name if isinstance(name, ZooModel) else find(name)
    seq = entry.seq if seq is None else seq
    global_batch = entry.global_batch if global_batch is None else global_batch
    return build_config(entry.config, seq, global_batch, precision, device)
