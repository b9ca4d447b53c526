"""Plans in files: how one is read, and whether it fits a model and devices."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.errors import UsageError
from autopar.plan import Plan, Prediction
from autopar.precision import PRECISIONS
from autopar.schedules import SCHEDULES

if TYPE_CHECKING:
    from autopar.devices import Cluster
    from autopar.graph import Graph

_WRITTEN_BY = "`autopar plan MODEL --devices ... -o FILE` writes one"

_COUNTS = ("microbatches", "global_batch", "chunks", "prefetch")


def read_plan(path: str | Path) -> Plan:
    """The plan in a file that ``Plan.dumps`` or ``autopar plan -o`` wrote.

    Raises:
        UsageError: there is no such file, or the file holds no plan.
    """
    try:
        return Plan.from_json(_checked(json.loads(Path(path).read_text(), parse_constant=_no_number)))
    except OSError as error:
        raise UsageError(f"the plan {path} cannot be read: {error.strerror}", _WRITTEN_BY) from error
    except (ValueError, KeyError, TypeError, IndexError, AssertionError, AttributeError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}"
        if isinstance(error, IndexError | AssertionError | _PlanError):
            reason = str(error) if isinstance(error, _PlanError) else "its stages and layers do not fit together"
        raise UsageError(f"{path} holds no plan ({reason})", _WRITTEN_BY) from error


class _PlanError(ValueError):
    """What a file that holds no plan holds."""


def _checked(data: Any) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise _PlanError("it is no JSON object")
    if data.get("feasible") is False:
        raise _PlanError("it says that nothing fits")
    for field in dataclasses.fields(Prediction):
        if isinstance(data[field.name], bool) or not isinstance(data[field.name], int | float):
            raise _PlanError(f"{field.name} is {data[field.name]!r}, no number")
    sizes = [(f"axis {axis['name']}", axis["size"]) for axis in data["mesh"]]
    for name, count in [*sizes, *((name, data.get(name, 1)) for name in _COUNTS)]:
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise _PlanError(f"{name} is {count!r}, no whole number from 1 up")
    for name, known in (("schedule", SCHEDULES), ("precision", PRECISIONS)):
        if data[name] not in known:
            raise _PlanError(f"{name} is {data[name]!r}, not one of {', '.join(known)}")
    return data


def _no_number(text: str) -> float:
    raise _PlanError(f"{text} is no number")


def check_model(plan: Plan, graph: Graph) -> None:
    """Raise ``UsageError`` where the plan is for another model or another batch."""
    mine, theirs = [layer.name for layer in graph.layers], [layer.name for layer in plan.layers]
    if mine != theirs:
        raise UsageError(
            f"the plan is for a model of {len(theirs)} layers ({theirs[0]} to {theirs[-1]}), "
            f"this one has {len(mine)} ({mine[0]} to {mine[-1]})",
            "a plan fits the model, the batch and the version of autopar that it was made for: plan again",
        )
    if plan.global_batch != graph.batch_size:
        raise UsageError(
            f"the plan is for a global batch of {plan.global_batch}, this one has {graph.batch_size}",
            f"give a batch of {plan.global_batch} rows (--global-batch {plan.global_batch}), or plan again",
        )


def check_devices(plan: Plan, cluster: Cluster, may_be_idle: bool = False) -> None:
    """Raise ``UsageError`` where the plan is for more devices, or without ``may_be_idle`` for fewer."""
    if plan.device_count > cluster.count or (plan.device_count < cluster.count and not may_be_idle):
        made_for = "" if plan.devices == str(plan.device_count) else f" ({plan.devices})"
        raise UsageError(
            f"the plan is for {plan.device_count} devices{made_for}, and the cluster has {cluster.count}",
            f"give {plan.device_count} devices, or make a plan for these",
        )
