"""The fitted constants of the price, each with the values that are tried and how a price is made with another value.

A constant that is fitted to published rows has one entry in ``FITTED``; a test compares the table with the product's constants.
``FittedBench`` prices rows with other values: it replaces figures of the clusters, the trainers' cost models and the settings.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from validation_page import records

from autopar.devices import Cluster, constants, hardware
from autopar.graph import Graph
from autopar.trainers import DEEPSPEED, OtherTrainer, Setting, figures
from autopar.trainers.layout import even_bounds
from autopar.validate.rows import Hardware, Row
from autopar.validate.run import Bench, Predicted
from autopar.validate.setting import reported_bytes, trainer_of

NEVER = 1e9  # blocks: no head weighs as much


@dataclass(frozen=True)
class FittedConstant:
    """A constant, named as in ``validation_page.records``.

    ``neutral`` is its value if the price did without it, which ``without`` explains; ``tried`` are the other values besides the
    product's. ``cluster``, ``model`` and ``setting`` return their argument with the value, ``reported`` the bytes that a row's tool
    would have reported. ``published``: a paper or another project printed the value.
    """

    name: str
    tried: tuple[float, ...]
    neutral: float
    without: str
    cluster: Callable[[Cluster, float], Cluster] | None = None
    model: Callable[[OtherTrainer, Setting, float], OtherTrainer] | None = None
    setting: Callable[[Setting, Graph, float], Setting] | None = None
    reported: Callable[[Setting, int, float], float] | None = None
    published: bool = False

    @property
    def committed(self) -> float:
        """The product's value."""
        return next(record.value for record in records() if record.name == self.name)

    @property
    def values(self) -> tuple[float, ...]:
        """All values, ascending."""
        return tuple(sorted({*self.tried, self.neutral, self.committed}))


def _with_products(cluster: Cluster, factor: float, copies: float = 1.0) -> Cluster:
    """Scale the rates of products in all precisions, and those of ``copies``."""
    gpu = cluster.gpu
    changed = dataclasses.replace(
        gpu,
        matmul_efficiency=gpu.matmul_efficiency * factor,
        memory_efficiency=gpu.memory_efficiency * copies,
        efficiencies={name: rate * factor for name, rate in gpu.efficiencies.items()},
    )
    return dataclasses.replace(cluster, gpu=changed)


def _sustained(cluster: Cluster, value: float) -> Cluster:
    """Scale the rates of GPUs whose training runs meet the power limit."""
    if not hardware.table()[cluster.gpu.name].get("power_limited"):
        return cluster
    factor = value / constants.SUSTAINED.value
    return _with_products(cluster, factor, factor)


def _sustained_of(kind: str) -> Callable[[Cluster, float], Cluster]:
    """Return the function that gives a kind of GPU other TFLOP/s in training, and those that reach the same fraction of their peak: the
    ones whose files name it, or have the same figure."""
    figure, field = "sustained_as", "sustained_matmul_bf16_tflops"

    def change(cluster: Cluster, value: float) -> Cluster:
        entry, own = hardware.table()[kind], hardware.table()[cluster.gpu.name]
        same = own.get(field) == entry[field] or own.get(figure) == kind
        return _with_products(cluster, value / entry[field]) if same else cluster

    return change


def _kernel(cluster: Cluster, value: float) -> Cluster:
    return dataclasses.replace(cluster, gpu=dataclasses.replace(cluster.gpu, kernel_s=value))


def _attention(cluster: Cluster, value: float) -> Cluster:
    return dataclasses.replace(cluster, gpu=dataclasses.replace(cluster.gpu, attention_efficiency=value))


def _host(cluster: Cluster, value: float) -> Cluster:
    return dataclasses.replace(cluster, host_s=value)


def _hop(cluster: Cluster, value: float) -> Cluster:
    if cluster.network is None:
        return cluster
    return dataclasses.replace(cluster, network=dataclasses.replace(cluster.network, hop_s=value * 1e-6))


def _pipelined_host(cluster: Cluster, value: float) -> Cluster:
    if cluster.network is None:
        return cluster
    return dataclasses.replace(cluster, network=dataclasses.replace(cluster.network, pipelined_host_s=value * 1e-6))


def _reserve(cluster: Cluster, value: float) -> Cluster:
    return dataclasses.replace(cluster, memory_override_bytes=int(cluster.gpu.memory_bytes / value))


def _tensor_overlap(model: OtherTrainer, s: Setting, value: float) -> OtherTrainer:
    """Replace the fraction of trainers that neither hide all tensor-parallel communication nor none."""
    if model.overlap_tensor != figures.TENSOR_OVERLAP.value:
        return model
    return dataclasses.replace(model, overlap_tensor=value)


def _deepspeed_gradients(model: OtherTrainer, s: Setting, value: float) -> OtherTrainer:
    if trainer_of(s) is not DEEPSPEED or "16-bit gradients" in s.facts:
        return model
    return dataclasses.replace(model, gradient_bytes=int(value))


def _heavy_head(s: Setting, graph: Graph, value: float) -> Setting:
    if s.stages == 1 or s.cuts is not None:
        return s
    return dataclasses.replace(s, cuts=even_bounds(graph, s, value)[1:-1])


_US = 1e-6

FITTED = (
    FittedConstant(
        "SUSTAINED", (0.65, 0.7, 0.735, 0.81, 0.85, 0.9), 1.0, "as in a short benchmark", cluster=_sustained
    ),
    FittedConstant("KERNEL_S", (1 * _US, 4 * _US, 6 * _US, 10 * _US), 0.0, "kernels start at no cost", cluster=_kernel),
    FittedConstant(
        "ATTENTION_EFFICIENCY",
        (0.25, 0.3, 0.4, 0.45, 0.5, 0.6),
        constants.MATMUL_EFFICIENCY.value,
        "attention is as fast as products",
        cluster=_attention,
        published=True,
    ),
    FittedConstant(
        "HOST_S", (1e-4, 2e-4, 2.75e-4, 4.5e-4, 6e-4), 0.0, "the host issues collectives at no cost", cluster=_host
    ),
    FittedConstant(
        "A100-40GB-SXM: sustained_matmul_bf16_tflops",
        (205.0, 220.0, 227.5, 242.5, 250.0, 260.0),
        271.2,
        "as in a short benchmark",
        cluster=_sustained_of("A100-40GB-SXM"),
    ),
    FittedConstant(
        "B200-180GB-SXM: sustained_matmul_bf16_tflops",
        (900.0, 1000.0, 1200.0, 1350.0, 1500.0),
        1745.0,
        "as in a short benchmark",
        cluster=_sustained_of("B200-180GB-SXM"),
        published=True,
    ),
    FittedConstant(
        "p5-efa: hop_us",
        (22.0, 28.0, 35.0, 45.0, 60.0),
        constants.NETWORK_HOP_S.value / _US,
        "NETWORK_HOP_S, as on other networks",
        cluster=_hop,
    ),
    FittedConstant(
        "p5-efa: pipelined_host_us",
        (100.0, 150.0, 200.0, 240.0, 300.0, 450.0),
        0.0,
        "the host takes as long as without a pipeline",
        cluster=_pipelined_host,
    ),
    FittedConstant("TENSOR_OVERLAP", (0.15, 0.45, 0.6, 0.8), 0.0, "nothing is hidden", model=_tensor_overlap),
    FittedConstant("HEAVY_HEAD", (0.0, 1.0, 1.5, 3.0, 4.0), NEVER, "the head never counts", setting=_heavy_head),
    FittedConstant(
        "DEEPSPEED_GRADIENT_BYTES",
        (4.0, 8.0, 12.0, 14.0),
        6.0,
        "a 16-bit gradient and a float32 sum, 6",
        model=_deepspeed_gradients,
    ),
    FittedConstant(
        "ALLOCATOR_RESERVE",
        (1.02, 1.035, 1.065, 1.08, 1.1),
        1.0,
        "the allocator reserves what is allocated",
        cluster=_reserve,
        reported=reported_bytes,
        published=True,
    ),
)
"""Every fitted constant on which a row's price depends, and published ones that come from a source of rows, in the order in which they are
fitted together."""

LIMITS = ("USABLE_MEMORY",)
"""Fitted constants on which no price depends: how much of a device's memory a plan may use."""


class FittedBench(Bench):
    """Prices rows with other values of constants, by name, and as if their words did not state ``fact``. Captured graphs are those of
    ``other``."""

    def __init__(self, values: Mapping[str, float], other: Bench, fact: str = "") -> None:
        super().__init__()
        self.graphs, self.variants, self.fact = other.graphs, other.variants, fact
        self.changes = [(one, values[one.name]) for one in FITTED if one.name in values]

    def predicted(self, row: Row) -> Predicted:
        settings = tuple(dataclasses.replace(s, facts=s.facts - {self.fact}) for s in row.settings)
        return super().predicted(dataclasses.replace(row, settings=settings))

    def cluster(self, hardware: Hardware) -> Cluster:
        found = super().cluster(hardware)
        for one, value in self.changes:
            found = one.cluster(found, value) if one.cluster else found
        return found

    def model(self, setting: Setting, cluster: Cluster) -> OtherTrainer:
        found = super().model(setting, cluster)
        for one, value in self.changes:
            found = one.model(found, setting, value) if one.model else found
        return found

    def setting(self, setting: Setting, graph: Graph) -> Setting:
        found = super().setting(setting, graph)
        for one, value in self.changes:
            found = one.setting(found, graph, value) if one.setting else found
        return found

    def reported(self, setting: Setting, memory: int) -> float:
        counted = (one.reported(setting, memory, value) for one, value in self.changes if one.reported)
        return next(counted, super().reported(setting, memory))
