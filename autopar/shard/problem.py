r"""States the problem of the cheapest types in one layer on one axis: options, costs and constraints.

For a layer class, a role (which fixes the types at the layer's border) and an axis of size *n*::

    minimise    sum_v cost[v, x_v]  +  sum_v sum_{t in needed(v)} conversion[v, produced(v), t]
    over        x_v, one option per node

* an option is one of ``rules.candidates``: the letter that the axis shards, or replication as I or as R; a placeholder's options
  are the types that it may have;
* ``needed(v)`` is the *set* of types in which the readers of ``v`` read it: a conversion is paid once per value and target type,
  for any number of operands that need it (q, k and v share one all-reduce);
* ``cost`` is the op's compute, divided by ``REFERENCE_AXIS`` if a letter is sharded, plus its kernel's exchanges; for a stored
  parameter ``BYTE_HELD_S`` per byte in memory;
* an option is legal if *n* divides the dims that it shards, or if these may be padded (``rules.padding``), which adds compute and bytes;
* ``conversion`` is the time of the collectives, forward plus (if a gradient flows) backward; infinite if there is no such conversion.

Times are those of a reference device and only rank alternatives inside one layer: the cost model (``autopar.price``) computes a plan's.
Costs are divided by the highest one, so that solvers see numbers near 1 for tiny and for huge layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from torch import fx

from autopar.flow import gradient_flow, output_nodes, parameter_nodes, placeholders, returned_nodes
from autopar.graph import LayerClass, Value
from autopar.ops.cost import op_cost
from autopar.ops.experts import of_experts
from autopar.ops.facts import facts
from autopar.ops.meta import meta
from autopar.ops.operands import operands, shape_of
from autopar.plan import Role
from autopar.rules import Candidate, candidates
from autopar.rules.padding import padding, round_up
from autopar.rules.traffic import kernel_traffic
from autopar.shard.grid import admits, converts, gathers, stored
from autopar.types import Collective, I, P, R, S, SpmdType, conversion, legal_over_microbatches

REFERENCE_FLOPS_PER_S = 4e14  # roughly a matmul's rate on one H100 in bfloat16
REFERENCE_BYTES_PER_S = 2e12  # device memory of the same GPU
REFERENCE_LINK_BYTES_PER_S = 2e11  # NVLink all-reduce bandwidth observed on nodes of 8
REFERENCE_AXIS = 8  # the axis size at which compute and communication are compared
# A parameter byte in memory costs as much as sending it over the link ten times: its gradient and optimizer state add seven
# bytes, and tensor parallelism is used to save memory, not time. On a Llama block, layouts do not change between a factor of 2 and
# one of 50; below 2 the embedding is replicated.
BYTE_HELD_S = 10 / REFERENCE_LINK_BYTES_PER_S
# Compilers fuse a chain of pointwise ops into one read and one write: the six ops of an RMSNorm read and write about fifteen
# tensors if each is a kernel, and two or three if fused. At the unfused cost, sharding a norm would seem worth a gather.
FUSED_SHARE = 0.2
# Every collective waits for the slowest rank, so it costs at least this share of the layer's highest cost. A conversion that sends
# nothing is still a line in the program; among equal optima the one with fewer conversions wins. Zeroing a value on all ranks but one
# (I or R to P) counts as a collective, because it is legal but rarely useful.
COLLECTIVE_SHARE = 0.02
CONVERSION_SHARE = 1e-6

_SENT_SHARE = {
    Collective.NONE: 0.0,
    Collective.LOCAL: 0.0,
    Collective.ALL_REDUCE: 2 * (REFERENCE_AXIS - 1) / REFERENCE_AXIS,
    Collective.ALL_GATHER: (REFERENCE_AXIS - 1) / REFERENCE_AXIS,
    Collective.REDUCE_SCATTER: (REFERENCE_AXIS - 1) / REFERENCE_AXIS,
    Collective.ALL_TO_ALL: (REFERENCE_AXIS - 1) / REFERENCE_AXIS**2,
    Collective.ROTATE: (REFERENCE_AXIS - 1) / REFERENCE_AXIS,
    Collective.SHIFT: 1 / REFERENCE_AXIS,
}
_BACKWARD_FACTOR = 2.0  # a matmul's backward is two matmuls


def boundary(cls: LayerClass, role: Role, value: Value) -> SpmdType | None:
    """Return the type of an activation at a layer's border under ``role``; ``None`` if the value lacks the role's dim.

    Dim 0 is the batch and dim 1 the sequence in the activations of every captured layer. A value without a batch dim (T5's position
    bias) depends only on parameters, and has their type. A 0-d value (a layer's auxiliary loss) is a partial sum if the role replicates
    parameters.
    """
    if not value.shape:
        return P if role.replicates_parameters else I
    if not cls.batched(value):
        return R if role.replicates_parameters else I
    if role.shards_batch:
        return S(0)
    if role.shards_sequence:
        return S(1) if len(value.shape) >= 3 else None
    if role in (Role.TENSOR_HIDDEN, Role.TENSOR_ROWS):
        return S(len(value.shape) - 1) if len(value.shape) >= 2 else None
    return I


def update_type(role: Role) -> SpmdType:
    """Return the type of a buffer's new value, which is replicated."""
    return I if role is Role.IDLE else R


class Problem:
    """The options, costs and readers of every node. ``feasible`` is false if a node has no option.

    With ``over_microbatches``, only options that suit sequential microbatches are legal: those without kernels and collectives.
    """

    def __init__(
        self,
        cls: LayerClass,
        role: Role,
        size: int,
        fixed: dict[str, SpmdType],
        batched: Mapping[str, SpmdType] | None = None,
        *,
        over_microbatches: bool = False,
    ) -> None:
        """``fixed`` has the types of nodes whose types are already decided. ``batched`` has the values' types under data parallelism: if
        such a type is sharded, the value may not have it in roles that shard the sequence and replicate parameters."""
        self.cls, self.role, self.size, self.fixed, self.over_microbatches = cls, role, size, fixed, over_microbatches
        self._batched = batched or {}
        self._op_costs: dict[str, tuple[float, float]] = {}
        self._conversion_costs: dict[tuple[str, str, int | None, str, int | None], float] = {}
        self._flow = gradient_flow(cls)
        self._padding = padding(cls)
        self._inputs = placeholders(cls)
        self._weights = {node.name for node in parameter_nodes(cls)}
        # whether every rank computes on its own tokens, as in the role data, except for an exchange inside a kernel
        self._own_tokens = role.replicates_parameters and role is not Role.DATA
        self._replicated = self._from_weights() if self._own_tokens else set()
        # costs of activations count one row of the batch: the trade-off against parameters must not depend on the batch size
        self._row = 1.0 / max((v.shape[0] for v in (*cls.activations, *cls.inputs) if cls.batched(v)), default=1)
        self.nodes = {node.name: node for node in cls.graph.graph.nodes if node.op != "output"}
        self.options: dict[str, list[Candidate]] = {name: self._options(node) for name, node in self.nodes.items()}
        self.reads: dict[str, list[tuple[str, int]]] = {name: [] for name in self.nodes}
        for node in self.nodes.values():
            if node.op != "placeholder":
                for index, operand in enumerate(operands(node)):
                    self.reads[operand.name].append((node.name, index))
        self.demands: dict[str, set[SpmdType]] = {name: set() for name in self.nodes}
        for node, value in zip(output_nodes(cls), cls.outputs, strict=True):
            target = boundary(cls, role, value)
            if not value.shape:
                self._loss(node.name)
            elif target is not None:
                self.demands[node.name].add(target)
        for node in returned_nodes(cls)[len(cls.outputs) :]:
            self.demands[node.name].add(update_type(role))
        self._seconds = {
            name: [self._compute_s(self.nodes[name], option) for option in options]
            for name, options in self.options.items()
        }
        self.max_cost_s = max((s for seconds in self._seconds.values() for s in seconds), default=0.0) or 1.0

    @property
    def feasible(self) -> bool:
        return all(self.options.values())

    def cost(self, name: str) -> list[float]:
        """Return the costs of the node's options, in units of the layer's highest cost."""
        return [self._cost(name, index) for index in range(len(self.options[name]))]

    def _cost(self, name: str, index: int) -> float:
        penalty = self._replication_penalty(name, self.options[name][index])
        return self._seconds[name][index] / self.max_cost_s + penalty

    def _replication_penalty(self, name: str, option: Candidate) -> float:
        """Return an extra cost for replicated ops under roles that shard only activations: as much as the layer's highest cost. Without it,
        small layers, where latencies outweigh compute, would get a different solution."""
        replicated = option.letter is None and not option.linear and bool(option.operands)
        wasteful = replicated and self._flow[name] and name not in self._replicated
        return 1.0 if wasteful and self._own_tokens else 0.0

    def conversion_cost(self, name: str, source: SpmdType, target: SpmdType) -> float:
        """Return the cost of converting the node's value, in units of the highest cost; infinite if there is no such conversion."""
        if source == target:
            return 0.0
        key = name, source.kind, source.dim, target.kind, target.dim  # hashing types takes longer
        if key not in self._conversion_costs:
            self._conversion_costs[key] = self._conversion_cost(name, source, target)
        return self._conversion_costs[key]

    def _conversion_cost(self, name: str, source: SpmdType, target: SpmdType) -> float:
        value = meta(self.nodes[name])["val"]
        pair = conversion(source, target)
        if self.over_microbatches and not legal_over_microbatches(source, target, self._flow[name]):
            return math.inf
        if pair is None or not hasattr(value, "shape"):
            return math.inf
        if name in self._replicated and target.sharded:
            return math.inf
        if not self._fits(name, value.shape, target):
            return math.inf
        if name in self._weights and name not in self.fixed and not gathers(self.role, source, tuple(value.shape)):
            return math.inf
        if name not in self._weights and not converts(self.role, source, target, tuple(value.shape)):
            return math.inf
        collectives = [pair[0], pair[1]] if self._flow[name] else [pair[0]]
        row = 1.0 if name in self._weights else self._row
        seconds = (
            sum(_SENT_SHARE[collective] for collective in collectives)
            * row
            * _bytes(self.nodes[name])
            / REFERENCE_LINK_BYTES_PER_S
        )
        waits = sum(_SENT_SHARE[collective] > 0 for collective in collectives) + (target == P and source != P)
        return seconds / self.max_cost_s + waits * COLLECTIVE_SHARE + CONVERSION_SHARE

    def objective(self, chosen: dict[str, int]) -> float:
        """Return the total cost if each node has the option with the index ``chosen[name]``, in units of the highest cost."""
        total = 0.0
        for name, index in chosen.items():
            produced = self.options[name][index].result
            needed = {
                self.options[reader][chosen[reader]].operands[i] for reader, i in self.reads[name]
            } | self.demands[name]
            total += self._cost(name, index) + sum(self.conversion_cost(name, produced, t) for t in needed)
        return total

    def _options(self, node: fx.Node) -> list[Candidate]:
        if node.op == "placeholder":
            return [Candidate((), t) for t in self._placeholder_types(node)]
        found = candidates(node)
        if self.role is Role.IDLE:
            return [option for option in found if not option.operands or set(option.operands) == {I}]
        if self.over_microbatches:
            found = tuple(option for option in found if option.kernel is None)
        weights = tuple(operand.name in self._weights for operand in operands(node))
        found = tuple(option for option in found if admits(self.role, option, weights))
        found = tuple(option for option in found if self._divides(node, option) and self._role_allows(node, option))
        if self.role is Role.EXPERT_RELAYED:
            relayed = {"expert_exchange": "expert_relay"}
            return [replace(option, kernel=relayed.get(option.kernel or "", option.kernel)) for option in found]
        return list(found)

    def _from_weights(self) -> set[str]:
        """Return the values that depend only on parameters. Roles with unsharded parameters don't shard them: gathering the activations
        instead takes fewer collectives but sends more bytes, and these costs get that trade-off wrong at small sizes."""
        found = set(self._weights)
        for node in self.cls.graph.graph.nodes:
            if node.op == "call_function" and operands(node) and all(value.name in found for value in operands(node)):
                found.add(node.name)
        return found

    def _role_allows(self, node: fx.Node, option: Candidate) -> bool:
        """Return whether the role allows this kind of option.

        Attention rotates keys and values under ``RING`` always, and under no other role. Under ``ULYSSES``, attention is sharded by heads.
        Neither role may reshard from the sequence to the batch: that would send fewer bytes, but it is data parallelism, which needs a
        large enough batch.
        """
        attention = self.role.dense
        if attention not in (Role.ULYSSES, Role.RING):
            return option.kernel != "ring_attention"
        pairs = [*zip(operands(node), option.operands, strict=True), (node, option.result)]
        if any(t.sharded and t == self._batched.get(value.name) for value, t in pairs):
            return False
        if not facts(node).is_attention:
            return True
        if attention is Role.RING:
            return option.kernel == "ring_attention"
        return option.result.dim == len(shape_of(node)) - 3

    def _fits(self, name: str, shape: tuple[int, ...], t: SpmdType) -> bool:
        """Return whether the axis's size divides the dim that this type shards, or the dim may be padded."""
        return t.dim is None or shape[t.dim] % self.size == 0 or (name, t.dim) in self._padding.groups

    def _divides(self, node: fx.Node, option: Candidate) -> bool:
        """Return whether the axis's size divides the letter (or both letters) that the option shards, or its dims may be padded."""
        if option.letter is None or option.extent % self.size == 0:
            return True
        pairs = [*zip(operands(node), option.operands, strict=True), (node, option.result)]
        if "+" in option.letter:  # each dim has one of the two letters: experts may be padded, tokens must divide
            return all(self._fits(value.name, shape_of(value), t) for value, t in pairs)
        return all(t.dim is None or (value.name, t.dim) in self._padding.groups for value, t in pairs)

    def _growth(self, name: str, option: Candidate) -> float:
        """Return the factor by which padding enlarges the sharded dims."""
        for value, t in zip((*self._padding.operands[name], name), (*option.operands, option.result), strict=True):
            group = None if t.dim is None else self._padding.groups.get((value, t.dim))
            if group is not None:
                count = self._padding.counts[group]
                return round_up(count, self.size) / count
        return 1.0

    def _placeholder_types(self, node: fx.Node) -> list[SpmdType]:
        cls, role = self.cls, self.role
        index = self._inputs.index(node)
        counts = (len(cls.activations), len(cls.inputs), len(cls.constants), len(cls.scalars), len(cls.parameters))
        kind = next(k for k in range(5) if index < sum(counts[: k + 1]))
        shape = shape_of(node)
        if kind == 0:
            t = boundary(cls, role, cls.activations[index])
            return [] if t is None else [t]
        if node.name in self.fixed:
            return [self.fixed[node.name]]
        if role is Role.IDLE:
            return [I]
        if kind == 1 and role.shards_batch and shape:
            return [S(0)]
        if kind in (1, 2, 3):
            return [R, I]
        distributable = role.folded.distributes_experts and of_experts(node)
        if distributable and role.distributes_experts:
            return [S(0)] if self._fits(node.name, shape, S(0)) else []
        if role.replicates_parameters:
            return [R]
        least = 1 if distributable else 0  # else every expert is sliced
        pieces = [
            S(d) for d, extent in enumerate(shape[least:], least) if extent > 1 and self._fits(node.name, shape, S(d))
        ]
        return stored(role, shape, self.size) or [I, *pieces]

    def _loss(self, name: str) -> None:
        """Restrict the loss, whose gradient is 1 on every rank, to P and I. If ranks sum the gradients of replicated parameters, the loss
        must be P, so a complete loss is zeroed on all ranks but one."""
        if self.role.replicates_parameters:
            self.demands[name].add(P)
        else:
            self.options[name] = [option for option in self.options[name] if option.result in {P, I}]

    def _compute_s(self, node: fx.Node, option: Candidate) -> float:
        if node.op == "placeholder":
            held = self._growth(node.name, option) / REFERENCE_AXIS if option.result.sharded else 1.0
            return BYTE_HELD_S * _bytes(node) * held if node.name in self._weights else 0.0
        if node.name not in self._op_costs:
            self._op_costs[node.name] = op_cost(node)
        flops, traffic = self._op_costs[node.name]
        seconds = max(flops / REFERENCE_FLOPS_PER_S, FUSED_SHARE * traffic / REFERENCE_BYTES_PER_S) * (
            1 + _BACKWARD_FACTOR
        )
        if option.letter is not None:
            seconds *= self._growth(node.name, option) / REFERENCE_AXIS
        if option.kernel is not None:
            for collective in kernel_traffic(option.kernel, node):
                backward = collective.backward if self._flow[node.name] else Collective.NONE
                share = _SENT_SHARE[collective.forward] + _SENT_SHARE[backward]
                seconds += share * collective.bytes() / REFERENCE_LINK_BYTES_PER_S
        # Sequence parallelism is meant to save activation memory. Gathering before a norm sends as many bytes as gathering after it; only
        # a cost of replicated activations, here the same per byte as for parameters, makes the latter cheaper.
        if self.role.dense is Role.TENSOR_SEQUENCE and self._flow[node.name] and option.result in (I, R):
            seconds += BYTE_HELD_S * _bytes(node)
        return seconds * self._row


def _bytes(node: fx.Node) -> float:
    value = meta(node)["val"]
    return float(math.prod(value.shape) * value.dtype.itemsize) if hasattr(value, "shape") else 0.0
