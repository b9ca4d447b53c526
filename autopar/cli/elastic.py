"""``autopar run --elastic``: turns this process into the node's agent (``autopar.run.elastic``), which runs this module as a script to plan
and write a program for the current number of nodes."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from autopar.cli.commands import batch_with_values, init_of, make_plan
from autopar.cli.options import PlanRequest
from autopar.compile import emit_program
from autopar.devices import parse
from autopar.errors import AutoparError, UsageError
from autopar.run.elastic import BATCH, Elastic, Nodes, become_agent
from autopar.run.initialise import is_path, write_initial_values


def become_node(nodes: Nodes, request: PlanRequest, output: str | None, options: Mapping[str, Any]) -> NoReturn:
    """Replace this process by the node's agent; ``options`` has the values of ``train.py``'s options by name."""
    if options["checkpoint"] is None:
        raise UsageError("--elastic needs checkpoints to continue from", "add --checkpoint DIR, which all nodes share")
    if request.plan_file is not None:
        raise UsageError(
            "--plan is a plan for one number of devices, but --elastic needs a plan for several",
            "leave one of them out",
        )
    if request.devices.endswith(".toml"):
        raise UsageError(
            f"--devices {request.devices} describes one cluster, and --elastic plans for different numbers of nodes",
            "give the devices of one node, such as 8xH100-80GB",
        )
    cluster = parse(request.devices)
    if cluster.nodes > 1:
        raise UsageError(
            f"--devices {request.devices} are {cluster.nodes} nodes, and --elastic takes the devices of one",
            f"give {cluster.gpus_per_node}x{cluster.gpu.name}",
        )
    if nodes.maximum > 1 and request.devices.isdecimal() and cluster.kind == "cuda":
        raise UsageError(
            f"--devices {request.devices} are GPUs of this machine, and plans for several nodes need their kind",
            "give 8xH100-80GB",
        )
    given = {name.replace("_", "-"): value for name, value in options.items() if value is not None}
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    if is_path(init := init_of(request)):
        words += ["--init", str(init)]  # the ranks start in this process's folder
    programs = str(Path(output or Path(options["checkpoint"]) / "programs").resolve())
    become_agent(Elastic(asdict(request), cluster.count, options["seed"], programs, (*words, "--resume")), nodes)


def devices_of(elastic: Elastic, nodes: int) -> str:
    """Return the value of ``--devices`` for ``nodes`` nodes."""
    per_node = str(elastic.request["devices"])
    if per_node.isdecimal():
        return str(nodes * elastic.ranks)
    return f"{nodes}x{elastic.ranks}x{parse(per_node).gpu.name}"


def write_program(elastic: Elastic, nodes: int) -> None:
    """Plan for ``nodes`` nodes, and write the program with its batch, or the reason why there is no plan."""
    print(f"planning for {nodes} node{'s' * (nodes > 1)}", file=sys.stderr, flush=True)
    folder = elastic.folder(nodes)
    part = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
    torch.manual_seed(elastic.seed)
    request = PlanRequest(**{**elastic.request, "devices": devices_of(elastic, nodes)})
    try:
        init = init_of(request)
        workload, _, graph, plan = make_plan(request, device="meta" if init else "cpu")
        state = None if init else workload.model.state_dict()
        emit_program(graph, plan, part, type_check=request.type_check, state=state)
        if init and not is_path(init):
            write_initial_values(workload.model, init, elastic.seed, part)
    except AutoparError as error:
        print(f"there is no plan for {nodes} nodes: {error.message}", file=sys.stderr, flush=True)
        shutil.rmtree(part, ignore_errors=True)
        elastic.refusal(nodes).write_text(f"{error.message}\n")
        return
    torch.save(replace(workload, batch=batch_with_values(request, workload)).inputs(graph), part / BATCH)
    part.rename(folder)


if __name__ == "__main__":
    write_program(Elastic.read(sys.argv[1]), int(sys.argv[2]))
