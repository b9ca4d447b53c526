"""Records the collectives of a program's ranks without communication. Each rank is a fork of one worker that has imported the trainer.

``record`` emits a plan's program, runs some steps of every rank on a recording process group (``autopar.checks.nccl.recorder``) and
returns the traces; ``Recorded.findings`` checks them. At a Python prompt::

    from autopar.verify.recording import Workers, record
    with Workers() as workers:
        recorded = record(subject.graph, plan, subject.state, subject.batch, workers)
    for finding in recorded.findings():
        print(finding)
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.checks.nccl.findings import FAILED, LATE, CollectiveFinding, findings, unaligned
from autopar.checks.nccl.graph import MODES, NcclMode
from autopar.checks.nccl.objects import Objects
from autopar.checks.nccl.recorder import Recorder
from autopar.checks.nccl.records import RankTrace
from autopar.checks.nccl.sizes import sizes_only
from autopar.emit import emit
from autopar.graph import Graph
from autopar.plan import Plan
from autopar.program.importing import resolve
from autopar.program.metrics import device_count
from autopar.run.folder import compile_sources, import_runtime, program_modules
from autopar.run.processes import Processes

LIMIT_S = 300.0
"""Timeout of a recorded rank in seconds; it waits for other ranks only to exchange Python objects and integer tensors."""
SIZES_LIMIT_S = 3600.0
"""Timeout of a rank of a large plan, which takes a minute of processor time."""
PRELOADED = (
    "autopar.program.trainer",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
)
"""Modules that the worker imports before it forks the ranks."""


@dataclass(frozen=True, slots=True)
class RecordedSteps:
    """The steps that the ranks run: ``steps`` of them with ``optimizer`` (``"module:function"``, called with the parameters) and, if
    ``save`` is ``"wait"`` or ``"async"``, a checkpoint after the first step. ``backend`` is that of ``torch.compile``."""

    steps: int = 2
    optimizer: str = "autopar.verify.recording:adamw"
    max_norm: float | None = None
    save: str = ""
    backend: str = "eager"


@dataclass(frozen=True, slots=True)
class Recorded:
    """Traces by rank, and the messages of ranks that failed. In the run ``late`` the results of async collectives are NaN until ``wait``,
    in the run ``at_once`` they are available at once: different values show that a result is read too early."""

    late: Mapping[int, RankTrace]
    at_once: Mapping[int, RankTrace]
    failures: Mapping[int, str] = field(default_factory=dict)

    def findings(self, modes: Sequence[NcclMode] = MODES) -> tuple[CollectiveFinding, ...]:
        failed = tuple(
            CollectiveFinding(LATE if rank in self.at_once else FAILED, f"rank {rank}: {text}", (rank,))
            for rank, text in self.failures.items()
        )
        if failed:  # other findings would be consequences
            return failed
        return findings(self.late, self.at_once, modes)

    def notes(self) -> tuple[str, ...]:
        """Return notes on unaligned messages, which are slow, and on values that couldn't be compared."""
        notes = [str(each) for each in unaligned(self.late)]
        if not all(trace.finite for trace in self.at_once.values()):
            notes.append("values are not finite, so results that are read too early may not show in them")
        return tuple(notes)


class Workers:
    """The worker process that forks the ranks; it starts at the first call."""

    def __init__(self) -> None:
        self._processes: Processes | None = None

    def call(self, target: str, *args: Any, timeout_s: float) -> Any:
        if self._processes is None or not self._processes.alive:
            self._processes = Processes(1)
        return self._processes.call(target, *args, timeout_s=timeout_s)[0]

    def close(self) -> None:
        if self._processes is not None:
            self._processes.close()
            self._processes = None

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def record(
    graph: Graph,
    plan: Plan,
    state: Mapping[str, Tensor],
    batch: Mapping[str, Tensor],
    workers: Workers,
    recipe: RecordedSteps | None = None,
    change: Callable[[Path], None] | None = None,
) -> Recorded:
    """Record every rank of the plan's program; ``change`` may edit the emitted folder first.

    Raises ``UsageError`` if the plan is invalid for the model.
    """
    with tempfile.TemporaryDirectory(prefix="autopar-record-") as name:
        folder = Path(name)
        emit(graph, dataclasses.replace(plan, nvme_path=name), folder / "program")
        if change is not None:
            change(folder / "program")
        torch.save(dict(state), folder / "initial.pt")
        return record_folder(folder / "program", folder / "initial.pt", batch, plan.device_count, workers, recipe)


def record_folder(
    program: Path,
    state: Path,
    batch: Mapping[str, Tensor],
    world: int,
    workers: Workers,
    recipe: RecordedSteps | None = None,
) -> Recorded:
    """Record all ``world`` ranks of an emitted folder, starting from ``state`` (a ``torch.save`` of a state dict)."""
    with tempfile.TemporaryDirectory(prefix="autopar-traces-") as name:
        args = (str(program), str(state), dict(batch), world, name, asdict(recipe or RecordedSteps()))
        failures = workers.call("autopar.verify.recording:record_ranks", *args, timeout_s=2 * LIMIT_S + 60)
        return _read(Path(name), world, failures)


def record_call(target: str, world: int, workers: Workers) -> Recorded:
    """Record a user's ``"module:function"``, called on each of ``world`` ranks without arguments."""
    with tempfile.TemporaryDirectory(prefix="autopar-traces-") as name:
        failures = workers.call("autopar.verify.recording:record_calls", target, world, name, timeout_s=LIMIT_S)
        return _read(Path(name), world, failures)


def _read(folder: Path, world: int, failures: Mapping[int, str]) -> Recorded:
    late, at_once = (_traces(folder, timing, range(world)) for timing in ("late", "at once"))
    return Recorded(late, at_once, failures)


def _traces(folder: Path, timing: str, ranks: Iterable[int]) -> dict[int, RankTrace]:
    files = {rank: _trace_file(folder, timing, rank) for rank in ranks}
    return {rank: RankTrace.read(file) for rank, file in files.items() if file.exists()}


def record_sizes(
    program: Path, shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]], ranks: Sequence[int], workers: Workers
) -> Recorded:
    """Record some ranks of an emitted folder at their real sizes, without values; ``shapes`` are those of the batch's inputs."""
    with tempfile.TemporaryDirectory(prefix="autopar-traces-") as name:
        inputs = {key: (list(shape), str(dtype).removeprefix("torch.")) for key, (shape, dtype) in shapes.items()}
        args, limit_s = (str(program), inputs, list(ranks), name), SIZES_LIMIT_S * (1 + len(ranks))
        failures = workers.call("autopar.verify.recording:record_ranks_sizes", *args, timeout_s=limit_s)
        return Recorded(_traces(Path(name), "sizes", ranks), {}, failures)


# -- in the worker -----------------------------------------------------------------------------------------------------


def adamw(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def record_ranks(
    program: str, state: str, batch: dict[str, Tensor], world: int, out: str, recipe: dict[str, Any]
) -> dict[int, str]:
    """Record all ranks, with late and then with immediate results; return the messages of ranks that failed."""
    _preload()
    compile_sources(program)
    return _record_both_timings(
        world,
        out,
        lambda rank, timing, shared: functools.partial(
            _record_rank, Path(program), state, batch, rank, world, timing, shared, Path(out), RecordedSteps(**recipe)
        ),
    )


def record_calls(target: str, world: int, out: str) -> dict[int, str]:
    """Record a function on all ranks, with late and then with immediate results; return the messages of ranks that failed."""
    _preload()
    function = resolve(target)
    return _record_both_timings(
        world,
        out,
        lambda rank, timing, shared: functools.partial(_record_call, function, rank, world, timing, shared, Path(out)),
    )


def _preload() -> None:
    torch.set_num_threads(1)
    for module in PRELOADED:
        importlib.import_module(module)


def _record_both_timings(world: int, out: str, task: Callable[[int, str, Path], Callable[[], None]]) -> dict[int, str]:
    """Run all ranks concurrently, with late and then with immediate results; ``task`` returns what a rank runs."""
    failures: dict[int, str] = {}
    for timing in ("late", "at once"):
        with tempfile.TemporaryDirectory(prefix="autopar-objects-") as shared:
            tasks = {rank: task(rank, timing, Path(shared)) for rank in range(world)}
            failed = in_forks(tasks, Path(out), LIMIT_S)
        arrive = "arrive late" if timing == "late" else "are there at once"
        failures = {rank: f"{text}, if results {arrive}" for rank, text in failed.items()} | failures
    return failures


def _record_call(function: Callable[[], Any], rank: int, world: int, timing: str, shared: Path, out: Path) -> None:
    recorder = Recorder(rank, world, late=timing == "late", objects=Objects(shared))
    recorder.start()
    function()
    recorder.trace().write(_trace_file(out, timing, rank))


def in_forks(
    tasks: Mapping[int, Callable[[], None]], logs: Path, limit_s: float, at_a_time: int = 64
) -> dict[int, str]:
    """Run every task in a fork of this process; return why tasks failed, by number: the last line of the log, or the time limit."""
    failed: dict[int, str] = {}
    left, running = list(tasks), dict[int, tuple[int, float]]()
    while left or running:
        while left and len(running) < at_a_time:
            number = left.pop(0)
            running[_fork(tasks[number], logs / f"{number}.log")] = number, time.monotonic() + limit_s
        time.sleep(0.003)
        for process, (number, end) in list(running.items()):
            done, status = os.waitpid(process, os.WNOHANG)
            if not done and time.monotonic() < end:
                continue
            del running[process]
            if not done:
                os.kill(process, 9)
                os.waitpid(process, 0)
                failed[number] = f"did not end within {limit_s:g} s"
            elif os.waitstatus_to_exitcode(status):
                lines = (logs / f"{number}.log").read_text(errors="replace").strip().splitlines()
                failed[number] = lines[-1] if lines else f"ended with status {os.waitstatus_to_exitcode(status)}"
    return failed


def _fork(task: Callable[[], None], log: Path) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        # Python warns of forking with threads; this process's other thread only waits for calls
        warnings.simplefilter("ignore", DeprecationWarning)
        process = os.fork()
    if process:
        return process
    code = 1
    try:
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        task()
        code = 0
    except BaseException as error:  # noqa: BLE001  the parent reads the last line
        traceback.print_exc()
        print(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}", file=sys.stderr)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _trace_file(folder: Path, timing: str, rank: int) -> Path:
    return folder / f"{timing} {rank}.json"


def _record_rank(
    program: Path,
    state: str,
    batch: dict[str, Tensor],
    rank: int,
    world: int,
    timing: str,
    shared: Path,
    out: Path,
    recipe: RecordedSteps,
) -> None:
    """Run some steps as one rank and write its trace into ``out``."""
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    torch.compile = functools.partial(torch.compile, backend=recipe.backend)
    recorder = Recorder(rank, world, late=timing == "late", objects=Objects(shared))
    recorder.start()
    with program_modules(program):
        runtime = import_runtime(program)
        loaded = runtime.load(program)
        _follow_turns(program, recorder)
        joined = runtime.start(loaded, device="cpu", nvme=str(shared))  # this machine lacks the plan's drives
        trainer = runtime.Trainer(
            loaded, joined, state=state, optimizer=resolve(recipe.optimizer), max_norm=recipe.max_norm
        )
        losses = []
        for step in range(recipe.steps):
            losses.append(trainer.step(batch))
            if recipe.save and step == 0:
                trainer.save(shared / "checkpoints", wait=recipe.save == "wait")
        trainer.finish_saving()
        trainer.finish_update()
        values, finite = _digests(trainer, losses)
    recorder.trace(values, finite).write(_trace_file(out, timing, rank))


def record_ranks_sizes(
    program: str, shapes: dict[str, tuple[list[int], str]], ranks: list[int], out: str
) -> dict[int, str]:
    """Record ranks without values, one per core at a time; return the messages of ranks that failed."""
    _preload()
    compile_sources(program)
    tasks = {rank: functools.partial(_record_sizes, Path(program), shapes, rank, Path(out)) for rank in ranks}
    return in_forks(tasks, Path(out), SIZES_LIMIT_S, os.cpu_count() or 1)


def _record_sizes(program: Path, shapes: dict[str, tuple[list[int], str]], rank: int, out: Path) -> None:
    warnings.filterwarnings("ignore")
    torch.compile = _uncompiled  # type: ignore[assignment]
    with program_modules(program):
        runtime = import_runtime(program)
        loaded = runtime.load(program)
        recorder = Recorder(rank, device_count(loaded.plan), late=False)
        recorder.start()
        _follow_turns(program, recorder)
        joined = runtime.start(loaded, device="cpu", nvme=str(out))
        _replace_values(program)
        with sizes_only(recorder):
            trainer = runtime.Trainer(
                loaded, joined, values=lambda layout: torch.empty(layout.original_shape, dtype=layout.dtype)
            )
            batch = {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, (shape, dtype) in shapes.items()}
            for _ in range(RecordedSteps().steps):
                trainer.step(batch)
            trainer.finish_update()
    recorder.trace().write(_trace_file(out, "sizes", rank))


def _follow_turns(program: Path, recorder: Recorder) -> None:
    """Let the recorder follow the program's threads that take turns."""
    for module in _runtime_modules(program):
        if (turns := getattr(module, "Turns", None)) is not None:
            recorder.follow(turns)


def _runtime_modules(program: Path) -> list[Any]:
    """Return the modules of the program's runtime that are imported."""
    return [sys.modules.get(f"runtime.{source.stem}") for source in program.glob("runtime/*.py")]


def _uncompiled(function: Any = None, **_: Any) -> Any:
    return function if function is not None else lambda f: f


def _replace_values(program: Path) -> None:
    """Replace the program's functions that read values: all digests become 0, and all experts get equally many rows."""

    def digest(tensor: Tensor, limit: int | None = None) -> int:
        return 0

    for module in _runtime_modules(program):
        if callable(getattr(module, "digest", None)):
            module.digest = digest
    experts: Any = sys.modules.get("runtime.kernels_experts")
    if experts is not None:
        experts._local_expert_ids = _evenly(experts._local_expert_ids)


def _evenly(original: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Wrap ``_local_expert_ids`` of ``kernels_experts`` so that it returns the rows per expert of a balanced router."""

    def evenly(ids: Tensor, count: int, *axes: Any) -> tuple[Tensor, Tensor]:
        ids, counts = original(ids, count, *axes)
        base, rest = divmod(len(ids), count)
        return ids, torch.tensor([base + (index < rest) for index in range(len(counts))])

    return evenly


def _digests(trainer: Any, losses: Iterable[float]) -> tuple[dict[str, str], bool]:
    """Return digests of losses and parameters, and whether all values are finite."""
    tensors = {f"the loss of step {step + 1}": torch.tensor(loss).double() for step, loss in enumerate(losses)}
    for stage in trainer.stages.values():
        for name, parameter in stage.named_parameters():
            value = parameter.detach()
            tensors[name] = value.to_local() if isinstance(value, DTensor) else value
    finite = all(bool(value.isfinite().all()) for value in tensors.values() if value.is_floating_point())
    return {name: _digest(value) for name, value in tensors.items()}, finite


def _digest(value: Tensor) -> str:
    data = value.contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()[:16]
