"""Blocks that a model repeats are traced once: the graph is the one that tracing every block gives, and what differs is traced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from exactness import MODELS
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture import capture, repeat
from autopar.capture import export as exporting
from autopar.capture.batch import describe_batch
from autopar.graph import Graph


def canonical(graph: Graph) -> list[Any]:
    """Every layer with all that it is bound to, and its class's code; names of values count in the order in which they appear."""
    number: dict[str, int] = {}
    lines: list[Any] = []
    for layer in graph.layers:
        cls = graph.classes[layer.cls]
        values = [number.setdefault(name, len(number)) for name in (*layer.activations, *layer.outputs)]
        bound = (layer.name, layer.inputs, layer.scalars, layer.parameters, layer.buffers, values)
        types = [(n.op, str(n.target), n.meta["val"].dtype, n.meta["val"].shape) for n in _tensors(cls.graph)]
        lines.append((bound, next(o.name for o in graph.layers if o.cls == layer.cls), types, len(layer.constants)))
    return lines


def _tensors(gm: Any) -> list[Any]:
    return [node for node in gm.graph.nodes if isinstance(node.meta.get("val"), Tensor)]


def found(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Filled with the repeats of every capture."""
    seen: list[Any] = []
    record = exporting.record
    monkeypatch.setattr(exporting, "record", lambda *args: seen.append(record(*args)) or seen[-1])
    return seen


@pytest.mark.parametrize("name", ["gpt2", "t5", "dit", "mixtral_balanced"])
def test_the_graph_is_that_of_tracing_every_block(name, monkeypatch):
    torch.manual_seed(0)
    model, batch, loss_fn = MODELS[name]()
    monkeypatch.setattr(repeat, "FEWEST", 2)
    if not exporting.members(model):
        pytest.skip("repeats nothing")
    once = capture(model, batch, loss_fn, precision="float64")
    monkeypatch.setattr(exporting, "members", lambda module: {})
    assert canonical(once) == canonical(capture(model, batch, loss_fn, precision="float64"))


class Block(nn.Module):
    def __init__(self, index: int, kind: str) -> None:
        super().__init__()
        self.index, self.kind = index, kind
        self.linear = nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(()))
        self.left: Tensor | None = None

    def forward(self, x: Tensor, skip: Tensor, factors: dict[str, float]) -> tuple[Tensor, Tensor]:
        y = F.gelu(self.linear(x))
        if self.kind == "index":
            y = y * self.index
        if self.kind == "buffer":
            y = y + self.count
        if self.kind == "inside":
            y.mul_(2)
            y[..., 0].add_(1)
        if self.kind == "leak":
            self.left = y
        if self.kind == "write":
            skip.add_(1)
        return x + factors["residual"] * y, skip + y


class Stack(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList(Block(index // 2, kind) for index in range(6))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        skip = torch.zeros_like(x)
        for block in [*self.blocks, *(self.blocks[4:] if self.kind == "twice" else [])]:
            x, skip = block(x, skip, {"residual": 0.5})
            if self.kind == "after":
                x.mul_(2)
        if self.kind == "penalty":
            x = x + 1e-3 * self.blocks[3].linear.weight.norm() + 1e-3 * self.blocks[4].linear.bias.sum()
        for block in self.blocks if self.kind == "leak" else []:
            x = x + block.left
        return self.head(x + skip)


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        ("equal", 4),
        ("index", 2),
        ("buffer", 4),
        ("leak", 0),
        ("twice", 2),
        ("write", 4),
        ("inside", 4),
        ("after", 4),
        ("penalty", 4),
    ],
)
def test_what_differs_is_traced(kind, count, monkeypatch):
    seen = found(monkeypatch)
    batch = torch.randn(4, 8), torch.randn(4, 4)
    once = capture(Stack(kind), batch, F.mse_loss)
    # The first block differs: no gradient reaches what it is given. "write" is seen in the traced block, and all is traced again.
    assert len(seen[-1].first) == count
    monkeypatch.setattr(exporting, "members", lambda module: {})
    assert canonical(once) == canonical(capture(Stack(kind), batch, F.mse_loss))


def test_of_repeated_blocks_parameters_are_exported_where_something_else_reads_them():
    model = Stack("penalty")
    batch = torch.randn(4, 8), torch.randn(4, 4)
    structure = describe_batch(model, batch, F.mse_loss, None)
    repeats = exporting._repeats(model, None, F.mse_loss, structure)
    assert repeats is not None and repeats.read == {"blocks.3", "blocks.4"}
    assert set(repeats.unread(model)) == {
        f"blocks.{i}.linear.{name}"
        for i in repeats.first
        for i in [int(i[7:])]
        if i not in (3, 4)
        for name in ("weight", "bias")
    }


def test_a_hook_that_collects_what_blocks_compute_is_obeyed(monkeypatch):
    """As transformers collects the router's logits for its auxiliary loss."""
    model, kept = Stack("equal"), []
    for block in model.blocks:
        block.linear.register_forward_hook(lambda module, given, result: kept.append(result))

    def loss(output: Tensor, target: Tensor) -> Tensor:
        collected = [kept.pop() for _ in range(6)]
        return F.mse_loss(output, target) + torch.stack([t.square().mean() for t in collected]).sum()

    batch = torch.randn(4, 8), torch.randn(4, 4)
    once = capture(model, batch, loss)
    monkeypatch.setattr(exporting, "members", lambda module: {})
    assert canonical(once) == canonical(capture(model, batch, loss))
