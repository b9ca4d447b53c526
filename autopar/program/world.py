"""Loads a program's records, joins its processes, and creates its mesh with this rank's coordinates.

Terms: an *axis* belongs to the mesh, a *dim* to a tensor. On each axis a parameter has a type: ``R`` (replicated, each rank's
gradient is a term of the sum), ``I`` (invariant, same gradient everywhere), ``S(d)`` (a slice of dim d).
"""

from __future__ import annotations

import datetime
import importlib
import itertools
import json
import math
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .mesh_axes import on_mesh
from .processes import ProcessGroups, StartError, check_node, device_of, ranks_from_environment, set_rendezvous
from .spec import LayerSpec, ProgramSpec, TensorSpec, layers_of
from .state import read_constants

# spmd-types calls two collectives by the names that torch 2.13 deprecates
warnings.filterwarnings("ignore", category=FutureWarning, module="spmd_types")


MIRROR = "mirror"
"""The axis of the two pipeline ranks ``r`` and ``P - 1 - r`` of ``P``, which have copies of the same stages. Its size is 1 unless
microbatches go through the pipeline in both directions. All parameters are ``R`` on it."""


# -- records ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Layout:
    """A parameter of a stage: its original in the user's model, and its type on each axis.

    ``name`` is the parameter's name in its stage, ``original`` its name in the user's model; ``part`` is ``(dim, start, length)`` if it
    is a slice of a fused original. ``shape`` is the unsharded shape, ``padded`` the shape with the zeros that are added if the axes do
    not divide it. ``tied`` are the original's other names. ``sharded`` gives, outermost first, the axes that slice it, each with its dim;
    ``replicated`` the axes on which it is ``R``. Copies of one tied parameter in several stages have the same ``shared`` key.
    ``stacked`` are the user's parameters, each of ``original_shape``, that it stacks along a new dim 0; ``original`` is then their common
    name, with ``*`` where they differ.
    """

    stage: int
    name: str
    original: str
    original_shape: tuple[int, ...]
    part: tuple[int, int, int] | None
    shape: tuple[int, ...]
    padded: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    tied: tuple[str, ...]
    sharded: tuple[tuple[str, int], ...]
    replicated: tuple[str, ...]
    shared: str | None
    stacked: tuple[str, ...] = ()

    @property
    def originals(self) -> tuple[str, ...]:
        """The names of the user's parameters that it has: the stacked ones, or its original's first name."""
        return self.stacked or (self.original,)

    def of(self, name: str) -> Layout:
        """Return the layout of the user's parameter ``name``, one of the ``originals``, as a full tensor."""
        shape = self.original_shape
        return replace(self, original=name, part=None, shape=shape, padded=shape, sharded=(), replicated=(), stacked=())

    @staticmethod
    def read(record: Mapping[str, Any], axes: Iterable[str]) -> Layout:
        """Read an entry of ``layouts.json``; ``axes`` are the mesh's axes, outermost first."""
        part, types = record["part"], record["types"]
        return Layout(
            stage=record["stage"],
            name=record["name"],
            original=record["original"],
            original_shape=tuple(record["original_shape"]),
            part=None if part is None else (part["dim"], part["start"], part["length"]),
            shape=tuple(record["global_shape"]),
            padded=tuple(record["padded_shape"]),
            dtype=getattr(torch, record["dtype"]),
            trainable=record["trainable"],
            tied=tuple(record["tied"]),
            sharded=tuple((axis, int(types[axis][2:-1])) for axis in axes if types[axis].startswith("S(")),
            replicated=tuple(axis for axis in axes if types[axis] == "R"),
            shared=record["shared"],
            stacked=tuple(record.get("stacked", ())),
        )

    def window(self, coordinates: Mapping[str, tuple[int, int]]) -> list[tuple[int, int]]:
        """Return for every dim the start of this rank's slice in the padded full tensor, and its size."""
        window = [(0, size) for size in self.padded]
        for axis, dim in self.sharded:
            (index, size), (start, extent) = coordinates[axis], window[dim]
            assert extent % size == 0, (self.original, self.padded, axis, size)
            window[dim] = (start + index * (extent // size), extent // size)
        return window

    def local_padding(self, coordinates: Mapping[str, tuple[int, int]]) -> list[tuple[int, int, int]]:
        """Return the padding in this rank's slice: for each padded dim, the dim, and the start and length within the slice."""
        found = []
        for dim, (start, extent) in enumerate(self.window(coordinates)):
            inside = max(0, min(extent, self.shape[dim] - start))
            if inside < extent:
                found.append((dim, inside, extent - inside))
        return found


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a parameter's masters, gradients and optimizer states are.

    ``layer`` is the path of the layer that has the parameter, empty for the stage itself. Gradients are summed over ``axes``, those larger
    than 1 on which the parameter is ``R``. ZeRO stage ``zero`` shards over ``shards``; ``copies`` are the other ``axes``: ``mirror``, and
    the axes over which HSDP replicates. Masters have the dtype ``master_dtype``, gradient sums ``gradient_dtype``, the stage's
    arithmetic ``compute_dtype``. Masters and optimizer states are in ``place``: ``"host"``, ``"nvme"``, or empty for the device's memory.
    """

    layer: str
    zero: int
    axes: tuple[str, ...]
    copies: tuple[str, ...]
    shards: tuple[str, ...]
    master_dtype: torch.dtype
    gradient_dtype: torch.dtype
    compute_dtype: torch.dtype
    place: str


@dataclass(frozen=True, slots=True)
class BufferRecord:
    """A buffer that the model writes: ``name`` in the stage, ``original`` in the user's model.

    Several layers may have a copy; one of them computes the new value (``written``). The model's state dict has ``persistent`` buffers.
    """

    stage: int
    name: str
    original: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    persistent: bool
    written: bool

    @staticmethod
    def read(record: Mapping[str, Any]) -> BufferRecord:
        """Read an entry of ``layouts.json``."""
        return BufferRecord(**{**record, "shape": tuple(record["shape"]), "dtype": getattr(torch, record["dtype"])})


@dataclass(frozen=True)
class LoadedProgram:
    """A program folder, loaded: ``plan.json``, ``layouts.json``, ``model.py`` and its constants."""

    plan: Mapping[str, Any]
    layouts: tuple[Layout, ...]
    spec: ProgramSpec
    layers: tuple[Mapping[str, LayerSpec], ...]  # of each stage, in order; "" has the stage's own parameters
    constants: dict[str, Tensor]
    buffers: tuple[BufferRecord, ...] = ()
    records: Mapping[str, Any] = field(default_factory=dict)  # the content of layouts.json
    folder: Path = Path()
    _placements: dict[Layout, Placement] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def splits_backward(self) -> bool:
        """Whether the schedule runs backward passes in two parts: input gradients, then weight gradients."""
        return self.plan["schedule"] in ("zero-bubble", "zbv", "dualpipev")

    @property
    def has_servers(self) -> bool:
        """Whether one rank of each group of replicas, its server, updates the parameters and broadcasts them."""
        return self.spec.served

    @property
    def local_steps(self) -> int:
        """The steps between two averages of the local SGD replicas' parameters; 0 without local SGD."""
        return self.spec.apart

    def split_local_sgd_axes(self, axes: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Divide ``axes`` into those inside a local SGD replica, and those between replicas, which are data axes in every layer."""
        roles = [layer["roles"] for layer in self.plan["layers"]] if self.local_steps else []
        between = {
            axis["name"] for i, axis in enumerate(self.plan["mesh"]) if roles and all(r[i] == "data" for r in roles)
        }
        return tuple(axis for axis in axes if axis not in between), tuple(axis for axis in axes if axis in between)

    @property
    def directions(self) -> int:
        """The number of directions in which microbatches go through the pipeline ranks; each direction has a copy of every stage."""
        return 2 if self.plan["schedule"] == "chimera" else 1

    @property
    def has_links(self) -> bool:
        """Whether each pair of pipeline ranks that exchange tensors has its own group. 1F1B sends and receives in one batch, which needs
        one group."""
        return self.plan["schedule"] not in ("none", "1f1b")

    @property
    def passes(self) -> int:
        """The number of microbatches that a copy of a stage runs in a step."""
        return int(self.plan["microbatches"]) // self.directions

    @property
    def axes(self) -> dict[str, int]:
        """The sizes of the axes on which parameters have types, outermost first: ``mirror`` and the axes of a stage's mesh."""
        return {MIRROR: self.directions, **self.spec.mesh}

    @property
    def inputs(self) -> dict[str, TensorSpec]:
        """The inputs of all stages, by name."""
        return {name: spec for stage in self.spec.stages for name, spec in stage.SPEC.inputs.items()}

    def placement(self, layout: Layout) -> Placement:
        """Return where the masters, gradients and optimizer states of a parameter are.

        FSDP2 shards a layer's parameters over the layer's data axes, except those on which the parameter itself is sharded (experts that
        are distributed over a data axis). Other parameters have ZeRO 1 at most: those that several layers or stages share, those that are
        ``R`` on other axes, scalars, and those whose dtype is not the main dtype of the layer. Tied copies all have the lowest ZeRO stage
        of their layers, are sharded over the axes that all of these layers shard over, and have their masters in one place, so that their
        updates are the same.
        """
        if layout not in self._placements:
            self._placements[layout] = self._compute_placement(layout)
        return self._placements[layout]

    def _compute_placement(self, layout: Layout) -> Placement:
        child = self._layer(layout)
        tied = [layout] if layout.shared is None else [c for c in self.layouts if c.shared == layout.shared]
        layers = [self.layers[copy.stage][self._layer(copy)] for copy in tied]
        sizes = self.axes
        axes = tuple(axis for axis in (MIRROR, *layout.replicated) if sizes[axis] > 1)
        spread = set(axes) - {MIRROR}  # ZeRO does not shard over the copies of a stage
        sharded = {axis for axis, _ in layout.sharded}
        data = {axis for axis in self.layers[layout.stage][child].data_axes if sizes[axis] > 1}
        # a layer's experts, if sharded apart from its other parameters, need a submodule (``fsdp.LayerPart``)
        apart = spread != data and layout.name.rpartition(".")[0] == child
        data_only = spread == data - sharded and not apart
        unusual = layout.original_shape == () or layout.dtype != self._main_dtype(layout.stage, child)
        explicit = child == "" or layout.shared is not None or not data_only or unusual
        replicating = {MIRROR, *(axis for layer in layers for axis in layer.replicate_axes)}
        shards = tuple(axis for axis in axes if axis not in replicating)
        half = layout.dtype.itemsize == 2 and layout.dtype == getattr(torch, self.plan["precision"])
        master_dtype = torch.float32 if half else layout.dtype
        narrow = half and "bfloat16_gradients" in self.plan.get("allow", ())
        return Placement(
            layer=child,
            zero=min(1 if explicit else 3, *(layer.zero for layer in layers)) if shards else 0,
            axes=axes,
            copies=tuple(axis for axis in axes if axis in replicating),
            shards=shards,
            master_dtype=master_dtype,
            gradient_dtype=torch.bfloat16 if narrow else master_dtype,
            compute_dtype=layout.dtype,
            place=max(layer.options.get("states", "") for layer in layers),  # "" < "host" < "nvme"
        )

    def reduced_over(self, layout: Layout) -> set[tuple[str, ...]]:
        """Return the axes of every collective that sums a parameter's gradient, averages its replicas, or gathers its shards."""
        own = self.placement(layout)
        inside, between = self.split_local_sgd_axes(own.axes)
        sharded = own.zero >= 2 or (own.zero == 1 and layout.trainable)
        # MIRROR is no axis of FSDP2's mesh
        copies = tuple(axis for axis in own.copies if axis != MIRROR or own.zero < 2)
        found = {copies, own.shards, between} if sharded and own.shards else {inside, between}
        return {axes for axes in found if axes} if layout.trainable or sharded else set()

    def is_first_copy(self, layout: Layout) -> bool:
        """Return whether a parameter is not tied to a parameter of an earlier stage."""
        return layout.shared is None or layout.stage == min(c.stage for c in self.layouts if c.shared == layout.shared)

    def _layer(self, layout: Layout) -> str:
        """Return the path of the layer that has the parameter in its stage, empty if it is the stage's own."""
        path, layers = layout.name, self.layers[layout.stage]
        while path and path not in layers:
            path = path.rpartition(".")[0]
        if path not in layers:
            raise ValueError(f"no SPEC in model.py has the parameter {layout.name} of stage {layout.stage}")
        return path

    def _main_dtype(self, stage: int, child: str) -> torch.dtype:
        """Return the dtype of most of the parameters' elements in a layer of a stage."""
        elements: dict[torch.dtype, int] = {}
        for layout in self.layouts:
            if layout.stage == stage and self._layer(layout) == child:
                elements[layout.dtype] = elements.get(layout.dtype, 0) + math.prod(layout.shape)
        return max(elements, key=lambda dtype: elements[dtype]) if elements else torch.float32


def load(folder: str | os.PathLike[str]) -> LoadedProgram:
    """Read a folder and import its ``model.py``, which must come first on ``sys.path``; raise ``FileNotFoundError`` or ``ImportError``."""
    path = Path(folder).resolve()
    for name in ("plan.json", "layouts.json", "model.py"):
        if not (path / name).is_file():
            raise FileNotFoundError(f"{path} is not a program folder: it has no {name}")
    model = importlib.import_module("model")
    assert model.__file__ is not None
    if Path(model.__file__).resolve().parent != path:
        raise ImportError(f"the name `model` is taken by {model.__file__}; put {path} first on sys.path")
    records = json.loads((path / "layouts.json").read_text())
    constants = read_constants(path)
    spec: ProgramSpec = model.PROGRAM
    return LoadedProgram(
        plan=json.loads((path / "plan.json").read_text()),
        layouts=tuple(Layout.read(record, spec.mesh) for record in records["parameters"]),
        spec=spec,
        layers=tuple(_layers(stage, constants) for stage in spec.stages),
        constants=constants,
        buffers=tuple(BufferRecord.read(record) for record in records.get("buffers", ())),
        records=records,
        folder=path,
    )


def _layers(stage: Any, constants: Mapping[str, Tensor]) -> dict[str, LayerSpec]:
    """Return the ``SPEC`` of each layer of a stage's class by path, in order; ``""`` has that of parameters that several layers share."""
    module: nn.Module = stage(device="meta", constants=constants)
    found: dict[str, Any] = {path: layer.SPEC for path, layer in layers_of(module).items()}
    own: LayerSpec | None = stage.SPEC.own
    return found if own is None else {**found, "": own}


# -- processes --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class World:
    """This rank's device, stages, coordinate on every axis, and process groups."""

    device: torch.device
    stages: tuple[int, ...]  # the stages of this rank, ascending
    placed: tuple[int, ...]  # the pipeline rank of each stage of the program
    mesh: DeviceMesh  # all devices: "pipeline", then one stage's axes
    stage_mesh: DeviceMesh  # one stage's axes
    grid: Tensor  # all ranks, as ``mirror_grid`` arranges them: [pipeline ranks or pairs of them, "mirror", one stage's axes...]
    coordinates: Mapping[str, tuple[int, int]]  # axis ("mirror" and one stage's axes): index, size
    groups: Mapping[tuple[str, ...], dist.ProcessGroup]  # over one or several flattened axes, outermost first
    # by tied parameter: the group of the pipeline ranks with copies, if there are several
    shared: Mapping[str, dist.ProcessGroup]
    replica: dist.ProcessGroup | None = None  # of this rank's local SGD replica, if there are several
    # by peer rank: the two-rank group for transfers with it
    links: Mapping[int, dist.ProcessGroup] = field(default_factory=dict)
    places: Any = None  # stores masters and optimizer states that are not on the device
    timeout_s: float = 600  # the time limit of groups that are created later

    @property
    def pipeline(self) -> int:
        """The number of pipeline ranks."""
        return max(self.placed) + 1

    @contextmanager
    def in_mesh(self) -> Iterator[None]:
        """Let collectives find the stage's axes, single and flattened, by name inside this context."""
        with on_mesh(self.stage_mesh, self.groups):
            yield

    def group(self, axes: tuple[str, ...]) -> dist.ProcessGroup:
        """Return this rank's group over ``axes``: one axis, or several (outermost first) that ``groups`` has."""
        return self.groups[axes] if axes in self.groups else self.mesh.get_group(*axes)

    def data_mesh(self, copies: tuple[str, ...], shards: tuple[str, ...]) -> DeviceMesh:
        """Return the mesh that FSDP2 shards a layer over: the flattened axes ``shards``, inside ``copies`` if there are any."""
        if not copies:
            return DeviceMesh.from_group(self.group(shards), self.device.type, mesh_dim_names=("shard",))
        dims = [1 + list(self.coordinates).index(axis) for axis in (*copies, *shards)]
        sizes = [math.prod(self.coordinates[axis][1] for axis in axes) for axes in (copies, shards)]
        grids = self.grid.movedim(dims, tuple(range(-len(dims), 0))).reshape(-1, *sizes)
        own = next(grid for grid in grids if dist.get_rank() in grid)
        groups = [self.group(copies), self.group(shards)]
        return DeviceMesh.from_group(groups, self.device.type, mesh=own, mesh_dim_names=("replicate", "shard"))

    def place_on(self, axes: Iterable[str]) -> tuple[int, int]:
        """Return this rank's index among the ranks that differ from it only on ``axes`` (outermost first), and their number."""
        index, count = 0, 1
        for axis in axes:
            place, size = self.coordinates[axis]
            index, count = index * size + place, count * size
        return index, count

    def first_on(self, axes: Iterable[str]) -> bool:
        """Return whether this rank is the first on each of ``axes``: among ranks with the same values, only this one counts."""
        return all(self.coordinates[axis][0] == 0 for axis in axes)


def start(
    program: LoadedProgram, *, device: str | None = None, timeout_s: float = 600, nvme: str | None = None
) -> World:
    """Join the other processes (``torchrun`` or ``srun`` sets the environment) and build the plan's mesh.

    The backend is NCCL on GPUs, gloo on CPUs; ``device`` is ``"cuda"``, ``"cpu"``, or ``None`` for GPUs if the node has any. ``timeout_s``
    is the time limit of all process groups that this creates. ``nvme`` is a folder on the node's NVMe that replaces the plan's, for plans
    that keep optimizer states there.

    Raises:
        StartError: the number of processes, in all or per node, is not that of the plan's devices; or a process has no GPU.
    """
    axes = program.spec.mesh
    stages, chunks = len(program.spec.stages), int(program.plan.get("chunks", 1))
    if stages % chunks:
        raise RuntimeError(f"{stages} stages cannot be placed on devices that run {chunks} each")
    pipeline_size = stages // chunks
    shape, names = (pipeline_size, *axes.values()), ("pipeline", *axes)
    ranks = ranks_from_environment(os.environ)
    if not dist.is_initialized():
        _check_world(ranks.size, axes, shape)
    here = device_of(ranks, device)
    timeout = datetime.timedelta(seconds=timeout_s)
    if here.type == "cuda":
        if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
            # tensors of varying sizes would fragment the memory; CUDA's allocator reads this when it is first used
            os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
        if ranks.size == math.prod(shape):  # otherwise a single process stands for one of the plan's devices
            check_node(ranks, program.plan, dict(zip(names, shape, strict=True)))
        torch.cuda.set_device(here)
    if not dist.is_initialized():
        set_rendezvous(os.environ, ranks)
        # without device_id: with it NCCL would run all transfers of a pipeline on one communicator, where they block each other
        dist.init_process_group("nccl" if here.type == "cuda" else "gloo", timeout=timeout)
    _check_world(dist.get_world_size(), axes, shape)
    groups = ProcessGroups(timeout)
    mesh = _mesh(groups, torch.arange(dist.get_world_size()).view(shape), names, here.type)
    at = mesh.get_coordinate()
    assert at is not None
    placed = tuple(int(stage["devices"][0]) // int(stage["devices"][1]) for stage in program.plan["stages"])
    chimera = program.directions == 2
    grid = mirror_grid(mesh.mesh, program.directions)
    own = (at[0], pipeline_size - 1 - at[0]) if chimera else (at[0],)
    indices = (int(chimera and 2 * at[0] >= pipeline_size), *at[1:])
    pairs = [(min(pair), max(pair)) for pair in itertools.pairwise(placed) if pair[0] != pair[1]]
    world = World(
        device=here,
        stages=tuple(stage for stage in range(stages) if placed[stage] in own),
        placed=placed,
        mesh=mesh,
        stage_mesh=mesh[tuple(axes)],
        grid=grid,
        coordinates={axis: (index, n) for (axis, n), index in zip(program.axes.items(), indices, strict=True)},
        groups=_axis_groups(groups, program, grid),
        shared=_tied_groups(groups, program, grid, placed),
        replica=_replica_group(groups, program, mesh.mesh),
        links=groups.links(mesh.mesh, pairs, mesh.get_group("pipeline")) if program.has_links else {},
        places=program.spec.places and program.spec.places(nvme or str(program.plan.get("nvme_path", ""))),
        timeout_s=timeout_s,
    )
    _warm_up(groups, here)
    return world


def _mesh(groups: ProcessGroups, ranks: Tensor, names: Sequence[str], kind: str) -> DeviceMesh:
    """Return the mesh of ``ranks`` with the axes ``names``, and a group for each axis."""
    rows = [ranks.movedim(dim, -1).flatten(0, -2) for dim in range(ranks.dim())]
    own = [group for row in rows if (group := groups.new_groups(row)) is not None]
    return DeviceMesh.from_group(own, kind, mesh=ranks, mesh_dim_names=tuple(names))


def _warm_up(groups: ProcessGroups, device: torch.device) -> None:
    try:
        groups.warm_up(device)
    except RuntimeError as error:
        if "Duplicate GPU" not in str(error):
            raise
        raise StartError(
            f"several processes of a node use the same GPU: {str(error).strip().splitlines()[-1]}",
            "start as many processes as the node has GPUs, each with a GPU of its own, or train on the CPUs with --device cpu",
        ) from error


def mirror_grid(ranks: Tensor, directions: int) -> Tensor:
    """Return ``ranks [pipeline, ...]`` with a dim ``mirror`` after the first. With two ``directions``, dim 0 is halved, and ``mirror`` has
    the pipeline ranks ``r`` and ``P - 1 - r``."""
    if directions == 1:
        return ranks.unsqueeze(1)
    half = len(ranks) // 2
    return torch.stack((ranks[:half], ranks[half:].flip(0)), 1)


def _check_world(size: int, axes: Mapping[str, int], shape: Sequence[int]) -> None:
    wanted = torch.Size(shape).numel()
    if size != wanted:
        mesh = " x ".join(f"{axis} {n}" for axis, n in {"pipeline": shape[0], **axes}.items())
        devices = f"{wanted} device{'s' if wanted != 1 else ''}"
        started = f"{size} process{'es' if size != 1 else ''}"
        raise StartError(
            f"the program is for {devices} ({mesh}) and was started with {started}",
            f"torchrun --nnodes N --nproc-per-node M starts N x M, and a program that is emitted for {size} continues from the same "
            "checkpoints",
        )


def _axis_groups(
    groups: ProcessGroups, program: LoadedProgram, ranks: Tensor
) -> dict[tuple[str, ...], dist.ProcessGroup]:
    """Return this rank's group for every combination of axes that gradients are reduced over or that model.py names."""
    wanted = {axes for layout in program.layouts for axes in program.reduced_over(layout) if len(axes) > 1}
    wanted |= set(program.spec.flattened) | ({(MIRROR,)} if program.directions > 1 else set())
    return groups.flattened(wanted, list(program.axes), ranks)


def _replica_group(groups: ProcessGroups, program: LoadedProgram, ranks: Tensor) -> dist.ProcessGroup | None:
    """Return the group of this rank's local SGD replica, over all pipeline stages; ``None`` without local SGD."""
    names = list(program.spec.mesh)
    dims = [1 + names.index(axis) for axis in program.split_local_sgd_axes(names)[1]]
    if not dims:
        return None
    return groups.new_groups(ranks.movedim(dims, list(range(len(dims)))).flatten(0, len(dims) - 1).flatten(1))


def _tied_groups(
    groups: ProcessGroups, program: LoadedProgram, grid: Tensor, placed: Sequence[int]
) -> dict[str, dist.ProcessGroup]:
    """Return this rank's group for every tied parameter with copies on several pipeline ranks. Mirrored ranks are in different groups,
    because gradients are reduced over ``mirror`` later."""
    places: dict[str, set[int]] = {}
    for layout in program.layouts:
        if layout.shared is not None:
            place = placed[layout.stage]
            places.setdefault(layout.shared, set()).add(place if place < len(grid) else max(placed) - place)
    own = {}
    for key in sorted(key for key, found in places.items() if len(found) > 1):
        group = groups.new_groups(grid[sorted(places[key])].flatten(1).t())
        if group is not None:
            own[key] = group
    return own
