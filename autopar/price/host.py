"""What a layer has in the memory of its node's processors: bytes there, and seconds of the ways there and back.

*Optimizer*: its states, the master copy and what passes through (the gradient that arrives, the parameter that leaves) are there for
every element that the device would update. Once a step gradients go there, the processors update at their memory's bandwidth, and
parameters come back; none of it is hidden, and each starts when the one before has ended.

*Activations*: what the layer saves for its backward goes there after its forward, and comes back before its backward, beside the
arithmetic of other layers: what takes longer than the layer's own arithmetic is waited for. On the device there is the layer at work,
and the one whose saved tensors are on their way, taken to be as large.

A price is of one microbatch in the steady state, so both directions are taken to be busy at once (``Cluster.host_link_bytes_per_s``).
Where the devices' memory is the host's (``Cluster.host`` is ``None``) states stay where they are, and saved tensors are copied for nothing:
there is what was saved, and while a layer is at work what came back of it and of the next one.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.devices import Cluster
from autopar.plan import Strategy
from autopar.price.memory import Precision


@dataclass(frozen=True, slots=True)
class Aside:
    """What of a layer is in the host's memory, and whether that is another one than the device's."""

    optimizer: bool
    activations: bool
    apart: bool

    @staticmethod
    def of(strategy: Strategy, cluster: Cluster) -> Aside:
        apart = cluster.host is not None
        return Aside(apart and strategy.offloads_optimizer, strategy.offloads_activations, apart)


def host_update_bytes(numbers: Precision) -> int:
    """Bytes that the processors move per parameter: read its gradient, read and write its states and master copy, write the parameter,
    which they read too where it is its own master."""
    return numbers.reduced + 2 * numbers.optimizer + numbers.shard * (1 if numbers.master else 2)


def host_update_s(elements: float, numbers: Precision, cluster: Cluster) -> float:
    """Seconds of an optimizer's step over so many elements in the host's memory, both ways included."""
    sent = elements * (numbers.reduced + numbers.shard)
    return sent / cluster.host_link_bytes_per_s + elements * host_update_bytes(numbers) / cluster.host_bytes_per_s


def host_state_bytes(elements: int, numbers: Precision) -> int:
    """Bytes that so many elements have there: states, master copy, and room for the gradient and the parameter."""
    return elements * (numbers.optimizer + numbers.reduced + numbers.shard)


def waited_s(size: float, compute_s: float, cluster: Cluster) -> float:
    """Seconds of sending ``size`` bytes one way that ``compute_s`` of arithmetic does not hide; a copy within one memory is not hidden."""
    if cluster.host is None:
        return 2 * size / cluster.gpu.bytes_per_s
    return max(0.0, size / cluster.host_link_bytes_per_s - compute_s)
