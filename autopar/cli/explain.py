"""``autopar explain`` explains why a plan was chosen."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autopar.cli.commands import (
    capture_request,
    cluster_and_options,
    make_plan,
    print_infeasible,
)
from autopar.cli.console import Messages, plain_table, show
from autopar.cli.options import PlanRequest
from autopar.cli.recorded import recorded_options, require, with_recorded_options
from autopar.data_files import MalformedFileError, read_json
from autopar.errors import InfeasibleError, UsageError
from autopar.explain import Explanation, Study, explain, suggest
from autopar.plan import Plan
from autopar.plan_files import check_devices, check_model, read_plan
from autopar.planning import find_plan
from autopar.summary import describe
from autopar.trainers.reading import trainer_named
from autopar.units import seconds, size
from autopar.workload import sequence_length


def explain_command(request: PlanRequest, target: str, as_json: bool) -> None:
    """Read or find the plan and print the explanation."""
    written = _read(target)
    request = with_recorded_options(written, request) if written is not None else replace(request, model=target)
    require(request, written, target)
    try:
        # the captured graph depends on the allowed deviations that the plan makes, so with ``allow`` the plan is found first
        given = make_plan(request, few_blocks=True)[-1] if written is None and request.allow else written
        found = explained(request, given)
    except InfeasibleError as error:
        if not as_json:
            raise
        print_infeasible(error)
    show(as_json, found.to_json(), Group(*_sections(found)))


def _read(target: str) -> Plan | None:
    """Return the plan in the file ``target``, or ``None`` if ``target`` names a model."""
    path = Path(target)
    if path.suffix != ".json":
        return None
    if not path.is_file():
        raise UsageError(f"there is no file {path}", "`autopar plan MODEL --devices ... -o FILE` writes a plan")
    try:
        data = read_json(path)
    except (OSError, MalformedFileError):
        return read_plan(path)  # raises with the reason
    return read_plan(path) if isinstance(data, dict) and "stages" in data else None  # a model's configuration


def explained(request: PlanRequest, given: Plan | None) -> Explanation:
    """Return the explanation of the ``given`` plan, or else of the best plan for the request."""
    if request.trainer:
        raise UsageError(
            f"explain compares plans as autopar's own program runs them; this one is for {trainer_named(request.trainer).title}",
            f"`autopar plan --trainer {request.trainer} --pin ...` plans the alternatives for it",
        )
    cluster, options = cluster_and_options(request)
    if given is not None:
        cluster = cluster.used_by(given.device_count)
    with Messages() as messages:
        graph, recapture = capture_request(request, cluster, given, messages)
        study = Study(graph, cluster, options, recapture=recapture, seq=sequence_length(graph))
        plan = None
        if given is not None:
            check_model(given, graph)
            check_devices(given, cluster)
            plan = study.reprice(given, cluster)
            if given.bound_s and same_prices(given, plan.prediction.step_time_s):
                plan = replace(plan, bound_s=given.bound_s, gap=given.gap, solver=given.solver)
        best = plan
        if best is None or not best.bound_s:
            try:
                best = find_plan(graph, cluster, options, pricer=study.pricer(), progress=messages)
            except InfeasibleError as error:
                raise suggest(study, error, lambda text: messages("explain", text)) from None
        best = replace(best, request=recorded_options(request))
        return explain(study, plan or best, best, lambda text: messages.step("explain", text))


def same_prices(written: Plan, step_s: float) -> bool:
    """Return whether the step time in the plan's file equals ``step_s``, the prediction of this version's cost model."""
    return math.isclose(written.prediction.step_time_s, step_s, rel_tol=1e-6)


def _sections(found: Explanation) -> list[RenderableType]:
    plan, best = found.plan, found.best
    step = best.prediction.step_time_s
    parts: list[RenderableType] = [
        Text.assemble(
            (plan.model, "bold"), " on ", (plan.devices, "bold"), f": {seconds(plan.prediction.step_time_s)} a step"
        ),
        Text(describe(plan)),
        "",
    ]
    if plan is not best and plan.prediction.step_time_s > step * (1 + 1e-9):
        slower = plan.prediction.step_time_s / step - 1
        parts += [Text(f"the best plan takes {seconds(step)}, this one {slower:.1%} more: {describe(best)}"), ""]
    parts.append(Text("what limits the plan", "bold"))
    parts += [Text(f"  {binding.text}") for binding in found.bindings] or [Text("  none of the tested resources")]
    parts += ["", Text("the value of each resource", "bold")]
    parts += [Text(f"  {price.text}") for price in found.prices]
    parts += ["", _families(found, step), "", _alternatives(found, step), "", _closing_line(found)]
    return parts


def _table(title: str, *columns: str) -> Table:
    table = plain_table(title)
    for i, name in enumerate(columns):
        last = i == len(columns) - 1
        table.add_column(name, justify="left" if last or i == 0 else "right", no_wrap=not last, overflow="fold")
    return table


def _families(found: Explanation, step: float) -> Table:
    table = _table("the best plan with ...", "", "step", "slower", "memory", "")
    for f in found.families:
        if f.step_time_s is None:
            table.add_row(f.title, "-", "-", "-", f.reason)
        else:
            how = "this plan" if f.chosen else f.summary
            table.add_row(f.title, seconds(f.step_time_s), _slower(f.step_time_s, step), size(f.memory_bytes or 0), how)
    return table


def _alternatives(found: Explanation, step: float) -> Table:
    others = found.alternatives
    table = _table(f"the best {len(others.plans)} of {others.total} configurations", "", "step", "slower", "memory", "")
    for number, (plan, row) in enumerate(zip(others.plans, others.to_json(step), strict=True), 1):
        took = plan.prediction.step_time_s
        table.add_row(str(number), seconds(took), _slower(took, step), size(row["memory_bytes"]), row["summary"])
    return table


def _closing_line(found: Explanation) -> Text:
    left = "" if found.alternatives.complete else "; there was no time to search every configuration"
    return Text(f"explained in {seconds(found.wall_time_s)}{left}", "dim")


def _slower(took: float, step: float) -> str:
    share = took / step - 1
    return "-" if abs(share) < 5e-4 else f"{share:+.1%}"
