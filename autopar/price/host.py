"""Offloading: a layer's bytes in host memory and on NVMe, and seconds of the copies in both directions.

*Optimizer states* (``program.state_places``): host memory, or a file on NVMe, holds the states and master weights of the elements that the
device would otherwise update. In every step, chunk by chunk, gradients are copied to the host, the CPUs update at the bandwidth of their
memory, and parameters are copied back. The copies of one chunk overlap the update of another, so the slowest of link, memory and drives
determines the time. Drives read and write the states and master weights once per step, but not at the same time. The buffers for two
chunks, 128 MB at most, are not counted.

The cost model assumes that both directions of the link are busy (``Cluster.host_link_bytes_per_s``). If devices and host share one memory
(``Cluster.host`` is ``None``), states in host memory count as device memory. ``saved_activations`` prices offloaded activations.
"""

from __future__ import annotations

from typing import NamedTuple

from autopar.devices import Cluster
from autopar.price.elementwise import most
from autopar.price.state import Precision
from autopar.techniques import Options


class OffloadedStateBytes(NamedTuple):
    """Bytes per element of the optimizer states and master weights that the host updates, in each memory: the device's (if devices and host
    share one memory), the host's, or NVMe. ``device`` is ``None`` if the states aren't offloaded."""

    device: int | None = None
    host: int = 0
    nvme: int = 0

    @staticmethod
    def of(options: Options, cluster: Cluster, precision: Precision) -> OffloadedStateBytes:
        memory, size = options.states_in, precision.optimizer + (0 if precision.master else precision.shard)
        if memory == "nvme":
            return OffloadedStateBytes(0, nvme=size)
        if not memory:
            return OffloadedStateBytes()
        return OffloadedStateBytes(size) if cluster.host is None else OffloadedStateBytes(0, host=size)

    def update_s(self, elements: float, tensors: int, zero: int, precision: Precision, cluster: Cluster) -> float:
        """Return the seconds of an optimizer step over ``elements`` elements of ``tensors`` tensors."""
        if self.device is None:  # gradients are unscaled and read; states and parameters are read and written
            size = precision.unscaled + precision.converted + precision.gradient
            size += 2 * precision.optimizer + 2 * precision.shard
            return cluster.gpu.update_s(elements * size, tensors)
        master, size = precision.at_rest or precision.shard, (self.device or 0) + self.host + self.nvme
        gradient, parameter = precision.reduced, master if zero >= 2 else precision.shard
        # the gradient is written and read, states and master weight are read and written, the parameter is read, cast, and sent
        traffic = elements * (2 * gradient + 2 * size + master + 2 * parameter + precision.converted)
        if cluster.host is None:
            update_s = traffic / cluster.gpu.bytes_per_s
        else:
            link_s = elements * max(gradient, parameter) / cluster.host_link_bytes_per_s
            update_s = most(traffic / cluster.host_bytes_per_s, link_s)
        return most(update_s, cluster.nvme_s(elements * self.nvme, elements * self.nvme)) if self.nvme else update_s


def exposed_copy_s(size: float, compute_s: float, cluster: Cluster) -> float:
    """Return the exposed seconds of copying ``size`` bytes one way under ``compute_s`` of arithmetic; in a shared memory nothing is
    hidden."""
    if cluster.host is None:
        return 2 * size / cluster.gpu.bytes_per_s
    return most(0.0, size / cluster.host_link_bytes_per_s - compute_s)
