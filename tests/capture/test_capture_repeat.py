"""Blocks that a model repeats are traced once: the graph is the one that tracing every block gives, and what differs is traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from exactness import MODELS
from test_capture_models import assert_equals_eager, pair
from tiers import slow
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture import capture, repeat
from autopar.capture import export as exporting
from autopar.capture.batch import describe_batch
from autopar.capture.clone import fake_model
from autopar.capture.external_state import ExternalState
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


@pytest.mark.parametrize("name", ["gpt2", "t5", slow("dit"), slow("mixtral_balanced")])
def test_the_graph_is_that_of_tracing_every_block(name, monkeypatch):
    torch.manual_seed(0)
    model, batch, loss_fn = MODELS[name]()
    monkeypatch.setattr(repeat, "MIN_MEMBERS", 2)
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
    external_state = ExternalState(model, F.mse_loss)
    repeats = exporting._find_repeats(
        model, structure, lambda **how: fake_model(model, None, F.mse_loss, external_state, **how)
    )
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


class Residual(nn.Module):
    """A block with all kinds of tensors, and a factor of its own that may be anything."""

    def __init__(self, factor: Any = 1) -> None:
        super().__init__()
        self.factor = factor
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("shift", torch.randn(8))

    def forward(self, x: Tensor, times: int = 1, mask: Tensor | None = None) -> Tensor:
        y = self.down(F.gelu(self.up(self.norm(x)))) * self.shift * times
        for factor in self.factor if isinstance(self.factor, list) else [self.factor]:
            y = -y if factor is True else y * factor
        return x + (y if mask is None else y * mask)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.ModuleList(Residual() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.inside:
            x = block(x)
        return x


class Chain(nn.Module):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Masked(Chain):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for index, block in enumerate(self.blocks):
            x = block(x, index % 2 + 1, mask=None if index < 2 else x > 0)
        return self.last(x)


def tied(name: str, *pairs: tuple[int, int], count: int = 4) -> Callable[[], nn.Module]:
    """A chain in which of each pair the second block's tensor of that name is the first's; -1 is the layer before all blocks."""

    def make() -> nn.Module:
        model = Chain([Residual() for _ in range(count)])
        owner, _, leaf = name.rpartition(".")
        for source, target in pairs:
            given = model.first if source < 0 else model.blocks[source].get_submodule(owner)
            setattr(model.blocks[target].get_submodule(owner), leaf, getattr(given, leaf))
        return model

    return make


def shared(change: Callable[[Chain], object], make: Callable[[], nn.Module] = Residual) -> Callable[[], nn.Module]:
    """A chain of five blocks after ``change``."""

    def changed() -> nn.Module:
        model = Chain([make() for _ in range(5)])
        change(model)
        return model

    return changed


def of_one(model: Chain) -> None:
    model.blocks = nn.ModuleList([model.blocks[0]] * 4)


def of_two(model: Chain) -> None:
    model.blocks = nn.ModuleList([model.blocks[k] for k in (0, 1, 0, 1, 1)])


def in_two_lists(model: Chain) -> None:
    model.part = model.blocks[1:4]


def one_projection(model: Chain) -> None:
    for block in model.blocks:
        block.up = model.blocks[0].up


def crosswise(model: Chain) -> None:
    for block, following in zip(model.blocks[:-1], model.blocks[1:], strict=True):
        block.up.weight, block.up.bias = following.down.weight, following.norm.bias


def within_some(model: Chain) -> None:
    for index in (2, 4):
        model.blocks[index].up.weight = model.blocks[index].down.weight


def within_all(model: Chain) -> None:
    for block in model.blocks:
        block.up.weight = block.down.weight


def one_inner_block(model: Chain) -> None:
    for block in model.blocks[2:]:
        block.inside[1] = model.blocks[1].inside[1]


def one_inner_weight(model: Chain) -> None:
    model.blocks[3].inside[0].up.weight = model.blocks[1].inside[2].up.weight


def hooked(model: Chain) -> None:
    model.blocks[1].register_forward_hook(lambda module, given, result: result * 2)
    model.blocks[2].register_forward_pre_hook(lambda module, given: (given[0] * 3,))
    model.blocks[3].up.register_forward_hook(lambda module, given, result: result + given[0])


def frozen(model: Chain) -> None:
    model.blocks[2].up.bias.requires_grad_(False)
    model.blocks[4].requires_grad_(False)


def of_factors(*factors: Any) -> Callable[[], nn.Module]:
    return lambda: Chain([Residual(factor) for factor in factors])


ONE = torch.linspace(0, 1, 8)

PATTERNS: dict[str, Callable[[], nn.Module]] = {
    "a projection, first two": tied("up.weight", (0, 1)),
    "a projection, second and third": tied("up.weight", (1, 2)),
    "a projection, first and last of six": tied("up.weight", (0, 5), count=6),
    "a projection, two pairs": tied("up.weight", (0, 2), (1, 3), count=5),
    "a bias of three": tied("down.bias", (0, 1), (0, 2)),
    "a norm of two": tied("norm.weight", (0, 3)),
    "a norm of all": tied("norm.weight", (0, 1), (0, 2), (0, 3)),
    "to something outside, first": tied("up.weight", (-1, 0)),
    "to something outside, third": tied("up.weight", (-1, 2)),
    "a buffer": tied("shift", (0, 2)),
    "one block": shared(of_one),
    "two blocks in turn": shared(of_two),
    "blocks in two lists": shared(in_two_lists),
    "one projection in all": shared(one_projection),
    "with the following block": shared(crosswise),
    "within some blocks": shared(within_some),
    "within all blocks": shared(within_all),
    "blocks of blocks": shared(lambda model: None, Inner),
    "one inner block": shared(one_inner_block, Inner),
    "one inner weight": shared(one_inner_weight, Inner),
    "hooks": shared(hooked),
    "frozen": shared(frozen),
    "factors": of_factors(1.0, 2.0, 2.0, 0.5, 2.0),
    "factors of several types": of_factors(1, True, 1.0, False, True),
    "lists": of_factors([1], [1, 2], [1, 2], [2, 1], [1]),
    "tensors": of_factors(ONE, ONE, 2 * ONE, ONE, ONE),
    "different arguments": lambda: Masked([Residual() for _ in range(6)]),
}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_blocks_are_equal_only_if_all_that_they_share_is(pattern: str) -> None:
    torch.manual_seed(0)
    assert_equals_eager(PATTERNS[pattern](), pair(8, 4), F.mse_loss)


class Teacher(nn.Module):
    """Equal blocks that run without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.head = nn.ModuleList(Block(0, "equal") for _ in range(4)), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            t, skip = x, torch.zeros_like(x)
            for block in self.teacher:
                t, skip = block(t, skip, {"residual": 0.5})
        return self.head(x + t + skip)


def test_equal_blocks_in_a_region_without_gradients_are_captured() -> None:
    torch.manual_seed(0)
    assert_equals_eager(Teacher(), pair(8, 4), F.mse_loss)
