"""Functions that a benchmark calls in its worker processes, which load every compared program once and run their steps in turns."""

from __future__ import annotations

import time
from typing import Any

import torch.distributed as dist

from autopar.bench.baselines import HandTuned, HandTunedRecipe, Step
from autopar.bench.models import subject
from autopar.run import remote

_contenders: dict[str, Step] = {}


def open_hand_tuned(name: str, model: str, recipe: dict[str, Any], lr: float, device: str) -> None:
    """Load the hand-written program of ``recipe`` for ``model`` as the contender ``name``."""
    _contenders[name] = HandTuned(subject(model), HandTunedRecipe(**recipe), lr, device).step


def open_program(name: str, folder: str, inputs: list[str], lr: float, state: str, device: str) -> None:
    """Load an emitted program as the contender ``name``, with the values in the file ``state``; ``inputs`` has the program's names for the
    batch's two tensors."""
    options = {"optimizer": None, "lr": lr, "seed": 0, "max_norm": None, "state": state}
    trainer = remote.open_trainer(folder, options, device=device, timeout_s=300)
    _contenders[name] = lambda *batch: float(trainer.step(dict(zip(inputs, batch, strict=True))))


def steps(name: str, model: str, seed: int, count: int) -> dict[str, list[Any]]:
    """Run ``count`` steps of a contender; return the seconds of each, from one barrier to the next, and the losses on
    this rank: ``None`` without the last stage of a pipeline."""
    batch = subject(model).batch(seed)
    seconds, losses = [], []
    for _ in range(count):
        dist.barrier()
        start = time.perf_counter()
        losses.append(_contenders[name](*batch))
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    return {"seconds": seconds, "losses": losses}
