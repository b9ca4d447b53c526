"""From a row's degrees, recipe and machines to what a user would have written: a mesh, strategies, cuts, a practice, a cluster."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from autopar.devices import Cluster, constants, described
from autopar.errors import InfeasibleError
from autopar.graph import Graph
from autopar.plan import Axis, Role, Strategy
from autopar.price.practice import Practice
from autopar.search import make_mesh
from autopar.validate.rows import Hardware, RowError, Setting

HEAVY_HEAD = 2.0
"""From this many blocks' arithmetic on, the head is assumed to have been counted when the blocks were dealt out to stages."""


@dataclass(frozen=True)
class Written:
    """What ``search.evaluate`` takes besides the graph and the cluster."""

    mesh: tuple[Axis, ...]
    bounds: tuple[int, ...]
    strategies: list[Strategy]
    microbatches: int
    schedule: str
    chunks: int
    precision: str


def write(graph: Graph, s: Setting, context: Role) -> Written:
    """The plan that the row describes; the axis of context parallelism plays ``context``."""
    mesh = make_mesh(("data", s.data), ("context", s.context), ("tensor", s.tensor))
    role = {
        "data": Role.DATA,
        "context": context,
        "tensor": Role.TENSOR_SEQUENCE if s.sequence else Role.TENSOR,
    }
    strategy = Strategy(
        tuple(role[axis.name] for axis in mesh),
        zero=s.zero if s.data * s.context > 1 else 0,
        recompute=s.recompute == "full",
        selective=s.recompute == "selective",
    )
    # the ends of the model are never recomputed: the head's logits are its last values, the lookup keeps nothing
    ends = dataclasses.replace(strategy, recompute=False, selective=False)
    strategies = [strategy] * len(graph.layers)
    strategies[0] = strategies[-1] = ends
    microbatches = s.global_batch // (s.data * s.microbatch)
    chunks = s.chunks if s.pipeline > 1 else 1
    schedule = "none" if s.pipeline == 1 else "interleaved" if chunks > 1 else "1f1b"
    return Written(mesh, cuts(graph, s), strategies, microbatches, schedule, chunks, s.precision)


def cuts(graph: Graph, s: Setting) -> tuple[int, ...]:
    """Where the stages begin, and the end of the last: equal numbers of blocks, the lookup with the first, the head with the last.

    Rows do not say how blocks were dealt out. Where they do not divide, or the head weighs as much as several blocks, stages are
    assumed to have been given equal arithmetic.
    """
    stages = s.pipeline * (s.chunks if s.pipeline > 1 else 1)
    blocks = len(graph.layers) - 2
    if stages > blocks + 2 or (stages > 1 and blocks < 1):
        raise InfeasibleError(f"{blocks} blocks cannot be cut into {stages} stages", "give it fewer stages")
    if stages == 1:
        return 0, len(graph.layers)
    head = head_weight(graph)
    if blocks % stages == 0 and head < HEAVY_HEAD:
        each = blocks // stages
        return (0, *(1 + each * i for i in range(1, stages)), len(graph.layers))
    if (blocks + 2) % stages == 0 and head < HEAVY_HEAD:  # lookup and head counted as a block each
        each = (blocks + 2) // stages
        return tuple(each * i for i in range(stages + 1))
    return balanced(blocks, head, stages)


def balanced(blocks: int, head: float, stages: int) -> tuple[int, ...]:
    """Stage bounds whose running arithmetic first passes each stage's share; every stage gets a layer."""
    total = blocks + head
    bounds = [0]
    for stage in range(1, stages):
        share = total * stage / stages
        at = 1 + min(blocks, int(share) + 1)  # the block that crosses the share stays before the cut
        bounds.append(min(max(at, bounds[-1] + 1), blocks + 2 - (stages - stage)))
    return (*bounds, blocks + 2)


def head_weight(graph: Graph) -> float:
    """The last layer's parameters over a block's: their arithmetic, to a good approximation."""
    size = {
        layer.name: sum(v.numel for p in layer.parameters if len((v := graph.parameters[p].value).shape) > 1)
        for layer in graph.layers
    }
    return size[graph.layers[-1].name] / max(1, size[graph.layers[1].name])


def practice_of(s: Setting, cluster: Cluster) -> Practice:
    """Kernels and overlaps by what the row says, else by the habits of its precision's years."""
    old = s.precision == "float16"
    megatron = old or s.chunks > 1 or "Megatron" in s.facts
    early = cluster.gpu.name.startswith(("V100", "A100")) and s.zero < 3
    return Practice(
        fused="eager" not in s.facts,
        flash="flash attention" in s.facts or not (old or early or "unfused attention" in s.facts),
        by_parameter=old,
        bucketed=True,
        gradient_bytes=4 if megatron or s.zero == 3 else 10 if "DeepSpeed" in s.facts else 8 if s.data > 1 else 6,
        regather=old or "Megatron" in s.facts or s.zero < 3,
        overlap_data=int(s.pipeline == 1)
        if old
        else s.pipeline
        if s.chunks > 1 and "overlap off" not in s.facts
        else 0,
        overlap_tensor=0.0 if old or "overlap off" in s.facts else 1.0 if s.chunks > 1 else 0.3,
    )


def instrument(s: Setting, memory: int) -> float:
    """What the row's instrument shows of ``memory`` allocated bytes: the allocator's reserve, or the driver's count."""
    if "device memory" in s.facts:
        return memory * constants.ALLOCATOR_RESERVE.value + constants.DEVICE_OVERHEAD.value
    return memory * constants.ALLOCATOR_RESERVE.value if "reserved memory" in s.facts else float(memory)


def cluster_of(hardware: Hardware) -> Cluster:
    """The machines of the row.

    Raises:
        DeviceError: a GPU that is not known.
    """
    per_node = min(hardware.per_node, hardware.devices)
    if hardware.devices % per_node:
        raise RowError(f"n_gpus = {hardware.devices} do not fill nodes of {per_node}")
    return described(hardware.gpu, hardware.devices // per_node, per_node, hardware.network)
