"""A trainer's weights from and to files in the safetensors format (``weights``), under any plan.

This file is copied into every emitted program; it needs torch alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.program import weights
from autopar.program.boxes import Piece
from autopar.program.checkpoint import Training, buffers, on_every_rank, parameters
from autopar.program.checkpoint_files import PARTIAL, CheckpointError, begin, final_of
from autopar.program.state import wrong_state
from autopar.program.weights import Stored


def load(training: Training, path: str | os.PathLike[str]) -> None:
    """Set parameters and buffers from a file or folder of weights; optimizer state stays. All ranks call this.

    Raises ``CheckpointError`` on every rank, before anything is changed if names or shapes are not those of the model.
    """
    source = Path(path)
    found: dict[str, Stored] = {}

    def check() -> None:
        found.update(weights.stored(source))
        nothing = torch.zeros(())
        if wrong := wrong_state(training.program.records, {n: nothing.expand(s.shape) for n, s in found.items()}):
            raise CheckpointError(
                f"{source} has no weights of the model that was compiled: {wrong}", "give weights of that model"
            )

    def copy() -> None:
        names = {layout.original: (layout.original, *layout.tied) for layout in training.program.layouts}
        for piece in (*parameters(training, every_copy=True), *buffers(training, every_copy=True)):
            own = piece.path[1]
            values = [(name, weights.read(found[name], piece.box)) for name in names.get(own, (own,)) if name in found]
            if values:  # a buffer that is in no state dict may be missing
                _check_tied(source, values)
                piece.values.copy_(values[0][1])

    on_every_rank(check, source, writing=False)
    on_every_rank(copy, source, writing=False)
    for group in training.groups:
        group.publish()


def _check_tied(source: Path, values: list[tuple[str, Tensor]]) -> None:
    """Raise ``CheckpointError`` if a tied parameter has other values under another of its names."""
    for name, other in values[1:]:
        if not torch.equal(values[0][1], other):
            raise CheckpointError(
                f"{values[0][0]} and {name} are one parameter in the model, and have different values in {source}",
                "give weights of the model that was compiled",
            )


def save(training: Training, folder: str | os.PathLike[str], file_bytes: int) -> None:
    """Write the folder of weights, in the model's own dtypes; all ranks call this.

    The folder must not exist; it gets its name once all files are on the disk. Raises ``CheckpointError`` on every rank.
    """
    target = Path(folder)
    partial = target.with_name(f"{target.name}{PARTIAL}")
    places = weights.divided(partial, _tensors(training), file_bytes)

    def prepare() -> None:
        if training.program.local_steps:
            raise CheckpointError(
                "each replica that trains apart has weights of its own", "state_dict() has their mean"
            )
        if dist.get_rank() == 0:
            if target.exists():
                raise CheckpointError(f"{target} exists", "give the name of a new folder")
            begin(partial)
            weights.create(places)

    def end() -> None:
        if dist.get_rank() == 0:
            partial.rename(final_of(partial))

    on_every_rank(prepare, partial, writing=True)
    on_every_rank(lambda: weights.write(_counted(training, places)), partial, writing=True)
    on_every_rank(end, partial, writing=True)


def _tensors(training: Training) -> Mapping[str, tuple[torch.dtype, tuple[int, ...]]]:
    """The dtypes and shapes of the parameters and of the buffers of the state dict that are written."""
    found = {layout.original: (layout.dtype, layout.original_shape) for layout in training.program.layouts}
    written = [record for record in training.program.buffers if record.written and record.persistent]
    return found | {record.original: (record.dtype, record.shape) for record in written}


def _counted(training: Training, places: Mapping[str, Stored]) -> Iterator[tuple[Stored, Piece]]:
    """This rank's pieces with their places; of pieces that several ranks have, those of the first one."""
    options = {"every_copy": False, "every_rank": False}
    for piece in (*parameters(training, **options), *buffers(training, **options)):
        if piece.path[0] == "model":
            yield places[piece.path[1]], piece
