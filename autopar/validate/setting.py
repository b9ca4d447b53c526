"""Turns a row's degrees, recipe and machines into a mesh, strategies, stage cuts, a cost model of the trainer, and a cluster."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from autopar.devices import Cluster, constants, described
from autopar.errors import InfeasibleError
from autopar.graph import Graph
from autopar.plan import Axis, Role, Strategy
from autopar.schedules import INTERLEAVED, NO_PIPELINE, ONE_F_ONE_B, Schedule, check_schedule
from autopar.search import make_mesh
from autopar.techniques.activations import KEEP
from autopar.trainers import OtherTrainer, figures
from autopar.validate.fields import RowError
from autopar.validate.rows import Hardware, Setting


@dataclass(frozen=True)
class RowPlan:
    """The plan of a row, as arguments of ``search.evaluate`` (which also takes graph, cluster and pricer)."""

    mesh: tuple[Axis, ...]
    bounds: tuple[int, ...]
    strategies: list[Strategy]
    schedule: Schedule
    precision: str


def plan_of_row(graph: Graph, s: Setting, context: Role) -> RowPlan:
    """Return the plan that the row describes; ``context`` is the role of the context-parallel axis."""
    copies = s.replicate if s.expert == 1 and s.context == 1 else 1
    experts = s.expert_axis
    inner = ("expert", experts), ("context", s.context), ("tensor", s.tensor)
    mesh = make_mesh(("replicas", copies), ("data", s.data // experts // copies), *inner)
    role = {
        "replicas": Role.DATA,
        "data": Role.DATA,
        "expert": Role.EXPERT,
        "context": context,
        "tensor": Role.TENSOR_SEQUENCE if s.sequence else Role.TENSOR,
    }
    role |= {name: role[name].folded for name in s.folds}
    # ZeRO shards experts over fewer ranks than the other parameters of their layer, which the expert axis replicates, too
    zero = s.zero if s.data * s.context > 1 else 0
    strategy = Strategy(
        tuple(role[axis.name] for axis in mesh),
        zero=zero,
        replicate=copies if zero else 1,
        options=s.options,
    )
    dense = strategy.dense
    # trainers recompute blocks, not the first and last layer. Under FSDP both are in the root unit, whose parameters stay gathered from
    # forward to backward
    ends = dataclasses.replace(
        dense.with_options(activations=KEEP), zero=2 if is_fsdp(s) and dense.zero else dense.zero
    )
    strategies = [strategy if graph.classes[layer.cls].experts else dense for layer in graph.layers]
    strategies[0] = strategies[-1] = ends
    return RowPlan(mesh, cuts(graph, s), strategies, schedule_of_row(s), s.precision)


def schedule_of_row(s: Setting) -> Schedule:
    """Return the row's pipeline schedule with its sizes. Raises ``UsageError`` if it is not 1F1B and does not admit them."""
    microbatches = s.global_batch // (s.data * s.microbatch)
    chunks = s.chunks if s.pipeline > 1 else 1
    if s.pipeline == 1:
        name = NO_PIPELINE
    elif s.schedule in ("", ONE_F_ONE_B, INTERLEAVED):
        name = INTERLEAVED if chunks > 1 else ONE_F_ONE_B
    else:
        check_schedule(Schedule(s.schedule, s.pipeline, microbatches, chunks))
        name = s.schedule
    return Schedule(name, s.pipeline, microbatches, chunks)


def cuts(graph: Graph, s: Setting) -> tuple[int, ...]:
    """Return stage bounds with equal numbers of blocks, the embedding in the first stage and the head in the last.

    Rows don't say which blocks each stage had. If the number of stages divides not the blocks but the layers (with embedding and head),
    stages have equal numbers of layers. Otherwise, and if the head costs at least ``HEAVY_HEAD`` blocks, they are assumed to have equal
    FLOPs.

    Raises ``InfeasibleError`` if there are more stages than layers.
    """
    stages = s.pipeline * (s.chunks if s.pipeline > 1 else 1)
    blocks = len(graph.layers) - 2
    if stages > blocks + 2 or (stages > 1 and blocks < 1):
        raise InfeasibleError(f"{blocks} blocks cannot be cut into {stages} stages", "give it fewer stages")
    if stages == 1:
        return 0, len(graph.layers)
    head = head_weight(graph)
    if blocks % stages == 0 and head < figures.HEAVY_HEAD.value:
        each = blocks // stages
        return (0, *(1 + each * i for i in range(1, stages)), len(graph.layers))
    if (blocks + 2) % stages == 0 and head < figures.HEAVY_HEAD.value:  # embedding and head count as a block each
        each = (blocks + 2) // stages
        return tuple(each * i for i in range(stages + 1))
    return balanced(blocks, head, stages)


def balanced(blocks: int, head: float, stages: int) -> tuple[int, ...]:
    """Return stage bounds that cut where the running sum of FLOPs passes a multiple of the stages' equal share. Every stage gets at least
    one layer. ``head`` is the FLOPs of the head over those of a block."""
    total = blocks + head
    bounds = [0]
    for stage in range(1, stages):
        share = total * stage / stages
        at = 1 + min(blocks, int(share) + 1)  # cut after the block that crosses the share
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


def is_fsdp(s: Setting) -> bool:
    """Return whether PyTorch's FSDP shards the parameters; ZeRO-3 in float16 is assumed to be DeepSpeed's."""
    return s.zero == 3 and s.precision != "float16" and "DeepSpeed" not in s.facts


def trainer_of(s: Setting, cluster: Cluster) -> OtherTrainer:
    """Return the cost model of the row's trainer: from the row's facts, or else the usual one for its recipe and GPU."""
    fp16_era = s.precision == "float16"
    before_flash = cluster.gpu.name.startswith(("V100", "A100")) and s.zero < 3
    megatron = fp16_era or s.chunks > 1 or "Megatron" in s.facts or (s.precision == "float8" and s.zero < 3)
    fsdp = is_fsdp(s)
    overlap_off = "overlap off" in s.facts
    if fp16_era:
        overlap_data = int(s.pipeline == 1)
    else:  # the pipeline's cool-down hides communication, too
        overlap_data = s.pipeline if not overlap_off and (s.chunks > 1 or "overlapped gradients" in s.facts) else 0
    if fp16_era or overlap_off or (fsdp and "overlapped tensor" not in s.facts):
        overlap_tensor = 0.0
    else:
        hides_all = s.chunks > 1 or "overlapped tensor" in s.facts
        overlap_tensor = 1.0 if hides_all else figures.TENSOR_OVERLAP.value
    return OtherTrainer(
        fused="eager" not in s.facts and (megatron or "compiled" in s.facts or s.precision == "float8"),
        flash="flash attention" in s.facts or not (fp16_era or before_flash or "unfused attention" in s.facts),
        gathers_by_parameter=fp16_era,
        gradient_bytes=_gradient_bytes(s, megatron, fsdp),
        fresh_bytes=0 if megatron or fsdp or "DeepSpeed" in s.facts else int(figures.FRESH_GRADIENT_BYTES.value),
        fsdp=fsdp,
        loss_copies=0 if not fsdp or "fused loss" in s.facts else 2 if s.tensor > 1 else 1,
        accumulation_fusion=megatron,
        regather=not fsdp,
        overlap_data=overlap_data,
        overlap_tensor=overlap_tensor,
    )


def _gradient_bytes(s: Setting, megatron: bool, fsdp: bool) -> int:
    """Return the bytes that the trainer keeps for one parameter's gradient, including copies."""
    if "16-bit gradients" in s.facts:
        return int(figures.RECIPE_GRADIENT_BYTES.value)
    if megatron or fsdp:  # Megatron accumulates in float32; FSDP's shard is float32
        return 4
    if "DeepSpeed" in s.facts:
        return int(figures.DEEPSPEED_GRADIENT_BYTES.value)
    return int((figures.DDP_GRADIENT_BYTES if s.data > 1 else figures.SUMMED_GRADIENT_BYTES).value)


def reported_bytes(s: Setting, memory: int) -> float:
    """Return the bytes that the row's tool would have reported for ``memory`` allocated bytes: the driver's count, the allocator's
    reservation, or ``memory`` itself."""
    if "device memory" in s.facts:
        return memory * constants.ALLOCATOR_RESERVE.value + constants.DEVICE_OVERHEAD.value
    return memory * constants.ALLOCATOR_RESERVE.value if "reserved memory" in s.facts else float(memory)


def cluster_of(hardware: Hardware) -> Cluster:
    """Return the row's cluster. Raises ``DeviceError`` for an unknown GPU, ``RowError`` if the devices don't fill whole nodes."""
    per_node = min(hardware.per_node, hardware.devices)
    if hardware.devices % per_node:
        raise RowError(f"n_gpus = {hardware.devices} do not fill nodes of {per_node}")
    return described(hardware.gpu, hardware.devices // per_node, per_node, hardware.network)
