"""The user's optimizer, over the parameters of this rank.

The user's callable is called once with meta tensors: all parameters of the user's model under their own names, shapes and order, frozen
ones included, so that parameter groups by name, by number of dims or by position are the same as on one device. This rank's master
copies then replace the meta tensors in the groups, and an optimizer of the same class with the same options is made of the groups.

Element-wise optimizers are exact on slices of parameters. Optimizers that read whole tensors (Muon, Adafactor, LAMB) are accepted where
every master copy is a whole parameter, and refused by name elsewhere. A user's own class counts as reading whole tensors unless it has
``elementwise = True``. Unless it has ``per_tensor = True``, it may also read all tensors together, and needs all of them on every rank.

This file is copied into every emitted program; it needs torch alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autopar.program.world import Layout, Program

Optimizer = Callable[[Any], torch.optim.Optimizer]

_ELEMENTWISE = frozenset(
    ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD")
)
_PER_TENSOR = frozenset(("Muon", "Adafactor"))
_NEVER = {
    "LBFGS": "its step evaluates the loss again and again",
    "SparseAdam": "it takes sparse gradients, and those of a program are dense",
}


class RefusedOptimizerError(ValueError):
    """An optimizer that would not train as on one device; ``message`` says why, ``hint`` what to do."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(f"{message}; {hint}")
        self.message, self.hint = message, hint


def make(
    optimizer: Optimizer, program: Program, masters: Sequence[tuple[Layout, nn.Parameter]]
) -> torch.optim.Optimizer | None:
    """The user's optimizer over this rank's master copies (``None`` if the rank has none).

    Raises ``RefusedOptimizerError`` where it would not train as on one device, on every rank alike.
    """
    model, names = checked(optimizer, program)
    mine: dict[str, list[nn.Parameter]] = {}
    for layout, master in masters:
        mine.setdefault(layout.original, []).append(master)
    return _rebuilt(model, names, mine) if masters else None


def checked(optimizer: Optimizer, program: Program) -> tuple[torch.optim.Optimizer, dict[int, str]]:
    """The optimizer that the user's callable makes of the stand-ins, and their names by ``id``.

    Raises ``RefusedOptimizerError`` as ``make`` does; nothing need have been started.
    """
    stand_ins = _stand_ins(program)
    model = optimizer(list(stand_ins.items()) if _wants_names(optimizer) else list(stand_ins.values()))
    if not isinstance(model, torch.optim.Optimizer):
        raise RefusedOptimizerError(
            f"the optimizer's function gave back {type(model).__name__}", "it returns one torch.optim.Optimizer"
        )
    names = {id(stand_in): name for name, stand_in in stand_ins.items()}
    for group in model.param_groups:
        if any(id(param) not in names for param in group["params"]):
            raise RefusedOptimizerError(
                f"{_name(model)} has tensors that are no parameters of the model",
                "its groups hold the tensors that the function was called with, not others made of them",
            )
    _refuse_pieces(model, [names[id(p)] for group in model.param_groups for p in group["params"]], program)
    # the meta tensors already show whether the class can be constructed again
    _rebuilt(model, names, {name: [stand_in] for name, stand_in in stand_ins.items()})
    return model, names


def _stand_ins(program: Program) -> dict[str, nn.Parameter]:
    """The user's parameters, on meta, by name, in the model's order."""
    found: dict[str, nn.Parameter] = {}
    dtypes = {layout.original: program.dtypes(layout)[0] for layout in program.layouts}
    entries = [(e["name"], e["shape"], e["trainable"]) for e in program.records.get("model", ()) if _own(e)]
    for name, shape, trainable in entries or [(x.original, x.original_shape, x.trainable) for x in program.layouts]:
        tensor = torch.empty(tuple(shape), dtype=dtypes.get(name, torch.float32), device="meta")
        found.setdefault(name, nn.Parameter(tensor, requires_grad=trainable))
    return found


def _own(entry: Mapping[str, Any]) -> bool:
    return bool(entry["parameter"]) and entry["alias"] is None


def _wants_names(optimizer: Optimizer) -> bool:
    try:
        first = next(iter(inspect.signature(optimizer).parameters), "")
    except (TypeError, ValueError):
        return False
    return first == "named_parameters"


def _name(optimizer: torch.optim.Optimizer) -> str:
    return type(optimizer).__name__


def _of_torch(optimizer: torch.optim.Optimizer) -> str:
    """The name of an optimizer of torch's own; ``""`` of any other, subclasses included."""
    name = _name(optimizer)
    return name if type(optimizer) is getattr(torch.optim, name, None) else ""


# -- pieces of tensors ------------------------------------------------------------------------------------------------


def _refuse_pieces(optimizer: torch.optim.Optimizer, names: Iterable[str], program: Program) -> None:
    torchs = _of_torch(optimizer)
    if torchs in _NEVER:
        raise RefusedOptimizerError(
            f"{torchs} cannot train a program: {_NEVER[torchs]}", "AdamW is the optimizer where none is given"
        )
    if torchs in _ELEMENTWISE or getattr(optimizer, "elementwise", False):
        return
    known = torchs in _PER_TENSOR
    hint = "plan with zero=0 and data parallelism alone" + (
        "" if known else ", or give its class elementwise = True if it treats elements alike"
    )
    trained = set(names)
    for layout in program.layouts:
        cut = _cut(layout, program) if layout.trainable and layout.original in trained else None
        if cut is not None:
            raise RefusedOptimizerError(
                f"{_name(optimizer)} looks at whole tensors, and no rank has the whole of {layout.original}: {cut}",
                hint,
            )
    if len(program.model.STAGES) > 1 and not (known or getattr(optimizer, "per_tensor", False)):
        raise RefusedOptimizerError(
            f"{_name(optimizer)} may look at all tensors together, and the pipeline's stages each have some",
            "give its class per_tensor = True if it looks at one tensor at a time, or elementwise = True if at one element",
        )


def _cut(layout: Layout, program: Program) -> str | None:
    """How the plan slices a master copy, in words; empty for a whole parameter."""
    axes = [axis for axis, _ in layout.sharded if program.model.MESH[axis] > 1]
    if axes:
        return f"the axis {axes[0]} shards it"
    if layout.part is not None:
        return "it is a fused projection, of which the program holds parts"
    _, zero, data = program.group(layout)
    return f"ZeRO {zero} divides it over {', '.join(data)}" if zero else None


# -- the same optimizer over other tensors ----------------------------------------------------------------------------


def _rebuilt(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], masters: Mapping[str, list[nn.Parameter]]
) -> torch.optim.Optimizer:
    """An optimizer of the same class with the same options over ``masters``."""
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        own = [(names[id(param)], master) for param in group["params"] for master in masters.get(names[id(param)], ())]
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        params: list[Any] = [master for _, master in own]
        if "param_names" in group:
            params = [(f"{name}#{index}", master) for index, (name, master) in enumerate(own)]
        groups.append({**options, "params": params})
    kind: Any = type(optimizer)
    taken = inspect.signature(kind).parameters
    first, *others = taken
    defaults = {key: value for key, value in optimizer.defaults.items() if key in others}
    try:
        rebuilt: torch.optim.Optimizer = kind(groups, **defaults)
    except Exception as error:
        raise _not_rebuilt(optimizer, f"its class raised {type(error).__name__}: {error}") from error
    for mine, its in zip(optimizer.param_groups, rebuilt.param_groups, strict=True):
        for key in mine.keys() - {"params", "param_names"}:
            if not _same(mine[key], its.get(key)):
                raise _not_rebuilt(optimizer, f"its class changes the option {key} of a group")
    _copy_attributes(optimizer, rebuilt)
    return rebuilt


def _not_rebuilt(optimizer: torch.optim.Optimizer, why: str) -> RefusedOptimizerError:
    return RefusedOptimizerError(
        f"{_name(optimizer)} cannot be made again over what each rank holds: {why}",
        "an optimizer's class takes groups with all their options, and keeps its other arguments as they are in attributes",
    )


def _copy_attributes(source: torch.optim.Optimizer, target: torch.optim.Optimizer) -> None:
    """Copy the attributes of the class besides its groups, except those with tensors, which the constructor made of the new parameters."""
    for name, value in vars(source).items():
        if name in ("param_groups", "state"):
            continue
        if name.startswith("_optimizer_") and name.endswith("_hooks"):
            if value:
                raise _not_rebuilt(source, "it has hooks")
            continue
        if any(True for _ in _tensors(value)):
            if type(getattr(target, name, None)) is not type(value):
                raise _not_rebuilt(source, f"its attribute {name} holds tensors")
        elif name == "step" or getattr(value, "__self__", None) is source:
            raise _not_rebuilt(source, f"its {name} was replaced, as a scheduler of the learning rate does")
        elif _plain(value) or callable(value) or not hasattr(target, name):
            setattr(target, name, value)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(key)
            yield from _tensors(item)
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from _tensors(item)


def _plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(_plain(item) for item in value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return all(_plain(item) for item in value)
    return value is None or isinstance(value, bool | int | float | complex | str | torch.dtype)


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and torch.equal(a, b)
    return bool(type(a) is type(b) and a == b)
