"""Type-checks an emitted program: every stage, with ``spmd_types``' global types, on a fake process group.

This needs no GPU and only one process: the fake group has as many ranks as a stage of the plan has devices, tensors are on the meta
device, and the checker tracks which dim is sharded on every axis. Most errors that give wrong gradients (a missing all-reduce, a bias added
once per rank, a softmax over a sharded dim) fail here. The checker cannot see values; the exactness matrix checks those.

Layers of one class with inputs of equal types are checked once: the result depends only on the class's code and its inputs.

``train.py`` runs the checker before the first step if a module of the folder was edited: ``runtime/checked.json`` has the digests of the
emitted modules, or of the modules that the checker accepted last.
"""

from __future__ import annotations

import datetime
import hashlib
import importlib
import inspect
import json
import os
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from spmd_types.checker import typecheck
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from .loader import Synthetic
from .processes import ProcessGroups
from .spec import Prelude, layers_of
from .spmd import spmd
from .state import read_constants

Progress = Callable[[str], None]

DIGESTS = "runtime/checked.json"
"""The file in a program's folder with the digests of ``layouts.json`` and of the modules."""

_FILES = ("plan.json", "layouts.json", "model.py")
_ILL_TYPED = (spmd.SpmdTypeError, AssertionError, ValueError, RuntimeError)
_HINT = "if the program was edited, a collective is missing or superfluous there; emit it again for a correct program"
_NAME = __name__


class IllTypedError(RuntimeError):
    """Raised if a program has a type error or can't be read; ``hint`` says what to do."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(f"{message}; {hint}" if hint else message)
        self.message, self.hint = message, hint


# -- edits ------------------------------------------------------------------------------------------------------------


def digests(folder: Path) -> dict[str, str]:
    """Return the digests of ``layouts.json`` and of every module of a program's folder except ``train.py``, which has no collectives."""
    files = [folder / "layouts.json", *folder.glob("*.py"), *folder.glob("runtime/*.py")]
    return {path.relative_to(folder).as_posix(): file_digest(path) for path in sorted(files) if path.name != "train.py"}


def file_digest(file: Path) -> str:
    """Return the SHA-256 of a file."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def write_digests(folder: Path) -> None:
    """Record the digests of the folder's current files."""
    part = folder / f"{DIGESTS}.{os.getpid()}.partial"
    part.write_text(json.dumps(digests(folder), indent=1) + "\n")
    part.replace(folder / DIGESTS)


def edited(folder: Path) -> list[str]:
    """Return the files that have changed since they were emitted or last accepted; ``model.py`` if the folder has no digests."""
    try:
        known: dict[str, str] = json.loads((folder / DIGESTS).read_text())
    except (OSError, ValueError):
        known = {"model.py": ""}
    now = digests(folder)
    return [name for name, digest in known.items() if now.get(name) != digest]


def check_edits(folder: Path, say: Callable[[str], None]) -> None:
    """Check the program if its files have changed since they were emitted or accepted. Raises ``IllTypedError``."""
    if names := edited(folder):
        say(f"type-checking the program, because {', '.join(names)} changed since it was emitted")
        check_in_subprocess(folder)
        with suppress(OSError):  # the folder may be read-only: then the next start checks again
            write_digests(folder)


# -- the check --------------------------------------------------------------------------------------------------------


def check_in_subprocess(folder: Path) -> int:
    """Return the result of ``check``, or raise its error; it runs in a subprocess, because this process has, or will have, a group."""
    world = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {name: value for name, value in os.environ.items() if name not in world}
    env["PYTHONPATH"] = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    done = subprocess.run(
        [sys.executable, "-m", _NAME, str(folder)], env=env, capture_output=True, text=True, check=False
    )
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        ended = f"the type checker of {folder.name} ended with status {done.returncode}: {done.stderr.strip()[-500:]}"
        raise IllTypedError(ended) from None
    if "error" in answer:
        raise IllTypedError(answer["error"], answer["hint"])
    return int(answer["stages"])


def check(path: Path, progress: Progress) -> int:
    """Check every stage of the program in the folder ``path``; return their number. This process must have no process group.

    Raises ``IllTypedError`` with the checker's own message, the stage, the axis and the line, or with the reason why a file cannot be read
    or run.
    """
    if missing := [name for name in _FILES if not (path / name).is_file()]:
        raise IllTypedError(f"{path} is not a program folder: it has no {missing[0]}", "`autopar emit` writes one")
    records = json.loads((path / "layouts.json").read_text())["parameters"]
    plan = json.loads((path / "plan.json").read_text())
    with (
        IMPORTING,
        warnings.catch_warnings(),
        _imported(path) as model,
        _fake_world(model.PROGRAM.mesh) as mesh,
        spmd.set_current_mesh(mesh),
        _flattened(model, mesh),
    ):
        # spmd-types calls two collectives by the names that torch 2.13 deprecates
        warnings.filterwarnings("ignore", category=FutureWarning, module="spmd_types")
        _type_saved_inputs(getattr(torch.utils.checkpoint, "_NoopSaveInputs", None))
        seen: _Seen = {}
        stages = model.PROGRAM.stages
        constants = read_constants(path)
        for index, kind in enumerate(stages):
            progress(f"type-checking stage {index + 1} of {len(stages)}")
            received = stages[index - 1].SPEC.sends if index else {}
            try:
                _check_stage((kind, received), [r for r in records if r["stage"] == index], plan, constants, seen)
            except Exception as error:
                # Besides the checker's own errors: torch's errors for local shapes that do not fit, and any error that an edited file
                # raises.
                text = str(error) if isinstance(error, _ILL_TYPED) else f"{type(error).__name__}: {error}"
                line = _line(error, path, kind)
                raise IllTypedError(f"stage {index} of {path.name} is ill-typed, {line}: {text}", _HINT) from error
        if model.PROGRAM.prelude is not None:
            _check_prelude(model.PROGRAM, constants, path)
    return len(stages)


def _line(error: Exception, path: Path, kind: Any) -> str:
    """Return a place such as ``"model.py:48"``: the innermost line of the folder's model in an error's traceback, or the last line of the
    stage's forward if there is none."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    lines = [number for _, number in traceback.walk_tb(error.__traceback__)]
    model = str(path / "model.py")
    found = [n for frame, n in zip(frames, lines, strict=True) if frame.f_code.co_filename == model]
    if found:
        return f"model.py:{found[-1]}"
    source, first = inspect.getsourcelines(kind.forward)
    return f"model.py:{first + len(source) - 1}"


def _check_prelude(program: Any, constants: Mapping[str, Tensor], path: Path) -> None:
    """Raise ``IllTypedError`` if a scalar that ranks sum over their own rows differs from the scalar of all rows, or the prelude fails.

    The prelude is plain tensor code, without types: it runs on two parts of synthetic batches, and on all of their rows.
    """
    prelude: Prelude = program.prelude
    if not prelude.by_rows:
        return
    line = f"model.py:{prelude.compute.__code__.co_firstlineno}"
    inputs = {name: spec for stage in program.stages for name, spec in stage.SPEC.inputs.items()}
    for seed in range(4):
        rows = Synthetic({name: inputs[name] for name in prelude.reads}, seed)
        batch = {name: torch.stack([rows[i][name] for i in range(8)]) for name in prelude.reads}
        halves = [{name: t[part] for name, t in batch.items()} for part in (slice(0, 3), slice(3, 8))]
        try:
            expected = prelude.compute(batch, constants, lambda term: term)
            terms: list[list[Tensor]] = [[], []]
            for own, half in zip(terms, halves, strict=True):
                prelude.compute(half, constants, lambda term, own=own: own.append(term) or term)  # type: ignore[misc]
            totals = iter([first + second for first, second in zip(*terms, strict=True)])
            summed = prelude.compute(halves[0], constants, lambda term, totals=totals: next(totals))  # type: ignore[misc]
        except Exception as error:
            # the class in the folder's guards.py; synthetic rows may violate the guards
            if type(error).__name__ == "GuardError":
                return
            raise IllTypedError(
                f"the prelude of {path.name} fails, {line}: {type(error).__name__}: {error}", _HINT
            ) from error
        if wrong := [name for name in expected if not torch.equal(expected[name], summed[name])]:
            differs = f"{wrong[0]}, summed over the ranks' rows, differs from that of the full batch"
            raise IllTypedError(f"the prelude of {path.name} is wrong, {line}: {differs}", _HINT)


def _type_saved_inputs(kind: Any) -> None:
    """Give ``_NoopSaveInputs`` of ``torch.utils.checkpoint`` (torch 2.11; later versions have none) a typing rule. It saves the inputs of a
    recomputed function and returns an empty tensor. The rule of spmd-types fails, because it accounts for none of the inputs."""

    def rule(output: Tensor, *, args: tuple[Any, ...]) -> None:
        values = [value for arg in args for value in (arg.values() if isinstance(arg, dict) else (arg,))]
        spmd.rules.ignore(*(value for value in values if isinstance(value, Tensor)))
        spmd.assert_type(output, dict.fromkeys(spmd.current_mesh(), spmd.R))

    if kind is not None:
        kind.spmd_typecheck = staticmethod(rule)


_Seen = dict[Any, Any]  # layer class and inputs -> result of the call


def _check_stage(
    place: tuple[Any, Any],
    records: list[dict[str, Any]],
    plan: dict[str, Any],
    constants: Mapping[str, Tensor],
    seen: _Seen,
) -> None:
    """Check one stage; ``place`` has its class, and the specs of the tensors that it receives."""
    kind, received = place
    constants = {name: tensor.to("meta") for name, tensor in constants.items()}
    stage = kind(device="meta", constants=constants)
    layouts = {record["name"]: record["types"] for record in records}
    spec = kind.SPEC
    everywhere = dict.fromkeys((axis["name"] for axis in plan["mesh"]), spmd.R)
    for name, parameter in stage.named_parameters():
        _declare(parameter, {axis: _type(text) for axis, text in layouts[name].items()})
    for _, buffer in stage.named_buffers():
        _declare(buffer, everywhere)
    rows = plan["global_batch"] // plan["microbatches"]
    activations = [_declare(border.on_meta(), border.types) for border in received.values()]
    inputs: dict[str, Any] = {}
    sizes = {axis["name"]: axis["size"] for axis in plan["mesh"]}
    for name, tensor in spec.inputs.items():
        local = [rows, *tensor.shape[1:]]
        for axis, dim in tensor.sharded.items():
            local[dim] //= sizes[axis]
        inputs[name] = _declare(torch.empty(local, dtype=tensor.dtype, device="meta"), tensor.types)
    if spec.random:
        inputs["key"] = 0
    for name in spec.scalars:
        inputs[name] = _declare(torch.empty((), device="meta"), everywhere)
    for layer in layers_of(stage).values():
        _memoise_forward(layer, seen)
    with torch.compiler.set_stance("force_eager"), typecheck(local=False):
        result = stage(*activations, **inputs)
        if spec.loss:
            spmd.assert_type(result, dict(spec.loss))
        else:
            for border, value in zip(spec.sends.values(), result, strict=True):
                _assert(value, border.types)


def _memoise_forward(layer: nn.Module, seen: _Seen) -> None:
    """Make a layer's forward return the result of an earlier equal call, without checking its ops again."""
    forward, own = layer.forward, _described_module(layer)
    if own is None:
        return

    def once(*args: Any, **kwargs: Any) -> Any:
        given = _described((args, tuple(sorted(kwargs.items()))))
        if given is None:
            return forward(*args, **kwargs)
        if (own, given) not in seen:
            result = forward(*args, **kwargs)
            found = _described(result)
            if found is None:
                return result
            seen[own, given] = found
            return result
        return _value_from(seen[own, given])

    layer.forward = once


def _described_module(layer: nn.Module) -> Any:
    """Return all state that a layer's forward can read: layers with equal state compute the same. ``None`` if it can't be described."""
    usual = {*vars(nn.Module()), "SPEC"}
    parts = []
    for name, module in layer.named_modules():
        extra = {key: value for key, value in vars(module).items() if key not in usual}
        # an attribute of another type may be mutable, so that a call could change it
        plain = all(isinstance(value, str | int | float | bool | tuple | None) for value in extra.values())
        if not plain or module._forward_hooks or module._forward_pre_hooks:
            return None
        tensors = {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}
        described = _described(tuple(tensors.items()))
        if described is None:
            return None
        parts.append((name, type(module), repr(sorted(extra.items())), described))
    return tuple(parts)


def _described(value: Any) -> Any:
    """Return a hashable description of a call's argument or result: tensors by shape, dtype and types; ``None`` for other objects."""
    if isinstance(value, Tensor):
        if not value.is_meta or not spmd.has_local_type(value):
            return None
        local = tuple(sorted(spmd.get_local_type(value).items(), key=str))
        return (
            _TENSOR,
            tuple(value.shape),
            value.stride(),
            value.dtype,
            value.requires_grad,
            local,
            spmd.get_partition_spec(value),
        )
    if isinstance(value, tuple):
        items = tuple(_described(item) for item in value)
        return None if None in items else (tuple, items)
    return (_PLAIN, type(value), value) if value is None or isinstance(value, str | int | float | bool) else None


_TENSOR, _PLAIN = "tensor", "plain"


def _value_from(description: Any) -> Any:
    """Return a value with this description."""
    if description[0] is tuple:
        return tuple(_value_from(item) for item in description[1])
    if description[0] == _PLAIN:
        return description[2]
    _, shape, stride, dtype, requires_grad, local, partition = description
    with spmd.no_typecheck():
        tensor = torch.empty_strided(shape, stride, dtype=dtype, device="meta", requires_grad=requires_grad)
    return spmd.assert_type(tensor, dict(local), partition)


def _type(text: str) -> Any:
    return {"I": spmd.I, "R": spmd.R, "P": spmd.P}.get(text) or spmd.S(int(text[2:-1]))


def _assert(tensor: torch.Tensor, types: Mapping[str, Any]) -> torch.Tensor:
    """Assert a tensor's types by axis, as ``spmd_types``' local types and a partition spec, outermost axis first."""
    entries: list[Any] = [[] for _ in range(tensor.dim())]
    local = {}
    for axis, t in types.items():
        if isinstance(t, spmd.S):
            entries[t.dim].append(axis)
            local[axis] = spmd.V
        else:
            local[axis] = t
    partition = spmd.PartitionSpec(*(None if not e else e[0] if len(e) == 1 else tuple(e) for e in entries))
    spmd.assert_type(tensor, local, partition)
    return tensor


_declare = _assert  # sets the types of a tensor that has none


IMPORTING = threading.RLock()
"""Held while a folder's modules replace modules in ``sys.modules``, which all threads share."""


def take_modules(folder: Path) -> dict[str, ModuleType]:
    """Remove all modules with the names of the folder's modules from ``sys.modules``, and return them."""
    names = {path.stem for path in folder.glob("*.py")} | {path.parent.name for path in folder.glob("*/__init__.py")}
    return {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in names}


@contextmanager
def _imported(path: Path) -> Iterator[ModuleType]:
    """Import the folder's ``model`` module for this context, and remove it from ``sys.modules`` afterwards."""
    hidden = take_modules(path)
    sys.path.insert(0, str(path))
    before = [set(kept) for kept in _spmd_types_registries()]
    try:
        importlib.invalidate_caches()
        try:
            model = importlib.import_module("model")
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            raise IllTypedError(f"model.py of {path.name} cannot be read: {text}", "emit it again") from error
        yield model
    finally:
        sys.path.remove(str(path))
        sys.path_importer_cache.pop(str(path), None)
        take_modules(path)
        sys.modules.update(hidden)
        for kept, old in zip(_spmd_types_registries(), before, strict=True):
            kept.intersection_update(old)


def _spmd_types_registries() -> list[set[Any]]:
    """Return spmd-types' registries, whose entries would keep modules alive (0.3; another version may have none)."""
    places = (
        ("_local_registration", "_LOCAL_AUTOGRAD_FUNCTIONS"),
        ("_local_registration", "_LOCAL_BACKWARD_HOOKS"),
        ("runtime", "_TYPECHECK_AUTOGRAD_FUNCTIONS"),
    )
    found = [getattr(sys.modules.get(f"spmd_types.{module}"), name, None) for module, name in places]
    return [kept for kept in found if isinstance(kept, set)]


def _flattened(model: ModuleType, mesh: Any) -> AbstractContextManager[None]:
    """Return a context that sets the mesh, with groups over several axes, in the program's own copy of ``mesh_axes``."""
    axes = model.PROGRAM.flattened
    if not axes:
        return nullcontext()
    names, ranks = list(model.PROGRAM.mesh), mesh.mesh.unsqueeze(0)
    on_mesh = importlib.import_module(f"{type(model.PROGRAM).__module__.removesuffix('spec')}mesh_axes").on_mesh
    groups = ProcessGroups(datetime.timedelta(minutes=1)).flattened(axes, names, ranks)
    here: AbstractContextManager[None] = on_mesh(mesh, groups)
    return here


@contextmanager
def _fake_world(axes: Mapping[str, int]) -> Iterator[Any]:
    """Create the mesh of one stage on a fake process group, for this context."""
    assert not dist.is_initialized(), "the checker needs a process without a process group"
    size = 1
    for n in axes.values():
        size *= n
    hook = sys.excepthook  # torch replaces it by a hook that puts the rank before each line
    dist.init_process_group("fake", rank=0, world_size=size)
    try:
        yield init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


if __name__ == "__main__":
    try:
        print(json.dumps({"stages": check(Path(sys.argv[1]).resolve(), lambda text: None)}))
    except IllTypedError as error:
        print(json.dumps({"error": error.message, "hint": error.hint}))
