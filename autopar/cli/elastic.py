"""The command line's part of ``autopar run --elastic`` (``autopar.run.elastic``): the request, and a program for a number of nodes."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch

from autopar.cli.commands import planned
from autopar.compile import emit_program
from autopar.devices import parse
from autopar.errors import AutoparError, UsageError
from autopar.run.elastic import BATCH, Elastic, Nodes, become_agent


def elastic_command(
    nodes: Nodes, request: Mapping[str, Any], output: str | None, options: Mapping[str, Any]
) -> NoReturn:
    """``autopar run --elastic``: becomes the agent of this node; ``options`` are those of ``train.py``, by name."""
    if options["checkpoint"] is None:
        raise UsageError("--elastic needs checkpoints to continue from", "add --checkpoint DIR, which all nodes share")
    if request["plan_file"] is not None:
        raise UsageError(
            "--plan is a plan for one number of devices, but --elastic needs a plan for several",
            "leave one of them out",
        )
    cluster, devices = parse(request["devices"]), str(request["devices"])
    if nodes.most > 1 and devices.isdigit() and cluster.kind == "cuda":
        raise UsageError(
            f"--devices {devices} are GPUs of this machine, and plans for several nodes need their kind",
            "give 8xH100-80GB",
        )
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    programs = str(Path(output or Path(options["checkpoint"]) / "programs").resolve())
    become_agent(Elastic(request, cluster.count, options["seed"], programs, (*words, "--resume")), nodes)


def devices_of(elastic: Elastic, nodes: int) -> str:
    """So many nodes in the form that ``--devices`` takes."""
    own = str(elastic.request["devices"])
    return str(nodes * elastic.ranks) if own.isdigit() else f"{nodes}x{own}"


def write_program(elastic: Elastic, nodes: int) -> None:
    """Plan for so many nodes, and write the program with its batch, or why there is none."""
    print(f"planning for {nodes} node{'s' * (nodes > 1)}", file=sys.stderr, flush=True)
    folder = elastic.folder(nodes)
    part = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
    torch.manual_seed(elastic.seed)
    try:
        workload, _, graph, plan = planned({**elastic.request, "devices": devices_of(elastic, nodes)}, device="cpu")
        state = workload.model.state_dict()
        emit_program(graph, plan, part, type_check=elastic.request["type_check"], state=state)
    except AutoparError as error:
        print(f"there is no plan for {nodes} nodes: {error.message}", file=sys.stderr, flush=True)
        shutil.rmtree(part, ignore_errors=True)
        elastic.refusal(nodes).write_text(f"{error.message}\n")
        return
    torch.save(workload.inputs(graph), part / BATCH)
    part.rename(folder)


if __name__ == "__main__":
    write_program(Elastic.read(sys.argv[1]), int(sys.argv[2]))
