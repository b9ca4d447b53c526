"""``autopar plan``: the best plan for a model, or the best configuration of another trainer."""

from __future__ import annotations

from autopar.cli.commands import cluster_and_options, make_plan, print_infeasible, recapture
from autopar.cli.console import Messages, output_file, show
from autopar.cli.options import PlanRequest
from autopar.cli.render import plan_tables
from autopar.cli.trainers import check_export, plan_for_trainer, write_export
from autopar.errors import InfeasibleError, UsageError
from autopar.explain import Study, nearby_batch
from autopar.plan import Plan


def plan_command(request: PlanRequest, output: str | None, export: str | None, as_json: bool) -> None:
    """Print the plan, or why the request is infeasible, as tables or as one JSON object."""
    if export and not request.trainer:
        raise UsageError("--export writes the configuration of a trainer", "name one with --trainer")
    file = output_file(output, "-o") if output else None
    hint = ""
    try:
        plan = _of_trainer(request, export) if request.trainer else None
        if plan is None:
            _, cluster, graph, plan = make_plan(request, price_pins=True, few_blocks=True)
            if not as_json:
                with Messages() as messages:
                    study = Study(
                        graph, cluster, cluster_and_options(request)[1], recapture=recapture(request, cluster)
                    )
                    hint = nearby_batch(study, plan, messages)
    except InfeasibleError as error:
        if not as_json:
            raise
        print_infeasible(error)
    if file is not None:
        file.write_text(plan.dumps() + "\n")
    show(as_json, plan.to_json(), plan_tables(plan, hint))


def _of_trainer(request: PlanRequest, export: str | None) -> Plan:
    """Return the best plan of another trainer, and write its configuration into the folder ``export``."""
    if export:
        check_export(export)  # before a search that may take minutes
    with Messages() as messages:
        plan, exported = plan_for_trainer(request, messages)
        if export:
            write_export(exported, plan, export, messages)
    return plan
