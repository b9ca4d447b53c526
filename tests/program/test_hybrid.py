"""Hybrid sharding: ZeRO inside of each copy, the shards' gradients summed over the copies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_overlap import LAYERS, Blocks, program
from tiers import in_short
from torch import Tensor, nn
from workers import WorkerPool

from autopar.capture import capture
from autopar.errors import UsageError
from autopar.run.folder import import_runtime, program_modules
from autopar.search.manual import make_mesh, manual_plan
from autopar.shard import annotate

MESH = make_mesh(("replicas", 2), ("data", 2))
Fault = tuple[str, str, str]


def stepped(folder: str, state: dict[str, Tensor], batch: dict[str, Tensor]) -> dict[str, Any]:
    """Two steps: the second one's gradients, their norm, the elements of this rank's masters, and the process groups' sizes."""
    with program_modules(folder):
        runtime = import_runtime(folder)
        opened = runtime.load(folder)
        trainer = runtime.Trainer(opened, runtime.start(opened, device="cpu"), state=state)
        trainer.forward_backward(batch)
        loss = trainer.forward_backward(batch)
        groups = [group for own in trainer._by_stage.values() for group in own]
        return {
            "loss": loss,
            "gradients": trainer.gradients(),
            "norm": trainer.clip_(1e9),
            "masters": sum(master.tensor.numel() for group in groups for master in group.masters),
            "sharded": [type(group).__name__ == "ShardedGroup" for group in groups],
        }


def emitted(folder: Path, zero: int, replicate: int, *faults: Fault) -> tuple[str, nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Blocks().double()
    x, y = torch.randn(2, 16, 16, dtype=torch.float64)
    nn.functional.mse_loss(model(x), y).backward()
    options = {"mesh": MESH, "zero": zero, "replicate": replicate, "microbatches": 2}
    return program(folder, faults=faults, model=model, batch=(x, y), **options), model, {"x": x, "targets": y}


def is_right(found: list[dict[str, Any]], model: nn.Module) -> bool:
    wanted = {name: p.grad for name, p in model.named_parameters()}
    norm = float(torch.cat([grad.flatten() for grad in wanted.values()]).norm())
    same = all((found[0]["gradients"][name] - grad).abs().max() < 1e-12 for name, grad in wanted.items())
    return same and all(abs(rank["norm"] / norm - 1) < 1e-12 for rank in found)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_each_copy_is_sharded_in_itself(zero: int, workers4: WorkerPool, tmp_path: Path) -> None:
    for replicate, share in ((1, 4), (2, 2)):
        path, model, batch = emitted(tmp_path / str(replicate), zero, replicate)
        found = workers4.run("test_hybrid:stepped", path, dict(model.state_dict()), batch)
        assert is_right(found, model)
        whole = sum(p.numel() for p in model.parameters())
        if zero == 1:  # equal pieces of each block, which begin at multiples of 128 bytes; the last ends with the block
            each = whole // LAYERS
            piece = -(-each // share // 16) * 16
            pieces = sorted(LAYERS * min(piece, each - i * piece) for i in range(share)) * replicate
            assert sorted(rank["masters"] for rank in found) == sorted(pieces)
        else:
            assert all(rank["masters"] == pytest.approx(whole / share, rel=0.05) for rank in found)
        assert all(sharded == (zero > 1) for sharded in found[0]["sharded"])


FAULTS: dict[str, tuple[int, Fault]] = {
    "no sum over the copies": (1, ("parameters.py", r"if self\._copies is not None and", "if False and")),
    "two sums over the copies": (1, ("parameters.py", r" and not self\._over_copies:", ":")),
    "copies that do not count as alike": (
        1, (
            "parameters.py", r" replicated_axes\(slot\.layout, \(\*self\._shards, \*self\._local_sgd_axes\),",
            " replicated_axes(slot.layout, slot.layout.replicated,",
        ),
    ),
    "FSDP without copies": (3, ("world.py", r"if not copies:", "if True:")),
}  # fmt: skip


@pytest.mark.parametrize("name", in_short(FAULTS, "no sum over the copies"))
def test_a_fault_is_caught(name: str, workers4: WorkerPool, tmp_path: Path) -> None:
    zero, fault = FAULTS[name]
    path, model, batch = emitted(tmp_path, zero, 2, fault)
    assert not is_right(workers4.run("test_hybrid:stepped", path, dict(model.state_dict()), batch), model)


def test_a_number_of_copies_that_the_axes_do_not_have_is_refused() -> None:
    x, y = torch.randn(2, 16, 16)
    graph = annotate(capture(Blocks(), (x, y), nn.functional.mse_loss))
    for copies in (3, 4):
        with pytest.raises(
            UsageError, match=f"replicate is {copies}, and the sizes of the outermost data axes multiply to 1, 2"
        ):
            manual_plan(graph, mesh=MESH, zero=3, replicate=copies)
