"""Memory besides the device's: bytes of a layer in host memory and on NVMe, and seconds of the copies in both directions.

*Optimizer states*, as ``program.state_places`` updates them: the host's memory, or a file on NVMe, has the states and a master copy of
every element that the device would update. Once per step gradients are copied to the host, the CPUs update at the
bandwidth of their memory, and parameters are copied back, chunk by chunk: the copies of one chunk run beside the update of another, so that
the slowest of link, memory and drives takes its time. On NVMe the states and the master copy are read and written once; the drives do one
after the other. Buffers for two chunks, 128 MB at most, are not counted.

A price is that of one microbatch in the steady state, so both directions are assumed busy at once (``Cluster.host_link_bytes_per_s``).
If devices and host share one memory (``Cluster.host`` is ``None``), states in host memory count as the device's. Activations are in
``kept``.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.devices import Cluster
from autopar.plan import Strategy
from autopar.price.state import Precision


@dataclass(frozen=True, slots=True)
class StatePlace:
    """Where a layer's optimizer states are: on the device (empty), in the memory of the ``host`` or on ``nvme``; and whether the host's
    memory is ``separate`` from the device's."""

    memory: str
    separate: bool

    @staticmethod
    def of(strategy: Strategy, cluster: Cluster) -> StatePlace:
        return StatePlace(strategy.options.states_in, cluster.host is not None)

    def in_host(self, elements: int, numbers: Precision) -> int:
        """Bytes of the states of ``elements`` in host memory; 0 if host and device share one memory."""
        return elements * offloaded_bytes(numbers) if self.memory == "host" and self.separate else 0

    def on_nvme(self, elements: int, numbers: Precision) -> int:
        """Bytes of the states of ``elements`` on NVMe."""
        return elements * offloaded_bytes(numbers) if self.memory == "nvme" else 0

    def here(self, numbers: Precision) -> int | None:
        """Bytes in device memory of the states of one element that the host updates; ``None`` if the device updates them."""
        if not self.memory:
            return None
        return 0 if self.separate or self.memory == "nvme" else offloaded_bytes(numbers)


def offloaded_bytes(numbers: Precision) -> int:
    """Bytes of an element in host memory or on NVMe: its states, and a master copy."""
    return numbers.optimizer + (0 if numbers.master else numbers.shard)


def host_update_s(elements: float, memory: str, zero: int, numbers: Precision, cluster: Cluster) -> float:
    """Seconds of an optimizer step over ``elements`` whose states are in host memory or on NVMe."""
    wide = numbers.at_rest or numbers.shard
    down, up = numbers.reduced, wide if zero >= 2 else numbers.shard
    # the gradient arrives and is read; states and master copy are read and written; the parameter is read, written in its dtype, and sent
    moved = elements * (2 * down + 2 * offloaded_bytes(numbers) + wide + 2 * up)
    if cluster.host is None:
        found = moved / cluster.gpu.bytes_per_s
    else:
        found = max(moved / cluster.host_bytes_per_s, elements * max(down, up) / cluster.host_link_bytes_per_s)
    size = elements * offloaded_bytes(numbers)
    return max(found, cluster.nvme_s(size, size)) if memory == "nvme" else found


def waited_s(size: float, compute_s: float, cluster: Cluster) -> float:
    """Seconds of copying ``size`` bytes one way that ``compute_s`` of arithmetic does not hide; a copy within one memory is not hidden."""
    if cluster.host is None:
        return 2 * size / cluster.gpu.bytes_per_s
    return max(0.0, size / cluster.host_link_bytes_per_s - compute_s)
