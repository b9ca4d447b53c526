"""``autopar hardware``: the kinds of device that are known, and every figure of one with its source."""

from __future__ import annotations

import json
from typing import Any

from autopar.cli.console import console, plain_table
from autopar.devices import described, hardware
from autopar.devices.figures import cluster_figures, constant_figures
from autopar.errors import UsageError


def hardware_command(action: str | None, name: str | None, as_json: bool) -> None:
    """Lists the kinds, or shows one."""
    if action is None:
        _print_list(as_json)
    elif action != "show" or name is None:
        raise UsageError(
            f"autopar hardware {action!r} is not known", "write `autopar hardware` or `autopar hardware show H100-80GB`"
        )
    else:
        figures = cpu_figures() if name.lower() == "cpu" else kind_figures(hardware.find(name))
        _print_figures(figures, as_json)


def kind_figures(name: str) -> list[dict[str, Any]]:
    """Every figure that prices on that GPU are made from: name, value, unit, source."""
    per_node = hardware.table()[name].get("gpus_per_node", hardware.GPUS_PER_NODE)
    return cluster_figures(described(name, 2, per_node))


def cpu_figures() -> list[dict[str, Any]]:
    """The figures of a process on this machine's CPU, before ``autopar profile`` has measured them."""
    return [c for c in constant_figures() if c["figure"].startswith(("CPU", "GLOO", "USABLE"))]


def _print_list(as_json: bool) -> None:
    rows: list[dict[str, Any]] = []
    for name, entry in hardware.table().items():
        gpu = hardware.gpu(name)
        rows.append(
            {
                "name": name,
                "memory_bytes": gpu.memory_bytes,
                "peak_bf16_flops": gpu.peak_flops["bfloat16"],
                "memory_bytes_per_s": gpu.memory_bytes_per_s,
                "nvlink_bytes_per_s": (entry.get("nvlink_gb_per_s_per_gpu_unidirectional") or 0) * 1e9,
            }
        )
    cpu, _ = hardware.cpu(1)
    rows.append(
        {
            "name": "cpu",
            "memory_bytes": cpu.memory_bytes,
            "peak_bf16_flops": cpu.peak_flops["bfloat16"],
            "memory_bytes_per_s": cpu.memory_bytes_per_s,
            "nvlink_bytes_per_s": 0.0,
        }
    )
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    table = plain_table(None, ("kind",), ("memory GiB", "bf16 TFLOP/s", "memory GB/s", "NVLink GB/s"))
    for row in rows:
        table.add_row(
            str(row["name"]),
            f"{row['memory_bytes'] / 2**30:,.0f}",
            f"{row['peak_bf16_flops'] / 1e12:,.4g}",
            f"{row['memory_bytes_per_s'] / 1e9:,.4g}",
            f"{row['nvlink_bytes_per_s'] / 1e9:,.4g}" if row["nvlink_bytes_per_s"] else "-",
        )
    console().print(table)


def _print_figures(figures: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print(json.dumps(figures, indent=1))
        return
    table = plain_table()
    for column in ("figure", "value", "unit", "source"):
        table.add_column(column, overflow="fold", justify="right" if column == "value" else "left")
    for row in figures:
        table.add_row(row["figure"], f"{row['value']:.4g}", row["unit"], row["source"])
    console(width=170).print(table)
