"""The boundary of capture: whatever other code raises becomes an error with the user's line and a hint."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_capture_models import assert_equals_eager, pair
from torch import Tensor, nn

from autopar.capture import capture, check_capture, opaque
from autopar.errors import CaptureError
from passes.clean import noops

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class Terms(tuple[int, ...]):
    """A tuple with a length of its own making, as e3nn's irreps are."""

    __slots__ = ()

    def __len__(self) -> int:
        raise NotImplementedError

    def __iter__(self) -> Iterator[int]:
        return iter(("never", "read"))  # type: ignore[arg-type]


class Odd:
    """An attribute that cannot be compared."""

    def __eq__(self, other: object) -> bool:
        raise LookupError("there is no order of these")

    __hash__ = None  # type: ignore[assignment]


class Uncopied(dict[str, int]):
    def items(self) -> Any:
        raise LookupError("no items here")


class Model(nn.Module):
    def __init__(self, act: Callable[[Any, Tensor], Tensor], **held: Any) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(8, 8), act
        for name, value in held.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self, self.linear(x))


def table(model: Any, y: Tensor) -> Tensor:
    rows = [] if model.table is None else [model.table]
    model.table = torch.cat([*rows, torch.ones(1, 8, dtype=y.dtype)])
    return y + model.table.sum(0)


def registered(model: Any, y: Tensor) -> Tensor:
    rows = [] if model.table is None else [model.table]
    model.register_buffer("table", torch.cat([*rows, torch.ones(1, 8, dtype=y.dtype)]), persistent=False)
    return y + model.table.sum(0)


class Tabled(Model):
    def __init__(self, act: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__(act)
        self.register_buffer("table", None, persistent=False)


def missing(model: Any, y: Tensor) -> Tensor:
    return y * {"a": 1}["b"]


def numbered(model: Any, y: Tensor) -> Tensor:
    return y * torch.from_numpy(y.detach().numpy()).sum()


def listed(model: Any, y: Tensor) -> Tensor:
    return torch.bincount(y.abs().long().flatten(), minlength=4)[:4].sum() * y


REFUSED: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "a buffer that grows": (lambda: Tabled(table), "table (None, then a tensor [1, 8])", "register_buffer"),
    "a buffer registered anew": (lambda: Tabled(registered), "table (None, then a tensor [1, 8])", "register_buffer"),
    "the model's own error": (lambda: Model(missing), '`return y * {"a": 1}["b"]`: KeyError', "without autopar"),
    "an attribute's method": (
        lambda: Model(lambda m, y: y, held=Uncopied(a=1)),
        "cannot be copied (LookupError: no items",
        "locks",
    ),
    "numpy": (lambda: Model(numbered), "y.detach().numpy()", "autopar.opaque"),
    "counts": (lambda: Model(listed), "a shape depends on the data: aten.bincount", "autopar.opaque"),
    "TorchScript": (
        lambda: Model(lambda m, y: m.part(y), part=torch.jit.trace(nn.Sequential(nn.Linear(8, 8)), X)),
        "part (Sequential) is compiled by TorchScript and has 2 parameters and buffers",
        "before torch.jit.script",
    ),
    "torch.compile": (
        lambda: torch.compile(Model(lambda m, y: y.tanh())),
        "the model is compiled by torch.compile",
        "use the module itself, before torch.compile",
    ),
    "opaque and torch.compile": (
        lambda: Model(lambda m, y: m.part(y), part=opaque(torch.compile(nn.Linear(8, 8)))),
        "part.module is compiled by torch.compile",
        "use autopar.opaque(module) as part, before torch.compile",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_every_error_is_a_sentence_with_a_line(case: str) -> None:
    make, words, hint = REFUSED[case]
    with pytest.raises(CaptureError) as refused:
        capture(make(), (X, X), F.mse_loss)
    assert words in refused.value.message and hint in str(refused.value.hint)


def test_an_error_of_a_pass_names_the_line_of_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noops, "_is_identity", operator.itemgetter("no such item"))
    with pytest.raises(CaptureError, match=r"line \d+, in forward .*self\.linear\(x\).*: TypeError: ") as refused:
        capture(Model(lambda m, y: y.tanh()), (X, X), F.mse_loss)
    assert isinstance(refused.value.__cause__, TypeError)


def test_a_lack_of_memory_is_no_fault_of_the_model() -> None:
    def raises(model: Any, y: Tensor) -> Tensor:
        raise MemoryError

    with pytest.raises(MemoryError):
        capture(Model(raises), (X, X), F.mse_loss)


@torch.jit.script
def scripted(y: Tensor) -> Tensor:
    """As e3nn's spherical harmonics are."""
    return torch.sin(y) * y + 2


RIGHT: dict[str, Callable[[], nn.Module]] = {
    "a scripted function": lambda: Model(lambda m, y: scripted(y)),
    "a scripted function of weights": lambda: Model(lambda m, y: scripted(m.linear.weight @ y.t()).t()),
    "a tuple that iterates in its own way": lambda: Model(lambda m, y: y, terms=Terms((1, 2))),
    "attributes that do not compare": lambda: Model(lambda m, y: y, odd=Odd()),
    "scripted without tensors": lambda: Model(lambda m, y: m.part(y), part=torch.jit.trace(nn.Tanh(), X)),
}


@pytest.mark.parametrize("case", RIGHT)
def test_what_has_odd_attributes_is_captured(case: str) -> None:
    torch.manual_seed(0)
    assert_equals_eager(RIGHT[case](), pair(8, 8), F.mse_loss)


class Channels(nn.Module):
    """Fake quantisation by channel, whose scale can have no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("scale", torch.full((8,), 0.1))
        self.register_buffer("zero", torch.zeros(8, dtype=torch.int32))

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.fake_quantize_per_channel_affine(self.linear.weight, self.scale, self.zero, 0, -128, 127)
        return F.linear(x, weight, self.linear.bias)


def test_operands_without_a_gradient_get_none() -> None:
    torch.manual_seed(0)
    model, batch = Channels(), (X, X.roll(1, 0))
    graph = capture(model, batch, F.mse_loss)
    assert len(graph.opaque) == 1
    assert "equals the model over two steps" in check_capture(graph, model, batch, F.mse_loss).note


def test_ops_without_a_meta_kernel_run_as_opaque_ops() -> None:
    torch.manual_seed(0)

    def act(model: Any, y: Tensor) -> Tensor:
        weight = torch.fake_quantize_per_tensor_affine(model.linear.weight, 0.1, 0, -128, 127)
        window = torch.ones(4, dtype=y.dtype)
        spectrum = torch.stft(F.linear(y, weight), 4, 1, window=window, return_complex=True)
        return torch.istft(spectrum * 3, 4, 1, window=window, length=8)

    graph = assert_equals_eager(Model(act), pair(8, 8), F.mse_loss)
    assert (
        len(graph.opaque) == 2 and sum("torch has no meta kernel for it" in sentence for sentence in graph.notes) == 2
    )
