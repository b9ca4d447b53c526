"""Creates the user's optimizers and learning rate scheduler over this rank's parameters.

The user's callable is called once with meta tensors: all parameters of the user's model with their names, shapes and order, frozen
ones included, so that parameter groups by name, by number of dims or by position are the same as on one device. It returns an optimizer, or
a list of them over disjoint parameters. This rank's master copies then replace the meta tensors in the groups, and an optimizer of
the same class is created with the same options and these groups.

Elementwise optimizers are exact on shards of parameters. If the plan shards parameters, optimizers that read one full tensor at a time get
full tensors (``whole_tensors``): torch's Muon and Adafactor, and a user's class with ``per_tensor = True``. Any other class without
``elementwise = True`` may read all parameters at once: it is refused if the plan divides a trained parameter or has several stages.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from .parameters import Master
from .world import Layout, LoadedProgram, World

Optimizer = Callable[[Any], torch.optim.Optimizer | Sequence[torch.optim.Optimizer]]
Scheduler = Callable[[torch.optim.Optimizer], LRScheduler]
T = TypeVar("T")

_ELEMENTWISE = frozenset(
    ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD")
)
_PER_TENSOR = frozenset(("Muon", "Adafactor"))
_NEVER = {
    "LBFGS": "its step evaluates the loss again and again",
    "SparseAdam": "it takes sparse gradients, and those of a program are dense",
}


class RefusedOptimizerError(ValueError):
    """Raised for an optimizer that would not train as on one device; ``message`` says why, ``hint`` what to do."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(f"{message}; {hint}")
        self.message, self.hint = message, hint


class OptimizerContainer(torch.optim.Optimizer):
    """Combines optimizers over disjoint parameters into one, with the groups of all of them, in order, and one state."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        super().__init__([{"params": []}], {})
        self.parts = tuple(parts)
        self.param_groups[:] = [group for part in parts for group in part.param_groups]
        for part in parts:
            self.state.update(part.state)
            part.state = self.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for part in self.parts:
            part.step()


class Updates:
    """Updates this rank's master copies with the optimizer, and the learning rates with the scheduler, if there is one.

    ``masters`` are the optimizer's parameters: this rank's own masters, or full tensors that it updates for several ranks, for which
    ``gatherer`` moves gradients and values between the ranks. ``offloaded`` runs the optimizer if some masters are not on the device,
    ``chunked`` if gradients or moments are in bfloat16. ``shared_groups`` are those of ``_shared_groups``.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scheduler: LRScheduler | None,
        masters: Sequence[Master],
        gatherer: TensorGatherer | None,
        offloaded: Any = None,
        chunked: Any = None,
        shared_groups: Sequence[Mapping[int, str]] = (),
    ) -> None:
        self.optimizer, self.scheduler, self.masters, self._gatherer = optimizer, scheduler, masters, gatherer
        self._offloaded, self._chunked, self._shared_groups = offloaded, chunked, shared_groups

    def step(self) -> None:
        """Update the masters by their gradients, then set the next step's learning rates; all ranks call this.

        Raises ``RefusedOptimizerError`` before the update if the scheduler gave other options to the group of another expert.
        """
        _check_same_options(self._shared_groups, self.optimizer)
        if self._gatherer is not None:
            self._gatherer.gather_gradients()
        (self._offloaded or self._chunked or self.optimizer).step()
        if self._gatherer is not None:
            self._gatherer.scatter_values()
        if self.scheduler is not None:
            self.scheduler.step()

    def read_masters(self) -> None:
        """Refresh the full tensors of ``WholeTensors`` after anything but ``step`` has set the masters; all ranks call this."""
        if self._gatherer is not None:
            self._gatherer.gather_values()

    def state_dtype(self, master: Master, key: str) -> torch.dtype | None:
        """Return the dtype of a state of the master's shape; ``None`` if the optimizer's class is not torch's, and may choose any."""
        if self._chunked is not None:
            return cast(torch.dtype, self._chunked.state_dtype(master, key))
        parts = self.optimizer.parts if isinstance(self.optimizer, OptimizerContainer) else (self.optimizer,)
        return master.tensor.dtype if all(map(_torch_class_name, parts)) else None


class TensorGatherer(Protocol):
    """The interface of ``whole_tensors.WholeTensors``."""

    masters: list[Master]

    def gather_gradients(self) -> None: ...
    def scatter_values(self) -> None: ...
    def gather_values(self) -> None: ...


def make(
    optimizer: Optimizer,
    program: LoadedProgram,
    world: World,
    masters: Sequence[Master],
    scheduler: Scheduler | None = None,
) -> Updates:
    """Return the user's optimizer and scheduler over this rank's master copies; all ranks call this.

    Raises ``RefusedOptimizerError`` on every rank if training would differ from training on one device.
    """
    user = checked(optimizer, program, scheduler)
    needs_full = {
        user.names[id(param)]
        for part in user.optimizers
        if not _is_elementwise(part)
        for group in part.param_groups
        for param in group["params"]
    }
    gatherer: TensorGatherer | None = None
    if needs_full and program.spec.whole_tensors is not None:  # ``None`` if the plan divides no parameter
        full_masters = [master for master in masters if master.layout.originals[0] in needs_full]
        gatherer = program.spec.whole_tensors(full_masters, program, world)
        masters = [*(m for m in masters if m.layout.originals[0] not in needs_full), *gatherer.masters]
    tensors: dict[str, list[nn.Parameter]] = {}
    for master in masters:
        tensors.setdefault(master.layout.originals[0], []).append(master.tensor)
    made = user.over(tensors)
    single_chunk = not all(_torch_class_name(part) for part in user.optimizers)
    chunked = program.spec.chunked_updates and program.spec.chunked_updates(made, masters, program, world)
    offloaded = world.places and world.places.updates(chunked or made, masters, world.device, single_chunk)
    made_scheduler = None if scheduler is None else scheduled(scheduler, made)
    return Updates(made, made_scheduler, masters, gatherer, offloaded, chunked, _shared_groups(user, program))


@dataclass(frozen=True)
class CheckedRecipe:
    """The optimizers that the user's callable made over meta tensors, the stand-ins for the parameters."""

    optimizers: list[torch.optim.Optimizer]
    stand_ins: Mapping[str, nn.Parameter]  # by name, in the model's order

    @property
    def names(self) -> dict[int, str]:
        """The stand-ins' names by ``id``."""
        return {id(stand_in): name for name, stand_in in self.stand_ins.items()}

    def over(self, masters: Mapping[str, list[nn.Parameter]]) -> torch.optim.Optimizer:
        """Return optimizers of the same classes with the same options over ``masters``, combined into one."""
        return _joined([_rebuilt(part, self.names, masters) for part in self.optimizers])

    def again(self) -> torch.optim.Optimizer:
        """Return the optimizers, rebuilt over the stand-ins."""
        return self.over({name: [stand_in] for name, stand_in in self.stand_ins.items()})


def checked(optimizer: Optimizer, program: LoadedProgram, scheduler: Scheduler | None = None) -> CheckedRecipe:
    """Return the optimizers that the user's callable makes over stand-ins for the parameters; the scheduler is tried on them.

    Raises ``RefusedOptimizerError`` as ``make`` does. No process group is needed.
    """
    stand_ins = _stand_ins(program)
    made: Any = optimizer(list(stand_ins.items()) if _wants_names(optimizer) else list(stand_ins.values()))
    optimizers: list[torch.optim.Optimizer] = list(made) if isinstance(made, list | tuple) else [made]
    for part in optimizers:
        if not isinstance(part, torch.optim.Optimizer):
            raise RefusedOptimizerError(
                f"the optimizer's function returned {type(part).__name__}",
                "it returns a torch.optim.Optimizer, or a list of them",
            )
    if not optimizers:
        raise RefusedOptimizerError("the optimizer's function returned an empty list", "it returns an optimizer")
    user = CheckedRecipe(optimizers, stand_ins)
    names = user.names
    taken: set[int] = set()
    for part in optimizers:
        own = [param for group in part.param_groups for param in group["params"]]
        if any(id(param) not in names for param in own):
            raise RefusedOptimizerError(
                f"{_name(part)} has tensors that are no parameters of the model",
                "its groups hold the tensors that the function was called with, not others made of them",
            )
        if twice := [names[id(param)] for param in own if id(param) in taken]:
            raise RefusedOptimizerError(
                f"two optimizers have {twice[0]}", "give each parameter to one of the optimizers in the list"
            )
        taken |= {id(param) for param in own}
        _check_compatible(part, [names[id(param)] for param in own], program)
        _rebuilt(part, names, {})  # try to construct it without parameters: a rank may have none
    # try on the meta tensors whether the classes can be constructed again
    again = user.again()
    if scheduler is not None:
        scheduled(scheduler, again)
    _check_same_options(_shared_groups(user, program), again)
    return user


def select(parameters: Mapping[str, T], *patterns: str) -> list[T]:
    """Return the parameters with one of these names, in the model's order; ``*`` in a name stands for a number: ``"layers.*.mlp.weight"``.

    Raises ``RefusedOptimizerError`` for a name that no parameter has.
    """
    forms = [re.compile(r"\d+".join(map(re.escape, pattern.split("*")))) for pattern in patterns]
    for pattern, form in zip(patterns, forms, strict=True):
        if not any(map(form.fullmatch, parameters)):
            raise RefusedOptimizerError(f"no parameter is called {pattern}", "a * stands for a number in a name")
    return [parameter for name, parameter in parameters.items() if any(form.fullmatch(name) for form in forms)]


def patterns_of(name: str) -> list[str]:
    """Return the patterns that fit a name, the widest first: with ``*`` for all its numbers, for one of them, and the name itself."""
    parts = name.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdecimal()]
    places = [numbers, *([i] for i in numbers), []]
    return [".".join("*" if i in place else part for i, part in enumerate(parts)) for place in places]


def difference(first: torch.optim.Optimizer, second: torch.optim.Optimizer) -> str:
    """Return the first difference of two optimizers over the same parameters, or an empty string. ``param_names`` aren't compared."""
    if type(first) is not type(second):
        return "class"
    if len(first.param_groups) != len(second.param_groups):
        return "number of groups"
    for own, other in zip(first.param_groups, second.param_groups, strict=True):
        if list(map(id, own["params"])) != list(map(id, other["params"])):
            return "order of parameters"
        if option := _different_option(own, other):
            return f"value of {option}"
    for name in vars(first).keys() | vars(second).keys():
        a, b = vars(first).get(name), vars(second).get(name)
        if name not in ("param_groups", "state") and not callable(a) and _plain(a) and not same(a, b):
            return f"attribute {name}"
    return ""


def _different_option(group: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Return the first option by name whose value differs in two parameter groups, or an empty string."""
    options = sorted((group.keys() | other.keys()) - {"params", "param_names"})
    return next((option for option in options if not same(group.get(option), other.get(option))), "")


def _joined(optimizers: Sequence[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    return optimizers[0] if len(optimizers) == 1 else OptimizerContainer(optimizers)


def scheduled(scheduler: Scheduler, optimizer: torch.optim.Optimizer) -> LRScheduler:
    """Return the scheduler that the user's callable makes for an optimizer. Raises ``RefusedOptimizerError``."""
    made = scheduler(optimizer)
    if not isinstance(made, LRScheduler):
        raise RefusedOptimizerError(
            f"the scheduler's function returned {type(made).__name__}",
            "it takes an optimizer, and returns one torch.optim.lr_scheduler.LRScheduler",
        )
    if isinstance(made, ReduceLROnPlateau):
        raise RefusedOptimizerError(
            "ReduceLROnPlateau waits for a measure, such as the loss on other data, that a step does not have",
            "take a scheduler that counts steps, such as CosineAnnealingLR",
        )
    if made.optimizer is not optimizer:
        raise RefusedOptimizerError(
            f"the scheduler {type(made).__name__} is for another optimizer than the one that its function was called with",
            "construct it with the function's argument",
        )
    return made


def class_name(made: torch.optim.Optimizer) -> str:
    """Return the name of an optimizer's class; for a container, those of its parts in order."""
    return " and ".join(
        type(part).__qualname__ for part in (made.parts if isinstance(made, OptimizerContainer) else (made,))
    )


def _stand_ins(program: LoadedProgram) -> dict[str, nn.Parameter]:
    """Return stand-ins on the meta device for the user's parameters, by name, in the model's order."""
    found: dict[str, nn.Parameter] = {}
    dtypes = {name: program.placement(x).master_dtype for x in program.layouts for name in x.originals}
    entries = [(e["name"], e["shape"], e["trainable"]) for e in program.records.get("model", ()) if _is_parameter(e)]
    for name, shape, trainable in entries or [
        (name, x.original_shape, x.trainable) for x in program.layouts for name in x.originals
    ]:
        tensor = torch.empty(tuple(shape), dtype=dtypes.get(name, torch.float32), device="meta")
        found.setdefault(name, nn.Parameter(tensor, requires_grad=trainable))
    return found


def _is_parameter(entry: Mapping[str, Any]) -> bool:
    return bool(entry["parameter"]) and entry["alias"] is None


def _wants_names(optimizer: Optimizer) -> bool:
    try:
        first = next(iter(inspect.signature(optimizer).parameters), "")
    except (TypeError, ValueError):
        return False
    return first == "named_parameters"


def _name(optimizer: torch.optim.Optimizer) -> str:
    return type(optimizer).__name__


def _torch_class_name(optimizer: torch.optim.Optimizer) -> str:
    """Return the optimizer's class name if the class is torch's own; ``""`` for any other class, even a subclass of torch's."""
    name = _name(optimizer)
    return name if type(optimizer) is getattr(torch.optim, name, None) else ""


# -- optimizers on shards ---------------------------------------------------------------------------------------------


def _is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    return _torch_class_name(optimizer) in _ELEMENTWISE or bool(getattr(optimizer, "elementwise", False))


def _check_compatible(optimizer: torch.optim.Optimizer, names: Iterable[str], program: LoadedProgram) -> None:
    torch_class = _torch_class_name(optimizer)
    if torch_class in _NEVER:
        raise RefusedOptimizerError(
            f"{torch_class} cannot train a program: {_NEVER[torch_class]}", "train with AdamW, the default"
        )
    if program.spec.chunked_updates is not None:
        elementwise = torch_class if torch_class in _ELEMENTWISE else ""
        program.spec.chunked_updates.check(elementwise, _name(optimizer), program.plan["allow"])
    if _is_elementwise(optimizer) or torch_class in _PER_TENSOR or getattr(optimizer, "per_tensor", False):
        return
    hint = "give its class per_tensor = True if it reads one tensor at a time, or elementwise = True if one element"
    trained = set(names)
    for layout in program.layouts:
        how = cut(layout, program) if layout.trainable and not trained.isdisjoint(layout.originals) else None
        if how is not None:
            raise RefusedOptimizerError(
                f"{_name(optimizer)} may read all parameters at once, but no rank has the full {layout.original}: {how}",
                hint,
            )
    if len(program.spec.stages) > 1:
        raise RefusedOptimizerError(
            f"{_name(optimizer)} may read all parameters at once, but each pipeline stage has only some of them", hint
        )


def _shared_groups(user: CheckedRecipe, program: LoadedProgram) -> list[dict[int, str]]:
    """Return the groups of each stacked parameter that is updated as one tensor although its parameters are in several groups: the groups'
    indices, each with the name of a parameter. The first group's options are those of the update.

    Raises ``RefusedOptimizerError`` if the parameters are in different optimizers.
    """
    all_groups = [(part, group) for part in user.optimizers for group in part.param_groups]
    owners: dict[str, torch.optim.Optimizer] = {}
    indices: dict[str, int] = {}
    all_names = user.names
    for index, (owner, group) in enumerate(all_groups):
        names = [all_names[id(param)] for param in group["params"]]
        owners |= dict.fromkeys(names, owner)
        indices |= dict.fromkeys(names, index)
    shared = []
    for layout in (layout for layout in program.layouts if layout.stacked and layout.trainable):
        first, parts = layout.stacked[0], [owners.get(name) for name in layout.stacked]
        if all(part is not None and not _is_elementwise(part) for part in parts):
            continue  # each parameter is updated as a full tensor
        if other := next((n for n, part in zip(layout.stacked, parts, strict=True) if part is not parts[0]), None):
            raise RefusedOptimizerError(
                f"{first} and {other} are in different optimizers, or only one of them is in an optimizer, and the program stores them as "
                "one tensor",
                "give the parameters of all experts of a mixture to one optimizer",
            )
        groups = dict[int, str]()
        for name in (name for name in layout.stacked if name in indices):
            groups.setdefault(indices[name], name)
        shared += [groups] if len(groups) > 1 else []
    return shared


def _check_same_options(shared: Iterable[Mapping[int, str]], optimizer: torch.optim.Optimizer) -> None:
    """Raise ``RefusedOptimizerError`` if groups that update one stacked parameter (see ``_shared_groups``) have different options."""
    for names in shared:
        (first, name), *others = names.items()
        for index, other in others:
            group, second = optimizer.param_groups[first], optimizer.param_groups[index]
            if option := _different_option(group, second):
                raise RefusedOptimizerError(
                    f"{name} and {other} are in different groups of the optimizer, with {option} {_shown(group.get(option))} and "
                    f"{_shown(second.get(option))}, and the program stores them as one tensor",
                    "give the groups of all experts of a mixture the same options in all steps",
                )


def _shown(option: Any) -> Any:
    return option.tolist() if isinstance(option, Tensor) else option


def cut(layout: Layout, program: LoadedProgram) -> str | None:
    """Describe how the plan divides the master copy of a parameter; ``None`` if it does not."""
    axes = [axis for axis, _ in layout.sharded if program.spec.mesh[axis] > 1]
    if axes:
        return f"the axis {axes[0]} shards it"
    if layout.part is not None:
        return "it is a fused projection, which the program stores in parts"
    if layout.stacked:
        return "the program stores it stacked with those of the other experts"
    placement = program.placement(layout)
    if placement.place:
        return "it is not on the device, and is updated piece by piece"
    return f"ZeRO {placement.zero} divides it over {', '.join(placement.axes)}" if placement.zero else None


# -- the same optimizer over other tensors ----------------------------------------------------------------------------


def _rebuilt(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], masters: Mapping[str, list[nn.Parameter]]
) -> torch.optim.Optimizer:
    """Return an optimizer of the same class with the same options over ``masters``, or raise ``RefusedOptimizerError``."""
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        own = [(names[id(param)], master) for param in group["params"] for master in masters.get(names[id(param)], ())]
        options = {  # tensors are cloned, because a scheduler changes a tensor learning rate in place
            key: value.clone() if isinstance(value, Tensor) else value
            for key, value in group.items()
            if key not in ("params", "param_names")
        }
        options |= {"param_names": [f"{name}#{i}" for i, (name, _) in enumerate(own)]} if "param_names" in group else {}
        groups.append({**options, "params": [master for _, master in own]})
    kind: Any = type(optimizer)
    taken = inspect.signature(kind).parameters
    first, *others = taken
    defaults = {key: value for key, value in optimizer.defaults.items() if key in others}
    try:
        rebuilt: torch.optim.Optimizer = kind(groups, **defaults)
    except Exception as error:
        raise _not_rebuilt(optimizer, f"its class raised {type(error).__name__}: {error}") from error
    for before, after in zip(optimizer.param_groups, rebuilt.param_groups, strict=True):
        for key in before.keys() - {"params", "param_names"}:
            if not same(before[key], after.get(key)):
                raise _not_rebuilt(optimizer, f"its class changes the option {key} of a group")
    _copy_attributes(optimizer, rebuilt)
    return rebuilt


def _not_rebuilt(optimizer: torch.optim.Optimizer, why: str) -> RefusedOptimizerError:
    return RefusedOptimizerError(
        f"{_name(optimizer)} cannot be rebuilt over each rank's parameters: {why}",
        "an optimizer's class takes groups with all their options, and keeps its other arguments as they are in attributes",
    )


def _copy_attributes(source: torch.optim.Optimizer, target: torch.optim.Optimizer) -> None:
    """Copy attributes except groups, state and rebuilt tensors; refuse hooks, tensors that weren't rebuilt, and a replaced ``step``."""
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


def same(a: Any, b: Any) -> bool:
    """Return whether two options are equal, and of the same type."""
    if a is b:
        return True
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and torch.equal(a, b)
    return bool(type(a) is type(b) and a == b)
