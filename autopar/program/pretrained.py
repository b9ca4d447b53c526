"""A trainer's weights from and to files in the safetensors format (``weights``), under any plan."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from . import weights
from .agree import digest, same_values
from .checkpoint import on_every_rank
from .checkpoint_files import PARTIAL, CheckpointError, begin, discard, final_of, sync
from .model_tensors import TrainingTensors, given
from .state import wrong_state
from .weights import Stored, mapped

_SAMPLED_BYTES = 2**16  # of each tensor, to learn whether ranks read the same files


def load(training: TrainingTensors, path: str | os.PathLike[str]) -> None:
    """Set parameters and buffers from a file or folder of weights; optimizer state stays. All ranks call this, then ``spread``.

    All that can be checked is checked on every rank before any rank changes a value: names and shapes, that tied parameters have one value,
    that all ranks have the same files. Raises ``CheckpointError`` on every rank.
    """
    source, opened = Path(path), list[Mapping[str, Tensor]]()

    def check() -> None:
        opened.append(mapped(source))
        if wrong := wrong_state(training.program.records, opened[0]):
            raise CheckpointError(
                f"{source} has no weights of the model that was compiled: {wrong}",
                "give weights of the model that was compiled",
            )

    on_every_rank(check, source, writing=False)
    (state,) = opened
    try:
        same_values({name: digest(state[name], _SAMPLED_BYTES) for name in sorted(state)}, training.world.device)
    except ValueError as error:
        raise CheckpointError(str(error), "all machines read one shared folder, or equal copies") from error
    on_every_rank(lambda: training.fill(given(state), state), source, writing=False, replaces=True)


def save(training: TrainingTensors, folder: str | os.PathLike[str], file_bytes: int) -> None:
    """Write the folder of weights, in the model's own dtypes; all ranks call this.

    The folder must not exist; it gets its name once all files are on the disk. Raises ``CheckpointError`` on every rank, and leaves nothing
    behind.
    """
    target = Path(folder)
    partial = target.with_name(f"{target.name}{PARTIAL}")
    places, begun = dict[str, Stored](), list[Path]()

    def prepare() -> None:
        if training.program.local_steps:
            raise CheckpointError(
                "each replica that trains apart has weights of its own", "state_dict() has their mean"
            )
        tensors = _tensors(training)
        if odd := weights.without_names(tensors):
            raise CheckpointError(
                f"safetensors files have no {', '.join(sorted({str(tensors[name][0]) for name in odd}))}, the dtype of {odd[0]}",
                "state_dict() has it",
            )
        places.update(weights.file_places(partial, tensors, file_bytes))
        if dist.get_rank() == 0:
            if target.exists():
                raise CheckpointError(f"{target} exists", "give the name of a new folder")
            begun.append(partial)
            begin(partial)
            weights.create(places)

    def end() -> None:
        if dist.get_rank() == 0:
            for path in (*partial.iterdir(), partial):
                sync(path)
            partial.rename(final_of(partial))
            sync(target.parent)

    try:
        on_every_rank(prepare, partial, writing=True)
        on_every_rank(
            lambda: weights.write((places[piece.path[1]], piece) for piece in training.pieces_once()),
            partial,
            writing=True,
        )
        on_every_rank(end, partial, writing=True)
    except CheckpointError:
        for path in begun:
            discard(path)
        raise


def _tensors(training: TrainingTensors) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """The dtypes and shapes of the parameters and of the buffers of the state dict that are written."""
    found = {layout.original: (layout.dtype, layout.original_shape) for layout in training.program.layouts}
    written = [record for record in training.program.buffers if record.written and record.persistent]
    return found | {record.original: (record.dtype, record.shape) for record in written}
