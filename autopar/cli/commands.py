"""``autopar plan`` and ``emit``: load the model, go through the stages of ``autopar.compile``, print."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

import torch

from autopar.cli.console import Messages, console
from autopar.cli.load import Sizes, is_pretrained, load_model
from autopar.cli.output import output_file
from autopar.cli.render import print_plan
from autopar.compile import emit_program
from autopar.devices import Cluster, parse
from autopar.errors import BatchError, InfeasibleError, UsageError
from autopar.explain import Study, nearby_batch
from autopar.graph import Graph
from autopar.pins import PINS, read_pins
from autopar.plan import Plan
from autopar.planning import plan_model
from autopar.program.state import INITIAL
from autopar.run.folder import folder_for_program
from autopar.run.initialise import is_path, with_tables, write_values
from autopar.search import SearchOptions
from autopar.units import parse_size
from autopar.workload import Recapture, Workload


def plan_command(as_json: bool, output: str | None, **request: Any) -> None:
    """``autopar plan``: the plan as tables, or as one JSON object; an infeasible request is such an object too."""
    file = output_file(output, "-o") if output else None
    try:
        _, cluster, graph, plan = planned(request, price_pins=True)
    except InfeasibleError as error:
        if not as_json:
            raise
        print_infeasible(error)
    if file is not None:
        file.write_text(plan.dumps() + "\n")
    if as_json:
        print(plan.dumps())
        return
    with Messages() as messages:
        study = Study(graph, cluster, asked(request)[1], recapture=recapture(request, cluster))
        hint = nearby_batch(study, plan, messages)
    print_plan(plan, console(), hint)


def print_infeasible(error: InfeasibleError) -> NoReturn:
    """The answer to an infeasible request as one JSON object; ends the process with its status."""
    changes = [change.to_json() for change in error.changes]
    print(json.dumps({"feasible": False, "error": error.message, "hint": error.hint, "changes": changes}, indent=1))
    sys.exit(error.exit_status)


def emit_command(output: str, as_json: bool, **request: Any) -> None:
    """``autopar emit``: writes the folder, with the model's values where it has any, prints its path."""
    folder = folder_for_program(output)
    torch.manual_seed(0)
    init = init_of(request)
    workload, cluster, graph, plan = planned(request, device="meta" if init else None)
    with Messages() as messages:
        state = None if init else workload.model.state_dict()
        emit_program(graph, plan, folder, messages, type_check=request["type_check"], state=state)
        if init and not is_path(init):
            write_values(workload.model, init, 0, folder)
        nodes, each = -(-plan.device_count // cluster.gpus_per_node), min(plan.device_count, cluster.gpus_per_node)
        start = f"torchrun --nnodes {nodes} --nproc-per-node {each} {folder / 'train.py'}"
        start += f" --init {init}" if is_path(init) else ""
        devices = f"{plan.device_count} device{'s' if plan.device_count != 1 else ''}"
        words = f"{len(plan.layers)} layers for {devices}; start it on every node with {start}"
        messages.console.print(words, highlight=False, soft_wrap=True)  # to be copied
        has_values = (folder / INITIAL).is_file() or bool(init)
        if not has_values:
            messages.console.print(
                f"the model is on meta and has no values, and so {folder} has none: start train.py with --init PATH, its safetensors or "
                "a torch.save of its state dict, or with --draw-init to draw values; or emit it with --init own",
                highlight=False,
                soft_wrap=True,
            )
    print(json.dumps({"folder": str(folder), "start": start, "has_values": has_values}) if as_json else folder)


def check_pins(request: Mapping[str, Any]) -> None:
    """Raise ``UsageError`` where decisions are given beside a plan, which has made them."""
    names = [name for name in (*PINS, "context", "microbatch", "sequence") if request.get(name) not in (None, False)]
    pins = [f"--{name.replace('_', '-')}" for name in names] + ["--pin"] * bool(request.get("pins"))
    if request.get("plan_file") and pins:
        raise UsageError(
            f"--plan has made the decision that {pins[0]} makes",
            f"leave --plan out, or {' and '.join(pins)}; `autopar plan` makes another plan",
        )


def planned(
    request: dict[str, Any], device: str | None = "meta", price_pins: bool = False
) -> tuple[Workload, Cluster, Graph, Plan]:
    """The stages up to the plan for the options of a command line.

    The model is on ``device``; where that is ``None``, on the CPU if the model has values or is small enough to be given some.
    """
    check_pins(request)
    cluster, options = asked(request)
    if price_pins:
        options = dataclasses.replace(options, pin_time_s=options.time_limit_s / 2)
    with Messages() as messages:
        workload = load(request, cluster, messages, device or "meta")
        if device is None and _worth_values(workload):
            workload = load(request, cluster, messages, "cpu")
        graph, plan = plan_model(
            workload,
            cluster,
            options,
            plan=request.get("plan_file"),
            capture_check=request.get("capture_check", True),
            recapture=recapture(request, cluster),
            progress=messages,
        )
    return workload, cluster, graph, dataclasses.replace(plan, request=plan.request or given(request))


VALUES_LIMIT_BYTES = 4 * 10**9
"""Models of the zoo and of configurations have no trained values; up to this size they are emitted with initial values."""


def _worth_values(workload: Workload) -> bool:
    """Whether the model is on meta and small enough to be made with values."""
    tensors = list(workload.model.state_dict().values())
    on_meta = any(tensor.is_meta for tensor in tensors)
    return on_meta and sum(tensor.numel() * tensor.element_size() for tensor in tensors) <= VALUES_LIMIT_BYTES


def asked(request: dict[str, Any]) -> tuple[Cluster, SearchOptions]:
    """The devices and the search's options of a command line."""
    limit = parse_size(request["memory_limit"]) if request["memory_limit"] else None
    cluster = parse(request["devices"], memory_limit_bytes=limit, calibration=request.get("calibration"))
    return cluster, SearchOptions(
        time_limit_s=request["time_limit"],
        allow=allowed(request),
        pin=read_pins(request["pins"]),
        **{name: request.get(name) for name in PINS},  # type: ignore[arg-type]
    )


def load(request: dict[str, Any], cluster: Cluster, messages: Messages | None = None, device: str = "meta") -> Workload:
    """The workload of a command line."""
    if messages is not None:
        messages("load", request["model"])
    sizes = Sizes(request["seq"], request["global_batch"], request["precision"])
    default = "float32" if cluster.kind == "cpu" else "bfloat16"
    workload = load_model(request["model"], sizes, device=device, default_precision=default)
    workload = dataclasses.replace(workload, model=with_tables(workload.model, init_of(request)))
    return dataclasses.replace(workload, precision=request["precision"], local_batch_norm=request["local_batch_norm"])


def init_of(request: dict[str, Any]) -> str | None:
    """Where the model's values come from, if not from the model: ``--init``, or MODEL where it is a folder of transformers."""
    folder = request["model"] if is_pretrained(request["model"]) else None
    found: str | None = request.get("init") or folder
    return found


def recapture(request: dict[str, Any], cluster: Cluster) -> Recapture:
    """Makes the model of a command line again with other sizes, or cuts its batch where the model makes its own."""

    def again(**sizes: Any) -> Graph:
        try:
            workload = load(request | {key: value for key, value in sizes.items() if value is not None}, cluster)
        except BatchError as refused:
            try:
                return load(request, cluster).resized(**sizes)  # where a factory has no parameter for it
            except BatchError:
                raise refused from None
        return workload.capture()

    return again


def given(request: dict[str, Any]) -> dict[str, Any]:
    """The options that were given, without those for a command's output, as ``Plan.request`` records them."""
    kept = ("model", "devices", "seq", "global_batch", "precision", "memory_limit", "time_limit", *PINS)
    found = {key: request[key] for key in kept if request.get(key) is not None}
    found |= {"pins": list(request["pins"])} if request["pins"] else {}
    found |= {"allow": list(request["allow"])} if request.get("allow") else {}
    return found | ({"local_batch_norm": True} if request["local_batch_norm"] else {})


def allowed(request: dict[str, Any]) -> tuple[str, ...]:
    """What of exactness the command line gives up, by the names in ``autopar.plan.ALLOWED``."""
    return tuple(name.replace("-", "_") for name in request.get("allow") or ())
