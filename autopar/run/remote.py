"""The functions that ``Program`` calls in its worker processes; each process keeps one open program between calls."""

from __future__ import annotations

import datetime
import os
from typing import Any

import torch
import torch.distributed as dist

from autopar.run.folder import import_runtime, program_modules
from autopar.run.worker import resolve

_open: list[Any] = []  # this process's one trainer


def open_trainer(folder: str, options: dict[str, Any], *, device: str | None, timeout_s: float) -> Any:
    """The folder's own ``Trainer`` for this rank, inside the processes that the environment describes.

    ``options``: ``optimizer`` (``"module:function"``, a callable, or ``None``), ``lr``, ``seed``, ``max_norm``, ``state`` (a file
    of the user's state dict, or ``None``).
    """
    with program_modules(folder):
        runtime = import_runtime(folder)
        program = runtime.load(folder)
        world = runtime.start(program, device=device, timeout_s=timeout_s)
        make, lr = options["optimizer"], options["lr"]
        make = resolve(make) if isinstance(make, str) else make
        state = options["state"]
        return runtime.Trainer(
            program,
            world,
            optimizer=make or (lambda params: runtime.adamw(params, lr, world)),
            state=runtime.read_state(state) if state is not None else None,
            seed=options["seed"],
            max_norm=options["max_norm"],
        )


def join(device: str, timeout_s: float) -> None:
    """Meet the other workers at the parent's store: the default process group of everything that follows."""
    torch.set_num_threads(1)
    rank, count, timeout = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), datetime.timedelta(seconds=timeout_s)
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timeout)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=timeout)


def open_program(folder: str, options: dict[str, Any], device: str, timeout_s: float) -> None:
    """Join the other workers and open the program."""
    join(device, timeout_s)
    _open.append(open_trainer(folder, options, device=device, timeout_s=timeout_s))


def call(name: str, *args: Any) -> Any:
    """``perform`` in a worker."""
    return perform(_open[0], name, *args)


def perform(trainer: Any, name: str, *args: Any) -> Any:
    """One call of ``Program`` to this rank's trainer; every rank gets the same call."""
    if name == "step":
        return trainer.step(*args)
    if name == "trace":
        return trainer.trace(*args)
    if name == "gradients":
        return trainer.forward_backward(*args), trainer.gradients()
    if name == "state_dict":
        return trainer.state_dict()
    if name == "scaler_state_dict":
        return {} if trainer.loss_scale is None else trainer.loss_scale.state_dict()
    if name == "load_scaler_state_dict":
        trainer.loss_scale.load_state_dict(*args)
        return None
    if name in ("save", "load", "save_weights", "load_weights"):
        return _with_files(trainer, name, *args)
    assert name == "load_state_dict", name
    trainer.load_state_dict(torch.load(args[0], weights_only=True, mmap=True))
    return None


def _with_files(trainer: Any, name: str, folder: str, options: dict[str, Any]) -> dict[str, Any]:
    """Save or load; a refusal is an answer, which leaves the processes alive: the folder's own class of errors is unknown here."""
    try:
        result = getattr(trainer, name)(folder, **options)
    except RuntimeError as error:
        if type(error).__name__ != "CheckpointError":
            raise
        refusal: Any = error
        return {"error": refusal.message, "hint": refusal.hint}
    return {"result": result if isinstance(result, int) else str(result)}
