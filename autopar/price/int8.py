"""Saved activations in 8 bits, as ``program.int8`` stores them: the tensors that are rounded, their bytes, and the passes over memory.

While the layer runs, its saved tensors also exist at full width: in the forward until the last op has read each (in a compiled layer until
its end), in the backward from the first op that reads each. All of them are counted as live, as they are while a recomputed layer runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.devices import Cluster
from autopar.devices.constants import INT8_KERNELS, INT8_RESTORING, INT8_ROUNDING
from autopar.devices.measured import Floats
from autopar.graph import LayerClass
from autopar.price.trace import Saved, Trace

BLOCK, LEAST, CHUNK = 64, 1024, 2**22
"""As in ``program.int8``: numbers that share a scale; elements of the smallest tensor that is rounded; elements rounded at a time."""

SCALE_BYTES = 4
TEMPORARY_BYTES = 9
"""Per element that is rounded by several kernels: a copy in float32, its quotient by the scale, the code."""


def may_be_int8(cls: LayerClass, run: Trace, saved: tuple[Saved, ...]) -> NDArray[np.bool_]:
    """The entries that are in 8 bits if they are large enough: floats that are not the layer's arguments, in layers but the last."""
    names = [node.name for node in cls.graph.graph.nodes if node.op == "placeholder"]
    arguments = {run.storage[name] for name in names if name in run.storage}
    return np.array(
        [not cls.gives_loss and e.dtype.is_floating_point and e.storage not in arguments for e in saved], dtype=bool
    )


@dataclass(frozen=True, slots=True)
class InInt8:
    """The cost of saving a layer's tensors in 8 bits on one device: bytes of every entry, bytes of the entries that are restored, bytes of
    the temporaries of rounding, the device's seconds of rounding and of restoring, and the host's seconds of launching the kernels."""

    stored: Floats
    restored_bytes: float = 0.0
    temporary_bytes: float = 0.0
    rounding_s: float = 0.0
    restoring_s: float = 0.0
    host_s: float = 0.0


def in_int8(
    may: NDArray[np.bool_], numel: Floats, whole: Floats, plain: list[int], cluster: Cluster, fused: bool
) -> InInt8:
    """``numel`` and ``whole`` are the elements and bytes of each entry on the device, ``plain`` the entries that are saved. ``fused``: one
    kernel rounds a tensor, and one restores it."""
    narrow = may & (numel >= LEAST)
    stored = np.where(narrow, numel + SCALE_BYTES * np.ceil(numel / BLOCK), whole)
    at = np.array(plain, dtype=np.intp)[narrow[plain]]
    elements, read, written = float(numel[at].sum()), float(whole[at].sum()), float(stored[at].sum())
    calls = float(len(at) if fused else np.ceil(numel[at] / CHUNK).sum())
    more = (0.0, 0.0, 1.0) if fused else (INT8_ROUNDING.value, INT8_RESTORING.value, INT8_KERNELS.value)
    rate, kernels = cluster.gpu.bytes_per_s, calls * more[2]
    return InInt8(
        stored=stored,
        restored_bytes=read,
        temporary_bytes=0.0 if fused else TEMPORARY_BYTES * min(CHUNK, float(numel[at].max(initial=0.0))),
        rounding_s=(read + written + more[0] * elements) / rate + kernels * cluster.gpu.kernel_s,
        restoring_s=(read + written + more[1] * elements) / rate + kernels * cluster.gpu.kernel_s,
        host_s=kernels * cluster.gpu.op_floor_s,
    )
