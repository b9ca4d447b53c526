"""Saves and restores the state of the optimizer and of its scheduler in checkpoints.

A parameter's state consists of tensors and numbers, and a parameter group has options. A tensor of the parameter's shape (``exp_avg``) is
sharded like the parameter; a number (``step``) is written once. A tensor of another shape (Adafactor's ``row_var``) is written in full by
a rank that has the full parameter (``whole_tensors``).

For a scheduler, the part of ``state_dict`` that JSON can express is saved. The rest, such as the function of a ``LambdaLR``, always comes
from the function that makes the scheduler.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim.lr_scheduler import LRScheduler

from .box_exchange import MasterValues, copy_index, writes
from .boxes import Piece, full_piece
from .checkpoint_files import CheckpointError
from .optimizers import Updates, class_name
from .parameters import Master
from .state import sentence
from .world import LoadedProgram, World

TENSOR, NUMBER = "tensor", "number"
"""Kinds of state: a tensor with dims, and one without. The other kinds are Python's number types."""
_OF_THE_PROGRAM = ("params", "param_names", "fused", "foreach", "capturable", "differentiable")
"""Group options that depend on the program: which parameters a rank has, and which kernels update them. They don't affect the result."""
_PYTHON: dict[str, type] = {"int": int, "float": float, "bool": bool}


# -- saving ------------------------------------------------------------------------------------------------------------


def described(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the optimizer's class, and its groups' options that JSON can express."""
    groups = [
        {key: own for key, option in group.items() if key not in _OF_THE_PROGRAM and (own := plain(option)) is not ...}
        for group in optimizer.param_groups
    ]
    return {"class": class_name(optimizer), "groups": groups}


def plain(option: Any) -> Any:
    """Return an option as JSON; ``...`` if JSON can't express it (then the user's function that makes the optimizer must set it)."""
    if isinstance(option, Tensor) and option.dim() == 0:
        return option.item()
    if isinstance(option, tuple | list):
        items = [plain(item) for item in option]
        return ... if ... in items else items
    return option if option is None or isinstance(option, bool | int | float | str) else ...


def merged(optimizer: Mapping[str, Any], parts: Iterable[Mapping[str, str]]) -> dict[str, Any]:
    """Return the optimizer's description with the kinds of all ranks' state keys; a key that is a number on any rank is a number."""
    kinds: dict[str, str] = {}
    for part in parts:
        for key, kind in part.items():
            kinds[key] = kind if kinds.get(key, TENSOR) == TENSOR else kinds[key]
    return {**optimizer, "keys": dict(sorted(kinds.items()))}


def saved(
    optimizer: torch.optim.Optimizer, masters: Sequence[Master], program: LoadedProgram, world: World
) -> tuple[list[MasterValues], list[Piece], dict[str, str]]:
    """Return this rank's part of the optimizer's state: the values that have their master's shape, the other values that this rank writes,
    and the kind of each key."""
    held: list[MasterValues] = []
    others: list[Piece] = []
    kinds: dict[str, str] = {}
    for master in masters:
        for key, value in optimizer.state.get(master.tensor, {}).items():
            kind = _kind(master, key, value)
            kinds[key] = kind if kinds.get(key, TENSOR) == TENSOR else kinds[key]
            if _is_like(master, value):
                held.append(MasterValues(_path(master, key), master, value.detach().contiguous()))
                continue
            axes = master.replicated_axes
            for piece in _unsharded_pieces(master, key, value):
                if writes(piece, axes, program, world) if piece.shape else _has_first_element(master, program, world):
                    others.append(piece)
    return held, others, kinds


def _is_like(master: Master, value: Any) -> bool:
    return isinstance(value, Tensor) and value.shape == master.tensor.shape


def _has_first_element(master: Master, program: LoadedProgram, world: World) -> bool:
    """Return whether this rank is the first with the parameter's first element: that rank writes the numbers of the parameter's state."""
    layout = master.layout
    begins = [master.first, *(start for start, _ in layout.window(world.coordinates)), (layout.part or (0, 0))[1]]
    return not any(begins) and copy_index(master.replicated_axes, program, world)[0] == 0


def _kind(master: Master, key: Any, value: Any) -> str:
    """Return the kind of a state value; raises ``CheckpointError`` if a checkpoint can't store it."""
    if not isinstance(key, str) or "." in key:
        raise _refused(master, key, "its key is not a word")
    if isinstance(value, Tensor):
        like = value.shape == master.tensor.shape
        if not like and value.dim() and tuple(master.tensor.shape) != master.layout.original_shape:
            raise _refused(master, key, "it has another shape than the parameter, which this rank has only in part")
        return TENSOR if like or value.dim() else NUMBER
    for name, kind in _PYTHON.items():
        if type(value) is kind:
            return name
    raise _refused(master, key, f"it is a {type(value).__name__}")


def _refused(master: Master, key: Any, why: str) -> CheckpointError:
    return CheckpointError(
        f"the optimizer's state {key!r} of {master.layout.original} cannot be saved: {why}",
        "a state is a tensor or a number, and its key is a word",
    )


def _path(master: Master, key: str) -> tuple[str, ...]:
    return "optimizer", master.layout.original, key


def _unsharded_pieces(master: Master, key: str, value: Any) -> list[Piece]:
    """Return the pieces of a state that is not sharded like the parameter: a full tensor, or a number, for each of the ``originals``."""
    if not isinstance(value, Tensor):
        value = torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
    return [full_piece(("optimizer", name, key), value.detach()) for name in master.layout.originals]


# -- reading -----------------------------------------------------------------------------------------------------------


class Restored:
    """A checkpoint's optimizer state for this rank's masters: created empty, filled by reading ``pieces`` and ``numbers``, then installed.

    ``numbers`` has those of each stacked parameter, such as the steps, which ``check_numbers`` compares. ``facts`` describe the optimizer
    that was saved, ``stored`` has the metadata of the checkpoint's tensors by name. Raises ``CheckpointError`` if the checkpoint has
    another optimizer's state, none, or that of only some of the parameters of a stack.
    """

    def __init__(
        self, updates: Updates, world: World, facts: Mapping[str, Any], stored: Mapping[str, TensorStorageMetadata]
    ) -> None:
        optimizer = updates.optimizer
        self._optimizer, self._facts = optimizer, facts
        self._states: dict[Tensor, dict[str, Tensor]] = {}
        self.pieces: list[Piece] = []
        self.numbers: list[list[Piece]] = []
        if facts is None:
            raise CheckpointError(
                f"the checkpoint has no optimizer state, but the program trains with {type(optimizer).__qualname__}",
                "it was saved by a program without trainable parameters: load only its parameters",
            )
        _check_same_optimizer(optimizer, facts)
        on_device = {
            id(param): bool(group.get("capturable") or group.get("fused"))
            for group in optimizer.param_groups
            for param in group["params"]
        }
        for master in updates.masters:
            state = self._states.setdefault(master.tensor, {})
            for key, kind in facts["keys"].items():
                first = master.layout.originals[0]
                there = _metadata(master.layout.originals, key, stored)
                if there is None:
                    continue
                shape, dtype = tuple(there.size), there.properties.dtype
                if kind == TENSOR and shape == master.layout.original_shape:
                    shape = tuple(master.tensor.shape)
                    # state of a user's class gets the master's dtype if it was saved in the parameter's, and otherwise keeps its own
                    if dtype == stored[f"model.{first}"].properties.dtype:
                        dtype = master.tensor.dtype
                    dtype = updates.state_dtype(master, key) or dtype
                # torch's optimizers keep the number of steps on the host, unless they are capturable or fused
                host = kind != TENSOR and key == "step" and not on_device[id(master.tensor)]
                device = "cpu" if host or kind in _PYTHON else master.tensor.device
                now = optimizer.state.get(master.tensor, {}).get(key)
                fits = isinstance(now, Tensor) and (now.shape, now.dtype) == (shape, dtype)
                if fits and world.places and world.places.has(now):
                    state[key] = now  # reuse it: the file of NVMe states never frees space
                elif master.offloaded is not None and shape == master.tensor.shape:
                    state[key] = world.places.zeros(master.offloaded.place, shape, dtype)
                else:
                    state[key] = torch.zeros(shape, dtype=dtype, device=device)
                if _is_like(master, state[key]):
                    self.pieces += MasterValues(_path(master, key), master, state[key]).pieces(world)
                elif not master.layout.stacked:
                    self.pieces += _unsharded_pieces(master, key, state[key])
                else:
                    others = [torch.zeros_like(state[key]) for _ in master.layout.stacked[1:]]
                    values = zip(master.layout.stacked, [state[key], *others], strict=True)
                    self.numbers.append([full_piece(("optimizer", name, key), value) for name, value in values])

    def check_numbers(self) -> None:
        """Raise ``CheckpointError`` if a number of the state isn't the same for all parameters of a stack."""
        for first, *others in self.numbers:
            for other in others:
                if not torch.equal(first.values, other.values):
                    raise CheckpointError(
                        f"the checkpoint has {first.name} {first.values.tolist()} and {other.name} {other.values.tolist()}, and the "
                        "program updates both parameters as one tensor",
                        "load only the checkpoint's parameters",
                    )

    def install(self) -> None:
        """Set the optimizer's state, and the options of its groups."""
        self._optimizer.state.clear()
        for param, state in self._states.items():
            kinds = self._facts["keys"]
            values = {key: value.item() if kinds[key] in _PYTHON else value for key, value in state.items()}
            if values:
                self._optimizer.state[param] = values
        for group, options in zip(self._optimizer.param_groups, self._facts["groups"], strict=True):
            for key, value in options.items():
                if isinstance(group.get(key), Tensor):
                    group[key].fill_(value)
                else:
                    group[key] = tuple(value) if isinstance(group.get(key), tuple) else value


def without_state(
    program: LoadedProgram, facts: Mapping[str, Any], stored: Mapping[str, TensorStorageMetadata]
) -> list[str]:
    """Return the trained parameters that have no state in the checkpoint although others do: they had no gradient yet, or were frozen."""
    trained = {name for layout in program.layouts if layout.trainable and facts["keys"] for name in layout.originals}
    return sorted(name for name in trained if not any(f"optimizer.{name}.{key}" in stored for key in facts["keys"]))


def _metadata(
    names: Sequence[str], key: str, stored: Mapping[str, TensorStorageMetadata]
) -> TensorStorageMetadata | None:
    """Return the metadata of a state of the first of the parameters that are updated as one tensor; ``None`` if none of them has the state.

    Raises ``CheckpointError`` if only some of them have it: the optimizer would start the others with other numbers of steps.
    """
    without = [name for name in names if f"optimizer.{name}.{key}" not in stored]
    if without and len(without) < len(names):
        has = next(name for name in names if name not in without)
        raise CheckpointError(
            f"{sentence(f'the checkpoint has the state {key} of {has}, and none of', without)}: the program updates them as one tensor",
            "load only the checkpoint's parameters",
        )
    return None if without else stored[f"optimizer.{names[0]}.{key}"]


def _check_same_optimizer(optimizer: torch.optim.Optimizer, facts: Mapping[str, Any]) -> None:
    own = class_name(optimizer)
    if own != facts["class"]:
        raise CheckpointError(
            f"the checkpoint has the state of {facts['class']}, and the program trains with {own}",
            f"train with {facts['class']}, or load only the checkpoint's parameters",
        )
    if len(optimizer.param_groups) != len(facts["groups"]):
        raise CheckpointError(
            f"the checkpoint has {len(facts['groups'])} groups of parameters, and the optimizer {len(optimizer.param_groups)}",
            "make the optimizer with the same groups",
        )


# -- the scheduler -----------------------------------------------------------------------------------------------------


def described_scheduler(scheduler: LRScheduler | None) -> dict[str, Any] | None:
    """Return the names of the scheduler's class and of its parts' classes, and its state."""
    return None if scheduler is None else {"class": _class(scheduler), "state": _saved(scheduler.state_dict())}


def check_scheduler(scheduler: LRScheduler | None, facts: Mapping[str, Any] | None) -> None:
    """Raise ``CheckpointError`` if the checkpoint was trained with another scheduler."""
    own, theirs = scheduler and _class(scheduler), facts and facts["class"]
    if own != theirs:
        raise CheckpointError(
            f"the checkpoint is of a training with {theirs or 'no scheduler'}, and the program's training has "
            f"{own or 'no scheduler'}",
            f"train with {theirs or 'no scheduler'}, or load only the checkpoint's parameters",
        )


def restore_scheduler(scheduler: LRScheduler | None, facts: Mapping[str, Any] | None) -> None:
    """Restore the scheduler's state; the learning rates themselves are options of the optimizer's groups."""
    if scheduler is not None and facts is not None:
        scheduler.load_state_dict(_restored(scheduler.state_dict(), facts["state"]))


def _class(scheduler: LRScheduler) -> str:
    parts = ", ".join(_class(part) for part in getattr(scheduler, "_schedulers", ()))
    return type(scheduler).__qualname__ + (f"({parts})" if parts else "")


def _saved(value: Any) -> Any:
    """Return the value as JSON; ``...`` if JSON can't express it. A dict keeps only the entries that JSON can express."""
    if isinstance(value, Mapping):
        entries = {key: _saved(item) for key, item in value.items() if isinstance(key, str)}
        return {key: item for key, item in entries.items() if item not in (..., {})}
    if isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        return [_saved(item) for item in value]
    return plain(value)


def _restored(now: Any, saved: Any) -> Any:
    """Return ``saved`` with the types of the current value ``now``; entries that were not saved come from ``now``."""
    if isinstance(now, Mapping) and isinstance(saved, Mapping):
        return {**now, **{key: _restored(now.get(key), item) for key, item in saved.items()}}
    if isinstance(now, list) and isinstance(saved, list) and len(now) == len(saved):
        return [_restored(*pair) for pair in zip(now, saved, strict=True)]
    if isinstance(now, Tensor):
        return torch.full_like(now, saved)
    return tuple(saved) if isinstance(now, tuple) else saved
