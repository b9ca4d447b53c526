"""What each command does: load the model, go through the stages of ``autopar.compile``, print."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Any

from autopar.errors import BatchError, InfeasibleError, LaunchError
from autopar.units import parse_size

if TYPE_CHECKING:
    from autopar.cli.console import Messages
    from autopar.cli.load import Loaded
    from autopar.devices import Cluster
    from autopar.explain.study import Recapture
    from autopar.graph import Graph
    from autopar.plan import Plan
    from autopar.search import SearchOptions


def plan_command(as_json: bool, **request: Any) -> None:
    """``autopar plan``: the plan as tables, or as one JSON object; an infeasible request is such an object too."""
    try:
        _, _, _, plan = planned(request, pin_time_s=request["time_limit"] / 2)
    except InfeasibleError as error:
        if not as_json:
            raise
        changes = [change.to_json() for change in error.changes]
        print(json.dumps({"feasible": False, "error": error.message, "hint": error.hint, "changes": changes}, indent=1))
        sys.exit(error.exit_status)
    if as_json:
        print(plan.dumps())
    else:
        _print(plan)


def emit_command(output: str, **request: Any) -> None:
    """``autopar emit``: writes the folder, with the model's values where it has any, prints its path."""
    import torch

    from autopar.cli.output import output_folder
    from autopar.compile import emit_program
    from autopar.program.state import INITIAL

    folder = output_folder(output)
    torch.manual_seed(0)
    loaded, cluster, graph, plan = planned(request, device=None)
    with _messages() as messages:
        state = loaded.module.state_dict()
        emit_program(graph, plan, folder, messages, type_check=request["type_check"], state=state)
        messages.console.print(
            f"{len(plan.layers)} layers for {plan.device_count} devices; start it on every node with "
            f"torchrun --nnodes {cluster.nodes} --nproc-per-node {min(plan.device_count, cluster.gpus_per_node)} "
            f"{folder / 'train.py'}",
            highlight=False,
            soft_wrap=True,  # to be copied
        )
        if not (folder / INITIAL).is_file():
            messages.console.print(
                f"the model is on meta and has no values, and so {folder} has none: start train.py with --init FILE, a torch.save of the "
                "model's state dict, or with --draw-init to draw values",
                highlight=False,
                soft_wrap=True,
            )
    print(folder)


def run_command(steps: int, seed: int, lr: float, output: str | None, **request: Any) -> None:
    """``autopar run``: trains on the factory's batch over and over, prints the loss of each step."""
    import torch

    from autopar.cli.output import output_folder
    from autopar.compile import start_program
    from autopar.devices import parse

    devices = request["devices"]
    if not parse(devices).local:
        raise LaunchError(
            f"{devices} describes devices that are not here, so nothing can run on them",
            "`autopar emit` writes the program for them; `--devices 4` runs on this machine",
        )
    folder = output_folder(output) if output else None
    torch.manual_seed(seed)
    loaded, cluster, graph, plan = planned(request, device="cpu")
    with _messages() as messages:
        program = start_program(
            graph, plan, cluster, folder, loaded.module, messages, request["type_check"], seed=seed, lr=lr
        )
    with program:
        program.train([loaded.batch], steps, lambda step, loss: print(f"step {step + 1} loss {loss:.6f}", flush=True))


def models_command(as_json: bool) -> None:
    """``autopar models``: the zoo."""
    from autopar.cli.console import console, plain_table
    from autopar.zoo import CATALOGUE

    if as_json:
        keys = ("name", "kind", "parameters", "source", "seq", "global_batch")
        print(json.dumps([{key: getattr(entry, key) for key in keys} for entry in CATALOGUE], indent=1))
        return
    table = plain_table()
    table.add_column("model", no_wrap=True)
    table.add_column("kind", no_wrap=True)
    for name in ("parameters", "--seq", "--global-batch"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("published in", no_wrap=True)
    for entry in CATALOGUE:
        size = f"{entry.parameters / 1e9:,.1f} B" if entry.parameters >= 1e9 else f"{entry.parameters / 1e6:,.1f} M"
        seq = f"{entry.seq:,}" if entry.seq else "-"
        table.add_row(entry.name, entry.kind, size, seq, f"{entry.global_batch:,}", entry.source)
    console(width=150).print(table)


def planned(
    request: dict[str, Any], device: str | None = "meta", pin_time_s: float | None = None
) -> tuple[Loaded, Cluster, Graph, Plan]:
    """The stages up to the plan for the options of a command line; on ``device``, or where the model can have values if it is ``None``."""
    from autopar.compile import plan_model

    cluster, options = asked(request)
    with _messages() as messages:
        loaded = load(request, cluster, messages, device or "meta")
        if device is None and _worth_values(loaded):
            loaded = load(request, cluster, messages, "cpu")
        graph, plan = plan_model(
            loaded.module,
            loaded.batch,
            loaded.loss_fn,
            cluster,
            options,
            name=loaded.name,
            precision=request["precision"],
            local_batch_norm=request["local_batch_norm"],
            allow=allowed(request),
            plan=request.get("plan_file"),
            capture_check=request.get("capture_check", True),
            progress=messages,
            pin_time_s=pin_time_s,
            recapture=recapture(request, cluster),
        )
    return loaded, cluster, graph, dataclasses.replace(plan, request=plan.request or given(request))


VALUES_LIMIT_BYTES = 4 * 10**9
"""Models of the zoo and of configurations have no trained values; up to this size they are emitted with those of their initialisers."""


def _worth_values(loaded: Loaded) -> bool:
    """Whether the model is on meta and small enough to be made with values."""
    tensors = list(loaded.module.state_dict().values())
    on_meta = any(tensor.is_meta for tensor in tensors)
    return on_meta and sum(tensor.numel() * tensor.element_size() for tensor in tensors) <= VALUES_LIMIT_BYTES


def asked(request: dict[str, Any]) -> tuple[Cluster, SearchOptions]:
    """The devices and the pins of a command line."""
    from autopar.devices import parse
    from autopar.search import SearchOptions
    from autopar.search.options import OF_LAYER, OF_PLAN, read_pins

    limit = parse_size(request["memory_limit"]) if request["memory_limit"] else None
    cluster = parse(request["devices"], memory_limit_bytes=limit, calibration=request.get("calibration"))
    return cluster, SearchOptions(
        time_limit_s=request["time_limit"],
        pin=read_pins(request["pins"]),
        **{name: request.get(name) for name in (*OF_PLAN, *OF_LAYER)},  # type: ignore[arg-type]
    )


def load(request: dict[str, Any], cluster: Cluster, messages: Messages | None = None, device: str = "meta") -> Loaded:
    """The model and the batch of a command line."""
    from autopar.cli.load import Sizes, load_model

    if messages is not None:
        messages("load", request["model"])
    sizes = Sizes(request["seq"], request["global_batch"], request["precision"])
    default = "float32" if cluster.kind == "cpu" else "bfloat16"
    return load_model(request["model"], sizes, device=device, default_precision=default)


def recapture(request: dict[str, Any], cluster: Cluster) -> Recapture:
    """Makes the model of a command line again with other sizes, or cuts its batch where the model makes its own."""
    from autopar.compile import capture_model
    from autopar.explain.resize import recapture_cut

    def again(**sizes: Any) -> Graph:
        how = {"name": None, "precision": request["precision"], "local_batch_norm": request["local_batch_norm"]}
        try:
            changed = request | {key: value for key, value in sizes.items() if value is not None}
            loaded = load(changed, cluster)
        except BatchError as refused:
            loaded = load(request, cluster)
            cut = recapture_cut(loaded.module, loaded.batch, loaded.loss_fn, **how | {"name": loaded.name})
            try:
                return cut(**sizes)  # where a factory has no parameter for it
            except BatchError:
                raise refused from None
        how |= {"name": loaded.name, "precision": changed["precision"]}
        return capture_model(loaded.module, loaded.batch, loaded.loss_fn, **how)

    return again


def given(request: dict[str, Any]) -> dict[str, Any]:
    """The options that were given, without those of a command's output: what ``Plan.request`` records."""
    from autopar.search.options import OF_LAYER, OF_PLAN

    kept = ("model", "devices", "seq", "global_batch", "precision", "memory_limit", "time_limit", *OF_PLAN, *OF_LAYER)
    found = {key: request[key] for key in kept if request.get(key) is not None}
    found |= {"pins": list(request["pins"])} if request["pins"] else {}
    found |= {"allow": list(request["allow"])} if request.get("allow") else {}
    return found | ({"local_batch_norm": True} if request["local_batch_norm"] else {})


def allowed(request: dict[str, Any]) -> tuple[str, ...]:
    """What of exactness the command line gives up, by the names in ``autopar.plan.ALLOWED``."""
    return tuple(name.replace("-", "_") for name in request.get("allow") or ())


def _messages() -> Messages:
    from autopar.cli.console import Messages

    return Messages()


def _print(plan: Plan) -> None:
    from autopar.cli.console import console
    from autopar.cli.render import print_plan

    print_plan(plan, console())
