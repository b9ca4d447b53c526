"""Training that goes on from a checkpoint under another plan, against the same training on one device in eager PyTorch."""

from __future__ import annotations

import functools
import re
import resource
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from exactness import KINDS, MODELS, subject
from places import file_of
from plain_loop import plain_loop
from torch import Tensor, nn
from torch.optim import lr_scheduler
from workers import WorkerPool
from written_models import WRITTEN

from autopar.capture import BatchStructure, Float64Everywhere
from autopar.capture.eager import WithoutDropout, copy_for_eager
from autopar.capture.export import call_model
from autopar.emit import emit
from autopar.plan import Plan
from autopar.run import remote
from autopar.verify import kind

Fault = tuple[str, str, str]
STEPS = 2  # under each plan
KIND = {
    each.name: each
    for each in (*KINDS, kind("data 2, local steps", data=2, sync="local-steps:3", allow={"local_steps"}))
}


def adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1, amsgrad=True)


def momentum(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True)


def asgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Its state has tensors, numbers on the device, and numbers on the host."""
    return torch.optim.ASGD(params, lr=1e-2, t0=1)


def adafactor(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Its state has rows and columns."""
    return torch.optim.Adafactor(params, lr=1e-2, eps=(1e-8, 1e-3), weight_decay=0.1)


def muon(params: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    """For matrices, beside AdamW for the others."""
    matrices, others = [p for p in params if p.ndim == 2], [p for p in params if p.ndim != 2]
    return [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(others, lr=1e-2, weight_decay=0.1)]


def cosine(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    """Two steps of warm-up, and down."""
    warm, down = lr_scheduler.LinearLR(optimizer, 0.5, total_iters=2), lr_scheduler.CosineAnnealingLR(optimizer, 6)
    return lr_scheduler.SequentialLR(optimizer, [warm, down], [2])


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Any]] = {
    "adamw": adamw,
    "momentum": momentum,
    "asgd": asgd,
    "adafactor": adafactor,
    "muon": muon,
}
SCHEDULERS = {"adafactor": cosine, "muon": cosine}
"""The others' learning rates are constant."""


def batch_of(name: str, step: int) -> dict[str, Tensor]:
    """The batch of a step: the model's one, with another row twice in place of the row before it."""
    tensors = subject(name).batch
    return {key: _changed(tensor, step) for key, tensor in tensors.items()}


def _changed(tensor: Tensor, step: int) -> Tensor:
    changed = tensor.clone()
    changed[(step + 1) % len(tensor)] = tensor[step % len(tensor)]
    return changed


@functools.cache
def straight(name: str, optimizer: str, steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and final values of the training on one device."""
    model, loss_of = eager(name)
    losses = [functools.partial(loss_of, batch_of(name, step)) for step in range(steps)]
    values = plain_loop(model, losses, OPTIMIZERS[optimizer], SCHEDULERS.get(optimizer))
    return values, {key: tensor.detach() for key, tensor in model.state_dict().items()}


def eager(name: str) -> tuple[nn.Module, Callable[[dict[str, Tensor]], Tensor]]:
    """The model as its user wrote it, with the values that its programs start from, and the loss of a batch."""
    given = subject(name)
    torch.manual_seed(0)
    model, _, loss_fn = (MODELS | WRITTEN)[name]()
    copied = copy_for_eager(model, loss_fn)
    copied.model.load_state_dict(given.state)
    structure = given.graph.structure
    assert isinstance(structure, BatchStructure)

    def loss_of(batch: dict[str, Tensor]) -> Tensor:
        with (
            Float64Everywhere(),
            WithoutDropout(),
        ):  # not around the optimizer, whose numbers of steps and the like have the default dtype
            return call_model(copied.model, structure, copied.loss_fn, list(batch.values()))

    return copied.model, loss_of


def trained(
    folder: str,
    batches: list[dict[str, Tensor]],
    optimizer: str,
    *,
    state: str | None = None,
    load: str | None = None,
    save: str | None = None,
    keep: int | None = None,
) -> dict[str, Any]:
    """In a worker: a step with each batch, after ``load`` or from ``state``, and then a checkpoint in ``save``.

    Without ``state`` the values are drawn: those of a checkpoint must replace all of them.
    """
    options = {
        "optimizer": OPTIMIZERS[optimizer],
        "scheduler": SCHEDULERS.get(optimizer),
        "lr": 0.0,
        "seed": 5 if load else 0,
        "max_norm": None,
        "state": state,
    }
    trainer = remote.open_trainer(folder, options, device="cpu", timeout_s=60)
    begun = trainer.load(load) if load else 0
    losses = [trainer.step(batch) for batch in batches]
    path = trainer.save(save, keep=keep) if save else None
    return {"begun": begun, "losses": losses, "state": trainer.state_dict(), "path": str(path), "rows": trainer.rows}


def refused(
    folder: str,
    batch: dict[str, Tensor],
    state: str,
    saved: str,
    limit_bytes: int | None = None,
    optimizer: str = "adamw",
) -> list[Any]:
    """In a worker: why a checkpoint is refused, and a step after that.

    With ``limit_bytes``, where no file may grow beyond it, it is ``saved`` that cannot be written; else it cannot be loaded.
    """
    options = {"optimizer": OPTIMIZERS[optimizer], "lr": 0.0, "seed": 0, "max_norm": None, "state": state}
    trainer = remote.open_trainer(folder, options, device="cpu", timeout_s=60)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        if limit_bytes is None:
            trainer.load(saved)
        else:
            trainer.save(saved)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limits[1]))
            trainer.steps += 1
            trainer.save(saved, keep=1)
    except RuntimeError as error:
        assert type(error).__name__ == "CheckpointError"
        why = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return [why, trainer.step(batch)]


def outcomes(folder: str, steps: list[str], values: dict[str, Tensor]) -> list[tuple[str, str]]:
    """In a worker: what becomes of each checkpoint: it is ``"refused"``, and why; ``"read"`` with these values, or with others
    (``"silent"``)."""
    options = {"optimizer": adamw, "lr": 0.0, "seed": 5, "max_norm": None, "state": None}
    trainer = remote.open_trainer(folder, options, device="cpu", timeout_s=60)
    found = []
    for step in steps:
        try:
            trainer.load(step)
        except RuntimeError as error:
            assert type(error).__name__ == "CheckpointError", error
            found.append(("refused", str(error)))
            continue
        state = trainer.state_dict()
        same = trainer.steps == 2 and all(torch.equal(tensor, values[name]) for name, tensor in state.items())
        found.append(("read" if same else "silent", f"step {trainer.steps}"))
    return found


def in_background(folder: str, batches: list[dict[str, Tensor]], state: str, saved: str) -> dict[str, Any]:
    """In a worker: a checkpoint that a thread writes between the two steps, and one that it cannot write."""
    options = {"optimizer": adamw, "lr": 0.0, "seed": 0, "max_norm": None, "state": state}
    trainer = remote.open_trainer(folder, options, device="cpu", timeout_s=60)
    losses = [trainer.step(batches[0])]
    path = trainer.save(saved, wait=False)
    losses.append(trainer.step(batches[1]))
    trainer.finish_saving()
    begun = trainer.load(saved)
    losses.append(trainer.step(batches[1]))
    limits, why = resource.getrlimit(resource.RLIMIT_FSIZE), ""
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, limits[1]))
    try:
        trainer.save(saved, wait=False)
        trainer.finish_saving()
    except RuntimeError as error:
        why = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    gate = threading.Event()
    trainer._background._thread.submit(gate.wait)
    trainer.positions["rows"] = (0, 8)
    trainer.save(saved, wait=False, keep=1)
    trainer.positions["rows"] = (0, 16)
    gate.set()
    trainer.finish_saving()
    return {"losses": losses, "path": str(path), "begun": begun, "why": why}


def emitted(name: str, plan: Plan, folder: Path) -> str:
    """The folder of a program of the model, with its initial values."""
    given = subject(name)
    emit(given.graph, plan, folder)
    torch.save(given.state, folder / "initial.pt")
    return str(folder)


def chain(
    name: str,
    plans: Sequence[Plan],
    optimizer: str,
    pool: Callable[[int], WorkerPool],
    folder: Path,
    faults: Sequence[Fault] = (),
) -> dict[str, float]:
    """Train under each plan in turn, each from the checkpoint of the one before; ``faults`` are changes of files that a
    program may have, and one program has.

    The errors by place: of the losses under each plan (``"0"``, ``"1"``, ...), and of the values after the last step (``"state"``).
    """
    wanted, values = straight(name, optimizer, STEPS * len(plans))
    errors: dict[str, float] = {}
    made: set[Fault] = set()
    for i, plan in enumerate(plans):
        program = emitted(name, plan, folder / f"plan{i}")
        for file, pattern, replacement in faults:
            if not file_of(Path(program), file).exists():
                continue
            made.add((file, pattern, replacement))
            text, count = re.subn(pattern, replacement, file_of(Path(program), file).read_text())
            assert count == 1, (file, pattern, count)
            file_of(Path(program), file).write_text(text)
        batches = [batch_of(name, step) for step in range(STEPS * i, STEPS * (i + 1))]
        start = {"load": str(folder / "saved")} if i else {"state": str(Path(program) / "initial.pt")}
        found = pool(plan.device_count).run(
            "resumed:trained", program, batches, optimizer, save=str(folder / "saved"), **start
        )
        assert all(rank["begun"] == STEPS * i and rank["losses"] == found[0]["losses"] for rank in found)
        expected = wanted[STEPS * i : STEPS * (i + 1)]
        pairs = zip(found[0]["losses"], expected, strict=True)
        errors[str(i)] = max(abs(a - b) / max(1.0, abs(b)) for a, b in pairs)
    assert made == set(faults)
    state = found[0]["state"]
    assert found[0]["rows"] == STEPS * len(plans) * len(next(iter(subject(name).batch.values())))
    errors["state"] = max(float((state[key] - values[key]).abs().max()) for key in state)
    return errors
