"""Lists the communication of a layer: the conversions of its values, and the exchanges inside its kernels.

Both follow from the layer's graph and the types on every axis. ``passes.collectives`` inserts the conversions listed here,
``passes.overlap`` chooses those that overlap arithmetic, the cost model prices all of them (``price.collective_pairs``),
and ``checks.collectives`` compares them with the graph after all passes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from autopar.graph import cached_for_graphs
from autopar.ops.operands import is_tensor, operands
from autopar.rules.traffic import SHARE, KernelCollective, kernel_traffic
from autopar.sharding import AxisTypes, Sharding
from passes.conversions import ConversionStep, Types, conversion_steps


@dataclass(frozen=True, slots=True)
class Conversion:
    """The conversion of ``value`` from the types that its op produces to the types that ``readers`` need.

    A reader is the name of an op and the index of its operand, or the name of the graph's output and the index of the result.
    """

    value: str
    source: Types
    target: Types
    steps: tuple[ConversionStep, ...]
    readers: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class KernelExchange:
    """An exchange inside the kernel that replaces ``op``, over ``axes``; ``sharded`` are the other axes that shard the exchanged value."""

    op: str
    axes: tuple[int, ...]
    sharded: tuple[int, ...]
    collective: KernelCollective


def conversions(
    graph: fx.GraphModule, types: Sequence[AxisTypes], gradient: Mapping[str, bool]
) -> tuple[Conversion, ...]:
    """Return every conversion of a layer's graph, in the order of the first readers. A value is converted once to each target.

    ``types`` has the layer's types on each axis (or run of axes with equal types); ``gradient`` says through which values a gradient flows.
    """
    produced, needed = [t.produced for t in types], [t.needed for t in types]
    readers: dict[tuple[str, Types], list[tuple[str, int]]] = {}
    reads, output = _reads(graph)
    for reader, i, value in reads:
        readers.setdefault((value, tuple([one[reader][i] for one in needed])), []).append((reader, i))
    for i, value in enumerate(output[1]):
        readers.setdefault((value, tuple([t.outputs[i] for t in types])), []).append((output[0], i))
    found = []
    for (value, target), its_readers in readers.items():
        source = tuple([one[value] for one in produced])
        if source != target:
            steps = conversion_steps(source, target, gradient[value])
            found.append(Conversion(value, source, target, steps, tuple(its_readers)))
    return tuple(found)


def kernel_exchanges(graph: fx.GraphModule, types: Sequence[AxisTypes]) -> Iterator[KernelExchange]:
    """Yield every exchange inside the kernels of a layer's graph, over the axes on which the kernel replaces the op."""
    replaced = {name for t in types for name in t.kernel}
    for node in graph.graph.nodes if replaced else ():
        kernels = {i: t.kernel[node.name] for i, t in enumerate(types) if node.name in t.kernel}
        for kernel in dict.fromkeys(kernels.values()):
            axes = tuple(i for i, name in kernels.items() if name == kernel)
            for collective in kernel_traffic(kernel, node):
                value_types = _types_at(collective.value, node, types)
                # of a token's rows, a rank sends those of experts with its coordinate on the axes without an exchange
                shared = [i for i, name in kernels.items() if name == SHARE and collective.router is not None]
                sharded = tuple(i for i, t in enumerate(value_types) if (t.sharded or i in shared) and i not in axes)
                yield KernelExchange(node.name, axes, sharded, collective)


def typed_values(graph: fx.GraphModule, sharding: Sharding) -> Iterator[tuple[fx.Node, Types]]:
    """Yield every tensor of a layer's graph with the types that its op produces, and again with those that each reading op needs."""
    for node in graph.graph.nodes:
        if node.op != "output" and is_tensor(node):
            yield node, sharding.produced(node.name)
        if node.op == "call_function":
            yield from ((operand, sharding.needed(node.name, i)) for i, operand in enumerate(operands(node)))


def _types_at(value: fx.Node, node: fx.Node, types: Sequence[AxisTypes]) -> Types:
    """Return the types of ``value`` that ``node`` needs; if ``value`` is ``node`` itself, those that it produces."""
    if value is node:
        return tuple(t.produced[node.name] for t in types)
    index = operands(node).index(value)
    return tuple(t.needed[node.name][index] for t in types)


@cached_for_graphs(maxsize=256)
def _reads(graph: fx.GraphModule) -> tuple[tuple[tuple[str, int, str], ...], tuple[str, tuple[str, ...]]]:
    """Return (op, operand index, value) for every read by an op, and the output node's name with the names of the results."""
    reads = []
    for node in graph.graph.nodes:
        if node.op not in ("placeholder", "output"):
            reads += [(node.name, i, operand.name) for i, operand in enumerate(operands(node))]
    output = graph.graph.output_node()
    results: Any = output.args[0]
    return tuple(reads), (output.name, tuple(result.name for result in results))
