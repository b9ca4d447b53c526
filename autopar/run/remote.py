"""Functions that ``Program`` calls in its worker processes; each process keeps one trainer between calls."""

from __future__ import annotations

import datetime
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autopar.program.importing import resolve
from autopar.program.loader import Tensors
from autopar.program.metrics import peak_memory_bytes
from autopar.program.share import DataError
from autopar.run.folder import import_runtime, import_train, optimizer_maker, program_modules

_opened_trainers: list[Any] = []  # one at most


def open_trainer(folder: str, options: dict[str, Any], *, device: str | None, timeout_s: float) -> Any:
    """Return the folder's ``Trainer`` for this rank; environment variables give the rank and the world size.

    ``options`` has ``optimizer`` (``"module:function"``, a callable, or ``None``), ``scheduler`` (the same, or left out), ``of_folder``
    (use ``train.py``'s instead of these), ``lr``, ``seed``, ``max_norm``, and ``state`` (the user's state dict, a path to it, or ``None``).
    """
    with program_modules(folder):
        runtime = import_runtime(folder)
        program = runtime.load(folder)
        world = runtime.start(program, device=device, timeout_s=timeout_s)
        make_optimizer, make_scheduler, lr = options["optimizer"], options.get("scheduler"), options["lr"]
        make_optimizer = resolve(make_optimizer) if isinstance(make_optimizer, str) else make_optimizer
        make_scheduler = resolve(make_scheduler) if isinstance(make_scheduler, str) else make_scheduler
        if options.get("of_folder"):
            train = import_train(Path(folder))
            make_optimizer, make_scheduler = optimizer_maker(train, lr, world), train.make_scheduler
        return runtime.Trainer(
            program,
            world,
            optimizer=make_optimizer or (lambda params: runtime.adamw(params, lr, world)),
            scheduler=make_scheduler,
            state=options["state"],
            seed=options["seed"],
            max_norm=options["max_norm"],
        )


def join(device: str, timeout_s: float) -> None:
    """Initialise the default process group with the other workers, through the parent's store."""
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
    _opened_trainers.append(open_trainer(folder, options, device=device, timeout_s=timeout_s))


def call(name: str, *args: Any) -> Any:
    """Call ``perform`` with the trainer that ``open_program`` opened in this process."""
    return perform(_opened_trainers[0], name, *args)


def perform(trainer: Any, name: str, *args: Any) -> Any:
    """Run the operation ``name`` of ``Program`` on this rank's trainer, and return its result; all ranks run the same operations."""
    if name in ("step", "trace", "state_dict", "load_state_dict"):
        return getattr(trainer, name)(*args)
    if name == "gradients":
        return trainer.forward_backward(*args), trainer.gradients()
    if name == "scaler_state_dict":
        return {} if trainer.loss_scale is None else trainer.loss_scale.state_dict()
    if name == "load_scaler_state_dict":
        return trainer.loss_scale.load_state_dict(*args)
    return _result_or_error(_OPERATIONS[name], trainer, *args)


def _file_operation(method: str) -> Any:
    def operation(trainer: Any, folder: str, options: dict[str, Any]) -> Any:
        result = getattr(trainer, method)(folder, **options)
        return result if isinstance(result, int) else str(result)

    return operation


def _open_data(trainer: Any, number: int, source: Any, order: dict[str, Any], collate: Any) -> dict[str, int]:
    """Open a data set, keep its loader as ``trainer.loaders[number]``, and return the fields of ``Data``."""
    try:
        if isinstance(source, dict) and "target" in source:
            source = resolve(source["target"])
        elif isinstance(source, dict) and isinstance(source.get("file"), str):
            source = Tensors.read(source["file"]).tensors
        if callable(source) and not hasattr(source, "__getitem__"):
            source = source()
    except DataError:
        raise
    except Exception as error:
        raise DataError(
            f"the data set cannot be opened: {type(error).__name__}: {error}",
            "every rank opens it: a file of torch.save({NAME: tensor, ...}), or a function that returns a data set",
        ) from error
    collate = resolve(collate) if isinstance(collate, str) else collate
    loader = trainer.loaders[number] = trainer.loader(source, order, collate=collate)
    return {"number": number, "rows": loader.rows, "batch": loader.batch, "batches": len(loader)}


def _train_step(trainer: Any, batch: Any, on_nan: str) -> dict[str, Any]:
    """Train one step and return its record. ``batch`` is a global batch, or the number of an open data set, whose next batch is read."""
    if isinstance(batch, int):
        loss, ends_epoch = trainer.step_from(trainer.loaders[batch], on_nan)
    else:
        loss, ends_epoch = trainer.step(batch, on_nan, with_norm=True), False
    norm, scale = trainer.gradient_norm, trainer.loss_scale
    return {
        "step": trainer.steps,
        "loss": loss,
        "ends_epoch": ends_epoch,
        "gradient_norm": None if norm is None else float(norm),
        "loss_scale": None if scale is None else scale.scale,
        "peak_memory_bytes": peak_memory_bytes(),
    }


def _evaluate(trainer: Any, batch: Any) -> list[float]:
    """Return the losses of ``batch``: of one global batch, or of an epoch of the open data set with that number."""
    if isinstance(batch, int):
        return [trainer.evaluate(rows) for rows in trainer.loaders[batch].epoch()]
    return [trainer.evaluate(batch)]


_OPERATIONS = {
    **{name: _file_operation(name) for name in ("save", "load", "save_weights", "load_weights")},
    "open_data": _open_data,
    "train_step": _train_step,
    "evaluate": _evaluate,
}
_EXPECTED_ERRORS = ("CheckpointError", "DataError", "ModeError", "NonFiniteLossError")


def _result_or_error(operation: Any, trainer: Any, *args: Any) -> dict[str, Any]:
    """Return the result, or an expected error as data: raising it would end the processes, and the parent can't import its class."""
    try:
        return {"result": operation(trainer, *args)}
    except RuntimeError as error:
        if type(error).__name__ not in _EXPECTED_ERRORS:
            raise
        expected: Any = error
        return {"error_type": type(error).__name__, "error": expected.message, "hint": expected.hint}
