"""``autopar run`` plans, starts processes, and trains on a data set or the model's example batch, with checkpoints; with ``--elastic`` it
becomes the agent of its node."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from autopar.cli.commands import batch_with_values, init_of, make_plan
from autopar.cli.console import Messages
from autopar.cli.elastic import become_node
from autopar.cli.options import PlanRequest
from autopar.compile import start_program
from autopar.devices import parse
from autopar.errors import BatchError, LaunchError, UsageError
from autopar.keywords import Request, Training
from autopar.program.checkpoint_files import PARENT, CheckpointError, FolderLock, has_any, lock_folder
from autopar.program.watch import heeded
from autopar.run.data import named_source
from autopar.run.elastic import Nodes
from autopar.run.folder import folder_for_program
from autopar.run.processes import check_count
from autopar.run.ranks import is_one_of_several

if TYPE_CHECKING:
    from autopar.graph import Graph
    from autopar.run import Program
    from autopar.run.data import Data


def run_command(
    request: PlanRequest,
    output: str | None,
    elastic: str | None,
    meet: str,
    restarts: int,
    as_json: bool,
    **training: Any,
) -> None:
    """Train on this machine, or with ``--elastic`` become the agent of this node; ``training`` has the options of training by name."""
    data = DataOptions(**{field.name: training.pop(field.name) for field in dataclasses.fields(DataOptions)})
    logs = Logs(*(training[field.name] for field in dataclasses.fields(Logs)))
    if elastic is not None:
        data.refuse_elastic()
        del training["resume"]  # every restart resumes
        become_node(Nodes.read(elastic, meet, restarts), request, output, training)
    steps, lr, seed = (training.pop(name) for name in ("steps", "lr", "seed"))
    checkpoints = Checkpoints(*(training[name] for name in ("checkpoint", "every", "keep", "resume")))
    _train(request, Training(seed=seed, lr=lr), steps, output, checkpoints, data, logs, as_json)


def _train(
    request: PlanRequest,
    training: Training,
    steps: int,
    output: str | None,
    checkpoints: Checkpoints,
    data: DataOptions,
    logs: Logs,
    as_json: bool,
) -> None:
    """Train on the data, or on the model's example batch in every step, and print the loss of each step."""
    _check_devices(request.devices)
    data.check(request.model)
    folder = folder_for_program(output) if output else None
    lock = checkpoints.lock()
    torch.manual_seed(training.seed)
    init = init_of(request)
    workload, cluster, graph, plan = make_plan(request, device="meta" if init else "cpu")
    data.check_evaluation(graph)
    with Messages() as messages:
        program = start_program(
            graph,
            plan,
            cluster,
            workload.model,
            folder,
            training=training,
            request=Request(type_check=request.type_check, init=init),
            progress=messages,
        )
    with program, Stop(checkpoints.folder is not None and not is_one_of_several()) as stop:
        batch = data.training(program, training.seed) or batch_with_values(request, workload)
        held_out = data.held_out(program)
        done = begun = checkpoints.load(program, steps)

        def batches() -> Iterator[Any]:
            while done < steps and not stop.asked:
                yield batch

        def show(what: str, loss: float) -> None:
            key = what.replace(" ", "_")
            line = json.dumps({"step": done, key: loss}) if as_json else f"step {done} {what} {loss:.6f}"
            with contextlib.suppress(OSError) if stop.asked else contextlib.nullcontext():  # the terminal may be gone
                print(line, flush=True)

        def after(_: int, loss: float, record: dict[str, Any]) -> None:
            nonlocal done
            done = record["step"]
            show("loss", loss)
            checkpoints.save(program, done, steps)
            if held_out is not None and not stop.asked and data.evaluates_after(done, steps):
                losses = program.evaluate(held_out)
                show("eval loss", sum(losses) / len(losses))

        try:
            program.train(batches(), max(0, steps - done), after, **logs.of_training())
        except BatchError:
            if not stop.asked:  # otherwise the batches end early
                raise
        if done < steps:
            if done > begun and done % checkpoints.every:
                checkpoints.save(program, done, done)
            message = f"{stop.asked}: training stops after {done} of {steps} steps; --resume continues from there"
            with contextlib.suppress(OSError):
                print(message, file=sys.stderr, flush=True)
    if lock is not None:
        os.environ.pop(PARENT, None)
        lock.close()


def _check_devices(devices: str) -> None:
    """Raise ``LaunchError`` if the devices are not on this machine, before planning, which takes up to a minute."""
    here = parse(devices)
    if not here.local:
        raise LaunchError(
            f"{devices} describes devices that are not on this machine",
            "`autopar emit` writes the program for them; `--devices 4` runs on this machine",
        )
    check_count(here.count)


@dataclasses.dataclass(frozen=True)
class DataOptions:
    """The data sets of the command line: files, ``module:function`` or ``file.py:function``; ``eval_every``: steps between evaluations."""

    dataset: str | None
    shuffle: bool
    eval_data: str | None
    eval_every: int | None

    def __post_init__(self) -> None:
        if self.shuffle and self.dataset is None:
            raise UsageError("--shuffle has nothing to order", "add --dataset DATA")
        if self.eval_every is not None and self.eval_data is None:
            raise UsageError("--eval-every has nothing to evaluate", "add --eval-data DATA")

    def check(self, model: str) -> None:
        """Raise ``UsageError`` if a file or function of the data doesn't exist, before planning. Modules may be in this folder, or beside
        the model's file."""
        for source in (self.dataset, self.eval_data):
            if source is None:
                continue
            file = model.rpartition(":")[0]
            for folder in (os.getcwd(), *([str(Path(file).resolve().parent)] if file.endswith(".py") else [])):
                if folder not in sys.path:
                    sys.path.append(folder)
            named_source(source)

    def refuse_elastic(self) -> None:
        """Raise ``UsageError`` if any data are given: nodes that join train on the example batch."""
        if self.dataset is not None or self.eval_data is not None:
            raise UsageError(
                "--elastic trains on the example batch, not on --dataset",
                "write the program with `autopar emit`, and start its train.py --dataset DATA --checkpoint DIR --resume",
            )

    def check_evaluation(self, graph: Graph) -> None:
        """Raise ``UsageError`` if there are data to evaluate, and programs can't evaluate the model."""
        if self.eval_data is not None and graph.no_evaluation:
            raise UsageError(
                f"--eval-data {self.eval_data}: the program cannot evaluate the model: {graph.no_evaluation}",
                "leave --eval-data out, and evaluate checkpoints with a program of model.eval()",
            )

    def training(self, program: Program, seed: int) -> Data | None:
        """Open the data to train on, if there are any."""
        return None if self.dataset is None else program.loader(self.dataset, shuffle=self.shuffle, seed=seed)

    def held_out(self, program: Program) -> Data | None:
        """Open the data to evaluate, if there are any."""
        return None if self.eval_data is None else program.loader(self.eval_data)

    def evaluates_after(self, step: int, last: int) -> bool:
        """Return whether to evaluate after ``step``: every ``eval_every`` steps, and after ``last``."""
        return step == last or (self.eval_every is not None and step % self.eval_every == 0)


@dataclasses.dataclass(frozen=True)
class Logs:
    """Where the records of steps go: a file of JSON lines, a folder for TensorBoard, and a project of W&B."""

    log_file: str | None
    tensorboard: str | None
    wandb: str | None

    def __post_init__(self) -> None:
        for package in ("tensorboard", "wandb"):
            if getattr(self, package) is not None and importlib.util.find_spec(package) is None:
                raise UsageError(
                    f"--{package} needs the package {package}", f"pip install {package}, or use --log-file FILE"
                )

    def of_training(self) -> dict[str, Any]:
        """Return the arguments of ``Program.train``."""
        return {"log": self.log_file, "tensorboard": self.tensorboard, "wandb": self.wandb}


class Stop:
    """A context in which, if ``enabled``, a termination signal only sets ``asked`` to its name; a second Ctrl-C ends the process."""

    def __init__(self, enabled: bool) -> None:
        self.asked = ""
        self._enabled = enabled
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        if self._enabled:
            self._handlers = {number: signal.signal(number, self._receive) for number in heeded()}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.asked = signal.Signals(number).name
        if number == signal.SIGINT:
            signal.signal(number, self._handlers[number])


@dataclasses.dataclass(frozen=True)
class Checkpoints:
    """Writes checkpoints into ``folder`` if any, every ``every`` steps, keeps the newest ``keep``, and with ``resume`` loads the newest."""

    folder: str | None
    every: int
    keep: int
    resume: bool

    def __post_init__(self) -> None:
        if self.resume and self.folder is None:
            raise UsageError("--resume has no folder to read from", "add --checkpoint DIR")
        if self.folder is not None and not self.resume and has_any(Path(self.folder)):
            raise UsageError(
                f"{self.folder} has checkpoints of another training, which this one would replace",
                "add --resume to continue it, or give another folder",
            )

    def lock(self) -> FolderLock | None:
        """Lock the folder against other training runs until the returned lock is closed.

        Raises ``UsageError`` if the folder can't be created or written to, or if another training run writes there.
        """
        if self.folder is None:
            return None
        try:
            lock = lock_folder(Path(self.folder), 0.0)
        except CheckpointError as error:
            raise UsageError(error.message, error.hint) from error
        os.environ[PARENT] = lock.inherited  # the worker processes write the checkpoints, under this lock
        return lock

    def load(self, program: Program, steps: int) -> int:
        """With ``resume``, load the newest checkpoint, if there is one, and say so. Return the number of steps done so far."""
        if self.folder is None or not self.resume or not has_any(Path(self.folder)):
            return 0
        done = program.load(self.folder)
        if done < steps:
            message = f"continues after step {done}, with the optimizer's options from the checkpoint"
        else:
            message = f"nothing to train: {self.folder} has {done} steps, and --steps {steps} counts them"
        print(message, file=sys.stderr, flush=True)
        return done

    def save(self, program: Program, step: int, last: int) -> None:
        """Write a checkpoint after ``step`` if one is due: every ``every`` steps, and after ``last``."""
        if self.folder is not None and (step % self.every == 0 or step == last):
            program.save(self.folder, keep=self.keep)
