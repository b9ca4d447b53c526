"""``autopar help`` shows the pins, the kinds of exactness, the models of the zoo, and the known hardware."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from autopar.cli.console import plain_table, show
from autopar.devices import described, hardware
from autopar.devices.figures import cluster_figures, constant_figures
from autopar.errors import UsageError
from autopar.pins import PINS
from autopar.plan import ALLOWED
from autopar.techniques.technique import ANY
from autopar.zoo import CATALOGUE

_PINS = (
    "A pin is a decision that you make; the search makes the others. --pin KEY=VALUE may be repeated. A key of layers may name some of "
    "them before its last dot: a layer's name or the end of one (layers.3), a range (layers.0-7), a pattern (layers.*), or a layer class. "
    "A pin of named layers overrides a pin of all layers.\n"
)


def help_command(topic: str, name: str | None, as_json: bool) -> None:
    """Print the page of a topic; ``name`` is a kind of device, for the topic ``hardware``."""
    if name is not None and topic != "hardware":
        raise UsageError(f"the page of {topic} has no part {name!r}", f"write `autopar help {topic}`")
    if topic == "hardware" and name is not None:
        _show_figures(name, as_json)
    else:
        {"pins": _show_pins, "exactness": _show_allowed, "models": _show_models, "hardware": _show_kinds}[topic](
            as_json
        )


def _show_pins(as_json: bool) -> None:
    keys = ("name", "meaning", "example", "of_layer", "names", "least", "most")
    pins = [pin for pin in PINS.values() if not pin.former]
    table = plain_table(None, ("pin", "of"), texts=("values", "decides", "example"))
    for pin in pins:
        values = ", ".join(pin.names) or pin.choices
        meaning = pin.meaning + (f"; {ANY}: the search's choice; no pin: {pin.names[0]}" if ANY in pin.names else "")
        table.add_row(pin.name, "layers" if pin.of_layer else "plan", values, meaning, pin.example)
    show(as_json, [{key: getattr(pin, key) for key in keys} for pin in pins], Text(_PINS), table)


def _show_allowed(as_json: bool) -> None:
    names = {name.replace("_", "-"): meaning for name, meaning in ALLOWED.items()}
    table = plain_table(None, ("--allow",), texts=("what is not exact",))
    for row in names.items():
        table.add_row(*row)
    show(as_json, names, table)


def _show_models(as_json: bool) -> None:
    keys = ("name", "kind", "parameters", "source", "seq", "global_batch")
    table = plain_table(None, ("model", "kind"), ("parameters", "--seq", "--global-batch"))
    table.add_column("published in", no_wrap=True)
    for entry in CATALOGUE:
        size = f"{entry.parameters / 1e9:,.1f} B" if entry.parameters >= 1e9 else f"{entry.parameters / 1e6:,.1f} M"
        seq = f"{entry.seq:,}" if entry.seq else "-"
        table.add_row(entry.name, entry.kind, size, seq, f"{entry.global_batch:,}", entry.source)
    show(as_json, [{key: getattr(entry, key) for key in keys} for entry in CATALOGUE], table, width=150)


def _show_kinds(as_json: bool) -> None:
    kinds = {name: (hardware.gpu(name), entry) for name, entry in hardware.table().items()}
    kinds["cpu"] = hardware.cpu(1)[0], {}
    rows: list[dict[str, Any]] = [
        {
            "name": name,
            "memory_bytes": device.memory_bytes,
            "peak_bf16_flops": device.peak_flops["bfloat16"],
            "memory_bytes_per_s": device.memory_bytes_per_s,
            "nvlink_bytes_per_s": (entry.get("nvlink_gb_per_s_per_gpu_unidirectional") or 0) * 1e9,
        }
        for name, (device, entry) in kinds.items()
    ]
    table = plain_table(None, ("kind",), ("memory GiB", "bf16 TFLOP/s", "memory GB/s", "NVLink GB/s"))
    for row in rows:
        table.add_row(
            str(row["name"]),
            f"{row['memory_bytes'] / 2**30:,.0f}",
            f"{row['peak_bf16_flops'] / 1e12:,.4g}",
            f"{row['memory_bytes_per_s'] / 1e9:,.4g}",
            f"{row['nvlink_bytes_per_s'] / 1e9:,.4g}" if row["nvlink_bytes_per_s"] else "-",
        )
    show(as_json, rows, table)


def _show_figures(name: str, as_json: bool) -> None:
    """Print every figure by which plans for a kind of device are priced, with its unit and its source."""
    if name.lower() == "cpu":  # the figures that apply until `autopar profile` has measured the machine
        figures: list[dict[str, Any]] = [
            c for c in constant_figures() if c["figure"].startswith(("CPU", "GLOO", "USABLE"))
        ]
    else:
        kind = hardware.find(name)
        figures = cluster_figures(described(kind, 2, hardware.gpus_per_node(kind)))
    table = plain_table()
    for column in ("figure", "value", "unit", "source"):
        table.add_column(column, overflow="fold", justify="right" if column == "value" else "left")
    for row in figures:
        table.add_row(row["figure"], f"{row['value']:.4g}", row["unit"], row["source"])
    show(as_json, figures, table, width=170)
