"""Constants have the model's own values: whatever extents coincide, however a mask is written, wherever a buffer is kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.capture import capture, flatten_batch, reference
from autopar.capture.export import call_model
from autopar.measure import compare

ROWS = 8  # as many rows as positions, channels, heads and experts


def difference(model: nn.Module, batch: Any, loss_fn: Any = None) -> float:
    """The largest error of the captured graph's loss and gradients against the model's as it was given."""
    model = model.double()
    if isinstance(loss_fn, nn.Module):
        loss_fn = loss_fn.double()
    graph = capture(model, batch, loss_fn, precision="float64")
    tensors = flatten_batch(graph.structure, batch)
    results = []
    for run in (
        lambda: reference.run(graph, dict(model.named_parameters()), tensors),
        lambda: call_model(model, graph.structure, loss_fn, list(tensors.values())),  # type: ignore[arg-type]
    ):
        model.zero_grad()
        loss = run()
        loss.backward()
        results.append(
            (float(loss.detach()), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        )
    return compare(*results[0], *results[1]).value


class Applied(nn.Module):
    """``function`` of what a linear makes of the batch."""

    def __init__(self, function: Callable[[Tensor], Tensor], width: int = ROWS) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(width, width), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x)).square().mean()


def index(*sizes: int) -> Tensor:
    return torch.arange(ROWS).reshape(sizes)


@pytest.mark.parametrize(
    "function",
    [
        lambda y: y * (torch.arange(ROWS) >= 5),
        lambda y: y * (index(ROWS, 1, 1) >= 5),
        lambda y: y + torch.arange(ROWS) // 3,
        lambda y: y + (index(1, ROWS, 1) // 3),
        lambda y: y * index(ROWS, 1, 1).clamp(max=4),
        lambda y: y * index(1, ROWS, 1).clamp(2, 5),
        lambda y: y * torch.tensor([1.0, 1, 1, 1, 2, 3, 4, 5])[:, None, None],
        lambda y: y * torch.tensor([1.0, 1, 1, 2, 3, 4, 5, 6])[None, :, None],
        lambda y: y * (torch.arange(y.shape[0]) < y.shape[0] // 2)[:, None, None],
        lambda y: y * (torch.arange(y.shape[0]) % 4 < 3)[:, None, None],
        lambda y: y + torch.eye(ROWS),
        lambda y: y + torch.ones(ROWS, ROWS).cumsum(0)[:, None],
        lambda y: y + torch.ones(ROWS, ROWS).cumsum(1).flip(0)[:, None],
        lambda y: y * torch.linspace(0, 1, ROWS)[:, None, None],
        lambda y: 1 / (torch.tensor([0.0, -0.0] * 4)[:, None, None] * y).sign().clamp(min=0.5),
        lambda y: y + 1 / torch.copysign(torch.ones(ROWS), torch.tensor([0.0, -0.0] * 4))[:, None, None],
        lambda y: y.masked_fill(torch.ones(ROWS, ROWS).tril() == 0, 3.0),
        lambda y: y + torch.zeros(ROWS, ROWS).index_fill(0, torch.tensor([6, 7]), 1.0)[:, None],
    ],
)
def test_an_extent_that_equals_the_batch(function: Callable[[Tensor], Tensor]) -> None:
    assert difference(Applied(function), torch.randn(ROWS, ROWS, ROWS, dtype=torch.float64)) < 1e-12


LENGTH = 160


def documents(query: Tensor, key: Tensor) -> Tensor:
    ends = torch.tensor([70, 100, LENGTH])
    return (key <= query) & (torch.searchsorted(ends, query, right=True) == torch.searchsorted(ends, key, right=True))


MASKS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "causal": (lambda q, k: k <= q, "causal"),
    "causal by difference": (lambda q, k: (q - k) >= 0, "causal"),
    "causal by a larger window": (lambda q, k: (k <= q) & (q - k < 200), "causal"),
    "everything": (lambda q, k: (q - k).abs() < 200, "full"),
    "window as a difference": (lambda q, k: (k <= q) & (q - k < 70), "mask"),
    "window of the whole length but one": (lambda q, k: (k <= q) & (q - k < LENGTH - 1), "mask"),
    "window as a product": (lambda q, k: (k <= q) & ((q - k) * 10 < 700), "mask"),
    "window as a power": (lambda q, k: (k <= q) & ((q - k) ** 2 < 4900), "mask"),
    "window as a logarithm": (lambda q, k: (k <= q) & (torch.log1p((q - k).clamp(min=0).float()) < 4.25), "mask"),
    "window of scaled distances": (lambda q, k: (k <= q) & ((q - k) / 64 < 1.1), "mask"),
    "documents": (documents, "mask"),
    "one hole": (lambda q, k: (k <= q) & ~((q == 150) & (k == 3)), "mask"),
    "one more": (lambda q, k: (k <= q) | ((q == 3) & (k == 150)), "mask"),
    "all but the last key": (lambda q, k: (k < LENGTH - 1) | (q == LENGTH - 1), "mask"),
    "wrapped around": (lambda q, k: (k - q).to(torch.int8) <= 0, "mask"),
}


class Masked(nn.Module):
    def __init__(self, mask: Callable[[Tensor, Tensor], Tensor], additive: bool) -> None:
        super().__init__()
        self.linear, self.mask, self.additive = nn.Linear(8, 24), mask, additive

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.linear(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        position = torch.arange(x.shape[1])
        mask = self.mask(position[:, None], position[None, :])[None, None].expand(x.shape[0], 1, -1, -1)
        if self.additive:
            mask = torch.zeros_like(mask, dtype=x.dtype).masked_fill(~mask, torch.finfo(x.dtype).min)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).square().mean()


@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_masks_are_proved_at_their_size(name: str, additive: bool) -> None:
    function, expected = MASKS[name]
    model, x = Masked(function, additive), torch.randn(2, LENGTH, 8, dtype=torch.float64)
    graph = capture(model.double(), x)
    nodes = [n for cls in graph.classes.values() for n in cls.graph.graph.nodes if "scaled_dot" in str(n.target)]
    found = "causal" if nodes[0].kwargs.get("is_causal") else "full" if len(nodes[0].args) == 3 else "mask"
    assert found == expected
    assert difference(model, x) < 1e-12


X, W = torch.randn(8, 6, dtype=torch.float64), torch.tensor([0.2, 3.0, 1.0, 0.5], dtype=torch.float64)
LABELS, SHARES = torch.arange(8) % 4, torch.rand(8, 4, dtype=torch.float64)


@pytest.mark.parametrize(
    ("loss_fn", "targets"),
    [
        (nn.CrossEntropyLoss(weight=W), LABELS),
        (nn.CrossEntropyLoss(weight=W, label_smoothing=0.1), LABELS),
        (nn.CrossEntropyLoss(weight=W, ignore_index=1), LABELS),
        (nn.NLLLoss(weight=W), LABELS),
        (nn.BCEWithLogitsLoss(pos_weight=W), SHARES),
        (nn.BCEWithLogitsLoss(weight=W), SHARES),
        (nn.MultiLabelSoftMarginLoss(weight=W), SHARES),
        (lambda y, t: F.cross_entropy(y, t, weight=W), LABELS),
    ],
)
def test_a_loss_that_has_buffers(loss_fn: Any, targets: Tensor) -> None:
    assert difference(nn.Linear(6, 4), (X, targets), loss_fn) < 1e-12


class Table(nn.Module):
    def __init__(self, plain: bool) -> None:
        super().__init__()
        table = torch.linspace(0.5, 2, 6, dtype=torch.float64)
        if plain:
            self.table = table
        else:
            self.register_buffer("table", table, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.table


class Block(nn.Module):
    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.linear, self.table = nn.Linear(6, 6), table

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.table(x)).tanh()


class Blocks(nn.Module):
    def __init__(self, count: int, plain: bool, last_first: bool) -> None:
        super().__init__()
        table = Table(plain)
        self.blocks = nn.ModuleList(Block(table) for _ in range(count))
        self.again = table
        self.last_first = last_first

    def forward(self, x: Tensor) -> Tensor:
        for block in reversed(self.blocks) if self.last_first else self.blocks:
            x = block(x)
        return self.again(x).square().mean()


@pytest.mark.parametrize("last_first", [False, True])
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_buffer_that_several_modules_share(count: int, plain: bool, last_first: bool) -> None:
    assert difference(Blocks(count, plain, last_first), X) < 1e-12


class Modes(nn.Module):
    """Batch norm, dropout and a branch on the mode, of which some may be in eval mode."""

    def __init__(self, still: tuple[str, ...]) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(6, 6, bias=False), nn.BatchNorm1d(6), nn.Dropout(0.5)
        self.norm.running_mean.uniform_()
        for name in still:
            self.get_submodule(name).eval()

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.norm(self.linear(x)))
        return (2 * x if self.training else x).sin().square().mean()


@pytest.mark.parametrize("still", [("",), ("drop",), ("norm", "drop"), ("linear", "drop")])
def test_modules_stay_in_their_mode(still: tuple[str, ...]) -> None:
    model = Modes(still)
    assert difference(model, X) < 1e-12
    assert any("eval mode" in note for note in capture(model, X).notes)


class SignedZeros(nn.Module):
    """Two constants that are equal, and whose reciprocals are not."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        above, below = torch.full([6], 0.0), torch.full([6], -0.0)
        return (torch.where(1 / above > 0, y, 2 * y) + torch.where(1 / below > 0, y, 3 * y)).square().mean()


def test_zeros_of_either_sign_are_different_constants() -> None:
    assert difference(SignedZeros(), X) < 1e-12


class ByColumns(nn.Module):
    """A constant whose columns, not rows, are views of the same memory: 128 MiB if stored, 32 bytes in the model."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x).square().mean() + torch.arange(8.0)[:, None].expand(8, 2**22)).amax()


def test_a_constant_is_stored_only_if_all_of_it_is_small() -> None:
    graph = capture(ByColumns(), X.float())
    assert all(value.numel() < 100 for value in graph.constants.values())


class Lookup(nn.Module):
    """Reads rows of a large buffer that are chosen by the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("table", torch.randn(2**20, 6))

    def forward(self, ids: Tensor) -> Tensor:
        return self.linear(F.embedding(ids, self.table)).square().mean()


def test_a_large_buffer_is_a_constant() -> None:
    ids = torch.arange(8)
    graph = capture(model := Lookup(), ids)
    assert [value.shape for value in graph.constants.values()] == [(2**20, 6)]
    loss = reference.run(graph, dict(model.named_parameters()), flatten_batch(graph.structure, ids))
    torch.testing.assert_close(loss, model(ids))


def test_lazily_conjugated_constants_have_their_values() -> None:
    turns = torch.polar(torch.ones(3), torch.arange(3.0))

    def rotated(y: Tensor) -> Tensor:
        pairs = torch.view_as_complex(y.reshape(-1, 3, 2))
        return torch.view_as_real(pairs * turns.conj() + pairs * turns.conj().imag * turns.conj()).flatten(1)

    assert difference(Applied(rotated, 6), X) < 1e-12
