"""The functions that ``Program`` calls in its worker processes; each process keeps one open program between calls."""

from __future__ import annotations

import datetime
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autopar.program.metrics import peak_memory_bytes
from autopar.program.share import DataError
from autopar.run.folder import import_runtime, import_train, made_by, program_modules
from autopar.run.worker import resolve

_open: list[Any] = []  # this process's one trainer


def open_trainer(folder: str, options: dict[str, Any], *, device: str | None, timeout_s: float) -> Any:
    """The folder's own ``Trainer`` for this rank, inside the processes that the environment describes.

    ``options``: ``optimizer`` (``"module:function"``, a callable, or ``None``), ``scheduler`` (likewise, or left out), ``lr``, ``seed``,
    ``max_norm``, ``state`` (the user's state dict, a file of it, or ``None``), ``of_folder`` (whether optimizer and scheduler are those of
    the folder's ``train.py``).
    """
    with program_modules(folder):
        runtime = import_runtime(folder)
        program = runtime.load(folder)
        world = runtime.start(program, device=device, timeout_s=timeout_s)
        make, schedule, lr = options["optimizer"], options.get("scheduler"), options["lr"]
        make = resolve(make) if isinstance(make, str) else make
        schedule = resolve(schedule) if isinstance(schedule, str) else schedule
        if options.get("of_folder"):
            train = import_train(Path(folder))
            make, schedule = made_by(train, lr, world), train.make_scheduler
        return runtime.Trainer(
            program,
            world,
            optimizer=make or (lambda params: runtime.adamw(params, lr, world)),
            scheduler=schedule,
            state=options["state"],
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
    if name in _ANSWERED:
        return _answered(_ANSWERED[name], trainer, *args)
    assert name == "load_state_dict", name
    trainer.load_state_dict(*args)
    return None


def _with_files(name: str) -> Any:
    def act(trainer: Any, folder: str, options: dict[str, Any]) -> Any:
        result = getattr(trainer, name)(folder, **options)
        return result if isinstance(result, int) else str(result)

    return act


def _open_data(trainer: Any, number: int, source: Any, order: dict[str, Any], collate: Any) -> dict[str, int]:
    """Open a data set under a number; its rows, and those of a global batch."""
    try:
        if isinstance(source, dict) and "target" in source:
            source = resolve(source["target"])
        elif isinstance(source, dict) and isinstance(source.get("file"), str):
            source = torch.load(source["file"], weights_only=True, mmap=True)
        if callable(source) and not hasattr(source, "__getitem__"):
            source = source()
    except Exception as error:
        raise DataError(
            f"the data set cannot be opened: {type(error).__name__}: {error}", "every rank opens it"
        ) from error
    collate = resolve(collate) if isinstance(collate, str) else collate
    loader = trainer.loaders[number] = trainer.loader(source, order, collate=collate)
    return {"number": number, "rows": loader.rows, "batch": loader.batch, "batches": len(loader)}


def _train_step(trainer: Any, batch: Any, on_nan: str) -> dict[str, Any]:
    """A step with a global batch, or with the next one of an open data set: its figures."""
    if isinstance(batch, int):
        loss, ends = trainer.step_from(trainer.loaders[batch], on_nan)
    else:
        loss, ends = trainer.step(batch, on_nan), False
    norm, scale = trainer.gradient_norm, trainer.loss_scale
    return {
        "step": trainer.steps,
        "loss": loss,
        "ends": ends,
        "gradient_norm": None if norm is None else float(norm),
        "loss_scale": None if scale is None else scale.scale,
        "peak_memory_bytes": peak_memory_bytes(),
    }


def _evaluate(trainer: Any, batch: Any) -> list[float]:
    """The losses of a global batch, or of those of an epoch of an open data set."""
    if isinstance(batch, int):
        return [trainer.evaluate(rows) for rows in trainer.loaders[batch].epoch()]
    return [trainer.evaluate(batch)]


_ANSWERED = {
    **{name: _with_files(name) for name in ("save", "load", "save_weights", "load_weights")},
    "open_data": _open_data,
    "train_step": _train_step,
    "evaluate": _evaluate,
}
_REFUSALS = ("CheckpointError", "DataError", "ModeError", "NonFiniteLossError")


def _answered(act: Any, trainer: Any, *args: Any) -> dict[str, Any]:
    """What may be refused. A refusal is an answer, which leaves the processes alive; the folder's classes of errors are unknown here."""
    try:
        return {"result": act(trainer, *args)}
    except RuntimeError as error:
        if type(error).__name__ not in _REFUSALS:
            raise
        refusal: Any = error
        return {"refused": type(error).__name__, "error": refusal.message, "hint": refusal.hint}
