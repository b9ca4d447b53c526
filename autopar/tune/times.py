"""Estimates step times of plans that took turns in rounds, where the machine is faster in some rounds than in others:

    log seconds(plan, round) = log step time(plan) + level(round) + noise

Plans are compared within the rounds that they share: the prior of levels, N(0, LEVEL_SD), is wide, and only connects rounds without a
common plan. The noise has Student's t distribution, whose scale is estimated from all measurements, so outliers count little; step times
are reweighted least squares, by expectation maximisation, and their covariance is the inverse of Fisher's information (Lange, Little and
Taylor 1989).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.units import Constant

Floats = NDArray[np.float64]

ROUND_SD = Constant(
    0.056,
    "log of a step time",
    "measured: docs/evidence/tune.jsonl, robust deviation of a program's rounds from all, median over contests but llama on 4 nodes",
)
LEVEL_SD = Constant(
    0.2,
    "log of a step time",
    "assumed: wider than 0.05, the deviation of rounds of one contest in docs/evidence/tune.jsonl",
)
NORMAL_95 = 1.96  # standard deviations on each side of a 95 % interval
_PRIOR_ROUNDS = 3.0  # as many measurements have ROUND_SD, besides the measured deviation
_FREEDOM = 4.0  # degrees of freedom of the noise
_ITERATIONS = 20


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The logarithms of the step times in seconds of ``names``, and their covariance."""

    names: tuple[str, ...]
    logs: Floats
    covariance: Floats

    def of(self, names: Sequence[str]) -> StepTimes:
        """Return the times of some plans."""
        at = [self.names.index(name) for name in names]
        return StepTimes(tuple(names), self.logs[at], self.covariance[np.ix_(at, at)])

    @property
    def seconds(self) -> dict[str, float]:
        """The step time of each plan."""
        return dict(zip(self.names, np.exp(self.logs).tolist(), strict=True))

    def error(self, name: str) -> float:
        """Return the relative standard error of a plan's step time."""
        k = self.names.index(name)
        return math.sqrt(self.covariance[k, k])

    def interval(self, name: str) -> tuple[float, float]:
        """Return the 95 % interval of a plan's step time."""
        log_s, error = self.logs[self.names.index(name)], self.error(name)
        return math.exp(log_s - NORMAL_95 * error), math.exp(log_s + NORMAL_95 * error)

    def ratio(self, one: str, other: str) -> tuple[float, float]:
        """Return the logarithm of the step time of ``one`` over that of ``other``, and its standard error."""
        a, b = self.names.index(one), self.names.index(other)
        variance = self.covariance[a, a] + self.covariance[b, b] - 2 * self.covariance[a, b]
        return float(self.logs[a] - self.logs[b]), math.sqrt(max(variance, 0.0))


def estimate(rounds: Sequence[Mapping[str, float]]) -> StepTimes:
    """Return the step times of all plans at the mean level, given the seconds of each plan in each round in which it took a turn."""
    if not rounds:
        return StepTimes((), np.zeros(0), np.zeros((0, 0)))
    names = tuple(dict.fromkeys(name for one in rounds for name in one))
    turns = [(names.index(name), k, step_s) for k, one in enumerate(rounds) for name, step_s in one.items()]
    plans, levels = len(names), len(rounds)
    design, observed = np.zeros((len(turns), plans + levels)), np.log([step_s for *_, step_s in turns])
    for row, (plan, level, _) in zip(design, turns, strict=True):
        row[plan] = row[plans + level] = 1.0
    prior = np.diag([0.0] * plans + [LEVEL_SD.value**-2] * levels)
    freedom = max(0, len(turns) - plans - levels + 1)
    variance, weights = ROUND_SD.value**2, np.ones(len(turns))
    for _ in range(_ITERATIONS):
        weighted = design.T * (weights / variance)
        found = np.linalg.solve(weighted @ design + prior, weighted @ observed)
        noise = observed - design @ found
        weights = (_FREEDOM + 1) / (_FREEDOM + noise**2 / variance)
        squares = float(weights @ noise**2)
        variance = (_PRIOR_ROUNDS * ROUND_SD.value**2 + squares) / (_PRIOR_ROUNDS + freedom)
    information = (_FREEDOM + 1) / (_FREEDOM + 3) / variance  # of one measurement, whatever its noise
    covariance = np.linalg.inv(information * design.T @ design + prior)
    at_mean: Floats = np.hstack([np.eye(plans), np.full((plans, levels), 1 / levels)])
    return StepTimes(names, at_mean @ found, at_mean @ covariance @ at_mean.T)
