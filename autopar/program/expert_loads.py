"""Records how many rows (pairs of a token and a chosen expert) routers send to each expert, as data for the planner.

``train.py --record-expert-loads FILE`` writes FILE at the end of a run; ``autopar plan --expert-loads FILE`` prices the busiest rank by it.
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
        self._layers = [layer["name"] for layer in plan["layers"]]
        self._steps: deque[dict[tuple[int, int], Tensor]] = deque(maxlen=STEPS)
        self._counts: dict[tuple[int, int], Tensor] = {}
        self._layer: int | None = None  # the one that runs forward; none in the backward pass, which may recompute it
        self._mixtures: dict[
            int, list[int]
        ] = {}  # by layer: the addresses of its mixtures' parameters, in the order of their calls
        for number, stage in stages.items():
            start, stop = plan["stages"][number]["layers"]
            for index, layer in zip(range(start, stop), layers_of(stage).values(), strict=True):
                layer.register_forward_pre_hook(partial(self._enter, index))
                layer.register_forward_hook(partial(self._leave, index), always_call=True)
        global _recorder
        _recorder = self

    def _enter(self, layer: int, *_: Any) -> None:
        self._layer = layer
        self._mixtures[layer] = []

    def _leave(self, layer: int, _module: nn.Module, _args: Any, result: Any) -> Any:
        self._layer = None
        return self._half(layer, result) if isinstance(result, Generator) else None

    def _half(self, layer: int, half: Generator[None, None, Any]) -> Generator[None, None, Any]:
        """Run one half of a microbatch (``halves``), which takes turns with the other half."""
        while True:
            self._layer = layer
            try:
                next(half)
            except StopIteration as end:
                return end.value
            finally:
                self._layer = None
            yield

    def count(self, index: Tensor, experts: int, parameter: Tensor) -> None:
        """Count the choices ``index`` of a mixture of the running layer; both halves of a microbatch have its ``parameter``."""
        if self._layer is None:
            return
        known = self._mixtures[self._layer]
        if (address := parameter.data_ptr()) not in known:
            known.append(address)
        chosen = index.detach().reshape(-1)
        counts = torch.zeros(experts, dtype=torch.long, device=index.device)
        counts.index_add_(0, chosen, torch.ones_like(chosen, dtype=torch.long))
        key = self._layer, known.index(address)
        self._counts[key] = self._counts[key] + counts if key in self._counts else counts

    def end_step(self) -> None:
        """End the counts of a step."""
        self._steps.append(self._counts)
        self._counts = {}

    def discard(self) -> None:
        """Drop the counts since the last step: those of an evaluation."""
        self._counts = {}

    def write(self, path: str | Path, device: torch.device) -> str:
        """Add up the counts of all ranks, and write them on rank 0; return on all ranks why there is nothing to write, or an empty string.
        All ranks call this. ``device`` is the one of this rank's collectives.

        Raises ``OSError`` on rank 0 if the file can't be written.
        """
        if not self._steps:
            return "no step was run"
        counts = [counts for step in self._steps for counts in step.values()]
        mixtures = max((mixture + 1 for step in self._steps for _, mixture in step), default=0)
        sizes = torch.tensor([mixtures, max(map(len, counts), default=0)], device=device)
        dist.all_reduce(sizes, dist.ReduceOp.MAX)
        total = torch.zeros(len(self._steps), len(self._layers), *sizes.tolist(), dtype=torch.long, device=device)
        experts = torch.zeros(len(self._layers), int(sizes[0]), dtype=torch.long, device=device)
        for number, step in enumerate(self._steps):
            for (layer, mixture), counted in step.items():
                total[number, layer, mixture, : len(counted)] = counted
                experts[layer, mixture] = len(counted)
        dist.all_reduce(total)
        dist.all_reduce(experts, dist.ReduceOp.MAX)
        layers = {
            name: [total[:, i, k, :n].tolist() for k, n in enumerate(experts[i].tolist()) if n]
            for i, name in enumerate(self._layers)
            if experts[i].any()
        }
        if not layers:
            return "the model has no experts"
        if dist.get_rank() == 0:
            written = Path(f"{path}.part")
            written.write_text(json.dumps({"format": FORMAT, "layers": layers}) + "\n")
            written.replace(path)
        return ""


_recorder: Recorder | None = None


def count(index: Tensor, experts: int, parameter: Tensor) -> None:
    """Count a router's choices, if they are recorded. ``parameter`` is one of its experts' parameters."""
    if _recorder is not None:
        _recorder.count(index, experts, parameter)
