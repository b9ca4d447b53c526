"""Reads plans from files, and checks that they fit a model and devices."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from autopar.data_files import MalformedFileError, read_json
from autopar.errors import UsageError
from autopar.plan import Plan
from autopar.plan_schema import check_plan

if TYPE_CHECKING:
    from autopar.devices import Cluster
    from autopar.graph import Graph

_WRITTEN_BY = "`autopar plan MODEL --devices ... -o FILE` writes one"


def read_plan(path: str | Path) -> Plan:
    """Read a plan that ``Plan.dumps`` or ``autopar plan -o`` wrote; the file is untrusted data.

    Raises ``UsageError`` if the file can't be read, or isn't a valid plan (``plan_schema``).
    """
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
            "a plan fits the model, the batch and the version of autopar that it was made for: plan again",
        )
    if plan.global_batch != graph.batch_size:
        raise UsageError(
            f"the plan is for a global batch of {plan.global_batch}, this one has {graph.batch_size}",
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
