"""``Program``: a plan and its emitted folder, with methods that train the model, read its state and launch ``train.py``."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autopar import devices
from autopar.capture.batch import BatchStructure, check_tensors, flatten_batch
from autopar.checks.types import check_program
from autopar.devices import Cluster
from autopar.errors import AutoparError, BatchError, CheckpointError, LaunchError, NonFiniteLossError, UsageError
from autopar.graph import Graph
from autopar.keywords import Training
from autopar.plan import Plan
from autopar.precision import FLOAT16
from autopar.program.metrics import Meter
from autopar.program.optimizers import Scheduler
from autopar.program.processes import StartError, nvme_folder
from autopar.program.state import (
    INITIAL,
    has_values,
    initial,
    names_outside_program,
    read_state,
    write_initial,
    wrong_state,
)
from autopar.program.weights import is_weights, mapped, write_file
from autopar.run import remote
from autopar.run.data import Data, import_path, shareable_source
from autopar.run.folder import folder_for_program
from autopar.run.processes import Processes, finalize_unless_forked
from autopar.run.ranks import is_local_rank_0, is_rank_0
from autopar.run.recipe import Optimizer, TrainingRecipe, recipe_for
from autopar.run.torchrun import torchrun
from autopar.run.training import OnStep, train

_DEFAULT = Training()
_RUNTIME_ERRORS: dict[str, type[AutoparError]] = {
    "CheckpointError": CheckpointError,
    "DataError": BatchError,
    "ModeError": UsageError,
    "NonFiniteLossError": NonFiniteLossError,
}
"""Maps the names of the emitted runtime's errors to autopar's errors."""


class Program:
    """A plan and the folder of its program.

    Under ``torchrun`` each process runs its rank. Otherwise the first call of ``step``, ``train`` etc. starts local worker processes;
    ``close`` (or the end of this process) ends them. The folder's code is what runs: to change it, edit the folder and open it again.

    Args:
        plan: the plan of the program.
        folder: the emitted program.
        graph: the captured model, whose ``structure`` maps a user's batch to inputs. Without a graph, a batch is a dict of tensors by
            input name.
        cluster: the devices of the plan; by default those that ``plan.devices`` describes.
        state: the state dict to start from, or the path of a safetensors file or of a ``torch.save`` of it. If it is left out, or on
            meta, training starts from the folder's ``initial.safetensors``.
        optimizer, scheduler, lr, max_norm, seed: the recipe. The default is that of the folder's ``train.py``: AdamW with 3e-4 and seed
            0, unless the program was compiled with another recipe, or edited. A folder that has a recipe refuses a different one.
        draw_init: if there are no initial values, draw them from ``seed`` (``autopar.program.model_tensors``).
        optimizer: builds an optimizer, or a list of optimizers with disjoint parameters, from the list of the model's parameters, or from
            (name, parameter) pairs if its argument is called ``named_parameters``; by default AdamW with ``lr``. It is called with
            meta tensors. A custom optimizer class must declare ``per_tensor = True`` if it updates each tensor independently, or
            ``elementwise = True`` if each element; otherwise it is refused where ranks hold shards. The cost model assumes Adam.
            Worker processes import the function, so it must be at the top level of a module, or be named ``"module:function"``.
        scheduler: builds a ``torch.optim.lr_scheduler.LRScheduler`` from the optimizer; worker processes import it in the same way. It is
            stepped once per update, but not at steps that float16's loss scaling skips. ``ReduceLROnPlateau`` is refused.
        max_norm: clip gradients to this global 2-norm.
        port: the rendezvous port of local processes on 127.0.0.1; 0 for any free port.
        timeout_s: the timeout of collectives, in seconds.
        type_check: type-check the folder first (``autopar.checks.types``).

    Raises:
        ProgramError: the folder has no program, or an ill-typed one: an edit removed a collective, or added one.
        UsageError: the folder's recipe can't be read, or differs from the arguments.
    """

    def __init__(
        self,
        plan: Plan,
        folder: str | os.PathLike[str],
        graph: Graph | None = None,
        *,
        cluster: Cluster | None = None,
        state: Mapping[str, Tensor] | str | os.PathLike[str] | None = None,
        optimizer: Optimizer | str | None = _DEFAULT.optimizer,
        scheduler: Scheduler | str | None = _DEFAULT.scheduler,
        lr: float | None = None,
        seed: int | None = None,
        max_norm: float | None = _DEFAULT.max_norm,
        port: int = _DEFAULT.port,
        timeout_s: float = 600,
        type_check: bool = True,
        draw_init: bool = _DEFAULT.draw_init,
    ) -> None:
        self.plan, self.folder = plan, Path(folder)
        if type_check and is_local_rank_0():
            check_program(self.folder)
        structure = None if graph is None else graph.structure
        assert structure is None or isinstance(structure, BatchStructure)
        self._structure = structure
        self._cluster = cluster or devices.parse(plan.devices)
        self._initial = initial(self.folder)
        given = {"optimizer": optimizer, "scheduler": scheduler, "lr": lr, "max_norm": max_norm, "seed": seed}
        recipe = recipe_for(self.folder, given, draw_init)
        state, init = recipe.init if state is None else state, None
        if isinstance(state, str | os.PathLike):
            path, state = Path(state), None
            if is_weights(path):
                self._initial = path
                init = None if path.resolve() == (self.folder / INITIAL).resolve() else str(path.resolve())
            else:
                state = read_state(path)
        self._records: dict[str, Any] = json.loads((self.folder / "layouts.json").read_text())
        self._state = _tensors(state) if has_values(state) else None
        self._outside_program: dict[str, Tensor] = {}  # values of ``names_outside_program``
        if self._state is not None:
            self._check_state(self._state)
            self._note_outside_program(self._state)
        elif self._initial is not None:
            self._note_outside_program(self._initial)
        self._recipe = dataclasses.replace(recipe, init=init)
        self._port, self._timeout_s = port, timeout_s
        self._trainer: Any = None
        self._processes: Processes | None = None
        self._failure: LaunchError | None = None
        self._closed = False
        self._data_sets = 0  # number of opened data sets
        self._seconds: list[float] = []  # seconds of each step of ``train``

    # -- training --

    def step(self, batch: Any) -> float:
        """Train one step on a global batch and return its loss, computed before the update."""
        return float(self._call("step", self._inputs(batch)))

    def trace(self, batch: Any, path: str | os.PathLike[str]) -> float:
        """Run ``step(batch)`` under the profiler; write a trace of all ranks in Chrome's trace-event format (https://ui.perfetto.dev).

        ``autopar report PLAN --trace OUT --measured FILE`` shows the predicted step above the trace. Profiling slows the step.
        """
        return float(self._call("trace", self._inputs(batch), str(Path(path).resolve())))

    def train(
        self,
        batches: Iterable[Any] | Data,
        steps: int | None = None,
        on_step: OnStep | None = None,
        *,
        on_nan: str = "stop",
        log: str | os.PathLike[str] | None = None,
        tensorboard: str | os.PathLike[str] | None = None,
        wandb: str | None = None,
    ) -> list[float]:
        """Train ``steps`` steps and return their losses.

        Args:
            batches: global batches, repeated from the first when they end, or a data set from ``loader``, which continues where it stopped.
            steps: the number of steps; by default one for each batch, or the rest of the data set's epoch.
            on_step: called with the number of the step (from 1), its loss and its record: ``step`` (counted from the start of training),
                ``loss``, ``step_time_s`` (data loading included), ``rows_per_s``, ``tokens_per_s``, ``peak_memory_bytes`` (maximum over
                ranks; on CPUs the resident set, with Python and torch), ``mfu`` if the plan has one, ``gradient_norm`` (before
                clipping), and in float16 ``loss_scale``.
            on_nan: when the loss is NaN or infinite, ``"stop"`` raises ``NonFiniteLossError`` before the update, with the first layer
                that produced such a value; ``"skip"`` skips the update.
            log: append the records to this file, one JSON object per line.
            tensorboard: a folder for TensorBoard.
            wandb: a project of W&B; ``WANDB_MODE=offline`` logs without a network.

        After 20 steps, a table of predicted and measured figures is printed to standard error.

        Raises:
            BatchError: rows can't be read, or batches don't fit the program; training can continue.
        """
        if on_nan not in ("stop", "skip"):
            raise UsageError(f"on_nan is {on_nan!r}", '"stop" or "skip"')
        first = is_rank_0()
        plan = json.loads((self.folder / "plan.json").read_text())
        try:
            opened = Meter(plan, *((log, tensorboard, wandb) if first else ()), seconds=self._seconds)
        except (OSError, ImportError) as error:
            raise UsageError(f"the log cannot be written: {error}", "leave log=, tensorboard= or wandb= out") from error
        with closing(opened) as meter:
            return train(batches, steps, lambda batch: self._train_step(batch, on_nan, meter), on_step)

    def _train_step(self, batch: Any, on_nan: str, meter: Meter) -> tuple[dict[str, Any], bool]:
        """Run a step and return its record, and whether it ended the data set's epoch."""
        meter.begin()
        data = batch.number if isinstance(batch, Data) else self._inputs(batch)
        replies = self._results("train_step", data, on_nan)
        memory = max(reply["peak_memory_bytes"] for reply in replies)
        more = {name: replies[0][name] for name in ("gradient_norm", "loss_scale")}
        record = meter.end(replies[0]["step"], replies[0]["loss"], memory, more)
        table = meter.comparison(memory, max(stage.memory.total for stage in self.plan.stages))
        if table and is_rank_0():
            print(table, file=sys.stderr)
        return record, replies[0]["ends_epoch"]

    def evaluate(self, batches: Iterable[Any] | Data) -> list[float]:
        """Return the losses of global batches, or of a data set's epoch, as ``model.eval()`` computes them, without updates.

        Dropout is off, and batch norm uses its running statistics. Raises ``UsageError`` if the capture did not show
        that the program computes what ``model.eval()`` does (``Graph.no_evaluation``).
        """
        if isinstance(batches, Data):
            losses: list[float] = self._results("evaluate", batches.number)[0]
            return losses
        return [self._results("evaluate", self._inputs(batch))[0][0] for batch in batches]

    def loader(
        self,
        dataset: Any,
        *,
        shuffle: bool = False,
        seed: int = 0,
        last: str = "drop",
        workers: int = 0,
        collate: Callable[[list[Any]], Any] | str | None = None,
    ) -> Data:
        """Open a data set; every rank reads only its own rows of a global batch.

        Args:
            dataset: a dict of tensors by input name, a ``TensorDataset``, the path of a file with such a dict (``torch.save``), or a
                function that returns a map-style data set or a ``DataLoader`` of one. The function is at the top level of a module, or
                given by its name, ``"module:function"`` or ``"file.py:function"``. Under ``torchrun`` also a map-style data set, or a
                ``DataLoader`` of one.
            shuffle, seed: draw each epoch's order from ``seed + epoch``, as ``DistributedSampler`` does.
            last: what to do with an incomplete last batch: ``"drop"`` it, or ``"pad"`` it with rows that the loss ignores.
            workers: the number of reader processes per rank.
            collate: turns a list of samples into tensors, by default as ``DataLoader`` does; a top-level function, or its name.

        A sample has the structure of the batch with which the model was captured, without dim 0. ``save`` and ``load`` keep the
        position, also within an epoch.

        Raises:
            BatchError: the data set is shorter than a global batch, or can't be read by row; or there is no proof that the loss ignores
                padding.
            UsageError: worker processes can't import it.
        """
        if last not in ("drop", "pad"):
            raise UsageError(f"last is {last!r}", '"drop" or "pad"')
        source, by = dataset, collate
        if not _is_rank() or isinstance(dataset, str | Path):
            with tempfile.NamedTemporaryFile(prefix="autopar-", suffix=".pt", delete=False) as file:
                path = Path(file.name)
            finalize_unless_forked(self, path.unlink, missing_ok=True)
            source = shareable_source(dataset, None if self._structure is None else self._structure.sample, path)
        if not _is_rank() and collate is not None:
            by = import_path(collate, "collate function", "a function")
        order = {"shuffle": shuffle, "seed": seed, "workers": workers, "last": last}
        self._data_sets += 1
        return Data(**self._results("open_data", self._data_sets, source, order, by)[0])

    def gradients(self, batch: Any) -> tuple[float, dict[str, Tensor]]:
        """Return the loss of a global batch, and the unsharded gradients by the user's parameter names. Parameters aren't updated.

        Under ``torchrun`` only rank 0 has the gradients.
        """
        loss, grads = self._call("gradients", self._inputs(batch))
        return loss, grads

    def state_dict(self) -> dict[str, Tensor]:
        """Return the unsharded parameters and buffers by the user's names, on the CPU; under ``torchrun`` on rank 0 only.

        Tensors that the forward pass neither reads nor writes keep their initial values.
        """
        trained: dict[str, Tensor] = self._call("state_dict")
        if not trained:
            return trained
        return {name: tensor.detach().cpu().clone() for name, tensor in self._outside_program.items()} | trained

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Set the parameters and buffers from a state dict of the user's model.

        Raises ``UsageError``, before any process starts, with the name of a tensor that is missing, unknown, or has another shape.
        """
        self._check_state(state)
        if _is_rank():
            self._call("load_state_dict", _tensors(state))
        else:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / INITIAL
                write_file(path, _tensors(state))
                self._call_with_path("load_weights", path)
        self._note_outside_program(_tensors(state))

    def scaler_state_dict(self) -> dict[str, float | int]:
        """Return the state of float16's dynamic loss scale in the form of ``torch.amp.GradScaler.state_dict``; empty without a scale."""
        state: dict[str, float | int] = self._call("scaler_state_dict")
        return state

    def load_scaler_state_dict(self, state: Mapping[str, float | int]) -> None:
        """Restore the state of the loss scale from ``scaler_state_dict``. Raises ``UsageError`` in programs without a loss scale."""
        if self.plan.precision != FLOAT16:
            raise UsageError(
                f"a program in {self.plan.precision} does not scale its loss",
                "only programs in float16 have this state",
            )
        self._call("load_scaler_state_dict", dict(state))

    def save(self, folder: str | os.PathLike[str], *, keep: int | None = None) -> Path:
        """Write a checkpoint, ``folder/step-N`` after ``N`` steps, and return its path.

        A program of the same model under any plan can load it. Each rank writes its shards of parameters and optimizer state, so all
        machines must share ``folder``. Of the checkpoints up to this one, only the last ``keep`` are kept (``None``: all).

        Raises ``CheckpointError``, for example if the disk is full; training can continue.
        """
        return Path(self._call_with_path("save", folder, keep=keep))

    def load(self, folder: str | os.PathLike[str]) -> int:
        """Resume from a checkpoint, ``folder`` itself or the newest complete one in it, and return its number of steps.

        Restores parameters, buffers, optimizer state, the options of the parameter groups, the scheduler's state and the seed.

        Raises ``CheckpointError`` if the checkpoint is damaged, or belongs to another model, optimizer or scheduler.
        """
        return int(self._call_with_path("load", folder))

    def save_weights(self, folder: str | os.PathLike[str]) -> None:
        """Write the parameters and buffers as safetensors, in the model's dtypes, into a new folder that all machines share.

        A large model is split into files of up to 5 GB with an index, as transformers does; each rank writes its shards. Raises
        ``CheckpointError``.
        """
        self._call_with_path("save_weights", folder)

    def load_weights(self, path: str | os.PathLike[str]) -> None:
        """Load the parameters and buffers from a safetensors file, or a folder of them; each rank reads its shards.

        Raises ``CheckpointError`` with the names of tensors that are missing, unknown, or have other shapes.
        """
        self._call_with_path("load_weights", path)
        self._note_outside_program(Path(path))

    def _call_with_path(self, name: str, path: str | os.PathLike[str], **options: Any) -> Any:
        return self._results(name, str(Path(path).resolve()), options)[0]

    def _results(self, name: str, *args: Any) -> list[Any]:
        """Return the results of a call by rank (under ``torchrun`` only this rank's), or raise the error of the first rank with one."""
        replies: list[dict[str, Any]] = self._call_all(name, *args)
        for reply in replies:
            if "error" in reply:
                raise _RUNTIME_ERRORS[reply["error_type"]](reply["error"], reply["hint"])
        return [reply["result"] for reply in replies]

    # -- the folder --

    def emit(self, folder: str | os.PathLike[str]) -> Path:
        """Copy the program to ``folder`` (created if missing) and return its path.

        The copy starts from this ``Program``'s ``state``, and its ``train.py`` has this program's recipe: optimizer, scheduler, ``lr``,
        ``max_norm`` and seed. If all of these are defaults, ``train.py`` is copied unchanged.

        Raises ``UsageError`` with the name of an object that can't be written as code, such as a lambda.
        """
        there = folder_for_program(folder)
        if there.resolve() != self.folder.resolve():
            shutil.copytree(self.folder, there, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
            if initial(self.folder) is None:
                (there / INITIAL).unlink(missing_ok=True)  # of a program that was there before
        if self._state is not None:
            write_initial(there, self._state)
        self.write_recipe(there)
        return there

    def write_recipe(self, folder: Path) -> None:
        """Write a recipe other than the default into a folder's ``train.py``.

        Raises ``UsageError`` if it can't be written as code; ``train.py`` then exits with the same message.
        """
        if self._recipe == TrainingRecipe():
            return
        try:
            self._recipe.write(folder)
        except UsageError as error:
            self._recipe.refuse(folder, error.message)
            raise

    def launch(self, *args: str) -> None:
        """Run the folder's ``train.py`` on this machine under ``torchrun``; its output goes to this process's standard output and error.

        Raises ``LaunchError`` with the first failing rank's error.
        """
        self._check_devices()
        with tempfile.TemporaryDirectory() as temporary:
            init = []
            if "--init" not in args and "--draw-init" not in args:
                state = self._state_file(Path(temporary))
                init = ["--draw-init"] if state is None else ["--init", state]
            options = ["--device", self._cluster.kind, *init, *args]
            folder = self.folder
            if self._recipe != TrainingRecipe() and not self._recipe.of_folder:
                self._recipe.check_same_as(folder)
                folder = Path(temporary) / self.folder.name
                shutil.copytree(self.folder.resolve(), folder, copy_function=_copy_or_link)
                self._recipe.write(folder)
            torchrun(folder, self.plan.device_count, options, port=self._port, env=self._visible_devices())

    def close(self) -> None:
        """End the worker processes and lose their training state; the program can't train again. Idempotent."""
        if self._processes is not None:
            self._closed = True
            self._processes.close()
            self._processes = None

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # -- how it runs --

    def _inputs(self, batch: Any) -> dict[str, Tensor]:
        inputs = dict(batch) if self._structure is None else flatten_batch(self._structure, batch)
        for name, tensor in inputs.items():
            check_tensors(f"{name!r} of the batch", tensor)
            if tensor.is_meta:
                raise BatchError(
                    f"{name!r} is on meta and has no values",
                    "the model may be on meta, but training needs a batch with values",
                )
            if tensor.dim() == 0 or tensor.shape[0] != self.plan.global_batch:
                raise BatchError(
                    f"{name!r} has shape {tuple(tensor.shape)}, and the plan is for a global batch of {self.plan.global_batch}",
                    "dim 0 is the batch; drop a last, smaller batch, or plan for this size",
                )
        return inputs

    def _call(self, name: str, *args: Any) -> Any:
        """Call ``remote.perform`` on every rank and return rank 0's result, or under ``torchrun`` this rank's."""
        return self._call_all(name, *args)[0]

    def _call_all(self, name: str, *args: Any) -> list[Any]:
        """Call ``remote.perform`` on every rank and return the results by rank, or under ``torchrun`` only this rank's."""
        if self._failure is not None:
            raise LaunchError(
                f"a rank failed before, and its training state is gone: {self._failure.message}",
                "compile the program again",
            )
        if self._closed:
            raise UsageError(
                "the program is closed, and the state of its training is gone",
                "save() before close() or the end of a with block; a program that is compiled or opened again can load() the checkpoint",
            )
        if _is_rank():
            return [self._call_on_this_rank(name, *args)]
        try:
            if self._processes is None:
                self._check_devices()
                self._check_before_start()
                self._processes = Processes(self.plan.device_count, port=self._port, env=self._visible_devices())
                self._open_remotely(self._processes)
            return self._processes.call("autopar.run.remote:call", name, *args)
        except LaunchError as error:
            if self._processes is not None and self._processes.started_here:
                self._failure = error
            raise

    def _check_before_start(self) -> None:
        """Raise ``UsageError``, before a process starts, if the plan's NVMe folder or the recipe (``TrainingRecipe.check``) is unusable."""
        if any(layer.strategy.options.on_nvme for layer in self.plan.layers):
            try:
                nvme_folder(self.plan.nvme_path)
            except StartError as error:
                raise UsageError(error.message, error.hint) from error
        self._recipe.check(self.folder)

    def _open_remotely(self, processes: Processes) -> None:
        folder = str(self.folder.resolve())
        with tempfile.TemporaryDirectory() as temporary:
            state = self._state_file(Path(temporary))
            options = {**self._recipe.options, **self._recipe.import_paths(), "state": state}
            processes.call("autopar.run.remote:open_program", folder, options, self._cluster.kind, self._timeout_s)

    def _call_on_this_rank(self, name: str, *args: Any) -> Any:
        count = int(os.environ["WORLD_SIZE"])
        if count != self.plan.device_count:
            raise LaunchError(
                f"the program was planned for {self.plan.device_count} devices and torchrun started {count} processes",
                f"start it with --nproc-per-node {self.plan.device_count}, or plan for {count} devices",
            )
        if self._trainer is None:
            state = self._initial_file() if self._state is None else self._state
            makers = {"optimizer": self._recipe.optimizer, "scheduler": self._recipe.scheduler}
            options = {**self._recipe.options, **makers, "state": state}
            self._trainer = remote.open_trainer(
                str(self.folder), options, device=self._cluster.kind, timeout_s=self._timeout_s
            )
        with torch.inference_mode(False), torch.enable_grad():  # the caller may have set other modes
            return remote.perform(self._trainer, name, *args)

    def _check_state(self, state: Mapping[str, Tensor]) -> None:
        if wrong := wrong_state(self._records, state):
            raise UsageError(
                f"the state dict does not match the compiled model: {wrong}",
                "give model.state_dict() of the compiled model",
            )

    def _note_outside_program(self, given: Mapping[str, Tensor] | Path) -> None:
        """Remember the values of the tensors that are not in the program, from a state dict or from safetensors."""
        names = names_outside_program(self._records)
        if not isinstance(given, Path):
            self._outside_program |= {name: given[name] for name in names & given.keys()}
            return
        try:
            tensors = mapped(given)
        except (ValueError, OSError) as error:
            raise UsageError(
                f"{given} cannot be read: {error}", "compile the model again, or copy the whole folder"
            ) from error
        if wrong := wrong_state(self._records, tensors):
            raise UsageError(
                f"{given} has no weights of the model that was compiled: {wrong}", "compile the model again"
            )
        self._outside_program |= {name: tensors[name].clone() for name in names & tensors.keys()}

    def _state_file(self, folder: Path) -> str | None:
        """Return the path of the initial values, written to ``folder`` if necessary; ``None`` if they are drawn."""
        if self._state is None:
            return self._initial_file()
        write_file(folder / INITIAL, self._state)
        return str((folder / INITIAL).resolve())

    def _initial_file(self) -> str | None:
        """Return the path of the folder's initial values; ``None`` if they are drawn."""
        if self._initial is None and not self._recipe.draw_init:
            raise UsageError(
                f"there are no values to start from: {self.folder} has no {INITIAL}, and the model was on meta",
                "give state=, a state dict of the model (or compile it on the CPU), or draw_init=True to draw values",
            )
        return None if self._initial is None else str(self._initial.resolve())

    def _check_devices(self) -> None:
        """Raise ``LaunchError`` if this machine doesn't have the planned devices."""
        cluster, count = self._cluster, self.plan.device_count
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        if cluster.kind == "cpu" or cluster.local and len(names) >= count:
            return
        kind = cluster.gpu.name.split("-")[0].upper()
        if len(names) >= count and all(kind in name.upper() for name in names):
            return  # the description of the planned devices matches this machine's GPUs
        has = f"{len(names)} GPUs ({', '.join(sorted(set(names)))})" if names else "no GPU"
        raise LaunchError(
            f"the program was planned for {self.plan.devices} ({count} devices), which are not here: this machine has {has}",
            "emit the folder and start its train.py there with torchrun, or plan for devices=4 to try it on local processes",
        )

    def _visible_devices(self) -> dict[str, str]:
        """Return the environment variables that map local rank ``i`` to the ``i``-th device that the user named."""
        indices = [name.partition(":")[2] for name in self._cluster.devices]
        chosen = self._cluster.kind == "cuda" and indices and all(indices)
        return {"CUDA_VISIBLE_DEVICES": ",".join(indices)} if chosen else {}


def _is_rank() -> bool:
    """Return whether ``torchrun`` started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def _copy_or_link(source: str, target: str) -> None:
    """Copy a Python file; symlink any other file, which may be large."""
    (shutil.copy if source.endswith(".py") else os.symlink)(source, target)


def _tensors(state: Mapping[str, Any] | None) -> dict[str, Tensor]:
    """Return the tensors of a state dict without modules' extra state, which no program reads."""
    return {name: tensor for name, tensor in (state or {}).items() if not name.endswith("_extra_state")}
