"""Hardware data: kinds of GPUs by name (``kinds/*.toml``), measured networks (``networks/*.toml``), and this machine.

Each kind is a TOML file with a source for every figure. TFLOP/s are dense, GB/s are 1e9 bytes per second, ``hbm_gb`` is in GiB. The
bandwidths of NVLink (per GPU) and of the network (per node) are for one direction.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any

from autopar.devices import constants as c
from autopar.devices.cluster import Gpu, Host, Link, Network
from autopar.errors import DeviceError
from autopar.memory import machine_memory_bytes
from autopar.precision import FP8_PRECISIONS, FP8_RECIPES, TF32

_GIGA, _TERA = 1e9, 1e12
GPUS_PER_NODE = 8  # as on an SXM board; the file of a kind may have another number (GB200)


@cache
def table() -> dict[str, Mapping[str, Any]]:
    """Return the contents of the files of GPU kinds by name, sorted by their ``order``."""
    entries = sorted((_read(file) for file in _files("kinds")), key=lambda entry: int(entry["order"]))
    for entry in entries:
        assert _peak(entry) and entry.get("hbm_gb_per_s"), f"{entry['name']} lacks a bandwidth or a peak"
    return {entry["name"]: entry for entry in entries}


def _files(folder: str) -> Iterator[Traversable]:
    """Yield the TOML files of a folder next to this module."""
    for file in resources.files("autopar.devices").joinpath(folder).iterdir():
        if file.name.endswith(".toml"):
            yield file


def _read(file: Traversable) -> dict[str, Any]:
    return tomllib.loads(file.read_text("utf-8"))


def gpu_names() -> tuple[str, ...]:
    """Return the GPU names that ``parse`` accepts, without aliases."""
    return tuple(table())


@cache
def _aliases() -> dict[str, str]:
    """Return the GPU name for each accepted spelling (folded). A shortened name means the first matching GPU in ``table``."""
    aliases: dict[str, str] = {}
    for name in table():
        parts = name.split("-")
        aliases.setdefault(_fold(name), name)
        for end in range(1, len(parts)):
            aliases.setdefault(_fold("-".join(parts[:end])), name)
        if "PCIE" in parts:  # A100-PCIE-80GB may also be written A100-80GB-PCIE
            aliases.setdefault(_fold(f"{parts[0]}-{parts[2]}-{parts[1]}"), name)
    aliases[_fold("A100")] = "A100-80GB-SXM"  # not the older 40 GB one
    return aliases


def _fold(name: str) -> str:
    return re.sub(r"[\s_-]", "", name).upper().removeprefix("NVIDIA").removeprefix("GEFORCE")


def find(name: str) -> str:
    """Return the full name of a known GPU from any accepted spelling. Raises ``DeviceError`` with the nearest names if there is none."""
    known = _aliases().get(_fold(name))
    if known is not None:
        return known
    folded = difflib.get_close_matches(_fold(name), _aliases(), n=4, cutoff=0.4)
    near = list(dict.fromkeys(_aliases()[alias] for alias in folded))
    names = f"the nearest names are {', '.join(near)}" if near else f"the known GPUs are {', '.join(table())}"
    raise DeviceError(
        f"the GPU {name!r} is not known",
        f"{names}; any other GPU can be described in a TOML file with memory_gb, memory_gb_per_s and peak_bf16_tflops",
    )


def nearest(text: str) -> str:
    """Return the name of the known GPU for a free-form description: by ``find``, else the one of its family with the nearest memory size.

    Raises ``DeviceError`` if no known GPU is of that family.
    """
    plain = re.sub(r"\(.*?\)", " ", text).strip()
    try:
        return find(plain)
    except DeviceError:
        words = [
            word for word in re.split(r"[^A-Z0-9.]+", plain.upper()) if word and word not in ("NVIDIA", "AMD", "TESLA")
        ]
        families = {name.split("-")[0].upper(): name for name in table()}
        family = next((word for word in words if word in families), None)
        if family is None:
            raise
        size = next((float(m[1]) for word in words if (m := re.fullmatch(r"([0-9.]+)GB", word))), None)
        relatives = [name for name in table() if name.split("-")[0].upper() == family]
        matches = [name for name in relatives if ("PCIE" in name) == ("PCIE" in words)] or relatives
        return matches[0] if size is None else min(matches, key=lambda name: abs(table()[name]["hbm_gb"] - size))


def network_entries() -> list[dict[str, Any]]:
    """Return the contents of the measured networks' files."""
    return sorted(map(_read, _files("networks")), key=lambda entry: str(entry["name"]))


def network(name: str, per_node: int, description: str) -> Network | None:
    """Return the measured network of nodes with ``per_node`` GPUs of the kind ``name``; ``None`` if none was measured, or if there is a
    ``description`` of the network."""
    if description:
        return None
    found = next((n for n in network_entries() if (n["gpu"], n["gpus_per_node"]) == (name, per_node)), None)
    if found is None:
        return None
    return Network(
        nodes=tuple(found["nodes"]),
        gather=tuple(b * _GIGA for b in found["gather_gb_per_s"]),
        reduce=tuple(b * _GIGA for b in found["reduce_gb_per_s"]),
        per_node=per_node,
        hop_s=found["hop_us"] * 1e-6,
        pipelined_host_s=found["pipelined_host_us"] * 1e-6,
        source=found["source"],
    )


_PORTS = {"XDR": 800, "NDR": 400, "HDR": 200, "EDR": 100, "FDR": 56, "OMNI-PATH": 100}  # Gb/s of one port


def node_bytes_per_s(description: str, per_node: int) -> float | None:
    """Return the bytes per second of a node's network from a description such as ``"8x HDR InfiniBand 200Gb/s"``, ``"4x Omni-Path links"``
    or ``"RDMA 400Gb/s per GPU"``; ``None`` if the description doesn't determine them."""
    text = description.upper()
    rate = re.search(r"([0-9.]+)\s*Gb", description)
    kind = next((kind for kind in _PORTS if kind in text), None)
    gigabits = float(rate[1]) if rate else _PORTS[kind] if kind else None
    count = re.search(r"(\d+)\s*[xX]\s*(?=[A-Za-z0-9])", description)
    if gigabits is None or (count is None and "PER GPU" not in text):
        return None
    return gigabits * 1e9 / 8 * (per_node if count is None else int(count[1]))


def rates(entry: Mapping[str, Any], ending: str = "") -> dict[str, float]:
    """Return peak FLOP/s by precision, for those of ``RATES`` for which ``entry`` has the key ``peak_NAME`` + ``ending`` + ``_tflops``."""
    keys = {precision: f"peak_{name}{ending}_tflops" for precision, name in RATES.items()}
    return {precision: entry[key] * _TERA for precision, key in keys.items() if key in entry}


def _peak(entry: Mapping[str, Any]) -> float:
    return float(entry.get("peak_bf16_dense_tflops") or entry.get("peak_fp16_dense_tflops") or 0.0) * _TERA


RATES = {**{recipe.precision: name for name, recipe in FP8_RECIPES.items()}, "float32": "fp32", TF32: "tf32"}
"""Precision whose peak is optional in specifications -> its name in the keys of files."""


def peaks(
    bf16_flops: float | None, fp16_flops: float | None = None, known: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Return peak dense FLOP/s by precision, from the peak of bfloat16 (or of float16, if the GPU has no bfloat16) and the ``known`` peaks
    of ``RATES``. By default FP8 is as fast as bfloat16, and TF32 as fast as float32."""
    if bf16_flops:
        found = {
            **dict.fromkeys(FP8_PRECISIONS, bf16_flops),
            "bfloat16": bf16_flops,
            "float16": bf16_flops,
            "float32": bf16_flops * c.FP32_OVER_BF16.value,
            "float64": bf16_flops * c.FP64_OVER_BF16.value,
        }
    else:
        assert fp16_flops
        single = fp16_flops * c.FP32_OVER_FP16_VOLTA.value
        # a GPU without bfloat16 hardware computes it in its float32 units
        singles = dict.fromkeys((*FP8_PRECISIONS, "bfloat16", "float32"), single)
        found = {**singles, "float16": fp16_flops, "float64": single / 2}
    found |= known or {}
    return {TF32: found["float32"], **found}


def gpu(name: str, memory_bytes: int | None = None) -> Gpu:
    """Return the known GPU ``name``. ``memory_bytes`` is the memory of the actual device; by default, the file of the kind has it."""
    entry = table()[name]
    peak = _peak(entry)
    sustained = _sustained(entry, peak)
    gib = entry.get("usable_gib_seen") or entry["hbm_gb"]
    bf16 = bool(entry.get("peak_bf16_dense_tflops"))
    return Gpu(
        name=name,
        memory_bytes=memory_bytes or int(gib * c.GIB_PER_VENDOR_GB.value),
        peak_flops=peaks(peak if bf16 else None, peak, rates(entry, "_dense")),
        matmul_efficiency=sustained / peak,
        memory_bytes_per_s=entry["hbm_gb_per_s"] * _GIGA,
        memory_efficiency=c.MEMORY_EFFICIENCY.value * c.SUSTAINED.value
        if entry.get("power_limited")
        else c.MEMORY_EFFICIENCY.value,
        op_floor_s=c.OP_FLOOR_S.value,
        efficiencies=_efficiencies(entry),
        vendor_attention_speedup=entry.get("vendor_attention_speedup", 1.0),
        sources=tuple(sorted(entry["sources"].items())),
    )


def _sustained(entry: Mapping[str, Any], peak: float) -> float:
    """Return the FLOP/s of large matrix products in training: as measured in training, or else as many of its peak as the kind that
    ``sustained_as`` names, or else in a short benchmark (by default ``MATMUL_EFFICIENCY`` of the peak), reduced for power-limited GPUs."""
    if seen := entry.get("sustained_matmul_bf16_tflops"):
        return float(seen) * _TERA
    if measured := entry.get("sustained_as"):
        other = table()[measured]
        return peak * _sustained(other, _peak(other)) / _peak(other)
    best = entry.get("achievable_matmul_bf16_tflops")
    reached = float(best) * _TERA if best else peak * c.MATMUL_EFFICIENCY.value
    return reached * c.SUSTAINED.value if entry.get("power_limited") else reached


def _efficiencies(entry: Mapping[str, Any]) -> dict[str, float]:
    """Return the fractions of FP8 peaks that products reach in training, if a short benchmark measured products in FP8 (on the kind that
    ``sustained_as`` names, if there is one). Training reaches as much of that benchmark as it does in bfloat16."""
    measured = table()[entry["sustained_as"]] if "sustained_as" in entry else entry
    best = measured.get("achievable_matmul_fp8_tflops")
    if best is None:
        return {}
    reached = best / measured["achievable_matmul_bf16_tflops"] * _sustained(measured, _peak(measured))
    fraction = reached / (measured["peak_fp8_dense_tflops"] * _TERA)
    return {precision: fraction for precision in rates(entry, "_dense") if precision in FP8_PRECISIONS}


def links(name: str, gpus_per_node: int) -> tuple[Link, Link]:
    """Return the link within a node, and a device's share of its node's network, for GPUs of the kind ``name``."""
    entry = table()[name]
    sources = entry["sources"]
    nvlink = entry.get("nvlink_gb_per_s_per_gpu_unidirectional")
    if nvlink:
        intra = intra_link(nvlink * _GIGA, sources.get("nvlink", name))
    else:
        pcie = entry["pcie_gb_per_s"] * _GIGA * c.INTRA_NODE_EFFICIENCY.value
        intra = Link(c.PCIE_HOP_S.value, pcie, f"kinds/{name}.toml: pcie_gb_per_s")
    node = entry.get("inter_node_gb_per_s_per_node")
    if node:
        # this cluster's GPUs per node share the network; the file's number may differ
        return intra, inter_link(node * _GIGA / gpus_per_node, sources.get("inter_node", name))
    default = c.DEFAULT_INTER_NODE_BYTES_PER_S
    return intra, inter_link(default.value, default.source)


def gpus_per_node(name: str) -> int:
    """Return the number of GPUs of a full node; ``GPUS_PER_NODE`` for a kind that isn't known."""
    return int(table().get(name, {}).get("gpus_per_node", GPUS_PER_NODE))


def nvlink_domain(name: str) -> int:
    """Return the number of GPUs that NVLink connects across nodes; 0 if it doesn't leave the node."""
    return int(table()[name].get("nvlink_domain", 0))


def host(name: str) -> Host:
    """Return the host memory of a node with GPUs of the kind ``name``, with low estimates for figures that its file lacks."""
    entry = table()[name]
    memory, bandwidth = c.DEFAULT_HOST_MEMORY_BYTES, c.DEFAULT_HOST_BYTES_PER_S
    return Host(
        int(entry.get("host_memory_gb", 0) * c.GIB_PER_VENDOR_GB.value or memory.value),
        entry.get("host_memory_gb_per_s", 0) * _GIGA or bandwidth.value,
        entry["host_gb_per_s"] * _GIGA,
        entry["sources"]["host"] if "host_memory_gb" in entry else memory.source,
    )


def intra_link(bytes_per_s: float, source: str) -> Link:
    """Return a link within a node from its peak bandwidth per device and direction."""
    return Link(c.NVLINK_HOP_S.value, bytes_per_s * c.INTRA_NODE_EFFICIENCY.value, source)


def inter_link(bytes_per_s: float, source: str) -> Link:
    """Return a link between nodes from a device's share of the peak bandwidth."""
    return Link(c.NETWORK_HOP_S.value, bytes_per_s * c.INTER_NODE_EFFICIENCY.value, source)


def match_device(device_name: str, memory_bytes: int) -> str:
    """Return the name of the known GPU for a driver's device name, such as ``NVIDIA H100 80GB HBM3``: by its family and nearest memory.

    Raises ``DeviceError`` if no known GPU is of that family.
    """
    words = set(re.split(r"[\s-]+", device_name.upper()))
    family = [name for name in table() if name.split("-")[0].replace("RTX", "") in words]
    pcie = [name for name in family if ("PCIE" in name) == ("PCIE" in words)] or family
    if not pcie:
        raise DeviceError(
            f"the GPU {device_name!r} is not in the table of known GPUs",
            "describe it in a TOML file with gpu, memory_gb, memory_gb_per_s, peak_bf16_tflops and local = true",
        )
    return min(pcie, key=lambda name: abs(table()[name]["hbm_gb"] * c.GIB_PER_VENDOR_GB.value - memory_bytes))


def cpu(processes: int) -> tuple[Gpu, Link]:
    """Return one of ``processes`` processes on this machine's CPU as a device, and gloo as its link."""
    flops, low = c.CPU_FLOPS.value, c.CPU_LOW_PRECISION.value
    device = Gpu(
        name="cpu",
        memory_bytes=machine_memory_bytes() // processes,
        peak_flops={
            **dict.fromkeys(FP8_PRECISIONS, flops * low),
            "bfloat16": flops * low,
            "float16": flops * low,
            "float32": flops,
            TF32: flops,
            "float64": flops / 2,
        },
        matmul_efficiency=1.0,  # the figures are achieved rates, not peaks
        memory_bytes_per_s=c.CPU_BYTES_PER_S.value,
        memory_efficiency=1.0,
        op_floor_s=c.CPU_OP_FLOOR_S.value,
        sources=(("flops", c.CPU_FLOPS.source), ("memory", c.CPU_BYTES_PER_S.source)),
    )
    return device, Link(c.GLOO_HOP_S.value, c.GLOO_BYTES_PER_S.value, c.GLOO_BYTES_PER_S.source)
