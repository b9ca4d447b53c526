"""From a trainer's setting to a plan: mesh, strategy of every layer, stage cuts, schedule."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from autopar.errors import InfeasibleError
from autopar.graph import Graph
from autopar.plan import Axis, Plan, Role, Strategy
from autopar.price import Pricer
from autopar.schedules import INTERLEAVED, NO_PIPELINE, ONE_F_ONE_B, Schedule, check_schedule
from autopar.search import evaluate, make_mesh
from autopar.search.problem import Devices
from autopar.techniques.activations import KEEP
from autopar.trainers import figures
from autopar.trainers.setting import Setting


@dataclass(frozen=True)
class PlanParts:
    """The plan of a setting, as arguments of ``search.evaluate``."""

    mesh: tuple[Axis, ...]
    bounds: tuple[int, ...]
    strategies: list[Strategy]
    schedule: Schedule
    precision: str

    def evaluate(self, graph: Graph, cluster: Devices, pricer: Pricer) -> Plan:
        """Return the priced plan; errors as in ``search.evaluate``."""
        return evaluate(
            graph,
            cluster,
            pricer,
            mesh=self.mesh,
            stage_bounds=self.bounds,
            strategies=self.strategies,
            schedule=self.schedule,
            precision=self.precision,
        )


def plan_parts(graph: Graph, s: Setting, root_zero: int | None = None) -> PlanParts:
    """Return the plan of a setting. ``root_zero`` is the ZeRO stage of the first and the last layer, by default that of all.

    Trainers recompute blocks, never the first and the last layer. Raises ``InfeasibleError`` if there are more stages than layers,
    ``UsageError`` if the schedule does not admit its sizes.
    """
    mesh = setting_mesh(s)
    block = block_strategy(s, mesh)
    dense, ends = block.dense, end_strategy(block, root_zero)
    of_class = {name: block if cls.experts else dense for name, cls in graph.classes.items()}
    strategies = [of_class[layer.cls] for layer in graph.layers]
    strategies[0] = strategies[-1] = ends
    bounds = stage_bounds(graph, s)
    if s.recomputed is not None:
        kept = {id(strategy): strategy.with_options(activations=KEEP) for strategy in (block, dense)}
        for start, stop in pairwise(bounds):
            blocks = [i for i in range(start, stop) if 0 < i < len(strategies) - 1]
            for i in blocks[s.recomputed :]:
                strategies[i] = kept[id(strategies[i])]
    return PlanParts(mesh, bounds, strategies, schedule_of(s), s.precision)


def setting_mesh(s: Setting) -> tuple[Axis, ...]:
    """Return the mesh of one stage."""
    copies = s.replicate if s.expert == 1 and s.context == 1 else 1
    inner = ("expert", s.expert_axis), ("context", s.context), ("tensor", s.tensor)
    return make_mesh(("replicas", copies), ("data", s.data // s.expert_axis // copies), *inner)


def block_strategy(s: Setting, mesh: tuple[Axis, ...]) -> Strategy:
    """Return the strategy of blocks with experts; blocks without have its ``dense``."""
    role = {
        "replicas": Role.DATA,
        "data": Role.DATA,
        "expert": Role.EXPERT,
        "context": Role.ULYSSES if "all-to-all context" in s.facts else Role.RING,
        "tensor": Role.TENSOR_SEQUENCE if s.sequence else Role.TENSOR,
    }
    role |= {name: role[name].folded for name in s.folds}
    # ZeRO shards experts over fewer ranks than the other parameters of their layer, which the expert axis replicates, too
    zero = s.zero if s.data * s.context > 1 else 0
    copies = next((axis.size for axis in mesh if axis.name == "replicas"), 1)
    return Strategy(
        tuple(role[axis.name] for axis in mesh), zero=zero, replicate=copies if zero else 1, options=s.options
    )


def end_strategy(block: Strategy, root_zero: int | None) -> Strategy:
    """Return the strategy of the first and the last layer."""
    ends = block.dense.with_options(activations=KEEP)
    return dataclasses.replace(ends, zero=root_zero) if root_zero is not None and ends.zero else ends


def schedule_of(s: Setting) -> Schedule:
    """Return the pipeline schedule with its sizes. Raises ``UsageError`` if it is not 1F1B and does not admit them."""
    chunks = s.chunks if s.pipeline > 1 else 1
    if s.pipeline == 1:
        return Schedule(NO_PIPELINE, 1, s.microbatches, 1)
    if s.schedule in ("", ONE_F_ONE_B, INTERLEAVED):
        return Schedule(INTERLEAVED if chunks > 1 else ONE_F_ONE_B, s.pipeline, s.microbatches, chunks)
    schedule = Schedule(s.schedule, s.pipeline, s.microbatches, chunks)
    check_schedule(schedule)
    return schedule


def stage_bounds(graph: Graph, s: Setting) -> tuple[int, ...]:
    """Return the first layer of each stage and the number of layers: the setting's cuts, or those of ``even_bounds``."""
    return even_bounds(graph, s) if s.cuts is None else (0, *s.cuts, len(graph.layers))


def even_bounds(graph: Graph, s: Setting, heavy_head: float = figures.HEAVY_HEAD.value) -> tuple[int, ...]:
    """Return stage bounds with equal numbers of blocks, the embedding in the first stage and the head in the last.

    Published settings don't say which blocks each stage had. If the number of stages divides not the blocks but the layers (with embedding
    and head), stages have equal numbers of layers. Otherwise, and if the head costs at least ``heavy_head`` blocks, they are assumed to
    have equal FLOPs.

    Raises ``InfeasibleError`` if there are more stages than layers.
    """
    stages, blocks = s.stages, len(graph.layers) - 2
    if stages > blocks + 2 or (stages > 1 and blocks < 1):
        raise InfeasibleError(f"{blocks} blocks cannot be cut into {stages} stages", "give it fewer stages")
    if stages == 1:
        return 0, len(graph.layers)
    head = head_weight(graph)
    if blocks % stages == 0 and head < heavy_head:
        each = blocks // stages
        return (0, *(1 + each * i for i in range(1, stages)), len(graph.layers))
    if (blocks + 2) % stages == 0 and head < heavy_head:  # embedding and head count as a block each
        each = (blocks + 2) // stages
        return tuple(each * i for i in range(stages + 1))
    return balanced(blocks, head, stages)


def is_even(bounds: Sequence[int]) -> bool:
    """Return whether all stages have the same number of blocks: the first also has the embedding, the last the head."""
    sizes = [b - a for a, b in pairwise(bounds)]
    sizes[0] -= 1
    sizes[-1] -= 1
    return len(set(sizes)) == 1 and sizes[0] > 0


def balanced(blocks: int, head: float, stages: int) -> tuple[int, ...]:
    """Return stage bounds that cut where the running sum of FLOPs reaches a multiple of the stages' equal share. Every stage gets at least
    one layer. ``head`` is the FLOPs of the head over those of a block.

    This is nanotron's rule (``build_model`` in src/nanotron/models/base.py), except that a stage there ends with the block that passes its
    share. With a head of four blocks, times and memory of nanotron's published sweep fit stages that end with the block that reaches it."""
    total = blocks + head
    bounds = [0]
    for stage in range(1, stages):
        share = total * stage / stages
        at = 1 + min(blocks, math.ceil(share))  # cut after the block that reaches the share
        bounds.append(min(max(at, bounds[-1] + 1), blocks + 2 - (stages - stage)))
    return (*bounds, blocks + 2)


def head_weight(graph: Graph) -> float:
    """Return the ratio of the head's matrix elements to the middle block's, approximately that of their FLOPs; of a mixture's experts,
    those count that a token takes."""
    return _elements(graph, -1) / max(1.0, _elements(graph, len(graph.layers) // 2))


def _elements(graph: Graph, at: int) -> float:
    """Return the matrix elements of a layer, with the share of its experts that a token takes."""
    layer = graph.layers[at]
    share = {count: choices / (graph.tokens * count) for count, choices in graph.classes[layer.cls].mixtures}
    shapes = [graph.parameters[name].value.shape for name in layer.parameters]
    return sum(math.prod(n) * (share.get(n[0], 1.0) if len(n) > 2 else 1.0) for n in shapes if len(n) > 1)
