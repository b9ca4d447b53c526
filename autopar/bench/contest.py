"""Measures the automatic program of a model and every hand-tuned program in turns.

All these contenders are loaded in the same worker processes. A round visits each contender once, in random order, and times a few steps
after an untimed one, so that a temporary slow-down of the machine affects all contenders. A hand-tuned contender that fails is recorded
with its error. The losses of the first step must agree, which shows that all contenders do the same work.
"""

from __future__ import annotations

import random
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from autopar.bench.baselines import HandTunedRecipe, recipes
from autopar.bench.models import MODELS, BenchModel
from autopar.compile import emit_program
from autopar.devices import Cluster
from autopar.errors import LaunchError, ProgramError
from autopar.graph import Graph
from autopar.plan import Plan
from autopar.planning import plan_model
from autopar.run.processes import NetworkNamespaces, Processes
from autopar.search import SearchOptions
from autopar.workload import Workload

AUTOMATIC = "automatic"
LEARNING_RATE = 1e-4
TIMEOUT_S = 300.0  # of one call of the workers, and of one collective
LOSS_TOLERANCE = 2e-3
"""Relative tolerance. Float32 sums in another order differ by about 1e-6, losses of another computation by far more."""


@dataclass(frozen=True, slots=True)
class Contender:
    """The measurement of one program. ``rounds_s`` has, for each round, the median seconds of its timed steps."""

    name: str
    recipe: dict[str, Any] | None
    predicted_s: float | None
    rounds_s: tuple[float, ...]
    error: str = ""

    @property
    def step_s(self) -> float:
        return statistics.median(self.rounds_s) if self.rounds_s else float("inf")


@dataclass(frozen=True, slots=True)
class ContestResult:
    """The result of a contest. ``ratio`` is the step time of the automatic program over that of the best hand-tuned one;
    ``ratio_interval`` is its 95 % bootstrap interval over rounds."""

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
        """Return the JSON of ``autopar bench --json``."""
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
    cluster: Cluster,
    *,
    choices: Sequence[HandTunedRecipe] | None = None,
    netns: NetworkNamespaces | None = None,
    rounds: int = 7,
    steps: int = 3,
    seed: int = 0,
    progress: Callable[[str, int, int], None] | None = None,
) -> ContestResult:
    """Measure ``model`` (a name of ``MODELS``) on as many processes of this machine as ``cluster`` has devices.

    The plan is for ``cluster``; the hand-tuned programs are those of ``choices``, by default of ``recipes``. With ``netns``, processes
    run in other network namespaces. After every round, hand-tuned contenders that take more than twice as long as the best hand-tuned one
    are dropped; those that remain have a time in every round, which is paired with the automatic program's. ``progress`` is called with the
    running contender, the number of measurements done, and their total number.

    Raises:
        ProgramError: the first loss of the automatic program differs from that of a hand-tuned one.
        LaunchError: the automatic program fails, or all hand-tuned ones do.
    """
    subject = MODELS[model]
    by_hand = {recipe.name: recipe for recipe in choices or recipes(cluster.count, subject)}
    tell = progress or (lambda text, done, total: None)
    with (
        tempfile.TemporaryDirectory() as folder,
        BenchmarkSession(subject, cluster.count, steps, Path(folder), netns) as session,
    ):
        tell("planning", 0, 1)
        graph, plan = plan_model(session.workload, cluster, SearchOptions(precision="float32"))
        session.open_program(AUTOMATIC, graph, plan)
        measured = 0
        total = (len(by_hand) + 1) * rounds
        for recipe in by_hand.values():
            session.open_hand_tuned(recipe)
        order = random.Random(seed)
        for number in range(rounds):
            names = list(session.remaining)
            order.shuffle(names)
            for name in names:
                tell(name, measured, total)
                session.measure(name)
                measured += 1
            session.drop_slow(slower_than=2.0)
            total = measured + (rounds - 1 - number) * len(session.remaining)
        session.check_losses(AUTOMATIC)
        settings = {"rounds": rounds, "steps": steps, "seed": seed, "torch": torch.__version__}
        return _result(subject, plan, session, list(by_hand.values()), settings)


class BenchmarkSession:
    """The worker processes with all contenders: emitted programs, and hand-tuned programs under the names of their recipes.

    All contenders start from the values of ``workload``'s model. By contender, ``rounds`` has the median seconds of the timed steps of each
    measurement, and ``losses`` the losses of all steps. ``errors`` has the errors of hand-tuned contenders that failed. An error of an
    emitted program is raised. ``remaining``: the contenders that are still measured.
    """

    def __init__(
        self,
        subject: BenchModel,
        processes: int,
        steps: int,
        folder: Path,
        netns: NetworkNamespaces | None = None,
        device: str = "cpu",
        precision: str | None = None,
    ) -> None:
        self.subject, self.count, self.steps, self.folder, self.device = subject, processes, steps, folder, device
        self.rounds: dict[str, list[float]] = {}
        self.losses: dict[str, list[float]] = {}
        self.errors: dict[str, str] = {}
        self.remaining: list[str] = []
        torch.manual_seed(0)
        self.workload = Workload(subject.build(), subject.batch(0), subject.loss_fn, subject.name, precision)
        self._netns = netns
        self._openers: dict[str, tuple[Any, ...]] = {}
        self._emitted: set[str] = set()
        self._processes = self._start()

    def __enter__(self) -> BenchmarkSession:
        return self

    def __exit__(self, *_: object) -> None:
        self._processes.close()

    def open_program(
        self, name: str, graph: Graph, plan: Plan, change: Callable[[Path], None] = lambda folder: None
    ) -> None:
        """Emit the program of ``plan`` for ``graph`` (of ``workload``), and load it in the workers; ``change`` may edit its folder first.

        Raises ``LaunchError`` if the program fails.
        """
        folder, state = self.folder / name, self.folder / "state.pt"
        emit_program(graph, plan, folder)
        change(folder)
        torch.save(self.workload.model.state_dict(), state)
        inputs = [value.name for value in graph.inputs]
        self._emitted.add(name)
        args = str(folder), inputs, LEARNING_RATE, str(state), self.device
        self.open_other(name, "autopar.bench.remote:open_program", *args)

    def open_hand_tuned(self, recipe: HandTunedRecipe) -> None:
        """Load a hand-tuned program in the workers, or record its error in ``errors``."""
        args = self.subject.name, recipe.to_dict(), LEARNING_RATE, self.device
        self.open_other(recipe.name, "autopar.bench.remote:open_hand_tuned", *args)

    def open_other(self, name: str, opener: str, *args: Any) -> None:
        """Load another program in the workers by ``opener(name, *args)``, a ``"module:function"``, or record its error in ``errors``."""
        self._openers[name] = (opener, *args)
        self.rounds[name] = []
        self.call(opener, name, *args)
        if name not in self.errors:
            self.remaining.append(name)

    def drop_slow(self, slower_than: float) -> None:
        """Drop contenders that failed, and hand-tuned ones that take more than ``slower_than`` times as long as the best hand-tuned one."""
        medians = {name: statistics.median(self.rounds[name]) for name in self.remaining if name not in self.errors}
        limit_s = slower_than * min((s for name, s in medians.items() if name not in self._emitted), default=0.0)
        self.remaining = [n for n, median_s in medians.items() if n in self._emitted or median_s <= limit_s]

    def measure(self, name: str) -> None:
        """Run one untimed step of a contender, then ``steps`` timed ones, and record their median and losses."""
        answers = self.call("autopar.bench.remote:steps", name, self.subject.name, 0, self.steps + 1)
        if answers is None:
            return
        self.rounds[name].append(statistics.median(answers[0]["seconds"][1:]))
        for of_ranks in zip(*(answer["losses"] for answer in answers), strict=True):
            # each replica has the mean loss of its rows; in a pipeline only the last stage has a loss
            self.losses.setdefault(name, []).append(statistics.fmean(x for x in of_ranks if x is not None))

    def check_losses(self, ours: str) -> None:
        """Raise ``ProgramError`` if a contender's loss in the first step, from the same values and batch, differs from that of ``ours``."""
        own = self.losses[ours][0]
        for name, (theirs, *_) in self.losses.items():
            if not abs(theirs - own) <= LOSS_TOLERANCE * abs(own):  # or NaN
                raise ProgramError(
                    f"{self.subject.name}: the first loss of {name} is {theirs:.6f}, that of {ours} {own:.6f}",
                    "they would not be compared on the same work",
                )

    def call(self, target: str, name: str, *args: Any) -> list[Any] | None:
        """Call ``"module:function"`` for the contender ``name`` on every rank; return the results by rank, or ``None`` if a hand-tuned
        contender fails. Raises ``LaunchError`` if an emitted program fails."""
        try:
            return self._processes.call(target, name, *args, timeout_s=TIMEOUT_S)
        except LaunchError as error:
            if name in self._emitted:
                raise LaunchError(f"{name}, a program of {self.subject.name}, fails: {error.message}") from error
            self.errors[name] = error.message
            self._processes = self._start()
            for other, (opener, *rest) in self._openers.items():
                if other not in self.errors:
                    self._processes.call(opener, other, *rest, timeout_s=TIMEOUT_S)
            return None

    def _start(self) -> Processes:
        processes = Processes(self.count, netns=self._netns)
        processes.call("autopar.run.remote:join", self.device, TIMEOUT_S)
        return processes


def _result(
    subject: BenchModel, plan: Plan, session: BenchmarkSession, choices: list[HandTunedRecipe], settings: dict[str, Any]
) -> ContestResult:
    contenders = [Contender(AUTOMATIC, None, plan.prediction.step_time_s, tuple(session.rounds[AUTOMATIC]))]
    for recipe in choices:
        name = recipe.name
        contenders.append(
            Contender(name, recipe.to_dict(), None, tuple(session.rounds[name]), session.errors.get(name, ""))
        )
    running = [c for c in contenders[1:] if c.name in session.remaining]
    if not running:
        raise LaunchError(f"no hand-tuned program of {subject.name} runs: {next(iter(session.errors.values()), '')}")
    best = min(running, key=lambda c: c.step_s)
    ratio, interval = paired_ratio(contenders[0].rounds_s, best.rounds_s, settings["seed"])
    return ContestResult(
        subject.name,
        session.count,
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
    """Return the median over rounds of ours / theirs, and its 95 % interval (percentile bootstrap; Efron and Tibshirani 1993, ch. 13)."""
    ratios = np.array(ours) / np.array(theirs)
    draws = np.random.default_rng(seed).choice(ratios, size=(2000, len(ratios)))
    low, high = np.percentile(np.median(draws, axis=1), [2.5, 97.5])
    return float(np.median(ratios)), (float(low), float(high))
