"""``Program``: an emitted folder, with methods that train it, read its state and launch it."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from autopar import devices
from autopar.capture.batch import BatchStructure, flatten_batch
from autopar.checks.types import check_program
from autopar.devices import Cluster
from autopar.errors import BatchError, CheckpointError, LaunchError, UsageError
from autopar.graph import Graph
from autopar.keywords import Training
from autopar.plan import Plan
from autopar.precision import FLOAT16
from autopar.program.optimizers import RefusedOptimizerError, checked
from autopar.program.state import INITIAL, has_values, initial, write_initial, wrong_state
from autopar.program.world import load
from autopar.run import remote
from autopar.run.folder import program_modules
from autopar.run.processes import Processes
from autopar.run.worker import is_consequence, resolve

Optimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
_DEFAULT = Training()


class Program:
    """A plan and the folder of its program.

    Under ``torchrun`` each process drives its own rank. Elsewhere the first call of ``step``, ``train`` and
    so on starts local worker processes; ``close`` (or the end of this process) ends them. The code that runs is the folder's: edit the
    folder and open it again.

    Args:
        plan: the plan of the program.
        folder: the emitted program.
        graph: the captured model, whose ``structure`` says how a user's batch maps to inputs. Without a graph, batches are dicts by
            the inputs' names.
        cluster: the devices that were planned for; if left out, those that ``plan.devices`` describes.
        state: the state dict to start from; if left out, or on meta, the folder's ``initial.pt``.
        draw_init: where neither exists, draw values from ``seed`` (``autopar.program.parameters.seeded``).
        optimizer: makes an optimizer of the list of the model's parameters, or of pairs with their names where its argument is called
            ``named_parameters``; AdamW with ``lr`` if left out. It is called with stand-ins of the same shapes and without values. An
            optimizer that looks at whole tensors is refused where ranks have shards (``autopar.program.optimizers``). Worker processes
            must be able to import it: a function at the top of a module, or its name ``"module:function"``.
        max_norm: the largest 2-norm of the gradients.
        port: the port on 127.0.0.1 where local processes meet; 0 for any free port.
        timeout_s: how long a collective may wait.
        type_check: whether the type checker goes over the folder first (``autopar.checks.types``).

    Raises:
        ProgramError: the folder has no program, or an ill-typed one: an edit removed a collective, or added one.
    """

    def __init__(
        self,
        plan: Plan,
        folder: str | os.PathLike[str],
        graph: Graph | None = None,
        *,
        cluster: Cluster | None = None,
        state: Mapping[str, Tensor] | None = None,
        optimizer: Optimizer | str | None = _DEFAULT.optimizer,
        lr: float = _DEFAULT.lr,
        seed: int = _DEFAULT.seed,
        max_norm: float | None = _DEFAULT.max_norm,
        port: int = _DEFAULT.port,
        timeout_s: float = 600,
        type_check: bool = True,
        draw_init: bool = _DEFAULT.draw_init,
    ) -> None:
        if not 0 <= lr < math.inf:
            raise UsageError(f"lr is {lr}, and a learning rate is a number from 0 up", "3e-4 is the default")
        if max_norm is not None and not max_norm > 0:
            raise UsageError(
                f"max_norm is {max_norm}, and gradients are scaled to a norm above 0", "None leaves them alone"
            )
        self.plan, self.folder = plan, Path(folder)
        if type_check and os.environ.get("LOCAL_RANK", "0") == "0":  # one process of a machine speaks for all
            check_program(self.folder)
        structure = None if graph is None else graph.structure
        assert structure is None or isinstance(structure, BatchStructure)
        self._structure = structure
        self._cluster = cluster or devices.parse(plan.devices)
        self._initial = self.folder / INITIAL if (self.folder / INITIAL).is_file() else None
        self._state = _tensors(state) if has_values(state) else None
        self._given = dict(self._state or initial(self.folder) or {})
        self._draw_init = draw_init
        if self._given:
            self._check_state(self._given)
        self._optimizer = optimizer
        self._options = {"lr": lr, "seed": seed, "max_norm": max_norm}
        self._port, self._timeout_s = port, timeout_s
        self._trainer: Any = None
        self._processes: Processes | None = None
        self._failure: LaunchError | None = None

    # -- training --

    def step(self, batch: Any) -> float:
        """Train one step on one global batch; the loss before the update."""
        return float(self._call("step", self._inputs(batch)))

    def trace(self, batch: Any, path: str | os.PathLike[str]) -> float:
        """``step(batch)``, and a file with what every rank did, in Chrome's trace-event format, which https://ui.perfetto.dev opens.

        ``autopar trace PLAN --measured FILE`` puts the predicted step above it. Profiling makes the step slower.
        """
        return float(self._call("trace", self._inputs(batch), str(Path(path).resolve())))

    def train(
        self, batches: Iterable[Any], steps: int | None = None, on_step: Callable[[int, float], None] | None = None
    ) -> list[float]:
        """Train ``steps`` steps (default: one for each batch), and start again when the batches end; the losses.

        ``on_step`` is called with the number of the step (from 0) and its loss.
        """
        losses: list[float] = []
        while steps is None or len(losses) < steps:
            before = len(losses)
            for batch in batches:
                if steps is not None and len(losses) >= steps:
                    break
                losses.append(self.step(batch))
                if on_step is not None:
                    on_step(len(losses) - 1, losses[-1])
            if steps is None:
                break
            if len(losses) == before:
                raise BatchError(
                    f"the batches ended after {len(losses)} of {steps} steps", "give a list, or fewer steps"
                )
        return losses

    def gradients(self, batch: Any) -> tuple[float, dict[str, Tensor]]:
        """The loss of one global batch and its gradients by original name, whole; nothing is updated.

        Under ``torchrun`` only rank 0 has the gradients.
        """
        loss, grads = self._call("gradients", self._inputs(batch))
        return loss, grads

    def state_dict(self) -> dict[str, Tensor]:
        """The parameters and buffers under the names of the user's model, whole, on the CPU; under ``torchrun`` on rank 0 only.

        Tensors that the forward pass neither uses nor writes have the values that the program was given.
        """
        trained: dict[str, Tensor] = self._call("state_dict")
        if not trained:
            return trained
        rest = {name: tensor for name, tensor in self._given.items() if name not in trained}
        return {name: tensor.detach().cpu().clone() for name, tensor in rest.items()} | trained

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Set the parameters and buffers from a state dict of the user's model.

        Raises ``UsageError``, before anything starts, with the name of a tensor that is missing, unknown, or of another shape.
        """
        self._check_state(state)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "state.pt"
            torch.save(_tensors(state), path)
            self._call("load_state_dict", str(path))
        self._given = {name: state.get(name, tensor) for name, tensor in self._given.items()}

    def scaler_state_dict(self) -> dict[str, float | int]:
        """The state of the dynamic loss scale of a program in float16, as ``torch.amp.GradScaler.state_dict`` has it; empty in others."""
        state: dict[str, float | int] = self._call("scaler_state_dict")
        return state

    def load_scaler_state_dict(self, state: Mapping[str, float | int]) -> None:
        """Set the state of the loss scale from ``scaler_state_dict``, to go on with a training that was saved.

        Raises ``UsageError`` in programs without a loss scale.
        """
        if self.plan.precision != FLOAT16:
            raise UsageError(
                f"a program in {self.plan.precision} does not scale its loss",
                "only programs in float16 have this state",
            )
        self._call("load_scaler_state_dict", dict(state))

    def save(self, folder: str | os.PathLike[str], *, keep: int | None = None) -> Path:
        """Write a checkpoint of the training, ``folder/step-N`` after ``N`` steps, and return its path.

        A program of the same model under any other plan can load it. Each process writes its own parts of parameters and optimizer state;
        all machines share ``folder``. Of the checkpoints up to this one, the last ``keep`` stay (``None``: all).

        Raises ``CheckpointError``, say where the disk is full; the training can go on.
        """
        return Path(self._with_files("save", folder, keep=keep))

    def load(self, folder: str | os.PathLike[str]) -> int:
        """Go on from a checkpoint: ``folder`` itself, or the newest whole one in it. Returns its number of steps.

        Parameters, buffers, optimizer state, the options of the optimizer's groups and the seed are those of the checkpoint.

        Raises ``CheckpointError`` where it is damaged, or of another model or optimizer.
        """
        return int(self._with_files("load", folder))

    def save_weights(self, folder: str | os.PathLike[str]) -> None:
        """Write the parameters and buffers as safetensors files, in the model's dtypes, into a new folder that all machines share.

        A large model is divided into files of up to 5 GB with an index, as transformers does; each process writes its own parts. Raises
        ``CheckpointError``.
        """
        self._with_files("save_weights", folder)

    def load_weights(self, path: str | os.PathLike[str]) -> None:
        """Set the parameters and buffers from a safetensors file, or a folder of them; each process reads its own parts.

        Raises ``CheckpointError`` with the names that are missing, unknown or of other shapes.
        """
        self._with_files("load_weights", path)

    def _with_files(self, name: str, path: str | os.PathLike[str], **options: Any) -> Any:
        answer: dict[str, Any] = self._call(name, str(Path(path).resolve()), options)
        if "error" in answer:
            raise CheckpointError(answer["error"], answer["hint"])
        return answer["result"]

    # -- the folder --

    def emit(self, folder: str | os.PathLike[str]) -> Path:
        """Copy the program to ``folder`` (made if missing) and return its path. The copy starts from the values that this
        ``Program`` was given."""
        there = Path(folder)
        if there.resolve() != self.folder.resolve():
            shutil.copytree(self.folder, there, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
        if self._state is not None:
            write_initial(there, self._state)
        return there

    def launch(self, *args: str) -> None:
        """Run the folder's ``train.py`` on this machine under ``torchrun``, its output going where ours goes.

        Raises ``LaunchError`` with the first failing rank's error.
        """
        self._check_here()
        meet = ["--standalone"]
        if self._port:
            _check_port(self._port)
            meet = ["--master-addr", "127.0.0.1", "--master-port", str(self._port)]
        with tempfile.TemporaryDirectory() as temporary:
            init = []
            if "--init" not in args and "--draw-init" not in args:
                state = self._state_file(Path(temporary))
                init = ["--draw-init"] if state is None else ["--init", state]
            command = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--nproc-per-node",
                str(self.plan.device_count),
                *meet,
            ]
            command += [str(self.folder / "train.py"), "--device", self._cluster.kind, *init, *args]
            threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
            # A folder with a user's ops or opaque modules imports what defines them: from wherever this process can.
            own = bool(json.loads((self.folder / "plan.json").read_text()).get("imports"))
            path = {"PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)} if own else {}
            status, error = _stream(command, {**os.environ, **threads, **path, **self._visible()})
        if status != 0:
            raise LaunchError(
                f"train.py ended with status {status}: {error}", "the output above has every rank's traceback"
            )

    def close(self) -> None:
        """End the worker processes; the state of the training is lost with them."""
        if self._processes is not None:
            self._processes.close()
            self._processes = None

    def __enter__(self) -> Program:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # -- how it runs --

    def _inputs(self, batch: Any) -> dict[str, Tensor]:
        inputs = dict(batch) if self._structure is None else flatten_batch(self._structure, batch)
        for name, tensor in inputs.items():
            if tensor.is_meta:
                raise BatchError(
                    f"{name!r} is on meta and has no values", "a model on meta will do, a batch on meta only plans"
                )
            if tensor.dim() == 0 or tensor.shape[0] != self.plan.global_batch:
                raise BatchError(
                    f"{name!r} has shape {tuple(tensor.shape)}, and the plan is for a global batch of {self.plan.global_batch}",
                    "dim 0 is the batch; drop a last, smaller batch, or plan for this size",
                )
        return inputs

    def _call(self, name: str, *args: Any) -> Any:
        """``remote.perform`` on every rank; rank 0's result, or under ``torchrun`` this rank's."""
        if self._failure is not None:
            raise LaunchError(
                f"a rank failed before, and its training state is gone: {self._failure.message}",
                "compile the program again",
            )
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            return self._call_here(name, *args)
        try:
            if self._processes is None:
                self._check_here()
                self._check_optimizer()
                self._processes = Processes(self.plan.device_count, port=self._port, env=self._visible())
                self._open_remotely(self._processes)
            return self._processes.call("autopar.run.remote:call", name, *args)[0]
        except LaunchError as error:
            if self._processes is not None:
                self._failure = error
            raise

    def _check_optimizer(self) -> None:
        """Raise ``UsageError`` where the optimizer would not train as on one device, before a process is started."""
        if self._optimizer is None:
            return
        name = _importable(self._optimizer)
        try:
            make = resolve(self._optimizer) if isinstance(self._optimizer, str) else self._optimizer
        except (ImportError, AttributeError, AssertionError) as error:
            raise UsageError(f"there is no optimizer {name}: {error}", 'name it "module:function"') from error
        with program_modules(self.folder):
            program = load(self.folder)
            try:
                checked(make, program)
            except RefusedOptimizerError as error:
                raise UsageError(error.message, error.hint) from error
            except Exception as error:
                raise UsageError(
                    f"the optimizer {name} raised {type(error).__name__}: {error}",
                    "it is called with the model's parameters, on meta: their names, shapes and order, without values",
                ) from error

    def _open_remotely(self, processes: Processes) -> None:
        state = self._state_file(processes.folder)
        options = {**self._options, "optimizer": _importable(self._optimizer), "state": state}
        folder = str(self.folder.resolve())
        processes.call("autopar.run.remote:open_program", folder, options, self._cluster.kind, self._timeout_s)

    def _call_here(self, name: str, *args: Any) -> Any:
        count = int(os.environ["WORLD_SIZE"])
        if count != self.plan.device_count:
            raise LaunchError(
                f"the program was planned for {self.plan.device_count} devices and torchrun started {count} processes",
                f"start it with --nproc-per-node {self.plan.device_count}, or plan for {count} devices",
            )
        if self._trainer is None:
            with tempfile.TemporaryDirectory() as temporary:
                state = self._state_file(Path(temporary))
                options = {**self._options, "optimizer": self._optimizer, "state": state}
                self._trainer = remote.open_trainer(
                    str(self.folder), options, device=self._cluster.kind, timeout_s=self._timeout_s
                )
        return remote.perform(self._trainer, name, *args)

    def _check_state(self, state: Mapping[str, Tensor]) -> None:
        records = json.loads((self.folder / "layouts.json").read_text())
        if wrong := wrong_state(records, state):
            raise UsageError(
                f"the state dict is not one of the model that was compiled: {wrong}",
                "give model.state_dict() of the model that was compiled",
            )

    def _state_file(self, folder: Path) -> str | None:
        """The file of the values to start from, written to ``folder`` if necessary; ``None`` where values are drawn."""
        if self._state is not None:
            torch.save(self._state, folder / "state.pt")
            return str((folder / "state.pt").resolve())
        if self._initial is None and not self._draw_init:
            raise UsageError(
                f"there are no values to start from: {self.folder} has no {INITIAL}, and the model was on meta",
                "give state=, a state dict of the model (or compile it on the CPU), or draw_init=True to draw values",
            )
        return None if self._initial is None else str(self._initial.resolve())

    def _check_here(self) -> None:
        """Raise ``LaunchError`` where the planned devices are not this machine's."""
        cluster, count = self._cluster, self.plan.device_count
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        if cluster.kind == "cpu" or cluster.local and len(names) >= count:
            return
        kind = cluster.gpu.name.split("-")[0].upper()
        if len(names) >= count and all(kind in name.upper() for name in names):
            return  # a description of other devices that fits the ones here
        has = f"{len(names)} GPUs ({', '.join(sorted(set(names)))})" if names else "no GPU"
        raise LaunchError(
            f"the program was planned for {self.plan.devices} ({count} devices), which are not here: this machine has {has}",
            "emit the folder and start its train.py there with torchrun, or plan for devices=4 to try it on local processes",
        )

    def _visible(self) -> dict[str, str]:
        """The environment in which local rank ``i`` finds the ``i``-th device that the user named."""
        indices = [name.partition(":")[2] for name in self._cluster.devices]
        chosen = self._cluster.kind == "cuda" and indices and all(indices)
        return {"CUDA_VISIBLE_DEVICES": ",".join(indices)} if chosen else {}


def _tensors(state: Mapping[str, Any] | None) -> dict[str, Tensor]:
    """The tensors of a state dict, without the extra state of modules, which no program reads."""
    return {name: tensor for name, tensor in (state or {}).items() if not name.endswith("_extra_state")}


def _importable(optimizer: Optimizer | str | None) -> str | None:
    """``"module:function"``, as another process finds the function."""
    if optimizer is None or isinstance(optimizer, str):
        return optimizer
    module, name = getattr(optimizer, "__module__", "__main__"), getattr(optimizer, "__qualname__", "<lambda>")
    if module == "__main__" or "<" in name:
        raise UsageError(
            f"worker processes cannot import the optimizer {module}.{name}",
            "make it a function at the top of a module (not of the script itself), or start the script with torchrun",
        )
    return f"{module}:{name}"


def _check_port(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise LaunchError(
                f"port {port} on 127.0.0.1 is already taken", "choose another port, or 0 for any that is free"
            ) from error


def _stream(command: Sequence[str], env: Mapping[str, str]) -> tuple[int, str]:
    """Run a command and pass its standard error on; the exit status, and the line that names the first cause."""
    errors: list[str] = []
    with subprocess.Popen(command, env=dict(env), stderr=subprocess.PIPE, text=True, errors="replace") as process:
        try:
            assert process.stderr is not None
            for line in process.stderr:
                sys.stderr.write(line)
                found = re.match(r"(?:\[rank\d+\]: ?)?((?:\w+\.)*\w*(?:Error|Exception|Exit)\b.*)", line)
                if found:
                    errors.append(found[1].strip())
            status = process.wait()
        finally:
            process.kill()
    causes = [line for line in errors if not is_consequence(line)] or errors
    return status, causes[0] if causes else "no error was printed"
