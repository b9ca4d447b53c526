"""One model, one number of processes: the automatic program and every hand-tuned one, measured in turns.

All contenders live in the same worker processes: a round visits each of them once, in a random order, and
times a few steps after one that is not timed. A temporary slow-down of the machine then affects all of them. A
contender that cannot run is recorded with its error. The first losses must agree, so that all contenders do the same work.
"""

from __future__ import annotations

import math
import random
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from autopar.bench.baselines import recipes
from autopar.bench.models import MODELS, Subject
from autopar.compile import emit_program
from autopar.devices import Cluster, parse
from autopar.errors import LaunchError, ProgramError
from autopar.plan import Plan
from autopar.planning import plan_model
from autopar.run.processes import Processes
from autopar.search import SearchOptions
from autopar.workload import Workload

AUTOMATIC = "automatic"
LEARNING_RATE = 1e-4
LOSS_TOLERANCE = 2e-3
"""Relative; float32 sums in another order differ by about 1e-6, losses of another computation by far more."""


@dataclass(frozen=True, slots=True)
class Contender:
    """One program's measurement. ``rounds_s`` are the medians of every round's timed steps, in seconds."""

    name: str
    recipe: dict[str, Any] | None
    predicted_s: float | None
    rounds_s: tuple[float, ...]
    error: str = ""

    @property
    def step_s(self) -> float:
        return statistics.median(self.rounds_s) if self.rounds_s else float("inf")


@dataclass(frozen=True, slots=True)
class Result:
    """A contest's outcome. ``ratio`` is automatic over best hand-tuned; its interval is a bootstrap's over rounds, 95 %."""

    name: str
    processes: int
    tokens: int
    plan: dict[str, Any]
    contenders: tuple[Contender, ...]
    ratio: float
    ratio_interval: tuple[float, float]
    best: str
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def automatic(self) -> Contender:
        return next(c for c in self.contenders if c.name == AUTOMATIC)

    @property
    def hand_tuned(self) -> tuple[Contender, ...]:
        return tuple(c for c in self.contenders if c.name != AUTOMATIC)

    def to_json(self) -> dict[str, Any]:
        """The object of ``autopar bench --json``."""
        return {
            "name": self.name,
            "processes": self.processes,
            "automatic_s": self.automatic.step_s,
            "best_hand_tuned_s": next(c.step_s for c in self.hand_tuned if c.name == self.best),
            "best_hand_tuned": self.best,
            "ratio": self.ratio,
            "ratio_interval": list(self.ratio_interval),
            "candidates": len(self.hand_tuned),
            "tokens": self.tokens,
            "plan": self.plan,
            "contenders": [asdict(c) | {"rounds_s": list(c.rounds_s)} for c in self.contenders],
            "settings": self.settings,
        }


def contest(
    model: str,
    processes: int,
    *,
    rounds: int = 7,
    steps: int = 3,
    seed: int = 0,
    calibration: str | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Result:
    """Measure ``model`` (a name of ``MODELS``) on ``processes`` local processes.

    Plans are priced by ``calibration`` (see ``autopar.devices.parse``). After every round, hand-tuned contenders whose median so far is
    twice that of the best one are dropped; one that remains to the end has a time for every round, paired with the automatic
    program's. ``progress`` is called with the running contender, the number of visits done, and their total number.

    Raises:
        ProgramError: the automatic program's losses are not those of the hand-tuned ones.
        LaunchError: the automatic program fails, or every hand-tuned one does.
    """
    subject = MODELS[model]
    choices = {recipe.name: recipe.to_dict() for recipe in recipes(processes, subject)}
    tell = progress or (lambda text, done, total: None)
    with tempfile.TemporaryDirectory() as folder, _Arena(subject, processes, steps, Path(folder)) as arena:
        tell("planning", 0, 1)
        plan = arena.open_automatic(parse(processes, calibration=calibration))
        visits = 0
        total = (len(choices) + 1) * rounds
        for name, recipe in choices.items():
            arena.open_hand_tuned(name, recipe)
        order = random.Random(seed)
        for number in range(rounds):
            names = list(arena.standing)
            order.shuffle(names)
            for name in names:
                tell(name, visits, total)
                arena.visit(name)
                visits += 1
            arena.leave_out(slower_than=2.0)
            total = visits + (rounds - 1 - number) * len(arena.standing)
        arena.check_losses()
        settings = {"rounds": rounds, "steps": steps, "seed": seed, "torch": torch.__version__}
        return _result(subject, processes, plan, arena, choices, settings)


class _Arena:
    """The worker processes with every contender open in them."""

    def __init__(self, subject: Subject, processes: int, steps: int, folder: Path) -> None:
        self.subject, self.count, self.steps, self.folder = subject, processes, steps, folder
        self.rounds: dict[str, list[float]] = {}
        self.losses: dict[str, float] = {}
        self.errors: dict[str, str] = {}
        self.standing: list[str] = []
        self._openers: dict[str, tuple[Any, ...]] = {}
        self._processes = self._start()

    def __enter__(self) -> _Arena:
        return self

    def __exit__(self, *_: object) -> None:
        self._processes.close()

    def open_automatic(self, cluster: Cluster) -> Plan:
        torch.manual_seed(0)
        module = self.subject.build()
        workload = Workload(module, self.subject.batch(0), self.subject.loss_fn)
        graph, plan = plan_model(workload, cluster, SearchOptions(precision="float32"))
        emit_program(graph, plan, self.folder / "program")
        state = self.folder / "state.pt"
        torch.save(module.state_dict(), state)
        names = [value.name for value in graph.inputs]
        self._open(AUTOMATIC, "open_automatic", str(self.folder / "program"), names, LEARNING_RATE, str(state))
        self._needs_automatic()
        return plan

    def open_hand_tuned(self, name: str, recipe: dict[str, Any]) -> None:
        self._open(name, "open_hand_tuned", self.subject.name, recipe, LEARNING_RATE)

    def leave_out(self, slower_than: float) -> None:
        """Drop contenders that failed, and hand-tuned ones that take ``slower_than`` times as long as the best, for all later rounds."""
        medians = {name: statistics.median(self.rounds[name]) for name in self.standing if name not in self.errors}
        limit_s = slower_than * min(medians.values(), default=0.0)
        self.standing = [name for name, median_s in medians.items() if name == AUTOMATIC or median_s <= limit_s]

    def visit(self, name: str) -> None:
        """One untimed step, then ``steps`` timed ones."""
        answers = self._call(name, "steps", self.subject.name, 0, self.steps + 1)
        if answers is None:
            self._needs_automatic()
            return
        self.rounds[name].append(statistics.median(answers[0]["seconds"][1:]))
        # replicas have the mean loss of their share of the batch; in a pipeline only the last stage has it
        known = [loss for loss in (answer["losses"][0] for answer in answers) if not math.isnan(loss)]
        self.losses.setdefault(name, statistics.fmean(known))

    def check_losses(self) -> None:
        """Compare the losses of the first step, which start from the same initial values and batch."""
        ours = self.losses[AUTOMATIC]
        for name, theirs in self.losses.items():
            if abs(theirs - ours) > LOSS_TOLERANCE * abs(ours):
                raise ProgramError(
                    f"{self.subject.name}: the first loss of {name} is {theirs:.6f}, the automatic program's {ours:.6f}",
                    "they would not be compared on the same work",
                )

    def _needs_automatic(self) -> None:
        if AUTOMATIC in self.errors:
            raise LaunchError(f"the automatic program of {self.subject.name} fails: {self.errors[AUTOMATIC]}")

    def _start(self) -> Processes:
        processes = Processes(self.count)
        processes.call("autopar.run.remote:join", "cpu", 300)
        return processes

    def _open(self, name: str, opener: str, *args: Any) -> None:
        self._openers[name] = (opener, *args)
        self.rounds[name] = []
        self._call(name, opener, *args)
        if name not in self.errors:
            self.standing.append(name)

    def _call(self, name: str, function: str, *args: Any) -> list[Any] | None:
        try:
            return self._processes.call(f"autopar.bench.remote:{function}", name, *args, timeout_s=300)
        except LaunchError as error:
            self.errors[name] = error.message
            self._processes = self._start()
            for other, (opener, *rest) in self._openers.items():
                if other not in self.errors:
                    self._processes.call(f"autopar.bench.remote:{opener}", other, *rest, timeout_s=300)
            return None


def _result(
    subject: Subject,
    processes: int,
    plan: Plan,
    arena: _Arena,
    choices: dict[str, dict[str, Any]],
    settings: dict[str, Any],
) -> Result:
    contenders = [Contender(AUTOMATIC, None, plan.prediction.step_time_s, tuple(arena.rounds[AUTOMATIC]))]
    for name, recipe in choices.items():
        contenders.append(Contender(name, recipe, None, tuple(arena.rounds[name]), arena.errors.get(name, "")))
    running = [c for c in contenders[1:] if c.name in arena.standing]
    if not running:
        raise LaunchError(f"no hand-tuned program of {subject.name} runs: {next(iter(arena.errors.values()), '')}")
    best = min(running, key=lambda c: c.step_s)
    ratio, interval = paired_ratio(contenders[0].rounds_s, best.rounds_s, settings["seed"])
    return Result(
        subject.name,
        processes,
        subject.tokens,
        {
            key: plan.to_json()[key]
            for key in ("mesh", "pipeline", "microbatches", "schedule", "layers", "step_time_s", "notes")
        },
        tuple(contenders),
        ratio,
        interval,
        best.name,
        settings,
    )


def paired_ratio(ours: tuple[float, ...], theirs: tuple[float, ...], seed: int) -> tuple[float, tuple[float, float]]:
    """The median of ours/theirs, round by round, and its 95 % interval (percentile bootstrap; Efron and Tibshirani 1993, ch. 13)."""
    ratios = np.array(ours) / np.array(theirs)
    draws = np.random.default_rng(seed).choice(ratios, size=(2000, len(ratios)))
    low, high = np.percentile(np.median(draws, axis=1), [2.5, 97.5])
    return float(np.median(ratios)), (float(low), float(high))
