"""The result of a tuning."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from autopar.devices.calibration import Calibration
from autopar.plan import Plan
from autopar.tune.log import Failure


@dataclass(frozen=True, slots=True)
class Trial:
    """A plan that was run: its step time as ``predicted_s`` by the base calibration, as ``corrected_s`` by the corrected one, and as
    measured in ``rounds_s``, with the median and its 95 % interval. ``expected_s`` is the step time to expect next: the corrected
    price and the error that measurements of this plan and of similar ones show (``fit.Posterior.predict``). ``failure`` says why a plan
    does not run, if it doesn't."""

    name: str
    plan: Plan
    predicted_s: float
    corrected_s: float
    expected_s: float
    rounds_s: tuple[float, ...]
    measured_s: float | None
    interval_s: tuple[float, float] | None
    failure: Failure | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"plan": self.plan.to_json()}


@dataclass(frozen=True, slots=True)
class Correction:
    """The factor of a group of figures, and its 95 % interval."""

    group: str
    factor: float
    interval: tuple[float, float]


@dataclass(frozen=True, slots=True)
class RunnerUp:
    """The second-best plan, and the step time of the best plan over its own: the median over shared rounds, and the 95 % interval."""

    name: str
    ratio: float
    interval: tuple[float, float]


@dataclass(frozen=True, slots=True)
class TuneResult:
    """``trials`` are sorted by measured step time, failed ones last; ``best`` is the first one's plan with corrected predictions.
    ``bound_s`` is the least step time that the corrected prices admit, ``stopped`` a sentence on why no more plans were measured.
    ``calibration`` is the corrected one, ``None`` if the figures of a cluster without a calibration were corrected."""

    best: Plan
    trials: tuple[Trial, ...]
    corrections: tuple[Correction, ...]
    calibration: Calibration | None
    runner_up: RunnerUp | None
    bound_s: float
    measured_steps: int
    stopped: str
    took_s: float

    def to_json(self) -> dict[str, Any]:
        """Return the JSON of ``autopar tune --json``; the calibration is a file of its own."""
        return {
            "best": self.trials[0].name,
            "plan": self.best.to_json(),
            "trials": [trial.to_json() for trial in self.trials],
            "corrections": [asdict(correction) for correction in self.corrections],
            "runner_up": None if self.runner_up is None else asdict(self.runner_up),
            "bound_s": self.bound_s,
            "measured_steps": self.measured_steps,
            "stopped": self.stopped,
            "took_s": self.took_s,
        }
