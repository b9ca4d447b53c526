"""Offloading: bytes of a layer in host memory, and seconds of the copies in both directions.

*Optimizer*: host memory has the optimizer states and the master copy, and buffers for arriving gradients and leaving parameters, for
every element that the device would update. Once per step the gradients are copied to the host, the CPUs update at the bandwidth of their
memory, and the parameters are copied back; nothing of this is hidden, and each part starts when the previous one has ended.

*Activations*: the tensors that the layer saves for its backward are copied to the host after its forward, and back before its backward,
during the arithmetic of other layers; the device waits for copies that take longer than the layer's own arithmetic. Device memory has
the saved tensors of the running layer and of one layer that is being copied, assumed to be as large.

A price is that of one microbatch in the steady state, so both directions are assumed busy at once (``Cluster.host_link_bytes_per_s``).
If the devices' memory is the host's (``Cluster.host`` is ``None``), states stay where they are, and copies of saved tensors only
cost: memory has the saved tensors, and while a layer runs also the copies of its tensors and of the next layer's.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.devices import Cluster
from autopar.plan import Strategy
from autopar.price.state import Precision


@dataclass(frozen=True, slots=True)
class Offloaded:
    """Which parts of a layer are in host memory, and whether host memory is ``separate`` from device memory."""

    optimizer: bool
    activations: bool
    separate: bool

    @staticmethod
    def of(strategy: Strategy, cluster: Cluster) -> Offloaded:
        separate = cluster.host is not None
        return Offloaded(separate and strategy.offloads_optimizer, strategy.offloads_activations, separate)


def host_update_bytes(numbers: Precision) -> int:
    """Bytes that the CPUs move per parameter: they read its gradient, read and write its states and master copy, and write the
    parameter, which they also read if it is its own master copy."""
    return numbers.reduced + 2 * numbers.optimizer + numbers.shard * (1 if numbers.master else 2)


def host_update_s(elements: float, numbers: Precision, cluster: Cluster) -> float:
    """Seconds of an optimizer step over ``elements`` in host memory, copies in both directions included."""
    sent = elements * (numbers.reduced + numbers.shard)
    return sent / cluster.host_link_bytes_per_s + elements * host_update_bytes(numbers) / cluster.host_bytes_per_s


def host_state_bytes(elements: int, numbers: Precision) -> int:
    """Bytes of ``elements`` in host memory: states, master copy, and buffers for the gradient and the parameter."""
    return elements * (numbers.optimizer + numbers.reduced + numbers.shard)


def waited_s(size: float, compute_s: float, cluster: Cluster) -> float:
    """Seconds of copying ``size`` bytes one way that ``compute_s`` of arithmetic does not hide; a copy within one memory is not hidden."""
    if cluster.host is None:
        return 2 * size / cluster.gpu.bytes_per_s
    return max(0.0, size / cluster.host_link_bytes_per_s - compute_s)
