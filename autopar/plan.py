"""The plan: frozen dataclasses with a JSON form. The search creates it; the passes, the emitter and people read it."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from typing import Any, TypeVar

from autopar.precision import FP8_RECIPES, TF32
from autopar.schedules import Schedule
from autopar.techniques import DEFAULTS, DEVIATIONS, LAYER, PLAN, Options, read_options
from autopar.techniques.sync import SYNC
from autopar.units import seconds

T = TypeVar("T")
R = TypeVar("R")


def distinct(items: Iterable[T]) -> list[T]:
    """Return the distinct objects among ``items``, by identity, in order: the layers of a plan share a few strategies."""
    return list({id(item): item for item in items}.values())


def for_each(items: Sequence[T], function: Callable[[T], R]) -> list[R]:
    """Return ``function(item)`` of every item, called once per distinct object."""
    found = {id(item): function(item) for item in distinct(items)}
    return [found[id(item)] for item in items]


class Role(Enum):
    """What one mesh axis does for one layer; the value is the text form."""

    DATA = "data"
    TENSOR = "tensor"
    TENSOR_SEQUENCE = "tensor+sequence"
    # 2D, 2.5D and 3D tensor parallelism, see autopar.shard.grid
    TENSOR_WEIGHTS = "tensor+weights"  # activations sharded along the batch, parameters gathered for products
    TENSOR_HIDDEN = "tensor+hidden"  # activations sharded along their last dim, gathered for products
    TENSOR_ROWS = "tensor+rows"  # activations sharded along their last dim; products reduce-scatter partial sums
    ULYSSES = "ulysses"  # activations sharded along the sequence, attention along the heads
    RING = "ring"  # activations sharded along the sequence, keys and values rotate
    # roles that also distribute experts; the role of everything else on the axis is ``dense``
    EXPERT = "expert"  # data
    EXPERT_RELAYED = "expert+relayed"  # data; relays pass a token on to its experts on inner axes
    TENSOR_EXPERT = "tensor+expert"
    TENSOR_SEQUENCE_EXPERT = "tensor+sequence+expert"
    ULYSSES_EXPERT = "ulysses+expert"
    RING_EXPERT = "ring+expert"
    IDLE = "idle"  # every rank of the axis does the same work

    # prices are cached by strategy, and hashing the names of roles took a tenth of a search
    __hash__ = object.__hash__

    @property
    def replicates_parameters(self) -> bool:
        """Whether the layer's parameters, except those of distributed experts, have type R on the axis: ZeRO may shard them there, and the
        loss is a partial sum."""
        return self.dense in (Role.DATA, Role.ULYSSES, Role.RING)

    @property
    def distributes_experts(self) -> bool:
        """Whether each rank of the axis has some of the layer's experts, whole. An all-to-all sends the tokens to them, or every rank of a
        tensor-parallel axis has all tokens."""
        return self in _DENSE

    @property
    def dense(self) -> Role:
        """The role of layers without experts, and of everything but the experts in a layer that has them."""
        return _DENSE.get(self, self)

    @property
    def folded(self) -> Role:
        """The role that also distributes experts; the role itself if there is none."""
        return next((role for role, dense in _DENSE.items() if dense is self), self)

    @property
    def shards_parameters(self) -> bool:
        """Whether ranks of the axis may have different slices of parameters."""
        return self.distributes_experts or not (self.replicates_parameters or self is Role.IDLE)

    @property
    def gathers_parameters(self) -> bool:
        """Whether a layer gathers sharded parameters for its products, as 2D, 2.5D and 3D tensor parallelism do."""
        return self in (Role.TENSOR_WEIGHTS, Role.TENSOR_HIDDEN, Role.TENSOR_ROWS)

    @property
    def shards_batch(self) -> bool:
        """Whether activations are sharded along the batch between layers."""
        return self.dense in (Role.DATA, Role.TENSOR_WEIGHTS)

    @property
    def shards_sequence(self) -> bool:
        """Whether activations are sharded along the sequence between layers."""
        return self.dense in (Role.TENSOR_SEQUENCE, Role.ULYSSES, Role.RING)


_DENSE = {
    Role.EXPERT: Role.DATA,
    Role.EXPERT_RELAYED: Role.DATA,
    Role.TENSOR_EXPERT: Role.TENSOR,
    Role.TENSOR_SEQUENCE_EXPERT: Role.TENSOR_SEQUENCE,
    Role.ULYSSES_EXPERT: Role.ULYSSES,
    Role.RING_EXPERT: Role.RING,
}

MICROBATCH_STATISTICS = "microbatch_statistics"
NARROW_GRADIENTS = "bfloat16_gradients"
NARROW_MOMENTS = "bfloat16_moments"
NARROW = (NARROW_GRADIENTS, NARROW_MOMENTS)
UNNAMED_LAYERS = ("embeddings", "model")  # names without a module; others are a module's path, and a number after "@"
ALLOWED = {
    MICROBATCH_STATISTICS: "a loss that needs the full batch (a router's auxiliary loss, batch norm, negatives of the same batch) is "
    "computed for each microbatch separately, and the step's loss is their mean",
    NARROW_GRADIENTS: "gradients of 16-bit parameters are accumulated and reduced in 16 bits",
    NARROW_MOMENTS: "Adam's moments of 16-bit parameters are in 16 bits",
    **{
        name: f"products with weights multiply 8-bit floating-point numbers, in models in bfloat16: {recipe.formats}"
        for name, recipe in FP8_RECIPES.items()
    },
    TF32: "matrix products of float32 round their operands to 10 bits of mantissa",
} | {mode.deviation: mode.inexact for technique in (*LAYER, *PLAN) for mode in technique.modes if mode.deviation}
"""The numerical deviations from exact training that a user may allow, by name, each with a description."""

DEGREES = {
    "data": (Role.DATA,),
    "tensor": tuple(role for role in Role if role.dense in (Role.TENSOR, Role.TENSOR_SEQUENCE)),
    "expert": tuple(role for role in Role if role.distributes_experts),
    "ulysses": (Role.ULYSSES, Role.ULYSSES_EXPERT),
    "ring": (Role.RING, Role.RING_EXPERT),
}
"""The parallel degrees of a layer by name; each is the product of the sizes of the axes with one of these roles. An axis over which experts
are folded counts twice: its ranks have different experts, and shares of the attention."""

FOLDS = {"none": (), "context": ("ulysses", "ring"), "all": ("ulysses", "ring", "tensor")}
"""The degrees over whose axes experts may be folded besides their own axis, by the name of the choice."""

REPLICATING = tuple(role for role in Role if role.replicates_parameters)
BATCHES = tuple(role for role in Role if role.shards_batch)
SEQUENCES = tuple(role for role in Role if role.shards_sequence)


def folded(roles: Iterable[Role], fold: str) -> tuple[Role, ...]:
    """Return the roles with experts folded over the axes of the choice ``fold`` (``FOLDS``)."""
    over = {role for name in FOLDS[fold] for role in DEGREES[name]}
    return tuple(role.folded if role in over else role for role in roles)


@lru_cache(1 << 14)
def _layout(roles: tuple[Role, ...]) -> tuple[Role, ...]:
    return tuple(role.dense for role in roles)


def deviations(sync: str, strategies: Iterable[Strategy]) -> tuple[str, ...]:
    """Return the numerical deviations (of ``ALLOWED``) that a synchronisation and the layers' strategies cause."""
    given = {technique.mode(value).deviation for s in strategies for technique, value in s.options.chosen}
    given.add(SYNC.mode(sync).deviation)
    return tuple(name for name in DEVIATIONS if name in given)


def copy_counts(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the numbers of copies of its shards that ZeRO may have over data axes of these sizes: the products of the outermost axes, but
    never of all of them, because ZeRO shards over at least one."""
    return tuple(math.prod(sizes[:i]) for i in range(max(1, len(sizes))))


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a stage's mesh. ``stride`` is the distance in devices between neighbours on it (1 is the innermost)."""

    name: str
    size: int
    stride: int


@dataclass(frozen=True, slots=True, init=False)
class Strategy:
    """How one layer is parallelised: the role of each mesh axis (in the mesh's order), the ZeRO stage over its data axes, and a value of
    every technique (``autopar.techniques``), by default the technique's default.

    ZeRO shards a parameter over the axes on which it is replicated: experts over fewer axes than the layer's other parameters. With
    ``replicate`` (hybrid sharding, HSDP) it shards over the innermost of these axes alone; the sizes of the others multiply to
    ``replicate``, the number of copies of the sharded state.
    """

    roles: tuple[Role, ...]
    zero: int
    replicate: int
    options: Options

    def __init__(
        self, roles: tuple[Role, ...], zero: int = 0, replicate: int = 1, options: Options = DEFAULTS, **chosen: str
    ) -> None:
        options = options.replace(**chosen) if chosen else options
        assert options.min_zero <= zero <= 3 and (replicate == 1 or zero), (zero, replicate, options)
        object.__setattr__(self, "roles", roles)  # no loop: a search makes a strategy for each of its candidates
        object.__setattr__(self, "zero", zero)
        object.__setattr__(self, "replicate", replicate)
        object.__setattr__(self, "options", options)

    def with_options(self, **changes: str) -> Strategy:
        """Return the strategy with other values of techniques."""
        return Strategy(self.roles, self.zero, self.replicate, self.options, **changes)

    @property
    def uninterrupted(self) -> bool:
        """Whether neither ZeRO nor a technique does anything before or after the layer's call."""
        return self.zero < 2 and not self.options.wraps_layer

    @property
    def unsplit(self) -> Strategy:
        """The strategy without microbatches that are computed in parts."""
        return dataclasses.replace(self, options=self.options.unsplit)

    def under(self, schedule: Schedule) -> Strategy:
        """Return the strategy for a pipeline of this schedule: a schedule that splits the backward pass computes weight gradients in a
        later action, and so determines the value of some techniques."""
        return dataclasses.replace(self, options=self.options.under(schedule)) if schedule.split else self

    @property
    def dense(self) -> Strategy:
        """The strategy for a layer without experts."""
        return dataclasses.replace(self, roles=self.layout)

    @property
    def layout(self) -> tuple[Role, ...]:
        """The roles without experts (``Role.dense``). Strategies with equal layouts shard the activations between layers alike."""
        return _layout(self.roles)

    @property
    def distributes_experts(self) -> bool:
        """Whether experts are distributed over an axis."""
        return any(role.distributes_experts for role in self.roles)

    def data_axes(self, mesh: tuple[Axis, ...], of_experts: bool = False) -> tuple[tuple[Axis, ...], tuple[Axis, ...]]:
        """Return the axes on which the layer's parameters are replicated, or those of its experts, outermost first: those that have copies
        of ZeRO's shards, and those over which ZeRO shards."""
        equal = self._replicated(mesh)
        at = copy_counts([axis.size for axis, _ in equal]).index(self.replicate)
        found = [
            [axis for axis, role in part if not (of_experts and role.distributes_experts)]
            for part in (equal[:at], equal[at:])
        ]
        return tuple(found[0]), tuple(found[1])

    def replicas(self, mesh: tuple[Axis, ...], of_experts: bool = False) -> tuple[tuple[Axis, ...], tuple[Axis, ...]]:
        """Return the data axes, whose ranks have different samples, and the other axes on which the layer's parameters are replicated, or
        those of its experts."""
        axes = [(a, role) for a, role in self._replicated(mesh) if not (of_experts and role.distributes_experts)]
        return tuple(a for a, r in axes if r is Role.DATA), tuple(a for a, r in axes if r is not Role.DATA)

    def _replicated(self, mesh: tuple[Axis, ...]) -> list[tuple[Axis, Role]]:
        return [(axis, role) for axis, role in zip(mesh, self.roles, strict=True) if role.replicates_parameters]

    def degree(self, mesh: tuple[Axis, ...], *roles: Role) -> int:
        """Return the product of the sizes of the axes whose role is one of ``roles``."""
        return math.prod(axis.size for axis, role in zip(mesh, self.roles, strict=True) if role in roles)

    def degrees(self, mesh: tuple[Axis, ...]) -> dict[str, int]:
        """Return the degrees as plans show them: data, tensor, expert, and ``sequence``, which includes Ulysses and ring attention."""
        own = {name: self.degree(mesh, *DEGREES[name]) for name in ("data", "tensor", "expert")}
        return own | {"sequence": self.degree(mesh, *SEQUENCES)}


def effective_sync(sync: str, mesh: tuple[Axis, ...], strategies: Iterable[Strategy]) -> str:
    """Return ``sync``, or the default if no layer has several replicas to synchronise."""
    roles = (Role.DATA,) if SYNC.mode(sync).deviation else REPLICATING
    return sync if any(s.degree(mesh, *roles) > 1 for s in strategies) else SYNC.default


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """A layer of the model with its strategy; plans list layers in the order of ``Graph.layers``."""

    name: str
    cls: str
    strategy: Strategy


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on one device of a stage, by part, at the step's peak."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    transients: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.transients


@dataclass(frozen=True, slots=True)
class StagePlan:
    """A pipeline stage: layers ``start`` to ``stop`` (exclusive), its devices, predicted memory and its limit, and the seconds of one
    microbatch (forward plus backward). ``host_bytes`` and ``nvme_bytes`` are the host memory and the NVMe space that a device uses,
    ``optimizer_s`` the seconds that the stage adds once per step."""

    start: int
    stop: int
    devices: tuple[int, int]  # first device, number of devices
    memory: Memory
    memory_limit_bytes: int
    microbatch_s: float
    host_bytes: int = 0
    nvme_bytes: int = 0
    optimizer_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds of one training step on the slowest device, by part; throughput and utilisation."""

    step_time_s: float
    compute_s: float
    communication_s: float  # exposed: not hidden under compute
    bubble_s: float
    optimizer_s: float
    mfu: float
    tokens_per_s_per_device: float


@dataclass(frozen=True, slots=True)
class PinPrice:
    """The cost of a pin: the best step time found without it (but with all other pins), and a lower bound for all such plans."""

    pin: str
    value: int | str | bool
    step_time_without_s: float
    bound_without_s: float

    def gain(self, step_time_s: float) -> tuple[float, float]:
        """Return the share of ``step_time_s`` that the plan without the pin saves, and an upper bound of what any such plan saves."""
        return 1 - self.step_time_without_s / step_time_s, 1 - self.bound_without_s / step_time_s


GIVEN = "given"


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """What becomes of a plan if its prices are wrong by ``error`` (a share), and what a wider margin of memory costs.

    - ``slower_compute`` and ``slower_links``: the share by which the step gets longer if FLOP/s and memory bandwidth, or the bandwidths of
      the links between devices, are lower by ``error``.
    - ``regret``: the largest share of its step by which another plan found is faster if both are off by ``error`` in opposite directions.
    - ``margin_bytes``: what the fullest device leaves free of its memory limit.
    - ``wider_margin_bytes`` and ``wider_margin_cost``: a margin, and the share by which it makes the step longer, at most; ``None`` if no
      plan with that margin was found.
    """

    error: float
    slower_compute: float
    slower_links: float
    regret: float
    margin_bytes: int
    wider_margin_bytes: int
    wider_margin_cost: float | None


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another plan that the search found, in one line (``autopar.summary.degrees``), its step time, and the line's abbreviations."""

    summary: str
    step_time_s: float
    abbreviations: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """Mesh, stages, schedule, microbatches and a strategy for every layer, with the prediction and the proved bound.

    The mesh is that of one stage; device ``rank = stage * prod(mesh) + position in the mesh`` (outermost axis first). If each device has
    several stages (``chunks``), ``Schedule.rank_of_stage`` maps a stage to its pipeline rank; the memory of each of them is then the sum
    over the stages of its rank.
    ``bound_s`` is a proved lower bound of the step time over the searched candidates; ``gap`` is ``1 - bound_s/step_time_s``.
    ``pins`` are the user's decisions with their prices, if the user requested prices. ``allow`` names the numerical deviations (of
    ``ALLOWED``) that the plan causes and the user allowed.
    """

    model: str
    devices: str
    mesh: tuple[Axis, ...]
    stages: tuple[StagePlan, ...]
    schedule: str  # one of ``autopar.schedules.SCHEDULES``
    microbatches: int
    global_batch: int
    precision: str
    layers: tuple[LayerPlan, ...]
    prediction: Prediction
    bound_s: float
    gap: float
    solver: str = ""  # what proved the bound; ``GIVEN``: the user wrote the plan, without a search
    notes: tuple[str, ...] = ()
    # modules that the program imports besides torch and spmd-types: a user's ops and opaque modules
    imports: tuple[str, ...] = ()
    wall_time_s: float = 0.0
    planning_memory_bytes: int = 0
    chunks: int = 1
    prefetch: int = 1  # the number of layers whose parameters FSDP prefetches, under ZeRO 2 and 3
    sync: str = SYNC.default
    pins: tuple[PinPrice, ...] = ()
    allow: tuple[str, ...] = ()
    nvme_path: str = ""  # the folder for optimizer states on NVMe, if the cluster names one
    gpus_per_node: int = 0  # 0: the nodes differ, or the plan names none
    sensitivity: Sensitivity | None = None  # of a plan from a search with a tolerance (``within``)
    alternatives: tuple[Alternative, ...] = ()  # the nearest of other degrees, the fastest first
    tokens_per_row: int = 0  # of a sequence, or 1 if the model has none; 0 in files of older versions
    request: dict[str, Any] = field(default_factory=dict, hash=False)  # the command line's options, to repeat it
    # the step time of the fastest plan found, if this one is a simpler plan; not in files
    faster_s: float = field(default=math.inf, compare=False)

    def __post_init__(self) -> None:
        assert len(self.stages) % self.chunks == 0, (len(self.stages), self.chunks)
        assert self.stages[0].start == 0 and self.stages[-1].stop == len(self.layers)
        assert all(a.stop == b.start for a, b in zip(self.stages, self.stages[1:], strict=False))
        strategies = distinct(layer.strategy for layer in self.layers)
        assert all(len(strategy.roles) == len(self.mesh) for strategy in strategies)
        assert all(strategy.zero <= SYNC.mode(self.sync).max_zero for strategy in strategies), self.sync
        # notes quote the user's lines of code, and plan files have printable text only
        if not all(note.isprintable() for note in self.notes):
            notes = tuple("".join(c if c.isprintable() else " " for c in note) for note in self.notes)
            object.__setattr__(self, "notes", notes)

    def __str__(self) -> str:
        """Return the plan in one sentence; ``autopar price`` prints all of it."""
        mesh = " x ".join(f"{axis.name} {axis.size}" for axis in self.mesh)
        stages = f"{len(self.stages)} stages ({self.schedule}) of mesh" if len(self.stages) > 1 else "mesh"
        spec = "" if self.devices == str(self.device_count) else f" ({self.devices})"
        return (
            f"plan of {self.model} for {self.device_count} devices{spec}: {stages} {mesh}, {self.microbatches} "
            f"microbatch{'es' * (self.microbatches > 1)}, one step in {seconds(self.prediction.step_time_s)}, at most {self.gap:.1%} from "
            "the best"
        )

    @property
    def fastest_s(self) -> float:
        """The step time of the fastest plan that the search found; this plan may be a simpler, slower one."""
        return min(self.faster_s, self.prediction.step_time_s)

    @property
    def pipeline(self) -> int:
        """The pipeline-parallel degree: the number of stages divided by ``chunks``."""
        return len(self.stages) // self.chunks

    @property
    def sized_schedule(self) -> Schedule:
        """The schedule with its number of devices, microbatches and chunks."""
        return Schedule(self.schedule, self.pipeline, self.microbatches, self.chunks)

    @property
    def too_full(self) -> tuple[int, ...]:
        """The indices of stages that exceed their memory limit; a plan from a search has none."""
        return tuple(i for i, stage in enumerate(self.stages) if stage.memory.total > stage.memory_limit_bytes)

    @property
    def devices_per_stage(self) -> int:
        return math.prod(axis.size for axis in self.mesh)

    @property
    def device_count(self) -> int:
        return self.pipeline * self.devices_per_stage

    def stage_of(self, layer: int) -> int:
        return next(i for i, stage in enumerate(self.stages) if stage.start <= layer < stage.stop)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object with the documented fields (``docs/reference/plan-json.md``); ``from_json`` reads it back."""
        layers = []
        for layer in self.layers:
            s = layer.strategy
            layers.append(
                {
                    "name": layer.name,
                    "class": layer.cls,
                    **s.degrees(self.mesh),
                    "zero": s.zero,
                    "replicate": s.replicate,
                    **s.options.by_name,
                    "roles": [role.value for role in s.roles],
                }
            )
        stages = [
            {
                "layers": [stage.start, stage.stop],
                "devices": list(stage.devices),
                "memory_bytes": stage.memory.total,
                "memory_limit_bytes": stage.memory_limit_bytes,
                "memory_by_part_bytes": dataclasses.asdict(stage.memory),
                "microbatch_s": stage.microbatch_s,
                "host_bytes": stage.host_bytes,
                "nvme_bytes": stage.nvme_bytes,
                "optimizer_s": stage.optimizer_s,
            }
            for stage in self.stages
        ]
        return {
            "feasible": True,
            "model": self.model,
            "devices": self.devices,
            **dataclasses.asdict(self.prediction),
            "bound_s": self.bound_s,
            "gap": self.gap,
            "pipeline": self.pipeline,
            "chunks": self.chunks,
            "microbatches": self.microbatches,
            "schedule": self.schedule,
            "prefetch": self.prefetch,
            "sync": self.sync,
            "global_batch": self.global_batch,
            "precision": self.precision,
            "mesh": [dataclasses.asdict(axis) for axis in self.mesh],
            "stages": stages,
            "layers": layers,
            "solver": self.solver,
            "notes": list(self.notes),
            "imports": list(self.imports),
            "pins": [dataclasses.asdict(pin) for pin in self.pins],
            "allow": list(self.allow),
            "nvme_path": self.nvme_path,
            "gpus_per_node": self.gpus_per_node,
            "sensitivity": None if self.sensitivity is None else dataclasses.asdict(self.sensitivity),
            "alternatives": [dataclasses.asdict(other) for other in self.alternatives],
            "tokens_per_row": self.tokens_per_row,
            "wall_time_s": self.wall_time_s,
            "planning_memory_bytes": self.planning_memory_bytes,
            "request": self.request,
        }

    @staticmethod
    def from_json(data: dict[str, Any]) -> Plan:
        """Read an object that ``to_json`` returned; ``autopar.plan_files.read_plan`` checks untrusted files first."""
        return Plan(
            model=data["model"],
            devices=data["devices"],
            mesh=tuple(Axis(**axis) for axis in data["mesh"]),
            stages=tuple(
                StagePlan(
                    s["layers"][0],
                    s["layers"][1],
                    (s["devices"][0], s["devices"][1]),
                    Memory(**s["memory_by_part_bytes"]),
                    s["memory_limit_bytes"],
                    s["microbatch_s"],
                    s.get("host_bytes", 0),
                    s.get("nvme_bytes", 0),
                    s.get("optimizer_s", 0.0),
                )
                for s in data["stages"]
            ),
            schedule=data["schedule"],
            microbatches=data["microbatches"],
            global_batch=data["global_batch"],
            precision=data["precision"],
            layers=tuple(
                LayerPlan(
                    layer["name"],
                    layer["class"],
                    Strategy(
                        tuple(Role(role) for role in layer["roles"]),
                        layer["zero"],
                        layer.get("replicate", 1),
                        read_options(layer),
                    ),
                )
                for layer in data["layers"]
            ),
            prediction=Prediction(**{f.name: data[f.name] for f in dataclasses.fields(Prediction)}),
            bound_s=data["bound_s"],
            gap=data["gap"],
            solver=data["solver"],
            notes=tuple(data["notes"]),
            imports=tuple(data.get("imports", ())),
            wall_time_s=data["wall_time_s"],
            planning_memory_bytes=data["planning_memory_bytes"],
            chunks=data.get("chunks", 1),
            prefetch=data.get("prefetch", 1),
            sync=data.get("sync", SYNC.default),
            pins=tuple(PinPrice(**pin) for pin in data.get("pins", ())),
            allow=tuple(data.get("allow", ())),
            nvme_path=data.get("nvme_path", ""),
            gpus_per_node=data.get("gpus_per_node", 0),
            sensitivity=Sensitivity(**known) if (known := data.get("sensitivity")) else None,
            alternatives=tuple(
                Alternative(**other | {"abbreviations": tuple(other.get("abbreviations", ()))})
                for other in data.get("alternatives", ())
            ),
            tokens_per_row=data.get("tokens_per_row", 0),
            request=data.get("request", {}),
        )

    def dumps(self) -> str:
        return json.dumps(self.to_json(), indent=1)
