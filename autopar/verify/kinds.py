"""Kinds of plans: every kind of parallelism, alone and combined, as plans for any model for which they are valid.

A kind sets roles, degrees and a schedule; the number of microbatches follows from the model and the batch. ``PlanKind.plan`` raises
``UsageError`` with the reason if the kind isn't valid for the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from autopar.errors import UsageError
from autopar.graph import Graph
from autopar.plan import Plan, Role, Strategy
from autopar.schedules import (
    CHIMERA,
    DUALPIPE_V,
    GPIPE,
    INTERLEAVED,
    ONE_F_ONE_B,
    ZERO_BUBBLE,
    ZERO_BUBBLE_V,
    copies_of,
)
from autopar.search.manual import grid_mesh, make_mesh, manual_plan, pinned_mesh
from autopar.shard import plan_shardings
from autopar.techniques import ALL, cases_of
from passes.stages import check_parts


@dataclass(frozen=True)
class PlanKind:
    """A kind of plan for ``devices``: ``options`` for ``manual_plan``, or ``mixed``, which returns a plan whose layers differ.

    ``options["microbatches"]`` is an upper limit: the plan has as many microbatches as the batch allows.
    """

    name: str
    devices: int
    options: dict[str, Any] = field(default_factory=dict)
    mixed: Callable[[Graph], Plan] | None = None

    def plan(self, graph: Graph) -> Plan:
        """Return the plan for a captured and annotated model. Raises ``UsageError`` with the reason if it is invalid for the model."""
        plan = self.mixed(graph) if self.mixed is not None else manual_plan(graph, **self._fitted(graph))
        assert plan.device_count == self.devices, (self, plan.device_count)
        check_parts(graph, plan, plan_shardings(graph, plan))
        return plan

    def _fitted(self, graph: Graph) -> dict[str, Any]:
        wanted, copies = self.options.get("microbatches", 1), copies_of(self.options.get("schedule"))
        return self.options | {"microbatches": microbatches(graph, wanted, self._batch_shards(), copies)}

    def _batch_shards(self) -> int:
        """Return the number of shards of a microbatch's batch dim under the roles."""
        return math.prod(
            axis.size
            for axis in self.options.get("mesh") or pinned_mesh(self.options)
            if not axis.name.startswith(("ring", "ulysses", "tensor", "hidden", "rows", "sequence"))
        )


def microbatches(graph: Graph, wanted: int, batch_shards: int = 1, copies: int = 1) -> int:
    """Return the largest number of microbatches up to ``wanted`` that divides the rows of each of ``batch_shards`` data-parallel devices,
    and that the ``copies`` of a stage can share equally. For a model that can't be microbatched it is ``graph.accumulated``."""
    if graph.unmicrobatchable:
        return graph.accumulated
    tried = (m for m in range(wanted, 1, -1) if m % copies == 0)
    return next((m for m in tried if graph.batch_size % (m * batch_shards) == 0), 1)


def kind(name: str, **options: Any) -> PlanKind:
    """Return a kind whose layers all have the same strategy; ``options`` are those of ``manual_plan``."""
    if "mesh" in options:
        return PlanKind(name, math.prod(axis.size for axis in options["mesh"]) * options.get("pipeline", 1), options)
    return PlanKind(name, math.prod(axis.size for axis in pinned_mesh(options)) * options.get("pipeline", 1), options)


def kinds(devices: int) -> tuple[PlanKind, ...]:
    """Return kinds for ``devices`` processes: every kind of parallelism, combinations, mixed layers, and the cases of all techniques."""
    techniques = (_case(name, pins) for technique in ALL for name, pins in cases_of(technique, devices))
    if devices == 1:
        return (kind("one device"), *techniques)
    return (
        *_single(devices),
        *_combined(devices),
        *_bidirectional(devices),
        *_mixed(devices),
        *techniques,
    )


def _case(name: str, pins: dict[str, Any]) -> PlanKind:
    """Return the plan kind of a technique's case; ``mesh`` in ``pins`` lists pairs of an axis name and a size."""
    return kind(name, **(pins | {"mesh": make_mesh(*pins["mesh"])} if "mesh" in pins else pins))


def _single(n: int) -> tuple[PlanKind, ...]:
    return (
        kind(f"data {n}", data=n, microbatches=2),
        *(kind(f"data {n}, zero {zero}", data=n, zero=zero, microbatches=2) for zero in (1, 2, 3)),
        kind(f"tensor {n}", tensor=n),
        kind(f"tensor+sequence {n}", tensor=n, sequence=True),
        kind(f"ulysses {n}", ulysses=n),
        kind(f"ring {n}", ring=n),
        kind(f"expert {n}", expert=n),
        kind(f"pipeline {n}", pipeline=n, microbatches=4 if n <= 4 else n, schedule=ONE_F_ONE_B),
        kind(f"pipeline {n}, gpipe", pipeline=n, microbatches=2, schedule=GPIPE),
        kind(f"pipeline {n}, zero bubble", pipeline=n, microbatches=4 if n <= 4 else n, schedule=ZERO_BUBBLE),
        *(
            [kind(f"pipeline {n}, Chimera", pipeline=n, microbatches=4 if n <= 4 else n, schedule=CHIMERA)]
            if n % 2 == 0
            else []
        ),
        # more than three devices would need models with many layers
        *(_in_chunks(n) if n <= 3 else ()),
    )


def _in_chunks(n: int) -> tuple[PlanKind, ...]:
    two = {"pipeline": n, "chunks": 2, "microbatches": 4}
    return (
        kind(f"pipeline {n} of 2 chunks", **two),
        kind(f"pipeline {n}, ZBV", **two, schedule=ZERO_BUBBLE_V),
    )


def _combined(n: int) -> tuple[PlanKind, ...]:
    if n % 2 or n < 4:
        return ()
    half = n // 2
    grid = make_mesh(("tensor0", 2), ("tensor1", half))
    copies = make_mesh(("replicas", 2), ("data", half))
    pipelined = {"pipeline": 2, "microbatches": 2, "schedule": ONE_F_ONE_B}
    interleaved = {"pipeline": 2, "chunks": 2, "microbatches": 4, "schedule": INTERLEAVED}
    return (
        kind(f"data 2 x tensor {half}, zero 3", data=2, tensor=half, zero=3),
        kind(f"data 2 x tensor+sequence {half}, zero 1", data=2, tensor=half, sequence=True, zero=1, microbatches=2),
        *(
            kind(f"data {half} in 2 copies, zero {zero}", mesh=copies, zero=zero, replicate=2, microbatches=2)
            for zero in (1, 2, 3)
        ),
        kind(f"tensor 2 x {half}", mesh=grid, microbatches=2),
        kind(f"tensor+sequence 2 x {half}", mesh=grid, sequence=True),
        *_grids(n),
        kind(f"ulysses 2 x ring {half}", ulysses=2, ring=half),
        kind(f"data 2 x ulysses {half}, zero 3", data=2, ulysses=half, zero=3),
        kind(f"data 2 x ring {half}, zero 3", data=2, ring=half, zero=3, microbatches=2),
        kind(f"ring 2 x tensor+sequence {half}", ring=2, tensor=half, sequence=True),
        kind(f"tensor 2 x ulysses {half}", mesh=make_mesh(("tensor", 2), ("ulysses", half))),
        kind(f"data 2 x expert {half}, zero 2", data=2, expert=half, zero=2),
        kind(f"expert 2 x tensor {half}", expert=2, tensor=half),
        *_folded(half),
        kind(f"pipeline 2 x tensor {half}", tensor=half, **pipelined),
        kind(f"pipeline 2 x expert {half}", expert=half, **pipelined),
        kind(f"pipeline 2 x ulysses {half}", ulysses=half, **pipelined),
        kind(f"pipeline 2 x data {half}, zero 2", data=half, zero=2, **pipelined),
        kind(f"pipeline 2 of 2 chunks x data {half}, zero 1", data=half, zero=1, **interleaved),
        kind(f"pipeline 2 of 2 chunks x tensor {half}", tensor=half, **interleaved),
        *_split(half),
    )


def _folded(half: int) -> tuple[PlanKind, ...]:
    """Return kinds with experts folded over tensor, sequence and data axes."""
    pipelined = {"pipeline": 2, "microbatches": 2, "schedule": ONE_F_ONE_B}
    of_half, of_all = {"expert": half, "fold_experts": "all"}, {"expert": 2 * half, "fold_experts": "all"}
    return (
        kind(f"data 2 x tensor {half}, experts folded, zero 3", data=2, tensor=half, zero=3, **of_half),
        kind(f"expert 2 x tensor+sequence {half}, experts folded", tensor=half, sequence=True, **of_all),
        kind(f"expert 2 x ulysses {half}, experts folded, zero 1", ulysses=half, zero=1, **of_all),
        kind(f"data 2 x ring {half}, experts folded, zero 2", data=2, ring=half, zero=2, **of_half),
        kind(f"ring 2 x tensor+sequence {half}, experts folded", ring=2, tensor=half, sequence=True, **of_all),
        kind(f"ring 2 x tensor {half}, experts over the ring", ring=2, tensor=half, expert=2, fold_experts="context"),
        kind(
            f"pipeline 2 x tensor+sequence {half}, experts folded", tensor=half, sequence=True, **of_half, **pipelined
        ),
        kind(f"pipeline 2 x ring {half}, experts folded, zero 3", ring=half, zero=3, **of_half, **pipelined),
        kind(f"expert 2 x {half}, relayed, zero 1", mesh=make_mesh(("relay", 2), ("expert", half)), zero=1),
        kind(
            f"expert 2 x tensor+sequence {half}, experts folded, relayed",
            mesh=make_mesh(("relay", 2), ("tensor", half)),
            sequence=True,
            fold_experts="all",
        ),
        kind(f"expert 2 x tensor {half}, relayed", mesh=make_mesh(("relay", 2), ("tensor", half))),
    )


def _split(half: int) -> tuple[PlanKind, ...]:
    """Return kinds with a split backward pass, each with some parallelism of a stage over ``half`` devices."""
    one = {"pipeline": 2, "microbatches": 4, "schedule": ZERO_BUBBLE}
    two = {"pipeline": 2, "chunks": 2, "microbatches": 4}
    return (
        kind(f"pipeline 2, zero bubble x tensor+sequence {half}", tensor=half, sequence=True, **one),
        kind(f"pipeline 2, zero bubble x expert {half}, zero 3", expert=half, zero=3, **one),
        kind(f"pipeline 2, ZBV x data {half}, zero 3", data=half, zero=3, schedule=ZERO_BUBBLE_V, **two),
        kind(f"pipeline 2, DualPipeV x data {half}, zero 2", data=half, zero=2, schedule=DUALPIPE_V, **two),
    )


def _bidirectional(n: int) -> tuple[PlanKind, ...]:
    """Return kinds that combine Chimera with data and expert parallelism of a stage over half of the devices."""
    if n % 2 or n < 4:
        return ()
    half = n // 2
    two = {"pipeline": 2, "microbatches": 4, "schedule": CHIMERA}
    return (
        kind(f"pipeline 2, Chimera x data {half}, zero 1", data=half, zero=1, **two),
        kind(f"pipeline 2, Chimera x expert {half}, zero 2", expert=half, zero=2, **two),
    )


def _grids(n: int) -> tuple[PlanKind, ...]:
    """Return kinds of 2D, 2.5D and 3D tensor parallelism, if ``n`` devices form such a grid."""
    grids = []
    for side in range(2, math.isqrt(n) + 1):
        depth, rest = divmod(n, side**2)
        if rest == 0:
            name = f"tensor 2D {side} x {side}" if depth == 1 else f"tensor 2.5D {side} x {side}, depth {depth}"
            grids.append(kind(name, mesh=grid_mesh(2, side, depth)))
        if side**3 == n:
            grids.append(kind(f"tensor 3D {side} x {side} x {side}", mesh=grid_mesh(3, side)))
    return tuple(grids)


def _mixed(n: int) -> tuple[PlanKind, ...]:
    if n % 2:
        return ()
    return (PlanKind(f"mixed on {n}: zero-3 ends, tensor blocks", n, mixed=lambda graph: alternating(graph, n)),)


def ends(graph: Graph) -> set[int]:
    """Return the indices of the first and last layers and of layers that share a parameter."""
    return {0, len(graph.layers) - 1} | {i for uses in graph.shared_parameters.values() for i in uses}


def alternating(graph: Graph, n: int) -> Plan:
    """Return a plan: ZeRO 3 on both axes for the ``ends``; tensor parallelism (inner axis) and ZeRO 2 (outer axis) for other layers."""
    mesh = make_mesh(("outer", n // 2), ("inner", 2))
    data = Strategy((Role.DATA,) * len(mesh), zero=3)
    tensor = Strategy((Role.DATA, Role.TENSOR)[-len(mesh) :], zero=2 if len(mesh) > 1 else 0)
    blocks = set(range(len(graph.layers))) - ends(graph)
    if not blocks:
        raise UsageError(
            "every layer is the first or last or shares a parameter, so none is left for tensor parallelism"
        )
    strategies = {i: tensor if i in blocks else data for i in range(len(graph.layers))}
    return manual_plan(graph, mesh=mesh, strategies=strategies, microbatches=microbatches(graph, 2, n))
