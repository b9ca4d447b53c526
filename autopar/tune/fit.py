"""Learns corrections of prices from measured step times: a Gaussian process whose mean is the cost model.

The logarithm of a plan's step time is

    log price(plan, exp(theta)) + e(plan) + noise

with *theta* the logarithms of the correction factors, *e* the error of the cost model that no factor explains, and the noise of the
measurement. The prior of each entry of theta is N(0, PRIOR_SD), that of *e* is N(0, MODEL_SD), and the errors of two plans correlate by
``similarity``. theta is the maximum a posteriori, by Gauss-Newton with derivatives by finite differences; its covariance is Laplace's
approximation. Predictions for plans that were not measured interpolate the errors (universal kriging; Rasmussen and Williams 2006,
section 2.7).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.plan import Plan
from autopar.tune.times import Floats
from autopar.units import Constant

LogPrices = Callable[[Sequence[Plan], Floats], Floats]
"""The logarithms of plans' predicted step times in seconds, with these logarithms of the factors."""

PRIOR_SD = Constant(
    0.5, "log of a factor", "assumed: a component that takes half or twice as long as priced is 1.4 deviations away"
)
MODEL_SD = Constant(
    0.1,
    "log of a step time",
    "measured: docs/evidence/measured-time.jsonl, measured over predicted of 17 plans of llama on 2 processes, around their mean",
)
_STEP = 0.05  # of finite differences, in log of a factor: wide enough to smooth the kinks of maxima in prices
_LARGEST_MOVE, _ITERATIONS, _SMALLEST_MOVE = 0.7, 12, 1e-3


@dataclass(frozen=True, slots=True)
class Posterior:
    """What the measurements say: ``theta``, logarithms of the factors of ``groups``, their ``covariance``, and the model's errors."""

    groups: tuple[str, ...]
    theta: Floats
    covariance: Floats
    _log_prices: LogPrices
    _plans: tuple[Plan, ...]
    _residual: Floats  # of each measured plan
    _precision: Floats  # inverse covariance of the residuals
    _jacobian: Floats

    @property
    def factors(self) -> dict[str, float]:
        """The factor of each group."""
        return dict(zip(self.groups, np.exp(self.theta).tolist(), strict=True))

    @property
    def deviations(self) -> dict[str, float]:
        """The standard deviation of the logarithm of each factor."""
        return dict(zip(self.groups, np.sqrt(np.diag(self.covariance)).tolist(), strict=True))

    def draw(self, rng: np.random.Generator) -> dict[str, float]:
        """Draw factors from the posterior."""
        drawn = rng.multivariate_normal(self.theta, self.covariance)
        return dict(zip(self.groups, np.exp(drawn).tolist(), strict=True))

    def predict(self, plans: Sequence[Plan]) -> list[tuple[float, float]]:
        """Return the expected step time of each plan in seconds, and the standard deviation of its logarithm."""
        if not plans:
            return []
        shares = [[similarity(plan, other) for other in self._plans] for plan in plans]
        shared = MODEL_SD.value**2 * np.array(shares).reshape(len(plans), len(self._plans))
        weights = shared @ self._precision
        logs = self._log_prices(plans, self.theta) + weights @ self._residual
        slopes = jacobian(self._log_prices, plans, self.theta) - weights @ self._jacobian
        variances = MODEL_SD.value**2 - (shared * weights).sum(axis=1)
        variances = variances + ((slopes @ self.covariance) * slopes).sum(axis=1)
        deviations = np.sqrt(np.maximum(variances, 0.0))
        return list(zip(np.exp(logs).tolist(), deviations.tolist(), strict=True))


def fit(
    log_prices: LogPrices, groups: tuple[str, ...], plans: Sequence[Plan], observed: Floats, noise: Floats
) -> Posterior:
    """Return the posterior after measurements of ``plans``: the logarithms of their step times, and the covariance of the errors of these.
    Without any it is the prior."""
    plans = tuple(plans)
    alike = np.array([[similarity(a, b) for b in plans] for a in plans]).reshape(len(plans), len(plans))
    precision = _inverse(MODEL_SD.value**2 * alike + noise)
    prior = np.eye(len(groups)) / PRIOR_SD.value**2
    theta = np.zeros(len(groups))
    if not plans:
        empty = np.zeros((0, len(groups)))
        return Posterior(
            groups, theta, PRIOR_SD.value**2 * np.eye(len(groups)), log_prices, plans, observed, precision, empty
        )

    def loss(residual: Floats, at: Floats) -> float:
        return float(residual @ precision @ residual + at @ prior @ at)

    residual = observed - log_prices(plans, theta)
    for _ in range(_ITERATIONS):
        slopes = jacobian(log_prices, plans, theta)
        hessian = slopes.T @ precision @ slopes + prior
        move = np.linalg.solve(hessian, slopes.T @ precision @ residual - prior @ theta)
        move *= min(1.0, _LARGEST_MOVE / max(float(np.abs(move).max()), 1e-12))
        while np.abs(move).max() > _SMALLEST_MOVE:  # a move must improve the fit
            trial = observed - log_prices(plans, theta + move)
            if loss(trial, theta + move) < loss(residual, theta):
                theta, residual = theta + move, trial
                break
            move /= 2
        else:
            break
    slopes = jacobian(log_prices, plans, theta)
    covariance = _inverse(slopes.T @ precision @ slopes + prior)
    return Posterior(groups, theta, covariance, log_prices, plans, residual, precision, slopes)


def _inverse(matrix: Floats) -> Floats:
    return np.linalg.inv(matrix).astype(np.float64)


def jacobian(log_prices: LogPrices, plans: Sequence[Plan], theta: Floats) -> Floats:
    """Return the derivative of each plan's log price by each logarithm of a factor."""
    columns = []
    for direction in np.eye(len(theta)) * _STEP:
        above, below = (log_prices(plans, theta + sign * direction) for sign in (1, -1))
        columns.append((above - below) / (2 * _STEP))
    return np.array(columns).T.reshape(len(plans), len(theta))


def similarity(one: Plan, other: Plan) -> float:
    """Return the correlation of the cost model's errors for two plans: 0 if their stages, meshes or schedules differ, otherwise the share
    of layers with equal strategies. (A product of kernels of equality is positive semidefinite, and so is the mean over layers.)"""
    if _frame(one) != _frame(other):
        return 0.0
    same = (a.strategy == b.strategy for a, b in zip(one.layers, other.layers, strict=True))
    return sum(same) / len(one.layers)


def _frame(plan: Plan) -> tuple[Any, ...]:
    starts = tuple(stage.start for stage in plan.stages)
    return plan.mesh, starts, plan.schedule, plan.chunks, plan.microbatches, plan.sync, plan.prefetch


def program_of(plan: Plan) -> tuple[Any, ...]:
    """Return what the program of a plan depends on: two plans with equal values are one program."""
    return _frame(plan), tuple(layer.strategy for layer in plan.layers), plan.allow
