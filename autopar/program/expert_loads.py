"""Records how many rows (pairs of a token and a chosen expert) routers send to each expert, as data for the planner.

``train.py --expert-loads FILE`` writes FILE at the end of a run, and ``autopar plan --expert-loads FILE`` prices the busiest rank by it.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Generator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .spec import layers_of

FORMAT = 1

STEPS = 32
"""The number of last steps that are recorded: a router's choices change while it learns."""


class Recorder:
    """Counts the choices of all routers in these ``stages`` (by number) on this rank, from its creation on; call ``end_step`` after each
    step. ``plan`` is the content of ``plan.json``, which names the layers.

    Only ratios between experts count: ranks with the same tokens count them each, and so does a recomputation of several layers as one.
    """

    def __init__(self, stages: Mapping[int, nn.Module], plan: Mapping[str, Any]) -> None:
        self._steps: deque[dict[tuple[str, int], Tensor]] = deque(maxlen=STEPS)
        self._counts: dict[tuple[str, int], Tensor] = {}
        self._layer: str | None = None  # the one that runs forward; none in the backward pass, which may recompute it
        self._mixture = 0  # the number of its next mixture
        for number, stage in stages.items():
            start, stop = plan["stages"][number]["layers"]
            of_plan = plan["layers"][start:stop]
            for name, layer in zip((each["name"] for each in of_plan), layers_of(stage).values(), strict=True):
                layer.register_forward_pre_hook(partial(self._enter, name))
                layer.register_forward_hook(partial(self._leave, name))
        global _recorder
        _recorder = self

    def _enter(self, name: str, *_: Any) -> None:
        self._layer, self._mixture = name, 0

    def _leave(self, name: str, _layer: nn.Module, _args: Any, result: Any) -> Any:
        self._layer = None
        return self._half(name, result) if isinstance(result, Generator) else None

    def _half(self, name: str, half: Generator[None, None, Any]) -> Generator[None, None, Any]:
        """Run one half of a microbatch (``halves``), which takes turns with the other half."""
        mixture = 0
        while True:
            self._layer, self._mixture = name, mixture
            try:
                next(half)
            except StopIteration as end:
                return end.value
            finally:
                self._layer, mixture = None, self._mixture
            yield

    def count(self, index: Tensor, experts: int) -> None:
        """Count the choices ``index`` of the running layer's next mixture."""
        if self._layer is None:
            return
        chosen = index.detach().reshape(-1)
        counts = torch.zeros(experts, dtype=torch.long, device=index.device)
        counts.index_add_(0, chosen, torch.ones_like(chosen, dtype=torch.long))
        key = self._layer, self._mixture
        self._counts[key] = self._counts[key] + counts if key in self._counts else counts
        self._mixture += 1

    def end_step(self) -> None:
        """End the counts of a step."""
        self._steps.append(self._counts)
        self._counts = {}

    def write(self, path: str | Path) -> bool:
        """Add up the counts of all ranks, and write them on rank 0; return whether there are any. All ranks call this."""
        steps = [{key: counts.tolist() for key, counts in step.items()} for step in self._steps]
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, steps)
        layers: dict[str, list[list[list[int]]]] = {}
        for name, mixture in sorted({key for rank in ranks for step in rank for key in step}):
            rows = []
            for step in zip(*ranks, strict=True):
                found = [own[name, mixture] for own in step if (name, mixture) in own]
                rows.append([sum(each) for each in zip(*found, strict=True)])
            assert len(layers.setdefault(name, [])) == mixture, (name, mixture)
            layers[name].append(rows)
        if layers and dist.get_rank() == 0:
            Path(path).write_text(json.dumps({"format": FORMAT, "layers": layers}) + "\n")
        return bool(layers)


_recorder: Recorder | None = None


def count(index: Tensor, experts: int) -> None:
    """Count a router's choices, if they are recorded."""
    if _recorder is not None:
        _recorder.count(index, experts)
