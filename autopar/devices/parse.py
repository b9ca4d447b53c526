"""Parses a user's description of devices into a ``Cluster``.

=====================  ==============================================================================================
``4``                  four devices of this machine: CUDA devices if it has four, otherwise processes on the CPU
``"8xH100-80GB"``      one node; more GPUs than a node has are several nodes (``"64xH100-80GB"`` is 8 nodes of 8)
``"128x8xH100-80GB"``  nodes x GPUs per node x kind
``"cluster.toml"``     a file, see below
``["cuda:0", ...]``    this machine's devices, by name or as ``torch.device``; ``"cpu"`` once per process
=====================  ==============================================================================================

A TOML file has these keys. A known GPU requires only ``gpu``; any other GPU also requires ``memory_gb``, ``memory_gb_per_s`` and
``peak_bf16_tflops``. ``gpus_per_node`` is the known GPU's by default (4 of GB200), or else 8::

    name = "our cluster"
    nodes = 16
    gpus_per_node = 8
    nvlink_domain = 72           # GPUs that NVLink connects, if it spans several nodes
    gpu = "H100-80GB"
    memory_gb = 80               # as in the GPU's name
    memory_gb_per_s = 3350       # peak, GB = 1e9 bytes
    peak_bf16_tflops = 989       # dense
    peak_fp8_tflops = 1979       # dense, of 8-bit products; default: bfloat16's
    peak_fp8_blockwise_tflops = 1979  # of those with a scale for each tile; default: bfloat16's
    peak_mxfp8_tflops = 4500     # of those in MXFP8; default: bfloat16's
    peak_fp32_tflops = 67        # dense, of float32 without TF32; default: a sixteenth of bfloat16's
    peak_tf32_tflops = 494.5     # dense, with TF32; default: float32's
    nvlink_gb_per_s = 450        # per GPU, one direction; without NVLink, that of PCIe
    inter_node_gb_per_s = 400    # per node, one direction
    intra_latency_us = 3.4       # one hop
    inter_latency_us = 14
    memory_limit_gb = 70         # memory of one GPU that a plan may use, GB = 1e9 bytes
    host_gb_per_s = 63           # from a GPU to host memory, one direction
    host_memory_gb = 2048        # per node, GB = 2^30 bytes
    host_memory_gb_per_s = 614   # per node, peak
    nvme_gb = 15360              # per node, all drives together, GB = 1e9 bytes; requires both rates
    nvme_read_gb_per_s = 27      # per node, sequential, as in the data sheet
    nvme_write_gb_per_s = 16
    nvme_path = "/nvme"          # the folder for optimizer states; without it, AUTOPAR_NVME or the option --nvme of train.py
    local = false                # the devices are this machine's

``gpu = "cpu"`` means ``gpus_per_node`` processes on this machine's CPU. Without the ``nvme`` keys a cluster has no NVMe; with them, a plan
may keep optimizer states in host memory and on NVMe even if no pin asks for it.

A cluster of different devices, or of parts with a slow link between them, has a group for each part, with these keys (except ``name`` and
``local``). Pipeline stages use devices in the order of the file::

    name = "two generations"
    between_gb_per_s = 100       # from group to group, per node, one direction
    between_latency_us = 30      # one hop

    [[group]]
    nodes = 8
    gpu = "H100-80GB"

    [[group]]
    nodes = 7                    # one is missing
    gpu = "A100-80GB-SXM"

torch is only imported for a number or a list of devices.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autopar.data_files import shown
from autopar.devices import constants as c
from autopar.devices import hardware
from autopar.devices.calibration import apply_calibration
from autopar.devices.cluster import Cluster, Gpu, Host, Link, Nvme, joined
from autopar.errors import DeviceError
from autopar.memory import machine_memory_bytes
from autopar.precision import FP8_RECIPES
from autopar.units import size

_FORMS = (
    'write 4, "8xH100-80GB", "128x8xH100-80GB" (nodes x GPUs x kind), the path of a TOML file, or a list of devices'
)
MOST = 2**20
"""Maximum number of devices; a search over many more takes too long."""
_NUMBER = re.compile(r"[+-]?\d{1,40}")
_MAX_BYTES = 2**20
_MAX_GROUPS = 64
_INTEGERS = ("nodes", "gpus_per_node", "nvlink_domain")
_NUMBERS = (
    "memory_gb",
    "memory_gb_per_s",
    "peak_bf16_tflops",
    *(f"peak_{name}_tflops" for name in hardware.RATES.values()),
    "nvlink_gb_per_s",
    "inter_node_gb_per_s",
    "intra_latency_us",
    "inter_latency_us",
    "memory_limit_gb",
    "host_gb_per_s",
    "host_memory_gb",
    "host_memory_gb_per_s",
)
_NVME = ("nvme_gb", "nvme_read_gb_per_s", "nvme_write_gb_per_s")
_KEYS = ("name", "gpu", "local", *_INTEGERS, *_NUMBERS, *_NVME, "nvme_path")
_BETWEEN = ("between_gb_per_s", "between_latency_us")
_KEYS_ABOVE_GROUPS = ("name", *_BETWEEN)  # keys of the file itself, if it has groups
_KEYS_OF_GROUP = ("gpu", *_INTEGERS, *_NUMBERS, *_NVME, "nvme_path")
_KEYS_OF_CPU = ("name", "gpu", "gpus_per_node", "local", "memory_limit_gb", *_NVME, "nvme_path")


def parse(spec: Any, *, memory_limit_bytes: int | None = None, calibration: str | Path | None = None) -> Cluster:
    """Return the cluster that ``spec`` describes, in the forms of the module's docstring.

    Args:
        spec: an int, a string, a path, or a sequence of devices; a ``Cluster`` is returned unchanged.
        memory_limit_bytes: the memory that a plan may use on a device; by default a fraction of the device's memory.
        calibration: a file that ``autopar profile`` wrote; by default the file at the default path, if there is one (see
            ``devices.calibration``).

    Raises:
        DeviceError: ``spec`` doesn't describe known devices, the memory limit is invalid, or the calibration is for other devices.
    """
    cluster = _parse(spec)
    _check_count(cluster.count)
    if not isinstance(spec, Cluster):
        cluster = apply_calibration(cluster, None if calibration is None else Path(calibration))
    if memory_limit_bytes is None:
        return cluster
    if isinstance(memory_limit_bytes, bool) or not isinstance(memory_limit_bytes, int | float):
        raise DeviceError(
            f"memory_limit_bytes is {memory_limit_bytes!r}, but it must be a number of bytes", "40e9 is 40 GB"
        )
    if not memory_limit_bytes >= 1:
        raise DeviceError(
            f"a memory limit of {memory_limit_bytes} bytes leaves room for nothing", "give a positive number of bytes"
        )
    if math.isinf(memory_limit_bytes):
        raise DeviceError("the memory limit is infinite", "leave memory_limit_bytes out")
    if cluster.kind == "cuda" and memory_limit_bytes > (most := cluster.gpu.memory_bytes):
        raise DeviceError(
            f"the memory limit is {size(int(memory_limit_bytes))}, and a device of {cluster.name} has {size(most)}",
            "give a lower limit, or describe devices with more memory in a cluster file",
        )
    return dataclasses.replace(cluster, memory_override_bytes=int(memory_limit_bytes))


def check_text(text: str) -> None:
    """Raise the ``DeviceError`` of ``parse(text)`` without importing torch, so that a wrong description is refused at once. Files are not
    read."""
    text = text.strip()
    if text.endswith(".toml"):
        return
    _check_count(int(text) if _NUMBER.fullmatch(text) else _from_text(text).count)


def _check_count(count: int) -> None:
    if count <= 0:
        raise DeviceError(f"the number of devices must be positive, not {count}", "use at least one device")
    if count > MOST:
        raise DeviceError(f"{count:,} devices are more than autopar plans for", f"ask for {MOST:,} at most")


def _parse(spec: Any) -> Cluster:
    if isinstance(spec, Cluster):
        return spec
    if isinstance(spec, bool):
        raise DeviceError(f"{spec} is not a description of devices", _FORMS)
    if isinstance(spec, int):
        return _local(spec)
    if isinstance(spec, Path):
        return _from_file(spec)
    if isinstance(spec, str):
        return _from_text(spec.strip())
    if isinstance(spec, Sequence):
        return _from_list(spec)
    raise DeviceError(f"{spec!r} is not a description of devices", _FORMS)


def _from_text(text: str) -> Cluster:
    if _NUMBER.fullmatch(text):
        return _local(int(text))
    if text.endswith(".toml"):
        return _from_file(Path(text))
    match = re.fullmatch(r"([+-]?\d+)\s*[x×*]\s*(?:([+-]?\d+)\s*[x×*]\s*)?([A-Za-z].*)", text, re.IGNORECASE)
    if match is None:
        raise DeviceError(f"{text!r} is not a description of devices", _FORMS)
    first, second, name = int(match[1]), match[2], hardware.find(match[3])
    if first <= 0 or (second is not None and int(second) <= 0):
        raise DeviceError(
            f"{text!r} asks for {first if first <= 0 else int(str(second))} devices", "ask for at least one"
        )
    if second is not None:
        return _described(text, first, int(second), name)
    node = hardware.gpus_per_node(name)
    if first <= node:
        return _described(text, 1, first, name)
    if first % node:
        raise DeviceError(
            f"{text!r} does not say how {first} GPUs are spread over nodes",
            f"write nodes x GPUs x kind, such as {first}x1x{match[3]} or {first // node + 1}x{node}x{match[3]}",
        )
    return _described(text, first // node, node, name)


def _described(text: str, nodes: int, per_node: int, name: str) -> Cluster:
    intra, inter = hardware.links(name, per_node)
    host, domain = hardware.host(name), hardware.nvlink_domain(name)
    return Cluster(text, nodes, per_node, "cuda", hardware.gpu(name), intra, inter, host=host, nvlink_domain=domain)


def described(gpu: str, nodes: int, per_node: int, network: str = "") -> Cluster:
    """Return the cluster that a published report describes: ``gpu`` such as ``"A100-40GB-SXM (DGX A100)"``, ``network`` such as
    ``"8x HDR InfiniBand 200Gb/s"``.

    Raises ``DeviceError`` if no GPU of that family is known.
    """
    name = hardware.nearest(gpu)
    cluster = _described(f"{nodes}x{per_node}x{gpu}", nodes, per_node, name)
    seen = hardware.node_bytes_per_s(network, per_node)
    inter = cluster.inter if seen is None else hardware.inter_link(seen / per_node, f"the run's report: {network}")
    return dataclasses.replace(cluster, inter=inter, network=hardware.network(name, per_node, network))


def _local(count: int) -> Cluster:
    _check_count(count)
    import torch

    if torch.cuda.is_available() and torch.cuda.device_count() >= count:
        return _local_cuda(str(count), tuple(range(count)))
    return _local_cpu(str(count), count)


def _local_cpu(name: str, count: int) -> Cluster:
    device, link = hardware.cpu(count)
    # a gloo collective costs only its hops, without kernel launches. Its copies and sums use the cores that compute, so communication is
    # assumed not to overlap compute until ``autopar profile`` has measured it.
    return Cluster(
        name, 1, count, "cpu", device, link, link, local=True, collective_s=0.0, host_s=0.0, overlap_slowdown=1.0
    )


def _local_cuda(name: str, indices: tuple[int, ...]) -> Cluster:
    import torch

    seen = [torch.cuda.get_device_properties(index) for index in indices]
    if len({device.name for device in seen}) > 1:
        raise DeviceError(
            f"the devices are of different kinds: {', '.join(sorted({d.name for d in seen}))}",
            "give a list of devices of one kind",
        )
    memory = min(device.total_memory for device in seen)
    entry = hardware.match_device(seen[0].name, memory)
    intra, inter = hardware.links(entry, len(indices))
    devices = tuple(f"cuda:{index}" for index in indices)
    host = dataclasses.replace(hardware.host(entry), memory_bytes=machine_memory_bytes())
    return Cluster(name, 1, len(indices), "cuda", hardware.gpu(entry, memory), intra, inter, True, devices, host=host)


def _from_list(spec: Sequence[Any]) -> Cluster:
    if not spec:
        raise DeviceError("the list of devices is empty", "name at least one device")
    import torch

    devices = []
    for item in spec:
        try:
            devices.append(torch.device(item))
        except (RuntimeError, TypeError) as error:
            what = repr(item) if isinstance(item, str) else f"an object of type {type(item).__name__}"
            raise DeviceError(
                f"the list of devices has {what}, which is not a device", 'write "cuda:0" or "cpu"'
            ) from error
    kinds = {device.type for device in devices}
    if kinds == {"cpu"}:
        return _local_cpu(f"{len(devices)} CPU processes", len(devices))
    if kinds != {"cuda"}:
        raise DeviceError(
            f"the devices are of these kinds: {', '.join(sorted(kinds))}", "give CUDA devices only, or the CPU only"
        )
    indices = tuple(device.index or 0 for device in devices)
    present = torch.cuda.device_count() if torch.cuda.is_available() else 0
    missing = [index for index in indices if index >= present]
    if missing:
        raise DeviceError(
            f"cuda:{missing[0]} is not on this machine, which has {present} CUDA devices",
            'describe devices that are elsewhere by kind, such as "8xH100-80GB"',
        )
    if len(set(indices)) != len(indices):
        raise DeviceError(f"a CUDA device is named twice in {[str(d) for d in devices]}", "one process per device")
    return _local_cuda(",".join(f"cuda:{index}" for index in indices), indices)


def _from_file(path: Path) -> Cluster:
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise DeviceError(
                f"{path} has more than {_MAX_BYTES:,} bytes", "a cluster file has a few lines for each kind of device"
            )
        data = tomllib.loads(content.decode("utf-8"))
    except OSError as error:
        raise DeviceError(
            f"{path} cannot be read: {error.strerror or error}", "check the path of the cluster file"
        ) from error
    except (
        ValueError,
        RecursionError,
    ) as error:  # an invalid date, or an integer of thousands of digits, is a plain ValueError
        raise DeviceError(
            f"{path} is not TOML: {error}", "see the fields of a cluster file in the documentation"
        ) from error
    if "group" not in data:
        _check(path, data, _KEYS)
        return _cpu_cluster(path, data) if data["gpu"].lower() == "cpu" else _gpu_cluster(path, data)
    groups = data["group"]
    if not (isinstance(groups, list) and groups and all(isinstance(group, dict) for group in groups)):
        raise DeviceError(f"{path}: group is not a list of tables", "write [[group]] above the keys of each")
    if len(groups) > _MAX_GROUPS:
        raise DeviceError(
            f"{path} has {len(groups):,} groups, and may have {_MAX_GROUPS}",
            "put equal nodes into one group, with nodes = N",
        )
    _check(path, {key: value for key, value in data.items() if key != "group"}, _KEYS_ABOVE_GROUPS, named=False)
    parts = []
    for group in groups:
        _check(path, group, _KEYS_OF_GROUP)
        parts.append(_gpu_cluster(path, group))
    name = data.get("name", path.stem)
    inter_part = min((part.inter for part in parts), key=lambda link: link.bytes_per_s)
    if "between_gb_per_s" in data:
        node = max(part.gpus_per_node for part in parts)
        inter_part = hardware.inter_link(data["between_gb_per_s"] * 1e9 / node, str(path))
    if "between_latency_us" in data:
        inter_part = dataclasses.replace(inter_part, latency_s=data["between_latency_us"] * 1e-6)
    return joined(name, parts, inter_part)


def _cpu_cluster(path: Path, data: dict[str, Any]) -> Cluster:
    """Return the cluster of ``gpus_per_node`` processes on this machine's CPU."""
    if others := [key for key in data if key not in _KEYS_OF_CPU]:
        raise DeviceError(
            f'{path}: {others[0]} describes GPUs, and gpu = "cpu" means processes on this machine\'s CPU',
            f"its keys are {', '.join(_KEYS_OF_CPU)}",
        )
    limit = data.get("memory_limit_gb")
    return dataclasses.replace(
        _local_cpu(data.get("name", path.stem), data.get("gpus_per_node", 1)),
        memory_override_bytes=math.ceil(limit * 1e9) if limit is not None else None,
        nvme=_nvme(path, data),
    )


def _nvme(path: Path, data: dict[str, Any]) -> Nvme | None:
    """Return the NVMe drives of a node, or ``None`` if the file has none of their keys."""
    given = [key for key in (*_NVME, "nvme_path") if key in data]
    if not given:
        return None
    if missing := [key for key in _NVME if key not in data]:
        raise DeviceError(
            f"{path} has {given[0]}, and not {missing[0]}",
            "give the capacity and both rates of a node: each is the sum of its drives' figures in the data sheet",
        )
    capacity, read, write = (data[key] * 1e9 for key in _NVME)
    return Nvme(int(capacity), read, write, data.get("nvme_path", ""), str(path))


def _gpu_cluster(path: Path, data: dict[str, Any]) -> Cluster:
    """Return the cluster of GPUs that a file, or one of its groups, describes."""
    kind = _kind(data["gpu"])
    nodes, per_node = data.get("nodes", 1), data.get("gpus_per_node", hardware.gpus_per_node(kind or ""))
    device = _gpu(path, data)
    intra, inter = _links(path, data, per_node)
    limit = data.get("memory_limit_gb")
    if limit is not None and limit * 1e9 > device.memory_bytes:
        raise DeviceError(
            f"{path}: memory_limit_gb is {limit}, and a {device.name} has {size(device.memory_bytes)}",
            "give a lower limit, or the GPU's own memory_gb",
        )
    return Cluster(
        name=data.get("name", path.stem),
        nodes=nodes,
        gpus_per_node=per_node,
        kind="cuda",
        gpu=device,
        intra=intra,
        inter=inter,
        local=data.get("local", False),
        memory_override_bytes=math.ceil(limit * 1e9) if limit is not None else None,
        host=_host(path, data),
        nvme=_nvme(path, data),
        nvlink_domain=data.get("nvlink_domain", hardware.nvlink_domain(kind) if kind else 0),
    )


def _check(path: Path, data: dict[str, Any], keys: Sequence[str], named: bool = True) -> None:
    """Raise ``DeviceError`` for a key that isn't in ``keys``, for an invalid value, and, if ``named``, for a missing ``gpu``."""
    for key, value in data.items():
        if key not in keys:
            near = difflib.get_close_matches(key, keys, n=3) or list(keys)
            raise DeviceError(f"{path} has the unknown key {shown(key)}", f"the nearest keys are {', '.join(near)}")
        if key in _INTEGERS and (isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= MOST):
            raise DeviceError(
                f"{path}: {key} = {shown(value)} is not a whole number from 1 to {MOST:,}",
                "count nodes and GPUs from 1",
            )
        if key in (*_NUMBERS, *_BETWEEN, *_NVME) and (
            isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e12
        ):
            raise DeviceError(f"{path}: {key} = {shown(value)} is not a positive number", "units are in the key's name")
        if key in ("name", "gpu", "nvme_path") and not (
            isinstance(value, str) and 0 < len(value) <= 1000 and value.isprintable()
        ):
            raise DeviceError(f"{path}: {key} = {shown(value)} is not a name", f'write {key} = "..."')
        if key == "local" and not isinstance(value, bool):
            raise DeviceError(f"{path}: local = {shown(value)} is neither true nor false", "write local = true")
    if named and "gpu" not in data:
        raise DeviceError(f"{path} does not name the GPU", 'add a line such as gpu = "H100-80GB"')


_SOURCES = {
    "memory_gb": "memory_size",
    "memory_gb_per_s": "hbm",
    "peak_bf16_tflops": "bf16",
    **{f"peak_{name}_tflops": name for name in FP8_RECIPES},
    "peak_fp32_tflops": "fp32",
    "peak_tf32_tflops": "fp32",
}
"""Key of a cluster file -> key of that figure's source in ``Gpu.sources``."""


def _kind(gpu: str) -> str | None:
    """Return the full name of a known GPU, ``None`` for another, which the file describes."""
    try:
        return hardware.find(gpu)
    except DeviceError:
        return None


def _gpu(path: Path, data: dict[str, Any]) -> Gpu:
    needed = ("memory_gb", "memory_gb_per_s", "peak_bf16_tflops")
    source = (("file", str(path)),)
    memory = int(data["memory_gb"] * c.GIB_PER_VENDOR_GB.value) if "memory_gb" in data else None
    kind, bf16, given = _kind(data["gpu"]), data.get("peak_bf16_tflops", 0.0) * 1e12, hardware.rates(data)
    if kind is None and all(key in data for key in needed):
        assert memory is not None
        return Gpu(
            name=data["gpu"],
            memory_bytes=memory,
            peak_flops=hardware.peaks(bf16, None, given),
            matmul_efficiency=c.MATMUL_EFFICIENCY.value,
            memory_bytes_per_s=data["memory_gb_per_s"] * 1e9,
            memory_efficiency=c.MEMORY_EFFICIENCY.value,
            op_floor_s=c.OP_FLOOR_S.value,
            sources=source,
        )
    kind = kind or hardware.find(data["gpu"])  # raises for a GPU that neither autopar knows nor the file describes
    if data.get("memory_gb") == hardware.table()[kind]["hbm_gb"]:
        memory = None  # the vendor's figure again; what a program can use of it may be known more precisely
    known = hardware.gpu(kind, memory)
    changes: dict[str, Any] = {}
    if "memory_gb_per_s" in data:
        changes["memory_bytes_per_s"] = data["memory_gb_per_s"] * 1e9
    other_peak = bf16 and bf16 != known.peak_flops["bfloat16"]  # other peaks follow from it
    if other_peak:
        changes |= {"peak_flops": hardware.peaks(bf16, None, given), "efficiencies": {}}
    elif given:
        changes["peak_flops"] = known.peak_flops | given
    if not any(key in data for key in _SOURCES):
        return known
    derived = {*FP8_RECIPES, "fp16", "fp32"} if other_peak else set()
    sources = {key: text for key, text in known.sources if key not in derived}
    sources |= {figure: str(path) for key, figure in _SOURCES.items() if key in data}
    return dataclasses.replace(known, **changes, sources=(*sources.items(), *source))


def _host(path: Path, data: dict[str, Any]) -> Host:
    if kind := _kind(data["gpu"]):
        found = hardware.host(kind)
    else:
        memory, bandwidth, link = (
            c.DEFAULT_HOST_MEMORY_BYTES,
            c.DEFAULT_HOST_BYTES_PER_S,
            c.DEFAULT_HOST_LINK_BYTES_PER_S,
        )
        found = Host(int(memory.value), bandwidth.value, link.value, memory.source)
    given = {
        "memory_bytes": int(data.get("host_memory_gb", 0) * c.GIB_PER_VENDOR_GB.value),
        "bytes_per_s": data.get("host_memory_gb_per_s", 0) * 1e9,
        "link_bytes_per_s": data.get("host_gb_per_s", 0) * 1e9,
    }
    changes: dict[str, Any] = {key: value for key, value in given.items() if value}
    return dataclasses.replace(found, **changes, source=str(path)) if changes else found


def _links(path: Path, data: dict[str, Any], per_node: int) -> tuple[Link, Link]:
    source = str(path)
    if kind := _kind(data["gpu"]):
        intra, inter = hardware.links(kind, per_node)
    else:  # links that the file lacks have low estimates
        default = c.DEFAULT_INTER_NODE_BYTES_PER_S
        intra, inter = (
            hardware.intra_link(default.value, default.source),
            hardware.inter_link(default.value, default.source),
        )
    if "nvlink_gb_per_s" in data:
        intra = hardware.intra_link(data["nvlink_gb_per_s"] * 1e9, source)
    if "inter_node_gb_per_s" in data:
        inter = hardware.inter_link(data["inter_node_gb_per_s"] * 1e9 / per_node, source)
    if "intra_latency_us" in data:
        intra = dataclasses.replace(intra, latency_s=data["intra_latency_us"] * 1e-6)
    if "inter_latency_us" in data:
        inter = dataclasses.replace(inter, latency_s=data["inter_latency_us"] * 1e-6)
    return intra, inter
