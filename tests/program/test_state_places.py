"""Optimizer states in the host's memory and on NVMe: as on one device, through checkpoints, in chunks, in files that are really used."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from exactness import subject
from resumed import KIND, Fault, chain

from autopar.plan import Plan
from autopar.program.state_places import NVME, PlaceError, Places, pieces_of

SMALL: Fault = ("state_places.py", r"(?m)^CHUNK_BYTES = .*", "CHUNK_BYTES = 1000")  # of 125 elements in float64


def away(plan: Plan, states: str, folder: Path, layers: slice = slice(None)) -> Plan:
    """The plan with the optimizer states of some layers there."""
    there = {layer.name for layer in plan.layers[layers]}
    changed = (
        replace(layer, strategy=replace(layer.strategy, states=states)) if layer.name in there else layer
        for layer in plan.layers
    )
    return replace(plan, layers=tuple(changed), nvme_path=str(folder))


# -- tensors in a file -------------------------------------------------------------------------------------------------


def test_tensors_in_a_file_are_written_there_and_leave_nothing(tmp_path: Path) -> None:
    """Each begins at a page of its own, and has its values after its pages were unmapped; the file has no name."""
    places = Places(str(tmp_path))
    tensors = [places.zeros(NVME, shape, torch.float32) for shape in ((3, 5), (1,), (5_000_000,), (), (0, 4))]
    assert all(not tensor.any() and places.has(tensor) == bool(tensor.numel()) for tensor in tensors)
    for value, tensor in enumerate(tensors):
        tensor.fill_(value + 1)
    places.release(tensors)
    places.expect(tensors)
    assert [float(tensor.sum()) for tensor in tensors] == [15.0, 2.0, 15_000_000.0, 4.0, 0.0]
    assert not list(tmp_path.iterdir())
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]
    assert mapped and all("(deleted)" in line and " rw-s " in line for line in mapped)


def test_a_folder_that_cannot_have_the_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AUTOPAR_NVME", raising=False)
    with pytest.raises(PlaceError, match="no folder on it is named; name one: nvme_path"):
        Places().zeros(NVME, (3,), torch.float32)
    with pytest.raises(PlaceError, match="cannot be kept in .*missing: .*No such file"):
        Places(str(tmp_path / "missing")).zeros(NVME, (3,), torch.float32)
    limits = __import__("resource").getrlimit(__import__("resource").RLIMIT_FSIZE)
    assert limits[0] != 0
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(PlaceError, match="need 0.04 GB in .*: is full; make room"):
        Places(str(tmp_path)).zeros(NVME, (10_000_000,), torch.float32)


@pytest.mark.parametrize("elements", [0, 1, 16 * 2**20, 16 * 2**20 + 1, 50 * 2**20])
def test_large_parameters_are_updated_piece_by_piece(elements: int) -> None:
    pieces = list(pieces_of(elements, torch.float32))
    assert [low for low, _ in pieces] == [0, *(high for _, high in pieces[:-1])] if elements else not pieces
    assert sum(high - low for low, high in pieces) == elements
    assert all(0 < high - low <= 16 * 2**20 for low, high in pieces)


# -- exact ------------------------------------------------------------------------------------------------------------

CHAINS: dict[str, tuple[str, str, str, tuple[str, ...]]] = {
    "zero": ("mlp", "adamw", NVME, ("data 2, zero 1", "data 2, zero 3", "data 2", "data 2, zero 2")),
    "tied and fused": (
        "gpt2",
        "adamw",
        "host",
        ("tensor 2", "data 2, zero 3", "pipeline 2 of 2 chunks x data 2, zero 1"),
    ),
    "schedules": ("mlp", "asgd", NVME, ("pipeline 2, Chimera", "data 2, parameter server", "one device")),
    "hybrid": ("mlp", "momentum", "host", ("data 2 in 2 copies, zero 3", "data 2 x tensor 2, zero 3")),
    "padding": ("odd_gpt2", "adamw", "host", ("tensor 3", "data 3, zero 3", "one device")),
    "whole tensors": ("gpt2", "muon", NVME, ("tensor 2", "data 2, zero 3")),
    "frozen": ("adapters", "adamw", "host", ("data 2, zero 3", "tensor 2")),
}


@pytest.mark.parametrize("name", CHAINS)
def test_training_is_exact_through_checkpoints(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Under each plan two steps in small chunks, from the checkpoint of the plan before; the last plan has all states on the device, and
    of the one before it only some layers' are away."""
    model, optimizer, states, kinds = CHAINS[name]
    graph = subject(model).graph
    plans = [away(KIND[kind].plan(graph), states, tmp_path) for kind in kinds]
    plans[-1] = away(plans[-1], states, tmp_path, slice(1, None, 2))
    plans.append(KIND["data 2, zero 1"].plan(graph))
    for plan in plans:
        plan_states = {layer.strategy.states for layer in plan.layers}
        assert plan is plans[-1] or states in plan_states
    pools = lambda count: request.getfixturevalue(f"workers{count}")  # noqa: E731
    errors = chain(model, plans, optimizer, pools, tmp_path, [SMALL])
    assert max(errors.values()) <= 1e-9, errors
