"""``autopar explain``: why a plan was chosen."""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from autopar.cli.commands import asked, given, load, planned, print_infeasible, recapture
from autopar.cli.console import Messages, console, plain_table
from autopar.cli.load import names_code
from autopar.data_files import DataError, read_json
from autopar.devices import Cluster
from autopar.errors import InfeasibleError, UsageError
from autopar.explain import Explanation, Study, describe, explain, suggest
from autopar.graph import Graph
from autopar.plan import Plan
from autopar.plan_files import check_devices, check_model, read_plan
from autopar.planning import capture_model, find_plan
from autopar.search.concessions import Concession
from autopar.units import seconds, size
from autopar.workload import Recapture, sequence_length, with_concession

_SAME = 1e-6  # relative: prices that agree to this are the prices that the plan was made with


def explain_command(target: str, model: str | None, as_json: bool, **request: Any) -> None:
    """Reads or finds the plan and prints the explanation."""
    written = _read(target)
    request |= {"model": model}
    request = repeated(written, request) if written is not None else request | {"model": target}
    check_named(target, request, written)
    try:
        if written is None and request["allow"]:  # the plan says which microbatches to explain
            written = planned(request)[-1]
        found = explained(request, written)
    except InfeasibleError as error:
        if not as_json:
            raise
        print_infeasible(error)
    if as_json:
        print(json.dumps(found.to_json(), indent=1))
    else:
        print_explanation(found, console())


def check_named(file: str, request: dict[str, Any], written: Plan | None) -> None:
    """Raise ``UsageError`` if a request does not name the model or the devices."""
    if (found := lacking(request, written)) is not None:
        raise UsageError(f"{file} {found[0]}", f"add {found[1]}")


def lacking(request: dict[str, Any], written: Plan | None) -> tuple[str, str] | None:
    """What the file of the plan ``written`` does not say of the model and the devices, as the end of a sentence about the file, and the
    options that say it; ``None`` where the request names both."""
    lacks = [option for option in ("model", "devices") if not request.get(option)]
    if not lacks:
        return None
    code = _factory_of(written) if lacks[0] == "model" else ""
    options = [f"--{option} {shlex.quote(code)}" if code and option == "model" else f"--{option}" for option in lacks]
    why = f"names the model {code}, which is code, and no file's code is run"
    return why if code else f"does not name its {' and '.join(lacks)}", " and ".join(options)


def _factory_of(written: Plan | None) -> str:
    """The factory that a plan's file names; empty if its model is data."""
    model = "" if written is None else str(written.request.get("model", ""))
    return model if names_code(model) else ""


def repeated(written: Plan, request: dict[str, Any]) -> dict[str, Any]:
    """The request with the values that the plan was made with where it has none. A factory comes from the command line alone: one that a
    file names is never imported."""
    # where the first command line left the batch to the factory, this one does, too
    before = written.request or {"global_batch": written.global_batch, "devices": written.devices}
    if _factory_of(written):
        before = {key: value for key, value in before.items() if key != "model"}
    return request | {key: value for key, value in before.items() if request.get(key) in (None, False, ())}


def _read(target: str) -> Plan | None:
    """The plan in the file ``target``, or ``None`` where ``target`` names a model."""
    path = Path(target)
    if path.suffix != ".json":
        return None
    if not path.is_file():
        raise UsageError(f"there is no file {path}", "`autopar plan MODEL --devices ... -o FILE` writes a plan")
    try:
        data = read_json(path)
    except (OSError, DataError):
        return read_plan(path)  # which raises and says why
    return read_plan(path) if isinstance(data, dict) and "stages" in data else None  # a model's configuration


def explained(request: dict[str, Any], written: Plan | None) -> Explanation:
    """The explanation of ``written``, or of the best plan for the request."""
    cluster, options = asked(request)
    with Messages() as messages:
        graph, again = captured(request, cluster, written, messages)
        study = Study(graph, cluster, options, recapture=again, seq=sequence_length(graph))
        plan = None
        if written is not None:
            check_model(written, graph)
            check_devices(written, cluster)
            plan = study.reprice(written, cluster)
            before, now = written.prediction.step_time_s, plan.prediction.step_time_s
            if written.bound_s and math.isclose(before, now, rel_tol=_SAME):
                plan = dataclasses.replace(plan, bound_s=written.bound_s, gap=written.gap, solver=written.solver)
        best = plan
        if best is None or not best.bound_s:
            try:
                best = find_plan(graph, cluster, options, pricer=study.pricer(), progress=messages)
            except InfeasibleError as error:
                raise suggest(study, error, lambda text: messages("explain", text)) from None
        best = dataclasses.replace(best, request=given(request))
        return explain(study, plan or best, best, lambda text: messages("explain", text))


def captured(
    request: dict[str, Any], cluster: Cluster, written: Plan | None, messages: Messages
) -> tuple[Graph, Recapture]:
    """The graph of a request, and how to make it again with other sizes; both give up the exactness that the plan ``written`` gives up."""
    concession = Concession() if written is None else Concession.of(written)
    whole = recapture(request, cluster)

    def again(**sizes: Any) -> Graph:
        return with_concession(whole(**sizes), lambda **rows: whole(**sizes | rows), concession)

    if concession != Concession():
        return again(), again
    return capture_model(load(request, cluster, messages), messages), again


def print_explanation(found: Explanation, to: Console) -> None:
    """Prints every section of the explanation."""
    to.print(Group(*_sections(found)))


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
    parts += [Text(f"  {binding.text}") for binding in found.bindings] or [
        Text("  none of the resources that were tried")
    ]
    parts += ["", Text("what more or less of each resource would save", "bold")]
    parts += [Text(f"  {price.text}") for price in found.prices]
    parts += ["", _families(found, step), "", _alternatives(found, step), "", _end(found)]
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
            how = ("this plan" if f.chosen else f.summary) + (f" (has a price only: {f.remark})" if f.remark else "")
            table.add_row(f.title, seconds(f.step_time_s), _slower(f.step_time_s, step), size(f.memory_bytes or 0), how)
    return table


def _alternatives(found: Explanation, step: float) -> Table:
    others = found.alternatives
    table = _table(f"the best {len(others.plans)} of {others.total} outer choices", "", "step", "slower", "memory", "")
    for number, (plan, row) in enumerate(zip(others.plans, others.to_json(step), strict=True), 1):
        took = plan.prediction.step_time_s
        table.add_row(str(number), seconds(took), _slower(took, step), size(row["memory_bytes"]), row["summary"])
    return table


def _end(found: Explanation) -> Text:
    left = "" if found.alternatives.complete else "; there was no time to look at every outer choice"
    return Text(f"explained in {seconds(found.wall_time_s)}{left}", "dim")


def _slower(took: float, step: float) -> str:
    share = took / step - 1
    return "-" if abs(share) < 5e-4 else f"{share:+.1%}"
