"""Offloading: bytes of a layer in host memory and on NVMe, and seconds of the copies in both directions.

*Optimizer states*, as ``program.state_places`` updates them: host memory, or a file on NVMe, holds the states and a master copy of
every element that the device would update. Once per step gradients are copied to the host, the CPUs update at the
bandwidth of their memory, and parameters are copied back, chunk by chunk: the copies of one chunk overlap the update of another, so that
the slowest of link, memory and drives decides the time. On NVMe the states and the master copy are read and written once; drives do not
read and write at once. Buffers for two chunks, 128 MB at most, are not counted.

A price is that of one microbatch in the steady state, so both directions are assumed busy at once (``Cluster.host_link_bytes_per_s``).
If devices and host share one memory (``Cluster.host`` is ``None``), states in host memory count as the device's. Activations are in
``kept``.
"""

from __future__ import annotations

from typing import NamedTuple

from autopar.devices import Cluster
from autopar.plan import Strategy
from autopar.price.state import Precision


class StateBytes(NamedTuple):
    """Bytes of one element's optimizer states and master copy that the host updates, by the memory that holds them: the device's (if
    devices and host share one memory), the host's, or NVMe. ``device`` is ``None`` if the device updates its own."""

    device: int | None = None
    host: int = 0
    nvme: int = 0

    @staticmethod
    def of(strategy: Strategy, cluster: Cluster, numbers: Precision) -> StateBytes:
        memory, size = strategy.options.states_in, numbers.optimizer + (0 if numbers.master else numbers.shard)
        if memory == "nvme":
            return StateBytes(0, nvme=size)
        if not memory:
            return StateBytes()
        return StateBytes(size) if cluster.host is None else StateBytes(0, host=size)

    def update_s(self, elements: float, tensors: int, zero: int, numbers: Precision, cluster: Cluster) -> float:
        """Return the seconds of an optimizer step over ``elements`` of so many tensors."""
        if self.device is None:  # the loss scale's, the gradient is read, its state and the parameter read and written
            size = numbers.unscaled + numbers.gradient + 2 * numbers.optimizer + 2 * numbers.shard
            return cluster.gpu.update_s(elements * size, tensors)
        wide, size = numbers.at_rest or numbers.shard, (self.device or 0) + self.host + self.nvme
        down, up = numbers.reduced, wide if zero >= 2 else numbers.shard
        # a gradient arrives and is read; states and master copy are read and written; the parameter is read, written in its dtype, and sent
        moved = elements * (2 * down + 2 * size + wide + 2 * up)
        if cluster.host is None:
            found = moved / cluster.gpu.bytes_per_s
        else:
            found = max(moved / cluster.host_bytes_per_s, elements * max(down, up) / cluster.host_link_bytes_per_s)
        return max(found, cluster.nvme_s(elements * self.nvme, elements * self.nvme)) if self.nvme else found


def exposed_copy_s(size: float, compute_s: float, cluster: Cluster) -> float:
    """Exposed seconds of copying ``size`` bytes one way under ``compute_s`` of arithmetic; a copy within one memory is fully exposed."""
    if cluster.host is None:
        return 2 * size / cluster.gpu.bytes_per_s
    return max(0.0, size / cluster.host_link_bytes_per_s - compute_s)
