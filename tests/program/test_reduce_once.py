"""ZeRO 2 and 3 with gradients reduced once a step: in the last backward pass of each stage, under every schedule."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from places import file_of
from programs import Shape, mlp_batch, mlp_model, write_mlp
from test_hybrid import MESH
from test_overlap import Blocks, program
from test_reductions import OPAQUE
from tiers import in_short
from torch import Tensor, nn
from workers import WorkerPool

from autopar.errors import LaunchError
from autopar.run.folder import import_runtime, program_modules

Batch = dict[str, Tensor]
Fault = tuple[str, str, str]
PIPELINE = {"pipeline": 2, "data": 2, "microbatches": 4}
PLANS: dict[str, dict[str, Any]] = {
    "no pipeline": {"data": 2, "zero": 3, "microbatches": 2},
    "ZeRO 2": {"data": 2, "zero": 2, "microbatches": 2},
    "one microbatch": {"data": 2, "zero": 3},
    "copies": {"mesh": MESH, "replicate": 2, "zero": 3, "microbatches": 2},
    "gpipe": PIPELINE | {"zero": 3, "schedule": "gpipe"},
    "1f1b": PIPELINE | {"zero": 2, "schedule": "1f1b"},
    "1f1b, recomputed": PIPELINE | {"zero": 3, "schedule": "1f1b", "recompute": "full"},
    "interleaved": PIPELINE | {"zero": 3, "chunks": 2, "schedule": "interleaved-1f1b"},
    "segments": {"data": 2, "zero": 3, "microbatches": 2, "segment": 3},
}


class Skipping(nn.Module):
    """Two values cross every border: the stage's result, and one that later stages read."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = Blocks().blocks

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.blocks[0](x)
        for block in self.blocks[1:]:
            x = block(x)
        return x + first.sin()


def stepped(folder: str, state: dict[str, Tensor], batches: list[Batch]) -> list[dict[str, Tensor]]:
    """The gradients of a step on each batch."""
    with program_modules(folder):
        runtime = import_runtime(folder)
        opened = runtime.load(folder)
        trainer = runtime.Trainer(opened, runtime.start(opened, device="cpu"), state=state)
        found = []
        for batch in batches:
            trainer.forward_backward(batch)
            found.append(trainer.gradients())
        return found


def is_right(pool: WorkerPool, path: str, model: nn.Module) -> bool:
    """Whether two steps have the gradients of one device; a gradient that is left over from the first would change the second."""
    torch.manual_seed(3)
    batches = [{"x": x, "targets": y} for x, y in torch.randn(2, 2, 16, 16, dtype=torch.float64)]
    found = pool.run("test_reduce_once:stepped", path, dict(model.state_dict()), batches)[0]
    for batch, gradients in zip(batches, found, strict=True):
        model.zero_grad()
        nn.functional.mse_loss(model(batch["x"]), batch["targets"]).backward()
        wanted = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        if wanted.keys() != gradients.keys():
            return False
        if any((gradients[name] - grad).abs().max() > 1e-12 for name, grad in wanted.items()):
            return False
    return True


def emitted(folder: Path, *faults: Fault, model: nn.Module | None = None, **options: Any) -> tuple[str, nn.Module]:
    torch.manual_seed(0)
    model = (model or Blocks()).double()
    x, y = torch.randn(2, 16, 16, dtype=torch.float64)
    return program(folder, faults=faults, model=model, batch=(x, y), **({"reduce": "step"} | options)), model


def workers(request: pytest.FixtureRequest, options: dict[str, Any]) -> WorkerPool:
    """The processes of a plan: two, or four where it has two axes."""
    pool: WorkerPool = request.getfixturevalue("workers4" if {"pipeline", "mesh"} & options.keys() else "workers2")
    return pool


def reduces_last(issued: list[list[str]], microbatches: int) -> bool:
    """Whether every layer's gradients are reduced once, directly after the layer's last backward pass."""
    names = {name for _, name in issued}
    for name in names:
        own = [what for what, layer in issued if layer == name and what in ("backward", "reduce")]
        if own != ["backward"] * microbatches + ["reduce"]:
            return False
    return len(names) > 0


@pytest.mark.parametrize("name", in_short(PLANS, "no pipeline", "one microbatch", "copies", "interleaved"))
def test_gradients_are_exact_and_reduced_once(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    options = PLANS[name]
    pool = workers(request, options)
    path, model = emitted(tmp_path / "exact", **options)
    assert ('"reduce": "step"' in (Path(path) / "model.py").read_text()) == (name != "one microbatch")
    assert is_right(pool, path, model)
    found = pool.run("test_overlap:timed", program(tmp_path / "timed", reduce="step", **options))
    assert all(reduces_last(rank["issued"], options.get("microbatches", 1)) for rank in found)
    each = pool.run("test_overlap:timed", program(tmp_path / "each", **options))
    assert all(reduces_last(rank["issued"], 1) == (name == "one microbatch") for rank in each)


EACH: dict[str, dict[str, Any]] = PLANS | {
    "zero bubble": PIPELINE | {"zero": 3, "chunks": 2, "schedule": "zero-bubble"},
    "selective": {"data": 2, "zero": 3, "microbatches": 4, "recompute": "selective", "prefetch": 2},
    "recomputed": {"data": 2, "zero": 3, "microbatches": 2, "recompute": "full"},
}


@pytest.mark.parametrize("name", in_short(EACH, "recomputed", "1f1b", "zero bubble"))
def test_gradients_are_exact_if_every_microbatch_reduces_them(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    assert is_right(workers(request, EACH[name]), *emitted(tmp_path, reduce="microbatch", **EACH[name]))


@pytest.mark.parametrize("name", ["no pipeline", "1f1b, recomputed"])
def test_frozen_parameters_have_no_gradients(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    model = Blocks()
    model.blocks[0].requires_grad_(False)
    for block in model.blocks:
        block.up.bias.requires_grad_(False)
    assert is_right(workers(request, PLANS[name]), *emitted(tmp_path, model=model, **PLANS[name]))


def test_layers_may_differ(workers4: WorkerPool, tmp_path: Path) -> None:
    """Some layers are reduced once a step, others in every microbatch."""
    path, model = emitted(tmp_path, **PLANS["1f1b"])
    file = Path(path) / "model.py"

    def apart(match: re.Match[str]) -> str:
        number = match["number"] or "i"
        return f"{match['made']}options={{'reduce': 'microbatch' if {number} in (1, 3, 4, 6) else 'step'}}"

    made = r'(?P<made>\[(?:str\(i\)|"(?P<number>\d)")\] = .*)options=\{"reduce": "step"\}'
    text, count = re.subn(made, apart, file.read_text())
    assert count > 0 and '{"reduce": "step"}' not in text
    file.write_text(text)
    assert is_right(workers4, path, model)


def test_stages_with_several_outputs(workers4: WorkerPool, tmp_path: Path) -> None:
    assert is_right(workers4, *emitted(tmp_path, model=Skipping(), **PLANS["1f1b"]))


RIGHT = r"self\._begun == self\._microbatches, recurse"
FAULTS: dict[str, tuple[Fault, type[nn.Module]]] = {
    "never reduced": (("fsdp.py", RIGHT, "False, recurse"), Blocks),
    "reduced in the first microbatch": (("fsdp.py", RIGHT, "self._begun == 1, recurse"), Blocks),
    "the next step goes on counting": (
        ("fsdp.py", r"(def begin_step\(self\) -> None:\n +\"\"\".*\"\"\"\n)        self\._begun = 0", r"\1        pass"), Blocks,
    ),
    "each output begins a backward pass": (("fsdp.py", r"if not begun:", "if True:"), Skipping),
    "the first output has to be reached": (("fsdp.py", r"for output in outputs if", "for output in outputs[:1] if"), Skipping),
    "other stages are not watched": (("reductions.py", r"self\._fsdp\[stage\]", "self._fsdp[max(self._fsdp)]"), Blocks),
    "added up and reduced": (("fsdp.py", r"self\._begun in \(1, self\._microbatches\)", "self._begun == 1"), Blocks),
}  # fmt: skip


@pytest.mark.parametrize("name", in_short(FAULTS, "reduced in the first microbatch"))
def test_a_fault_is_caught(name: str, workers4: WorkerPool, tmp_path: Path) -> None:
    fault, kind = FAULTS[name]
    path, model = emitted(tmp_path, fault, model=kind(), **PLANS["1f1b" if kind is Skipping else "interleaved"])
    try:
        assert not is_right(workers4, path, model)
    except LaunchError as error:
        assert "its gradients are not reduced" in error.message + (error.hint or "")  # noqa: PT017


# -- gradients that some microbatches lack ----------------------------------------------------------------------------

LAST_OF_RANK_0 = (
    r"(?m)^        return hidden \+ self\.scale \* \(x \+ self\.down\.bias\)",
    "        self.calls = getattr(self, 'calls', 0) + 1\n"
    "        used = self.replicated_norm or (self.calls % 2 == 0 and torch.distributed.get_rank() == 0)\n"
    "        return hidden + self.scale * (x + self.down.bias if used else x)",
)
ONCE = (r"(    SPEC = LayerSpec\()", r"\1options={'reduce': 'step'}, ")
NOT_STARTED = (r"module\.register_forward_pre_hook\(", "(lambda _: None)(")


def opaque(folder: Path, precision: str, *changes: tuple[str, str], fault: bool = False) -> str:
    """A program in which layer_0's bias gets a gradient in the second of two microbatches, on rank 0 alone."""
    write_mlp(folder, Shape(data=2, zero=(3, 3), microbatches=2, precision=precision))
    files = [("model.py", change) for change in (LAST_OF_RANK_0, OPAQUE, *changes)]
    for name, (pattern, replacement) in files + ([("fsdp.py", NOT_STARTED)] if fault else []):
        text, count = re.subn(pattern, replacement, file_of(folder, name).read_text())
        assert count, pattern
        file_of(folder, name).write_text(text)
    file = folder / "layouts.json"
    file.write_text(file.read_text().replace('"float32"', '"bfloat16"'))  # parameters, with masters in float32
    return str(folder)


@pytest.mark.parametrize("precision", ["float64", "bfloat16"])
def test_a_gradient_that_only_the_last_microbatch_of_one_rank_has(
    precision: str, workers2: WorkerPool, tmp_path: Path
) -> None:
    state = {name: value.detach() for name, value in mlp_model().state_dict().items()}
    tolerance = 1e-14 if precision == "float64" else 1e-6  # sums are in float32 beside arithmetic in bfloat16

    def gradients(folder: str) -> list[dict[str, Tensor]]:
        found = workers2.run("test_run_runtime:gradients", folder, state, mlp_batch())[0]
        return [step["gradients"] for step in found["steps"]]

    wanted = gradients(opaque(tmp_path / "each", precision))
    found = gradients(opaque(tmp_path / "once", precision, ONCE))
    for one, other in zip(found, wanted, strict=True):
        assert float(other["layers.0.down.bias"].abs().max()) > 0
        for name, gradient in other.items():
            assert (one[name] - gradient).abs().max() <= tolerance, name
    if precision == "bfloat16":
        with pytest.raises(LaunchError):
            gradients(opaque(tmp_path / "fault", precision, ONCE, fault=True))
