"""Collectives of Python objects: recorded ranks exchange the real objects, through files.

A program's next operations may depend on the other ranks' objects (which rank owns a parameter under Muon, a checkpoint's plan). So ranks
that are recorded at the same time write their objects into one temporary folder, and read those of the others. A rank that is recorded
alone has no such folder, and uses its own object in place of the others'.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from autopar.checks.nccl.works import IssueRequest
from autopar.torch_private import object_tensor, tensor_object

if TYPE_CHECKING:
    from autopar.checks.nccl.recorder import Recorder, RecordingGroup

TIMEOUT_S = 30.0


class MissingObjectError(RuntimeError):
    """A rank's object is missing: the rank isn't recorded, or doesn't call the collective."""


class Objects:
    """Exchanges objects through files in ``folder``; without a folder, this rank's object replaces those of all members."""

    def __init__(self, folder: Path | None, timeout_s: float = TIMEOUT_S) -> None:
        self._folder, self._timeout_s = folder, timeout_s
        self._calls: Counter[str] = Counter()

    @property
    def exchanges(self) -> bool:
        """Whether ranks exchange objects."""
        return self._folder is not None

    def send(self, group: RecordingGroup, kind: str, value: Any) -> Callable[[], list[Any]]:
        """Send this rank's object; return a function that waits for all members' objects and returns them in the group's order."""
        members, name = group.communicator.members, group.communicator.name
        self._calls[name] += 1
        if self._folder is None:
            return lambda: [value] * len(members)
        files = [self._folder / f"{name}.{self._calls[name]}.{kind}.{rank}" for rank in members]
        own = files[group.rank()]
        draft = own.with_suffix(own.suffix + ".draft")
        draft.write_bytes(bytes(object_tensor(value).numpy()))
        draft.rename(own)

        def collected() -> list[Any]:
            end = time.monotonic() + self._timeout_s
            while missing := [rank for rank, file in zip(members, files, strict=True) if not file.exists()]:
                if time.monotonic() > end:
                    raise MissingObjectError(
                        f"{kind} of {group.communicator}: rank {missing[0]} sends no object within {self._timeout_s:g} s"
                    )
                time.sleep(0.002)
            return [tensor_object(torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8)) for file in files]

        return collected

    def functions(self, recorder: Recorder) -> dict[str, Callable[..., Any]]:
        """Return the functions that replace torch's object collectives, by name."""

        def exchange(kind: str, value: Any, group: Any, root: int = -1) -> tuple[list[Any], RecordingGroup]:
            pg: Any = group or dist.group.WORLD
            work = recorder.issue(pg, IssueRequest(kind, root=root))
            found = self.send(pg, kind, value)()
            work.wait()
            if recorder.thread() == 0:
                recorder.host_sync()
            return found, pg

        def all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
            object_list[:] = exchange("all_gather_object", obj, group)[0]

        def gather_object(
            obj: Any, object_gather_list: Any = None, dst: Any = None, group: Any = None, group_dst: Any = None
        ) -> None:
            root = _root(dst, group_dst, group)
            found, pg = exchange("gather_object", obj, group, root)
            if pg.rank() == root:
                object_gather_list[:] = found

        def broadcast_object_list(
            object_list: list[Any], src: Any = None, group: Any = None, device: Any = None, group_src: Any = None
        ) -> None:
            root = _root(src, group_src, group)
            found, pg = exchange("broadcast_object_list", list(object_list), group, root)
            if pg.rank() != root:
                object_list[:] = found[root]

        def scatter_object_list(
            scatter_object_output_list: list[Any],
            scatter_object_input_list: Any = None,
            src: Any = None,
            group: Any = None,
            group_src: Any = None,
        ) -> None:
            root = _root(src, group_src, group)
            found, pg = exchange("scatter_object_list", scatter_object_input_list, group, root)
            if found[root] is not None:  # None: recorded alone, and not the root, which has the objects
                scatter_object_output_list[0] = found[root][pg.rank()]

        return {
            function.__name__: function
            for function in (all_gather_object, gather_object, broadcast_object_list, scatter_object_list)
        }


def _root(rank: int | None, group_rank: int | None, group: Any) -> int:
    """Return the root's rank in the group, from its global or group rank (global rank 0 if neither is given)."""
    if group_rank is not None:
        return group_rank
    pg: Any = group or dist.group.WORLD
    return dist.get_group_rank(pg, 0 if rank is None else rank)
