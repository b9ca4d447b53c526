"""State dicts of the user's model: the initial values in a program's folder, and checks of a state dict before any process starts.

In ``layouts.json`` the list ``model`` has an entry for each name in the user's state dict: a tied tensor has several.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .weights import mapped, write_file

INITIAL = "initial.safetensors"
"""The file in a program's folder with the initial values, under the names of the user's model."""

CONSTANTS = "runtime/constants.safetensors"
"""The file in a program's folder with the model's constant tensors."""

NO_VALUES = "the folder has no initial values: the model was on meta, or compiled without values"
_SHOWN = 5


def has_values(state: Mapping[str, Any] | None) -> bool:
    """Return whether a state dict has values: the state dict of a model on meta has none."""
    tensors = [value for value in (state or {}).values() if isinstance(value, Tensor)]
    return bool(tensors) and not any(tensor.is_meta for tensor in tensors)


def write_initial(folder: Path, state: Mapping[str, Any] | None) -> None:
    """Write the folder's initial values, or remove the old file if ``state`` has no values, and update the plan's note about them."""
    if state is not None and has_values(state):
        tensors = {name: value.detach() for name, value in state.items() if isinstance(value, Tensor)}
        write_file(folder / INITIAL, tensors)
    else:
        (folder / INITIAL).unlink(missing_ok=True)
    note_values(folder)


def note_values(folder: Path) -> None:
    """If the folder has no initial values, add a note to its plan that says so; otherwise remove that note."""
    plan = json.loads((folder / "plan.json").read_text())
    others = [note for note in plan.get("notes", ()) if note != NO_VALUES]
    notes = others if (folder / INITIAL).is_file() else [NO_VALUES, *others]
    if notes != plan.get("notes"):
        (folder / "plan.json").write_text(json.dumps(plan | {"notes": notes}, indent=1) + "\n")


def read_constants(folder: Path) -> dict[str, Tensor]:
    """Return the model's constant tensors, by name."""
    if (folder / CONSTANTS).is_file():
        return {name: tensor.clone() for name, tensor in mapped(folder / CONSTANTS).items()}
    former = folder / "constants.pt"  # in folders that were emitted before the runtime was a package
    return torch.load(former, weights_only=True) if former.is_file() else {}


def read_state(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Return the state dict in a ``torch.save`` file, memory-mapped: tensors are read when they are used. Raises ``TypeError`` for a file
    of anything else."""
    state: Any = torch.load(path, weights_only=True, mmap=True, map_location="cpu")
    if not isinstance(state, Mapping):
        raise TypeError(f"it has a {type(state).__name__}, and a state dict is expected")
    return dict(state)


def initial(folder: str | os.PathLike[str]) -> Path | None:
    """Return the file of the folder's initial values, or ``None``."""
    path = Path(folder) / INITIAL
    return path if path.is_file() else None


def names_outside_program(records: Mapping[str, Any]) -> set[str]:
    """Return the names in the model's state dict of tensors that are neither parameters of the program nor buffers that it writes."""
    own = {name for record in records["parameters"] for name in (*_originals(record), *record["tied"])}
    own |= {record["original"] for record in records.get("buffers", ()) if record["persistent"] and record["written"]}
    return {entry["name"] for entry in records.get("model", ())} - own - other_names(records, own).keys()


def _originals(record: Mapping[str, Any]) -> Sequence[str]:
    """Return the names of the user's parameters in a record, as ``Layout.originals``."""
    return record.get("stacked") or (record["original"],)


def other_names(records: Mapping[str, Any], names: Collection[str]) -> dict[str, str]:
    """Return the other names that tensors in ``names`` have in the model's state dict, each with the name in ``names``."""
    first = {entry["name"]: entry["alias"] or entry["name"] for entry in records.get("model", ())}
    known = {first[name]: name for name in names if name in first}
    return {name: known[same] for name, same in first.items() if same in known and name not in names}


def wrong_state(records: Mapping[str, Any], state: Mapping[str, Tensor]) -> str:
    """Return why a state dict of the user's model doesn't fit a program with these records (``layouts.json``); ``""`` if it fits.

    It must contain every parameter of the program and every buffer that the program writes (a tied one under any name), unsharded and
    with values, and no name that the model does not have. Other tensors may be missing (``names_outside_program``).
    """
    needed: dict[tuple[str, ...], tuple[int, ...]] = {}
    for record in records["parameters"]:
        for original in _originals(record):
            needed[original, *record["tied"]] = tuple(record["original_shape"])
    for record in records.get("buffers", ()):
        if record["persistent"] and record["written"]:
            needed[record["original"],] = tuple(record["shape"])
    known = {entry["name"]: tuple(entry["shape"]) for entry in records.get("model", ())}
    known |= {name: shape for names, shape in needed.items() for name in names}
    given = {name: tensor for name, tensor in state.items() if not name.endswith("_extra_state")}
    sentences = [
        sentence("it has no", [names[0] for names in needed if not any(name in given for name in names)]),
        sentence("the model has no", [name for name in given if name not in known]),
        sentence("not a tensor:", [name for name, value in given.items() if not isinstance(value, Tensor)]),
    ]
    tensors = {name: value for name, value in given.items() if isinstance(value, Tensor) and name in known}
    shapes = {name: tuple(value.shape) for name, value in tensors.items()}
    sentences += [
        sentence("on the meta device, without values:", [name for name, value in tensors.items() if value.is_meta]),
        sentence(
            "wrong shape:",
            [f"{name} ({shape}, in the model {known[name]})" for name, shape in shapes.items() if shape != known[name]],
        ),
    ]
    if not any(sentences):
        sentences.append(_conflicting_ties(needed, tensors))
    return "; ".join(filter(None, sentences))


def _conflicting_ties(needed: Iterable[Sequence[str]], tensors: Mapping[str, Tensor]) -> str:
    """Return a sentence that lists the tied parameters whose names (``needed``) have different values; ``""`` if there are none."""
    found = []
    for names in needed:
        values = [tensors[name] for name in names if name in tensors]
        if any(not _same(values[0], other) for other in values[1:]):
            found.append(" and ".join(name for name in names if name in tensors))
    return sentence("tied in the model, but with different values here:", found)


def _same(a: Tensor, b: Tensor) -> bool:
    if a.data_ptr() == b.data_ptr() and a.stride() == b.stride() and a.dtype == b.dtype:
        return True
    return bool(((a == b) | ((a != a) & (b != b))).all())  # noqa: PLR0124  a NaN is the same as a NaN


def sentence(what: str, names: Sequence[str]) -> str:
    """Return ``what`` followed by the first few names; ``""`` if there are no names."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{what} {', '.join(names[:_SHOWN])}{more}" if names else ""
