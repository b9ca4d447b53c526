"""Lists figures of a cluster that the cost model uses, with unit and source: all but NVMe, latencies of links, and measured times."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

from autopar.devices import constants
from autopar.devices.cluster import Cluster
from autopar.devices.constants import Constant
from autopar.precision import FP8_RECIPES, TF32

_RATES = {
    **{recipe.precision: (name, "") for name, recipe in FP8_RECIPES.items()},
    "float32": ("fp32", "FP32_OVER_BF16"),
    TF32: ("fp32", "FP32_OVER_BF16"),
    "float64": ("", "FP64_OVER_BF16"),
}
"""Precision -> (key of its peak's source in the file of a GPU kind, constant from which the peak is derived if the file has none)."""


def cluster_figures(cluster: Cluster) -> list[dict[str, Any]]:
    """Return rows with ``figure``, ``value``, ``unit`` and ``source``: the devices, links, hosts and network of the cluster (or of each of
    its parts), then ``constant_figures``."""
    found = []
    for part in cluster.parts or (cluster,):
        rows = _devices(part)
        found += [row | {"figure": f"{part.name}: {row['figure']}"} for row in rows] if cluster.parts else rows
    if (link := cluster.inter_part) is not None:
        found += _rows([("link between parts", link.bytes_per_s, "bytes/s per GPU", link.source)])
    return found + constant_figures()


def _peak_source(dtype: str, sources: dict[str, str]) -> str | None:
    """Return the source of the peak of ``dtype``: that in the file of the GPU kind, or the constant from which the peak is derived;
    ``None`` if there is neither, as for 16-bit dtypes."""
    own, ratio = _RATES.get(dtype, ("", ""))
    if own in sources or not ratio:
        return sources.get(own)
    if "bf16" in sources:
        return _cite(ratio)
    return _cite("FP32_OVER_FP16_VOLTA") if "fp16" in sources else None


def _devices(cluster: Cluster) -> list[dict[str, Any]]:
    gpu, host, network = cluster.gpu, cluster.host, cluster.network
    sources = dict(gpu.sources)
    # a calibration, or a user's cluster file for figures without a source in the file of the GPU kind
    overall = "; ".join(sources[key] for key in ("measured", "file") if key in sources)
    memory = sources.get("hbm") or sources.get("memory") or overall
    peak = sources.get("bf16") or sources.get("fp16") or sources.get("flops") or overall
    known, usual = "bfloat16" in gpu.peak_flops, gpu.matmul_efficiency == constants.MATMUL_EFFICIENCY.value
    sustained = sources.get("sustained") or sources.get("sustained_as") or overall
    sustained = sustained or _cite("MATMUL_EFFICIENCY" if usual else "SUSTAINED")
    rows = [
        ("memory", gpu.memory_bytes, "bytes", sources.get("memory_size") or memory),
        *((f"peak {t}", flops, "FLOP/s", _peak_source(t, sources) or peak) for t, flops in gpu.peak_flops.items()),
        *(
            [
                ("sustained products", gpu.flops_per_s("bfloat16"), "FLOP/s, bfloat16", sustained),
                *(
                    (f"sustained {t}", gpu.flops_per_s(t), "FLOP/s", sources.get("achievable_fp8") or sustained)
                    for t in gpu.efficiencies
                ),
                ("flash attention", gpu.attention_flops_per_s("bfloat16"), "FLOP/s", _cite("ATTENTION_EFFICIENCY")),
            ]
            if known
            else ()
        ),
        ("memory bandwidth", gpu.memory_bytes_per_s, "bytes/s, peak", memory),
        ("sustained copies", gpu.bytes_per_s, "bytes/s", overall or _cite("MEMORY_EFFICIENCY")),
        ("link in a node", cluster.intra.bytes_per_s, "bytes/s", cluster.intra.source),
        *(
            [("NVLink domain", cluster.nvlink_domain, "GPUs", sources.get("nvlink_domain") or overall)]
            if cluster.nvlink_domain
            else ()
        ),
        ("share of the network", cluster.inter.bytes_per_s, "bytes/s per GPU", cluster.inter.source),
    ]
    if host is not None:
        rows += [
            ("link to the host", host.link_bytes_per_s, "bytes/s per GPU, peak", sources.get("host") or host.source),
            ("memory of the host", host.memory_bytes, "bytes per node", host.source),
            ("host's memory bandwidth", host.bytes_per_s, "bytes/s per node, peak", host.source),
        ]
    if network is not None:
        rows += [
            (f"{what}, {nodes} nodes", value, "bytes/s, bus", network.source)
            for what, values in (("all-gather", network.gather), ("all-reduce", network.reduce))
            for nodes, value in zip(network.nodes, values, strict=True)
        ]
    return _rows(rows)


def _rows(rows: list[tuple[str, float, str, str]]) -> list[dict[str, Any]]:
    return [{"figure": a, "value": b, "unit": c, "source": d} for a, b, c, d in rows]


def constant_figures() -> list[dict[str, Any]]:
    """Return the rows for ``devices.constants``, which are the same for all kinds of devices."""
    found = {name: value for name, value in vars(constants).items() if isinstance(value, Constant)}
    assert [f.name for f in fields(Constant)] == ["value", "unit", "source"]
    return [{"figure": name} | asdict(constant) for name, constant in found.items()]


def _cite(name: str) -> str:
    return f"{name}: {getattr(constants, name).source}"
