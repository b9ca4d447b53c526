"""The type checker over an emitted program: every stage, with ``spmd_types``' global types, on a fake process group.

No GPU, no second process: the fake group has as many ranks as the plan has devices, tensors are on the meta device, and the
checker follows on every axis which dim is sharded. Most wrong gradients (a missing all-reduce, a bias added once per rank, a
softmax over a sharded dim) fail here. What it cannot see are values; the exactness matrix does.
"""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import spmd_types as spmd
import torch
import torch.distributed as dist
from spmd_types.checker import typecheck
from torch.distributed.device_mesh import init_device_mesh

from autopar.errors import ProgramError
from autopar.program.world import flat_groups
from autopar.torch_private import fake_store


def check_program(folder: str | Path) -> int:
    """Type-check every stage of the program in ``folder``; the number of stages checked.

    Raises ``ProgramError`` with the checker's own message, the stage and the axis. Must run in a process without a
    default process group (``check_in_subprocess`` starts one).
    """
    path = Path(folder).resolve()
    records = json.loads((path / "layouts.json").read_text())["parameters"]
    plan = json.loads((path / "plan.json").read_text())
    with (
        warnings.catch_warnings(),
        _imported(path) as model,
        _fake_world(model.MESH) as mesh,
        spmd.set_current_mesh(mesh),
        _flattened(model, mesh),
    ):
        # spmd-types calls two collectives by the names that torch 2.13 deprecates
        warnings.filterwarnings("ignore", category=FutureWarning, module="spmd_types")
        for index, kind in enumerate(model.STAGES):
            try:
                _check_stage(kind, [r for r in records if r["stage"] == index], plan, path)
            except (spmd.SpmdTypeError, AssertionError, ValueError, RuntimeError) as error:
                # The last two are torch's own, of local shapes that do not fit, and the checker's, of conversions it has none for.
                raise ProgramError(f"stage {index} of {path.name} is ill-typed: {error}") from error
    return len(model.STAGES)


def _check_stage(kind: Any, records: list[dict[str, Any]], plan: dict[str, Any], path: Path) -> None:
    constants_file = path / "constants.pt"
    constants = torch.load(constants_file, weights_only=True) if constants_file.exists() else {}
    constants = {name: tensor.to("meta") for name, tensor in constants.items()}
    stage = kind(device="meta", constants=constants)
    layouts = {record["name"]: record["types"] for record in records}
    everywhere = dict.fromkeys(_axes(kind, layouts), "R")
    for name, parameter in stage.named_parameters():
        _declare(parameter, layouts[name])
    for _, buffer in stage.named_buffers():
        _declare(buffer, everywhere)
    rows = plan["global_batch"] // plan["microbatches"]
    activations = []
    for name, shape, dtype, *flows in kind.RECEIVES:
        tensor = torch.empty(shape, dtype=getattr(torch, dtype), device="meta", requires_grad=flows != [False])
        activations.append(_declare(tensor, kind.BORDERS[name]))
    inputs = {}
    sizes = {axis["name"]: axis["size"] for axis in plan["mesh"]}
    for name, (shape, dtype) in kind.SHAPES.items():
        local = [rows, *shape[1:]]
        for axis, dim in kind.INPUTS[name].items():
            local[dim] //= sizes[axis]
        inputs[name] = _declare(torch.empty(local, dtype=getattr(torch, dtype), device="meta"), kind.TYPES[name])
    if kind.RANDOM:
        inputs["key"] = torch.zeros(1, dtype=torch.long)
    for name in kind.SCALARS:
        inputs[name] = _declare(torch.empty((), device="meta"), everywhere)
    with typecheck(local=False):
        result = stage(*activations, **inputs)
        if kind.LOSS:
            spmd.assert_type(result, {axis: _type(t) for axis, t in kind.LOSS.items()})
        else:
            for (name, *_), tensor in zip(kind.SENDS, result, strict=True):
                _assert(tensor, kind.BORDERS[name])


def _axes(kind: Any, layouts: Mapping[str, Mapping[str, str]]) -> list[str]:
    tables = [*layouts.values(), *kind.TYPES.values(), *kind.BORDERS.values()]
    return list(tables[0]) if tables else []


def _type(text: str) -> Any:
    return {"I": spmd.I, "R": spmd.R, "P": spmd.P}.get(text) or spmd.S(int(text[2:-1]))


def _assert(tensor: torch.Tensor, types: Mapping[str, str]) -> torch.Tensor:
    """Assert the types; a dim that several axes shard is said as a partition, outermost axis first."""
    entries: list[Any] = [[] for _ in range(tensor.dim())]
    local = {}
    for axis, text in types.items():
        t = _type(text)
        if isinstance(t, spmd.S):
            entries[t.dim].append(axis)
            local[axis] = spmd.V
        else:
            local[axis] = t
    partition = spmd.PartitionSpec(*(None if not e else e[0] if len(e) == 1 else tuple(e) for e in entries))
    spmd.assert_type(tensor, local, partition)
    return tensor


_declare = _assert  # on a tensor without types, asserting gives them


@contextmanager
def _imported(path: Path) -> Iterator[ModuleType]:
    """The folder's ``model`` module, and no trace of it afterwards."""
    names = [source.stem for source in path.glob("*.py")]
    hidden = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    sys.path.insert(0, str(path))
    try:
        importlib.invalidate_caches()
        yield importlib.import_module("model")
    finally:
        sys.path.remove(str(path))
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(hidden)


def _flattened(model: ModuleType, mesh: Any) -> AbstractContextManager[None]:
    """The program's groups over several axes, known to the program's own copy of ``flattened``."""
    axes = getattr(model, "FLATTENED", ())
    if not axes:
        return nullcontext()
    names, ranks = list(model.MESH), mesh.mesh.unsqueeze(0)
    groups: AbstractContextManager[None] = model.flattened.use(flat_groups(axes, names, ranks))
    return groups


@contextmanager
def _fake_world(axes: Mapping[str, int]) -> Iterator[Any]:
    """A mesh of one stage on the fake process group."""
    assert not dist.is_initialized(), "the checker needs a process without a process group"
    size = 1
    for n in axes.values():
        size *= n
    dist.init_process_group("fake", rank=0, world_size=size, store=fake_store())
    try:
        yield init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    finally:
        dist.destroy_process_group()
