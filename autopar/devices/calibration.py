"""Reads the calibration file that ``autopar profile`` writes, and applies its measurements to devices and links.

The file is a JSON object: ``version``, ``machine`` (processor, cores, torch, GPU), ``measured_at``, and ``figures``. Each figure is one
measurement: the number of ``processes`` that ran, its ``size``, ``unit``, ``median``, the quartiles ``low`` and ``high``, and the
``count`` of samples.

The file's path is ``AUTOPAR_CALIBRATION`` (empty: no file), else ``~/.cache/autopar/calibration.json`` (``XDG_CACHE_HOME`` is
respected). The measurements apply to this machine's devices if they were made with one process for each device. If the user names a file
that was measured on a GPU, its op times also apply to GPUs of that kind in other machines; its link times don't.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autopar.data_files import MalformedFileError, read_json, shown
from autopar.devices import hardware
from autopar.devices.cluster import Cluster, Gpu, Link
from autopar.devices.measured import POINTWISE, CollectiveTimes, Curve, Ops
from autopar.errors import DeviceError

VERSION = 1
VARIABLE = "AUTOPAR_CALIBRATION"
_RERUN = "`autopar profile` measures this machine and writes the file again"
MEMORY = "memory"
"""The name of the figure that has the bytes that programs take over the predicted ones."""
_MIN_COMPUTE_SHARE = 0.2  # minimum fraction of a measurement that counts as compute once the op's launch is subtracted


@dataclass(frozen=True, slots=True)
class Figure:
    """One measurement on ``device`` ("cpu" or "cuda") while ``processes`` processes run: the ``median`` and the quartiles ``low`` and
    ``high`` of ``count`` samples, in ``unit``. ``variant`` is a dtype, a kind of op or a collective; ``size`` has numbers such as the
    ``"bytes"`` moved (see ``_SIZES``)."""

    name: str
    device: str
    processes: int
    variant: str
    backward: bool
    size: Mapping[str, float]
    unit: str
    median: float
    low: float
    high: float
    count: int


@dataclass(frozen=True, slots=True)
class Calibration:
    """A calibration file's content; ``machine`` describes the measured machine."""

    machine: Mapping[str, Any]
    measured_at: str
    figures: tuple[Figure, ...]

    def dumps(self) -> str:
        figures = ",\n  ".join(json.dumps(asdict(figure)) for figure in self.figures)
        head = {"version": VERSION, "machine": dict(self.machine), "measured_at": self.measured_at}
        return json.dumps(head, indent=1)[:-2] + f',\n "figures": [\n  {figures}\n ]\n}}\n'

    def processes(self, device: str) -> tuple[int, ...]:
        """Return the numbers of processes that were measured on ``device``, in ascending order."""
        return tuple(sorted({figure.processes for figure in self.figures if figure.device == device}))


def this_machine() -> dict[str, Any]:
    """Describe this machine: the processor and the number of cores that this process may use."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"processor": names[0] if names else platform.processor() or platform.machine(), "cores": cores}


def default_path() -> Path | None:
    """Return the calibration file's path; ``None`` if ``AUTOPAR_CALIBRATION`` is empty, or if the user has no home."""
    if VARIABLE in os.environ:
        return Path(os.environ[VARIABLE]) if os.environ[VARIABLE] else None
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "autopar" / "calibration.json"
    except RuntimeError:
        return None


def read(path: Path) -> Calibration:
    """Read a calibration. Raises ``DeviceError`` if the file doesn't exist or isn't a calibration of this version."""
    try:
        data = read_json(path)
        if isinstance(data, dict) and (version := data.get("version")) != VERSION:
            raise DeviceError(f"{path} is a calibration of version {shown(version)}, this is version {VERSION}", _RERUN)
        return from_json(data)
    except OSError as error:
        raise DeviceError(f"the calibration {path} cannot be read: {error.strerror}", _RERUN) from error
    except MalformedFileError as error:
        raise DeviceError(f"{path} is no calibration file ({error})", _RERUN) from error


def from_json(data: Any) -> Calibration:
    """Return the calibration in the untrusted JSON object ``data``. Raises ``MalformedFileError`` if it isn't one of this version."""
    if not isinstance(data, dict) or data.get("version") != VERSION:
        raise MalformedFileError(f"it is not a JSON object of version {VERSION}")
    _check_content(data)
    figures = tuple(Figure(**figure) for figure in data["figures"])
    if not figures or not all(_is_valid(figure) for figure in figures):
        raise MalformedFileError("figures that are not positive numbers")
    _check_complete(figures)
    return Calibration(data["machine"], data["measured_at"], figures)


_FIGURE = {
    **dict.fromkeys(("name", "device", "variant", "unit"), str),
    **dict.fromkeys(("processes", "count"), int),
    **dict.fromkeys(("median", "low", "high"), (int, float)),
    "backward": bool,
    "size": dict,
}


def _check_content(data: Mapping[str, Any]) -> None:
    """Raise ``MalformedFileError`` for a field that is missing or unknown, or has another type than in ``Figure`` and ``Calibration``."""
    kinds: dict[str, Any] = {"version": int, "machine": dict, "measured_at": str, "figures": list}
    checked: list[tuple[str, Any, dict[str, Any]]] = [("it", data, kinds)]
    if isinstance(data.get("figures"), list):
        checked += [(f"figures[{i}]", figure, _FIGURE) for i, figure in enumerate(data["figures"])]
    for where, values, fields in checked:
        if not isinstance(values, dict) or (odd := sorted(values.keys() ^ fields.keys())):
            raise MalformedFileError(
                f"{where} {'is not an object' if not isinstance(values, dict) else f'lacks, or should not have, {shown(odd[0])}'}"
            )
        for name, kind in fields.items():
            value = values[name]
            if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
                raise MalformedFileError(f"{where}.{name} is {shown(value)}")
    machine = data["machine"]
    if not isinstance(machine.get("gpu", ""), str) or not isinstance(machine.get("gpu_memory_bytes") or 0, int):
        raise MalformedFileError("machine.gpu is not text, or machine.gpu_memory_bytes not a number")


_SIZES = {
    "update": ("bytes",),
    "product": ("flops", "bytes"),
    "attention": ("flops",),
    "move": ("bytes",),
    "wire": ("members", "bytes"),
    "wait": ("members", "seconds"),
}
"""Name of a figure -> the entries that its ``size`` must have."""


def _check_complete(figures: Sequence[Figure]) -> None:
    """Raise ``MalformedFileError`` if a figure lacks a size, or if a required figure is missing for a number of processes."""
    for figure in figures:
        if missing := [size for size in _SIZES.get(figure.name, ()) if not figure.size.get(size)]:
            raise MalformedFileError(f"a figure {shown(figure.name)} has no {missing[0]}")
    for device, count in sorted({(figure.device, figure.processes) for figure in figures}):
        here = {(f.name, f.variant, f.backward) for f in figures if (f.device, f.processes) == (device, count)}
        names = {(name, backward) for name, _, backward in here}
        needed = {"launch": {("launch", False), ("launch", True)} <= names, "update": ("update", False) in names}
        needed["move"] = {("move", POINTWISE, False), ("move", POINTWISE, True)} <= here
        needed |= {name: any((name, b) in names for b in (False, True)) for name in ("product", "attention")}
        if missing := [name for name, is_there in needed.items() if not is_there]:
            raise MalformedFileError(f"the figures of {count} {device} processes lack {missing[0]}")


def machine_mismatch(found: Calibration) -> str:
    """Return how the measured machine differs from this machine (a clause for messages), or an empty string if it doesn't."""
    here = this_machine()
    if all(found.machine.get(key) == value for key, value in here.items()):
        return ""
    there = ", ".join(f"{key} {found.machine.get(key)}" for key in here)
    return f"was measured on another machine ({there}; here: {', '.join(f'{k} {v}' for k, v in here.items())})"


def _gpu_mismatch(found: Calibration, cluster: Cluster) -> str:
    """Return how the measured GPU differs from the cluster's, or an empty string if they are equal or the measured GPU is unknown."""
    name, memory = str(found.machine.get("gpu", "")), found.machine.get("gpu_memory_bytes")
    if cluster.kind != "cuda" or not name or memory is None:
        return ""
    try:
        kind = hardware.match_device(name, int(memory))
    except DeviceError:
        return ""
    return (
        "" if kind == cluster.gpu.name else f"was measured on {name} ({kind}), and this machine has {cluster.gpu.name}"
    )


def _is_valid(figure: Figure) -> bool:
    numbers = (figure.median, figure.low, figure.high, figure.processes, figure.count, *figure.size.values())
    return all(_is_number(n) and 0 <= n < 1e30 for n in numbers) and figure.median > 0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def apply_calibration(cluster: Cluster, path: Path | None) -> Cluster:
    """Return ``cluster`` with the measurements in the file ``path``; if it is ``None``, with those in the file at the default path, if any.

    The default file applies to this machine's devices only; if it was measured on others, it is ignored, and a note says so. A file that
    the user names (``path``) also gives the op times of GPUs in other machines if it was measured on that kind of GPU.

    Raises ``DeviceError`` if ``path`` was measured on other devices, or if the file can't be read.
    """
    given = path is not None
    if path is None:
        path = default_path()
        if path is None or not cluster.local or (VARIABLE not in os.environ and not path.is_file()):
            return cluster
    found = read(path)
    if not cluster.local:
        return _for_same_kind(cluster, found, path)
    counts = found.processes(cluster.kind)
    reason = machine_mismatch(found) or _gpu_mismatch(found, cluster)
    if not reason and cluster.count not in counts:
        measured = " and ".join(map(str, counts)) or "no"
        reason = f"was measured with {measured} {cluster.kind} processes, not with {cluster.count}"
    name = _tilde(path)
    if reason:
        text = f"{name} {reason}"
        if given:
            raise DeviceError(text, f"`autopar profile --processes {cluster.count}` measures this machine")
        return dataclasses.replace(cluster, notes=(*cluster.notes, f"prices are not calibrated: {text}"))
    learned = found.machine.get("corrected")
    by_steps = ", corrected by measured steps" if isinstance(learned, dict) and learned else ""
    note = f"prices use measurements of this machine: {name}, {found.measured_at}{by_steps}"
    return calibrated(cluster, found, (*cluster.notes, note), name)


def _for_same_kind(cluster: Cluster, found: Calibration, path: Path) -> Cluster:
    """Return ``cluster``, which isn't this machine, with the op times that were measured on one GPU of the same kind."""
    figures = [f for f in found.figures if f.device == "cuda" and f.processes == 1]
    name = str(found.machine.get("gpu", ""))
    memory = found.machine.get("gpu_memory_bytes")
    if not figures or not name or memory is None or cluster.parts or cluster.kind != "cuda":
        raise DeviceError(
            f"{path} is a calibration of a machine{' with ' * bool(name)}{name}, and {cluster.name} are other devices",
            "`autopar profile --processes 1` on a GPU of the same kind measures ops for plans elsewhere; a cluster.toml describes the rest",
        )
    kind = hardware.match_device(name, int(memory))
    if kind != cluster.gpu.name:
        raise DeviceError(
            f"{path} was measured on {name} ({kind}), and {cluster.name} has {cluster.gpu.name}",
            "calibrate with a GPU of the kind that is planned for",
        )
    note = f"prices of ops use measurements of one {name}: {_tilde(path)}, {found.measured_at}; links are not measured"
    return dataclasses.replace(cluster, gpu=_measured_gpu(cluster, figures, _tilde(path)), notes=(*cluster.notes, note))


def _tilde(path: Path) -> str:
    """Return the path as plans show it: with ``~`` in place of the user's home, because plans are shared."""
    try:
        return f"~/{path.resolve().relative_to(Path.home()).as_posix()}"
    except (ValueError, RuntimeError):  # the path is outside of the home, or the user has none
        return str(path)


def calibrated(cluster: Cluster, found: Calibration, notes: tuple[str, ...], source: str) -> Cluster:
    """Return ``cluster``, calibrated or not, with the measurements of as many processes as it has devices; ``source`` names the file."""
    figures = [f for f in found.figures if f.device == cluster.kind and f.processes == cluster.count]
    gpu = _measured_gpu(cluster, figures, source)
    collective_times = _collective_times(figures)
    link = collective_times.curves.get(("p2p", 2))
    p2p_link = Link(link.y[0], link.x[-1] / link.y[-1], source) if link is not None else cluster.intra
    slow = [f.median for f in figures if f.name == "overlap"]
    call = [f.median for f in figures if f.name == "call"]
    return dataclasses.replace(
        cluster,
        gpu=gpu,
        # memory that programs take beyond the prediction is not there for plans
        memory_beyond=max([1.0, *(f.median for f in figures if f.name == MEMORY)]),
        intra=p2p_link,
        collective_times=collective_times,
        collective_s=call[0] if call else cluster.collective_s,
        overlap_slowdown=slow[0] if slow else cluster.overlap_slowdown,
        notes=notes,
    )


def _measured_gpu(cluster: Cluster, figures: list[Figure], source: str) -> Gpu:
    """Return the cluster's device with measured op times."""
    launch = {f.backward: f.median for f in figures if f.name == "launch"}
    ops = _ops(figures, launch)
    products = {dtype: curve for (dtype, backward), curve in ops.products.items() if not backward}
    best = {dtype: max(curve.y) for dtype, curve in products.items()}
    copies = ops.moves[POINTWISE, False]
    start_s = (launch[False] + launch[True]) / 2
    return dataclasses.replace(
        cluster.gpu,
        peak_flops=cluster.gpu.peak_flops | best if cluster.kind == "cpu" else cluster.gpu.peak_flops,
        memory_bytes_per_s=copies.y[-1] / cluster.gpu.memory_efficiency,
        # a CPU runs one op at a time; the host launches a GPU's kernels while earlier ones run
        kernel_s=start_s if cluster.kind == "cpu" else cluster.gpu.kernel_s,
        op_floor_s=0.0 if cluster.kind == "cpu" else start_s,
        measured=ops,
        sources=(("measured", source),),
    )


def _ops(figures: Iterable[Figure], launch: Mapping[bool, float]) -> Ops:
    points: dict[str, dict[tuple[str, bool], list[tuple[float, float]]]] = {"product": {}, "attention": {}, "move": {}}
    update = []
    for f in figures:
        if f.name == "update":
            update.append((f.size["bytes"], f.median))
        if f.name not in points:
            continue
        # the cost model adds launches separately
        seconds = max(f.median - launch[f.backward] * f.size.get("ops", 1.0), _MIN_COMPUTE_SHARE * f.median)
        flops, moved = f.size.get("flops", 0.0), f.size.get("bytes", 0.0)
        point = {
            "product": (flops / max(moved, 1.0), flops / seconds),
            "attention": (flops, flops / seconds),
            "move": (moved, moved / seconds),
        }[f.name]
        points[f.name].setdefault((f.variant, f.backward), []).append(point)
    products, attention, moves = ({k: Curve.through(v) for k, v in points[name].items()} for name in points)
    return Ops(products, attention, moves, Curve.through(update, rising=True))


def _collective_times(figures: Iterable[Figure]) -> CollectiveTimes:
    points: dict[tuple[str, int], list[tuple[float, float]]] = {}
    waits = {}
    for f in figures:
        if f.name == "wire":
            points.setdefault((f.variant, int(f.size["members"])), []).append((f.size["bytes"], f.median))
        elif f.name == "wait":
            waits[int(f.size["members"])] = f.median / math.sqrt(f.size["seconds"])
    return CollectiveTimes({key: Curve.through(found, rising=True) for key, found in points.items()}, waits)
