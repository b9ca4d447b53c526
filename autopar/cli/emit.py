"""``autopar emit`` writes the program of a plan."""

from __future__ import annotations

import itertools
import json
import shlex
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from autopar.cli.commands import init_of, make_plan
from autopar.cli.console import Messages, show
from autopar.cli.options import PlanRequest
from autopar.compile import emit_program
from autopar.devices import Cluster
from autopar.errors import UsageError
from autopar.program.state import INITIAL, read_state, wrong_state
from autopar.program.weights import is_weights, mapped
from autopar.run.folder import folder_for_program
from autopar.run.initialise import is_path, write_initial_values


def emit_command(request: PlanRequest, output: str, as_json: bool) -> None:
    """Write the program's folder, with the model's values if it has any, and print its path."""
    folder = folder_for_program(output)
    torch.manual_seed(0)
    init = init_of(request)
    # read before the search, which may take minutes
    weights = _weights(Path(init)) if init and is_path(init) and Path(init).exists() else None
    workload, cluster, graph, plan = make_plan(request, device="meta" if init else None)
    with Messages() as messages:
        state = None if init else workload.model.state_dict()
        emit_program(graph, plan, folder, messages, type_check=request.type_check, state=state)
        if init and not is_path(init):
            write_initial_values(workload.model, init, 0, folder)
        elif weights is not None:
            if wrong := wrong_state(json.loads((folder / "layouts.json").read_text()), weights):
                raise UsageError(
                    f"{init} has no weights of this model: {wrong}",
                    f"{folder} is written without values: start its train.py with --init PATH of the model's weights",
                )
        elif init:
            messages.say(f"{init} is not on this machine: train.py checks it when the training starts")
        words = [str(folder / "train.py"), *(["--init", init] if init and is_path(init) else [])]
        commands = start_commands(cluster, plan.device_count, words)
        start = "\n".join(commands.values())
        devices = f"{plan.device_count} device{'s' if plan.device_count != 1 else ''}"
        how = [f"start it on {nodes} with {command}" for nodes, command in commands.items()]
        messages.say(f"{len(plan.layers)} layers for {devices}; {'; '.join(how)}")
        has_values = (folder / INITIAL).is_file() or bool(init)
        if not has_values:
            messages.say(
                f"the model is on meta, so {folder} has no initial values: start train.py with --init PATH (safetensors or a torch.save of "
                "its state dict), or with --draw-init to draw values; or emit it with --init own"
            )
    show(as_json, {"folder": str(folder), "start": start, "has_values": has_values}, str(folder))


def _weights(source: Path) -> dict[str, Tensor]:
    """Return the state dict in a file or folder, memory-mapped. Raises ``UsageError`` if it cannot be read."""
    try:
        return mapped(source) if is_weights(source) else read_state(source)
    except Exception as error:  # whatever torch.load raises
        why = next(iter(str(error).splitlines()), "")
        raise UsageError(
            f"{source} cannot be read: {type(error).__name__}{why and ': '}{why}",
            "give --init safetensors, or a torch.save of a state dict",
        ) from error


def start_commands(cluster: Cluster, devices: int, words: Sequence[str]) -> dict[str, str]:
    """Return the commands that start the program ``words`` on the cluster's first ``devices`` devices, by the nodes on which they start:
    "every node", or if nodes have different numbers of processes, "node 0", "nodes 1 to 3" and so on, by their rank."""
    nodes: list[int] = []  # the number of processes of each node
    for part in cluster.parts or (cluster,):
        here = min(devices - sum(nodes), part.count)
        full, rest = divmod(here, part.gpus_per_node)
        nodes += [part.gpus_per_node] * full + [rest] * (rest > 0)
    found, first = {}, 0
    for each, group in itertools.groupby(nodes):
        last = first + len(list(group)) - 1
        where = f"node {first}" if last == first else f"nodes {first} to {last}"
        where = "every node" if last - first + 1 == len(nodes) else where
        found[where] = shlex.join(["torchrun", "--nnodes", str(len(nodes)), "--nproc-per-node", str(each), *words])
        first = last + 1
    return found
