"""What runs at the same time: FSDP's gathers and reductions under computation, on a clock; and faults that would undo it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp_clock import clock
from places import file_of
from tiers import in_short
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from workers import WorkerPool

from autopar.capture import capture
from autopar.emit import emit
from autopar.errors import LaunchError
from autopar.graph import Graph
from autopar.run.folder import import_runtime, program_modules
from autopar.search.manual import manual_plan
from autopar.shard import annotate

LAYERS = 8
TIMES = {"gather": 0.5, "forward": 1.0, "backward": 2.0, "reduce": 1.0}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def rows() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(16, 16), torch.randn(16, 16)


_captured: dict[Any, Graph] = {}


def captured(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Graph:
    """The graph of the model and a mean squared error; models of one class with parameters and batches alike are captured once."""
    parameters = [(name, p.shape, p.dtype, p.requires_grad) for name, p in model.named_parameters()]
    key = type(model), *parameters, *((tensor.shape, tensor.dtype) for tensor in batch)
    if key not in _captured:
        _captured[key] = annotate(capture(model, batch, nn.functional.mse_loss))
    return _captured[key]


def program(
    folder: Path,
    *,
    faults: tuple[tuple[str, str, str], ...] = (),
    model: nn.Module | None = None,
    batch: tuple[Tensor, Tensor] | None = None,
    **options: Any,
) -> str:
    """Emit a program; ``faults`` are changes of its files: the file, a pattern, the replacement."""
    graph = captured(model or Blocks(), batch or rows())
    emit(graph, manual_plan(graph, **options), folder)
    for name, pattern, replacement in faults:
        text, count = re.subn(pattern, replacement, file_of(folder, name).read_text())
        assert count == 1, (name, pattern, count)
        file_of(folder, name).write_text(text)
    return str(folder)


def timed(folder: str, times: dict[str, float] = TIMES) -> dict[str, Any]:
    """A step on the clock: seconds, what was issued in which order, and the bytes of reductions' inputs."""
    with program_modules(folder), clock(**times) as device:
        runtime = import_runtime(folder)
        program = runtime.load(folder)
        trainer = runtime.Trainer(program, runtime.start(program, device="cpu"))
        for index, stage in trainer.stages.items():
            for name in program.layers[index]:
                if name and isinstance(stage.get_submodule(name), FSDPModule):
                    device.follow(name, stage.get_submodule(name))
        batch = dict(zip(("x", "targets"), rows(), strict=True))
        trainer.forward_backward(batch)
        start_s = device.compute.time
        device.issued.clear()
        device.waits.clear()
        trainer.forward_backward(batch)
        return {
            "seconds": device.compute.time - start_s,
            "issued": [list(each) for each in device.issued],
            "waits": device.waits,
            "live_bytes": device.inputs_bytes,
            "all_bytes": sum(size for _, size in device.inputs) // 2,
        }


def expected(passes: str, names: list[str], ahead: int = 1) -> list[list[str]]:
    """What a stage's layers issue in its forward passes (F) and backward passes (B) under ZeRO 3. The first layers stay gathered from a
    backward pass to a forward pass that follows."""
    issued: list[list[str]] = []
    for before, way in zip(" " + passes, passes, strict=False):
        layers, gathered = names if way == "F" else names[::-1], 1 + ahead if before + way == "BF" else 0
        for i, name in enumerate(layers):
            upto = min(i + 1 + ahead, len(layers))
            issued += [["gather", each] for each in layers[gathered:upto]]
            gathered = upto
            issued += [["forward", name]] if way == "F" else [["backward", name], ["reduce", name]]
    return issued


def layers_of(issued: list[list[str]]) -> list[str]:
    return list(dict.fromkeys(name for what, name in issued if what == "forward"))


ROOT = ("fsdp.py", r"(?m)^            if meshes:$", "            if not meshes:")
ORDER = ("fsdp.py", r"\[::-1\]\[: layer\.ahead\]", "[: layer.ahead]")
NO_LIST = ("fsdp.py", r"\[\*parts, \*before\] or \[first\]", "[*parts, *before]")
ALWAYS_LAST = ("fsdp.py", r"set_is_last_backward\(self\._begun == self\._microbatches", "set_is_last_backward(True")
NOT_KEPT = ("fsdp.py", r"self\._begun > self\._followed_by_forward", "True")
NO_EVENT = ("fsdp.py", r"if self\._root is not None and self\._event is not None:", "if False:")
NOT_AHEAD = ("fsdp.py", r"layers\[i \+ 1 : i \+ 1 \+ layer\.ahead\]", "layers[:0]")
FAULTS = {"root": ROOT, "order": ORDER, "no list": NO_LIST, "not ahead": NOT_AHEAD}


def test_gathers_and_reductions_run_under_the_computation(workers2: WorkerPool, tmp_path: Path) -> None:
    """Layers compute for 24 s. Only the first gather and the last reduction are waited for; without a common root it is all of them."""
    folder = program(tmp_path / "nested", data=2, zero=3)
    for found in workers2.run("test_overlap:timed", folder):
        names = layers_of(found["issued"])
        assert len(names) == LAYERS
        assert found["issued"] == expected("FB", names)
        compute_s = LAYERS * (TIMES["forward"] + TIMES["backward"])
        assert found["seconds"] == compute_s + TIMES["gather"] + TIMES["reduce"] <= 26
        assert found["live_bytes"] <= 2 * found["all_bytes"] / LAYERS * 1.1  # a reduction, and the one before it
    apart = program(tmp_path / "apart", faults=(ROOT,), data=2, zero=3)
    for found in workers2.run("test_overlap:timed", apart):
        assert found["seconds"] > 39
        assert found["live_bytes"] >= found["all_bytes"] * (LAYERS - 1) / LAYERS


def test_gathers_run_ahead_by_the_number_in_the_plan(workers2: WorkerPool, tmp_path: Path) -> None:
    found = workers2.run("test_overlap:timed", program(tmp_path, prefetch=2, data=2, zero=3))[0]
    assert found["issued"] == expected("FB", layers_of(found["issued"]), ahead=2)
    assert found["seconds"] <= 26


def test_between_microbatches_nothing_is_waited_for(workers2: WorkerPool, tmp_path: Path) -> None:
    """The last reduction of a microbatch runs under the next one's first layer, which is still gathered. Only the step's first gather and
    its last reduction are waited for; with either left out, every microbatch waits."""
    options = {"data": 2, "zero": 3, "microbatches": 4}
    compute_s, ends_s = 4 * LAYERS * 3, TIMES["gather"] + TIMES["reduce"]
    found = workers2.run("test_overlap:timed", program(tmp_path / "right", **options))[0]
    assert found["issued"] == expected("FBFBFBFB", layers_of(found["issued"]))
    assert found["seconds"] == compute_s + ends_s
    assert found["waits"] == [(1, TIMES["gather"]), (len(found["issued"]), TIMES["reduce"])]
    for name, fault in (("end", ALWAYS_LAST), ("kept", NOT_KEPT)):
        found = workers2.run("test_overlap:timed", program(tmp_path / name, faults=(fault,), **options))[0]
        assert found["seconds"] > compute_s + ends_s, name


def test_gathers_do_not_wait_for_the_microbatch_before(workers4: WorkerPool, tmp_path: Path) -> None:
    """Of forward passes in a row, the first gather of each but the first runs under the pass before."""
    options = {"pipeline": 2, "data": 2, "zero": 3, "microbatches": 4, "schedule": "gpipe"}
    for name, faults, waiting in (("right", (), 1), ("no event", (NO_EVENT,), 4)):
        found = workers4.run("test_overlap:timed", program(tmp_path / name, faults=faults, **options))[0]
        assert len([at for at, _ in found["waits"] if at <= 4 * LAYERS // 2 * 2]) == waiting


def test_layers_without_gradients_are_not_gathered_again(workers2: WorkerPool, tmp_path: Path) -> None:
    model = Blocks()
    for block in model.blocks[:2]:
        block.requires_grad_(False)
    found = workers2.run("test_overlap:timed", program(tmp_path, model=model, data=2, zero=3))[0]
    names = layers_of(found["issued"])
    assert found["issued"] == expected("F", names) + expected("B", names[2:])


def test_under_1f1b_every_pass_gathers_its_own_layers(workers4: WorkerPool, tmp_path: Path) -> None:
    folder = program(tmp_path, pipeline=2, data=2, zero=3, microbatches=4, schedule="1f1b")
    found = workers4.run("test_overlap:timed", folder)
    for rank, passes in enumerate(("FFBFBFBB", "FFBFBFBB", "FBFBFBFB", "FBFBFBFB")):
        assert found[rank]["issued"] == expected(passes, layers_of(found[rank]["issued"]))


@pytest.mark.parametrize("name", in_short(FAULTS, "root"))
def test_a_fault_shows(name: str, workers4: WorkerPool, tmp_path: Path) -> None:
    folder = program(tmp_path, faults=(FAULTS[name],), pipeline=2, data=2, zero=3, microbatches=4, schedule="1f1b")
    try:
        found = workers4.run("test_overlap:timed", folder)
    except LaunchError:
        return
    passes = ("FFBFBFBB", "FFBFBFBB", "FBFBFBFB", "FBFBFBFB")
    assert any(
        each["issued"] != expected(way, layers_of(each["issued"])) for each, way in zip(found, passes, strict=True)
    )
