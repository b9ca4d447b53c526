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

import torch

from autopar.bench.baselines import HandTunedRecipe, recipes
from autopar.bench.models import MODELS, BenchModel
from autopar.devices import Cluster
from autopar.errors import LaunchError
from autopar.plan import Plan
from autopar.planning import plan_model
from autopar.run.processes import Placement
from autopar.search import SearchOptions
from autopar.timing import TimingSession, paired_ratio
from autopar.timing.session import LEARNING_RATE
from autopar.workload import Workload

AUTOMATIC = "automatic"


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
    placement: Placement | None = None,
    rounds: int = 7,
    steps: int = 3,
    seed: int = 0,
    progress: Callable[[str, int, int], None] | None = None,
) -> ContestResult:
    """Measure ``model`` (a name of ``MODELS``) on as many processes of this machine as ``cluster`` has devices.

    The plan is for ``cluster``; the hand-tuned programs are those of ``choices``, by default of ``recipes``. With ``placement``, processes
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
        BenchmarkSession(subject, cluster.count, steps, Path(folder), placement) as session,
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


class BenchmarkSession(TimingSession):
    """A session with the programs of a benchmark's model: emitted ones, and hand-tuned ones under the names of their recipes. They start
    from the values of ``workload``'s model."""

    def __init__(
        self,
        subject: BenchModel,
        processes: int,
        steps: int,
        folder: Path,
        placement: Placement | None = None,
        device: str = "cpu",
        precision: str | None = None,
    ) -> None:
        self.subject = subject
        torch.manual_seed(0)
        self.workload = Workload(subject.build(), subject.batch(0), subject.loss_fn, subject.name, precision)
        super().__init__(
            self.workload.model.state_dict(), subject.batch(0), processes, steps, folder, placement, device
        )

    def __enter__(self) -> BenchmarkSession:
        return self

    def open_hand_tuned(self, recipe: HandTunedRecipe) -> None:
        """Load a hand-tuned program in the workers, or record its error in ``errors``."""
        args = self.subject.name, recipe.to_dict(), LEARNING_RATE, self.device
        self.open_other(recipe.name, "autopar.bench.remote:open_hand_tuned", *args)

    def drop_slow(self, slower_than: float) -> None:
        """Drop contenders that failed, and hand-tuned ones that take more than ``slower_than`` times as long as the best hand-tuned one."""
        medians = {name: statistics.median(self.rounds[name]) for name in self.remaining if name not in self.errors}
        limit_s = slower_than * min((s for name, s in medians.items() if name not in self.required), default=0.0)
        self.remaining = [n for n, median_s in medians.items() if n in self.required or median_s <= limit_s]


def _result(
    subject: BenchModel, plan: Plan, session: BenchmarkSession, choices: list[HandTunedRecipe], settings: dict[str, Any]
) -> ContestResult:
    contenders = [Contender(AUTOMATIC, None, plan.prediction.step_time_s, tuple(session.rounds[AUTOMATIC]))]
    for recipe in choices:
        name = recipe.name
        contenders.append(Contender(name, recipe.to_dict(), None, tuple(session.rounds[name]), session.error_of(name)))
    running = [c for c in contenders[1:] if c.name in session.remaining]
    if not running:
        raise LaunchError(
            f"no hand-tuned program of {subject.name} runs: {next(map(session.error_of, session.errors), '')}"
        )
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
