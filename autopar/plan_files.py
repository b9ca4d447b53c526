"""Reads plans from files, and checks that they fit a model and devices."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from autopar.data_files import MalformedFileError, read_json
from autopar.errors import UsageError
from autopar.plan import UNNAMED_LAYERS, Plan
from autopar.plan_schema import check_plan

if TYPE_CHECKING:
    from torch import nn

    from autopar.devices import Cluster
    from autopar.graph import Graph

_WRITTEN_BY = "`autopar plan MODEL --devices ... -o FILE` writes one"
_PLAN_AGAIN = "a plan fits the model, the batch and the version of autopar that it was made for: plan again"


def read_plan(path: str | Path) -> Plan:
    """Read a plan that ``Plan.dumps`` or ``autopar plan -o`` wrote; the file is untrusted data.

    Raises ``UsageError`` if the file can't be read, or isn't a valid plan (``plan_schema``).
    """
    if not isinstance(path, str | Path):
        raise UsageError(
            f"plan is an object of type {type(path).__name__}, not a Plan or the path of its file",
            "Plan.from_json(data) reads a JSON object",
        )
    try:
        data = read_json(path)
        check_plan(data)
    except OSError as error:
        raise UsageError(f"the plan {path} cannot be read: {error.strerror}", _WRITTEN_BY) from error
    except MalformedFileError as error:
        raise UsageError(f"{path} holds no plan ({error})", _WRITTEN_BY) from error
    return Plan.from_json(data)


def check_model(plan: Plan, graph: Graph) -> None:
    """Raise ``UsageError`` if the plan is for another model or batch."""
    mine, theirs = [layer.name for layer in graph.layers], [layer.name for layer in plan.layers]
    if mine != theirs:
        raise UsageError(
            f"the plan is for a model of {len(theirs)} layers ({theirs[0]} to {theirs[-1]}), "
            f"this one has {len(mine)} ({mine[0]} to {mine[-1]})",
            _PLAN_AGAIN,
        )
    _check_batch(plan, graph.batch_size)


def check_modules(plan: Plan, model: nn.Module, rows: int) -> None:
    """Raise ``UsageError`` if a layer of the plan is no module of the model, or the batch has other ``rows``. This needs no capture;
    ``check_model`` compares all layers."""
    modules = {*UNNAMED_LAYERS, *(name for name, _ in model.named_modules(remove_duplicate=False))}
    missing = [layer.name for layer in plan.layers if layer.name.partition("@")[0] not in modules]
    if missing:
        raise UsageError(
            f"the plan is for another model: {type(model).__name__} has no module {missing[0]} "
            f"({len(missing)} of the plan's {len(plan.layers)} layers are missing)",
            _PLAN_AGAIN,
        )
    _check_batch(plan, rows)


def _check_batch(plan: Plan, rows: int) -> None:
    if plan.global_batch != rows:
        raise UsageError(
            f"the plan is for a global batch of {plan.global_batch}, this one has {rows}",
            f"give a batch of {plan.global_batch} rows (--global-batch {plan.global_batch}), or plan again",
        )


def check_devices(plan: Plan, cluster: Cluster, may_be_idle: bool = False) -> None:
    """Raise ``UsageError`` if the plan is for more devices than the cluster has or, unless devices ``may_be_idle``, for fewer."""
    if plan.device_count > cluster.count or (plan.device_count < cluster.count and not may_be_idle):
        made_for = "" if plan.devices == str(plan.device_count) else f" ({plan.devices})"
        raise UsageError(
            f"the plan is for {plan.device_count} devices{made_for}, and the cluster has {cluster.count}",
            f"give {plan.device_count} devices, or make a plan for these",
        )
