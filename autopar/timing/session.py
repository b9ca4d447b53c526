"""Worker processes with several programs of one training step, which are measured in turns.

All programs start from the same values and train on the same batch. A program that fails is recorded with its error; the workers then start
again, with the other programs.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autopar.compile import emit_program
from autopar.errors import LaunchError, ProgramError
from autopar.graph import Graph
from autopar.memory import available_memory_bytes, machine_memory_bytes
from autopar.plan import Plan
from autopar.run.processes import Placement, Processes
from autopar.summary import memory_bytes

LEARNING_RATE = 1e-4
TIMEOUT_S = 300.0  # of one call of the workers, and of one collective
_RESERVE = 0.1  # of the machine's memory, which the program that is opened next takes
LOSS_TOLERANCE = 2e-3
"""Relative tolerance. Float32 sums in another order differ by about 1e-6, losses of another computation by far more."""


class TimingSession:
    """``count`` worker processes with emitted programs and others, by name.

    All programs get the values ``state`` and the tensors ``batch``. By program, ``rounds`` has the median seconds of the timed steps of
    each measurement, ``losses`` the losses of all steps, and ``peak_bytes`` the latest peak on a GPU. ``errors`` has the errors of programs
    that failed; the error of a ``required`` program is raised. ``remaining``: the programs that are still measured. Emitted programs that
    are predicted to take more than ``room_bytes`` of a device together are not kept open at the same time, nor are programs on CPUs that
    leave this machine less than a tenth of its memory.
    """

    def __init__(
        self,
        state: Mapping[str, Tensor],
        batch: Sequence[Tensor],
        count: int,
        steps: int,
        folder: Path,
        placement: Placement | None = None,
        device: str = "cpu",
        room_bytes: float = float("inf"),
    ) -> None:
        self.count, self.steps, self.folder, self.device = count, steps, folder, device
        self.rounds: dict[str, list[float]] = {}
        self.losses: dict[str, list[float]] = {}
        self.peak_bytes: dict[str, int] = {}
        self.errors: dict[str, LaunchError] = {}
        self.remaining: list[str] = []
        self.required: set[str] = set()
        self.state_file, self.batch_file = folder / "state.pt", folder / "batch.pt"
        torch.save(dict(state), self.state_file)
        torch.save(list(batch), self.batch_file)
        self._placement, self._room_bytes = placement, room_bytes
        self._openers: dict[str, tuple[Any, ...]] = {}
        self._bytes: dict[str, float] = {}
        self._open: list[str] = []  # the programs in the workers' memory, the latest used last
        self._processes = self._start()

    def __enter__(self) -> TimingSession:
        return self

    def __exit__(self, *_: object) -> None:
        self._processes.close()

    def open_program(
        self,
        name: str,
        graph: Graph,
        plan: Plan,
        change: Callable[[Path], None] = lambda folder: None,
        *,
        required: bool = True,
    ) -> None:
        """Emit the program of ``plan`` for ``graph``, and load it in the workers; ``change`` may edit its folder first.

        Raises ``LaunchError`` if it is ``required`` and fails.
        """
        folder = self.folder / name
        emit_program(graph, plan, folder)
        change(folder)
        if required:
            self.required.add(name)
        self._bytes[name] = memory_bytes(plan)
        inputs = [value.name for value in graph.inputs]
        args = str(folder), inputs, LEARNING_RATE, str(self.state_file), self.device
        self.open_other(name, "autopar.timing.remote:open_program", *args)

    def open_other(self, name: str, opener: str, *args: Any) -> None:
        """Load another program in the workers by ``opener(name, *args)``, a ``"module:function"``, or record its error in ``errors``."""
        self._openers[name] = (opener, *args)
        self.rounds[name] = []
        self._make_room(name)
        self.call(opener, name, *args)
        if name not in self.errors:
            self._open.append(name)
            self.remaining.append(name)

    def measure(self, name: str, timeout_s: float = TIMEOUT_S) -> float | None:
        """Run one untimed step of a program, then ``steps`` timed ones; record their median and losses, and return the median, ``None`` if
        the program fails."""
        self._make_room(name)
        if name not in self._open and self.call(self._openers[name][0], name, *self._openers[name][1:]) is None:
            return None
        self._open = [*(other for other in self._open if other != name), name]
        answers = self.call(
            "autopar.timing.remote:steps", name, str(self.batch_file), self.steps + 1, timeout_s=timeout_s
        )
        if answers is None:
            return None
        self.rounds[name].append(statistics.median(answers[0]["seconds"][1:]))
        self.peak_bytes[name] = max(answer["peak_bytes"] for answer in answers)
        for of_ranks in zip(*(answer["losses"] for answer in answers), strict=True):
            # each replica has the mean loss of its rows; in a pipeline only the last stage has a loss
            self.losses.setdefault(name, []).append(statistics.fmean(x for x in of_ranks if x is not None))
        return self.rounds[name][-1]

    def retry(self, name: str) -> None:
        """Let a program that failed be opened again when it is measured next; no other program is open then."""
        del self.errors[name]
        self.remaining.append(name)

    def error_of(self, name: str) -> str:
        """Return the message of a program's error, or an empty string."""
        return self.errors[name].message if name in self.errors else ""

    def check_losses(self, ours: str) -> None:
        """Raise ``ProgramError`` if a program's loss in the first step, from the same values and batch, differs from that of ``ours``."""
        own = self.losses[ours][0]
        for name, (theirs, *_) in self.losses.items():
            if not abs(theirs - own) <= LOSS_TOLERANCE * abs(own):  # or NaN
                raise ProgramError(
                    f"the first loss of {name} is {theirs:.6f}, that of {ours} {own:.6f}",
                    "they would not be compared on the same work",
                )

    def call(self, target: str, name: str, *args: Any, timeout_s: float = TIMEOUT_S) -> list[Any] | None:
        """Call ``"module:function"`` for the program ``name`` on every rank; return the results by rank, or ``None`` if the program fails.
        Raises ``LaunchError`` if it is required."""
        try:
            return self._processes.call(target, name, *args, timeout_s=timeout_s)
        except LaunchError as error:
            if name in self.required:
                raise LaunchError(f"{name} fails: {error.message}", error.hint, error.cause) from error
            self.errors[name] = error
            self.remaining = [other for other in self.remaining if other != name]
            self._open = []  # the others are opened again when they are measured
            self._processes = self._start()
            return None

    def _make_room(self, name: str) -> None:
        """Close the programs that were not used for longest until all open ones fit into memory with ``name``."""
        others = [other for other in self._open if other != name]
        while others and (
            sum(self._bytes.get(other, 0.0) for other in (*others, name)) > self._room_bytes or self._is_memory_low()
        ):
            self._processes.call("autopar.timing.remote:close_program", oldest := others.pop(0), timeout_s=TIMEOUT_S)
            self._open.remove(oldest)

    def _is_memory_low(self) -> bool:
        """Return whether the programs run on CPUs and this machine has little memory left."""
        return self.device == "cpu" and available_memory_bytes() < _RESERVE * machine_memory_bytes()

    def _start(self) -> Processes:
        processes = Processes(self.count, placement=self._placement)
        processes.call("autopar.run.remote:join", self.device, TIMEOUT_S)
        return processes
