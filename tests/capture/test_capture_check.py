"""The comparison of the captured graph with the model: what passes, what is refused with its line, what is not compared and says so."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from capture_faults import FAULTS, ROWS, WIDTH, Buffers, Counting, Drawing, Normed, Small, TrainedNorm
from torch import Tensor, nn

import autopar
from autopar.capture import NOT_COMPARED, capture, check_capture
from autopar.capture import check as module
from autopar.capture.eager import copy_for_eager
from autopar.capture.structure import same_graph, same_structure
from autopar.errors import CaptureError
from autopar.graph import Graph
from autopar.torch_private import is_fake


def checked(model: nn.Module, batch: Any, loss_fn: Any = None) -> str:
    return check_capture(capture(model, batch, loss_fn), model, batch, loss_fn).note


def rows(count: int = ROWS) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(0))


EXACT = "the captured graph equals the model over two steps of 2 rows and a step of 3 rows: loss, gradients and buffers, in float64"


# -- what passes ------------------------------------------------------------------------------------------------------


def test_a_plain_model_is_equal_and_is_left_as_it_was() -> None:
    model = TrainedNorm()
    before = copy.deepcopy(model.state_dict())
    assert checked(model, rows()).startswith(EXACT)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.dtype == torch.float32 and parameter.grad is None for parameter in model.parameters())


class Infinite(Small):
    """A mask of minus infinity, and counts that are integers, held as buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.full((WIDTH, WIDTH), float("-inf")).triu(1))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("nothing", torch.zeros(0))
        self.register_buffer("met", torch.zeros(WIDTH, dtype=torch.bool))

    def middle(self, x: Tensor) -> Tensor:
        self.count += 1
        self.met |= (x > 0).any(0)
        return (x[:, None] * x[:, :, None] + self.mask).softmax(-1).sum(1)


class NoGradient(Small):
    """A gradient that is NaN on every row where the loss is a number."""

    def middle(self, x: Tensor) -> Tensor:
        return (x * 0.0).abs().sqrt() + x


class Dropped(Small):
    """Every way to ask for dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.attend = nn.Dropout(0.3), nn.MultiheadAttention(WIDTH, 2, dropout=0.2, batch_first=True)
        self.recur = nn.LSTM(WIDTH, WIDTH, 2, dropout=0.4, batch_first=True)

    def middle(self, x: Tensor) -> Tensor:
        x = F.dropout(self.drop(x), 0.1)[:, None].expand(-1, 3, -1)
        x = self.attend(x, x, x, need_weights=False)[0]
        return F.scaled_dot_product_attention(self.recur(x)[0], x, x, dropout_p=0.25).sum(1)


class Noisy(Small):
    """Numbers that torch draws."""

    def middle(self, x: Tensor) -> Tensor:
        return x + torch.rand_like(x) * torch.randn(x.shape[0], 1)


class Shared(Small):
    """Tied parameters, and one buffer by two names."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(WIDTH, WIDTH)
        self.again.weight = self.first.weight
        self.register_buffer("one", torch.linspace(0.0, 1.0, WIDTH))
        self.two = self.one

    def middle(self, x: Tensor) -> Tensor:
        return self.again(x) * self.one + self.two


@pytest.mark.parametrize("model", [Infinite, NoGradient, Dropped, Noisy, Shared])
def test_what_must_not_be_a_false_alarm(model: Callable[[], nn.Module]) -> None:
    assert checked(model(), rows()).startswith("the captured graph equals the model over two steps")


def test_a_bias_in_front_of_batch_norm_is_no_false_alarm() -> None:
    # its gradient is zero but for rounding, of which two rows make 2.6e-9 of a millionth of the largest with this seed
    torch.manual_seed(105)
    model = TrainedNorm()
    batch = torch.randn(ROWS, WIDTH)
    assert checked(model, batch).startswith(EXACT)


def test_constants_that_follow_the_precision_are_no_difference() -> None:
    class Turned(Small):
        def middle(self, x: Tensor) -> Tensor:
            angle = torch.arange(1000).float()[:, None] * torch.logspace(0, -3, WIDTH)
            hidden = torch.full((WIDTH, WIDTH), torch.finfo(x.dtype).min, dtype=x.dtype).triu(1)
            return (x[:, None] * x[:, :, None] * angle.cos()[-WIDTH:].to(x.dtype) + hidden).softmax(-1).sum(1)

    assert checked(Turned(), rows()).startswith(EXACT)


def test_a_dict_with_none_and_a_loss_function_that_is_a_module() -> None:
    class Optional(Small):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
            return super().forward(x if mask is None else x * mask)

    assert checked(Optional(), {"x": rows(), "mask": None}).startswith(EXACT)
    labels = torch.arange(ROWS) % 5
    loss = nn.CrossEntropyLoss(torch.linspace(0.5, 2.0, 5))
    assert checked(nn.Linear(WIDTH, 5), (rows(), labels), loss).startswith(EXACT)


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [Counting, Drawing])
def test_what_changes_between_calls_is_refused(model: Callable[[], nn.Module]) -> None:
    with pytest.raises(CaptureError) as raised:
        checked(model(), rows())
    assert raised.value.hint


def test_a_difference_names_the_value_its_line_and_a_way_out() -> None:
    class Rooted(Small):
        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x).square()
            y = (y + 1.0).sqrt()  # this line
            return self.last(y).mean()

    model = Rooted()
    graph = capture(model, rows())
    real = module.capture

    def other(*args: Any, **kwargs: Any) -> Graph:
        found = real(*args, **kwargs)
        for cls in found.classes.values():
            for node in cls.graph.graph.nodes:
                if "sqrt" in str(node.target):
                    node.target = torch.ops.aten.exp.default
            cls.graph.recompile()
        return found

    with pytest.MonkeyPatch.context() as patch, pytest.raises(CaptureError) as raised:
        patch.setattr(module, "capture", other)
        check_capture(graph, model, rows(), None)
    assert "the first value that the model does not compute is" in raised.value.message
    assert "# this line" in raised.value.message and __file__ in raised.value.message
    assert "--no-capture-check" in str(raised.value.hint)


# -- what is not compared, or less ------------------------------------------------------------------------------------


def test_a_forward_that_was_replaced_on_the_module_is_named() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    linear = model[0]
    linear.forward = lambda x: F.gelu(F.linear(x, linear.weight))  # the parameter of the original, not of the copy
    with pytest.raises(CaptureError, match=r"0\.forward was replaced by another function") as refused:
        checked(model, (rows(), rows()), F.mse_loss)
    assert "class of its own" in str(refused.value.hint)


def test_a_model_on_meta_is_compared_with_drawn_values_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        small, buffers = Normed(), Buffers()
    assert checked(small, torch.empty(ROWS, WIDTH, device="meta")).startswith(EXACT)
    assert checked(buffers, rows()) == f"{NOT_COMPARED}: buffers of the model are on meta"
    monkeypatch.setattr(module, "DRAWN_BYTES", 100)
    assert checked(small, rows()) == f"{NOT_COMPARED}: the model is on meta and too large to draw values for"


def test_what_takes_too_long_or_too_much_memory_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(module, "MAX_FLOPS", 100)
        # 6 times the products of 4 + 3 rows: 8 x 8 and 8 x 1 weights
        assert checked(Small(), rows()) == f"{NOT_COMPARED}: it takes {6 * 7 * 2 * (64 + 8):.0e} operations in float64"
    monkeypatch.setattr(module, "LIMIT_BYTES", 100)
    assert checked(Small(), rows()).startswith(f"{NOT_COMPARED}: it takes")


class Narrow(Small):
    """Knows no float64."""

    def middle(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float64:
            raise RuntimeError("float64 is not implemented")
        return x.tanh()


class Halves(Small):
    """Takes an even number of rows, and no fewer than six."""

    def middle(self, x: Tensor) -> Tensor:
        return x + x.view(3, -1, WIDTH).mean(0).repeat(3, 1) if x.shape[0] % 6 == 0 else x.view(6, -1)


def test_a_model_that_takes_no_float64_is_compared_in_its_own_precision() -> None:
    assert "loss, gradients and buffers, in float32 (" in checked(Narrow(), rows())


def test_a_model_that_takes_its_own_number_of_rows_alone_is_compared_whole() -> None:
    said = checked(Halves(), rows())
    assert said.startswith("the captured graph equals the model over two steps of 6 rows (not compared on 7 rows: ")


def test_a_loss_that_is_no_number_is_refused() -> None:
    class Undefined(Small):
        def middle(self, x: Tensor) -> Tensor:
            return (x - x - 1.0).log()

    with pytest.raises(
        CaptureError, match="cannot be compared with the model: on 6 rows of the batch the model's loss is nan"
    ):
        checked(Undefined(), rows())


class Fussy(Small):
    """Takes no fewer than eight rows, and runs on values alone."""

    def middle(self, x: Tensor) -> Tensor:
        if is_fake(x) or x.is_meta or x.shape[0] >= 8:
            return x.tanh()
        raise RuntimeError("too few rows")


def test_a_model_that_does_not_run_is_refused_unless_the_comparison_is_switched_off() -> None:
    with pytest.raises(CaptureError, match="on 6 rows of the batch the model raises RuntimeError: too few") as refused:
        checked(Fussy(), rows())
    assert "--no-capture-check (capture_check=False)" in str(refused.value.hint)
    notes = autopar.compile(Fussy(), 1, rows(), capture_check=False, type_check=False).plan.notes
    assert any(note.startswith(NOT_COMPARED) for note in notes)


def test_without_values_of_the_users_or_with_too_many_rows_it_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    said = checked(Fussy(), torch.empty(ROWS, WIDTH, device="meta"))
    assert said.startswith(f"{NOT_COMPARED}: on 6 rows of the batch the model raises RuntimeError: too few rows")
    assert said.endswith(", with random values")
    monkeypatch.setattr(module, "MAX_ROWS", 10)
    said = checked(Fussy(), rows(12))
    assert (
        said
        == f"{NOT_COMPARED}: on 2 rows of the batch the model raises RuntimeError: too few rows, and 12 rows take too long"
    )


def test_one_example_is_enough_for_a_model_that_takes_one() -> None:
    assert checked(Small(), rows(1)).startswith("the captured graph equals the model over two steps of 1 rows")


def test_a_model_that_cannot_be_copied_says_so() -> None:
    model = Small()
    graph = capture(model, rows())
    model.lock = threading.Lock()
    with pytest.raises(
        CaptureError, match=r"on 6 rows of the batch the model cannot be copied \(TypeError: cannot pick"
    ):
        check_capture(graph, model, rows(), None)


def test_switched_off_it_says_so_in_the_plan() -> None:
    plan = autopar.compile(Small(), 1, rows(), capture_check=False, type_check=False).plan
    assert any(note.startswith(NOT_COMPARED) and "capture_check=False" in note for note in plan.notes)
    assert any(note.startswith(EXACT) for note in autopar.compile(Small(), 1, rows(), type_check=False).plan.notes)


# -- two captures of one model ----------------------------------------------------------------------------------------


class Several(Small):
    """Numbers of several kinds, dropout, and extents of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.1)

    def middle(self, x: Tensor) -> Tensor:
        x = F.softplus(self.drop(x), 2.0).roll(1, 1) * 0.5
        return F.layer_norm(x.reshape(-1, 2, WIDTH // 2).reshape(x.shape[0], WIDTH), (WIDTH,))


def test_structures_for_other_rows_and_precisions_are_the_same() -> None:
    graph = capture(Several(), rows())
    assert same_structure(graph, capture(Several().eval(), rows(2), precision="float64")) == ""
    assert same_structure(graph, capture(Several(), rows(18))) == ""


class Chooses(nn.Module):
    """A model whose mode decides on a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.a, self.b = (nn.Parameter(torch.full((WIDTH,), value)) for value in (1.0, 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) * (self.a if self.training else self.b)).sum()


def test_a_mode_that_chooses_a_parameter_is_found() -> None:
    """Both graphs have the same calls."""
    training, evaluation = (capture(Chooses().train(mode), rows()) for mode in (True, False))
    assert same_structure(training, evaluation) == "" and "parameters" in same_graph(training, evaluation)
    assert same_graph(training, capture(Chooses(), rows())) == ""
    assert same_graph(capture(Several(), rows()), capture(Several().eval(), rows())) == ""


def test_a_mode_that_changes_a_constant_is_found() -> None:
    model = next(fault for fault in FAULTS if fault.name == "all rows of a constant are its first").model()
    graph, other = capture(model, rows()), capture(model, rows())
    assert same_graph(graph, other) == ""
    other.constants[next(iter(other.constants))][-1] += 1e-6
    assert same_structure(graph, other) == "" and "constant" in same_graph(graph, other)


CHANGES = {
    "aten.softplus": lambda node: (node.args[0], 3.0),  # a float
    "aten.roll": lambda node: (node.args[0], [2], *node.args[2:]),  # an int
    "aten.layer_norm": lambda node: (node.args[0], node.args[1], None, None, 1e-4),
}


@pytest.mark.parametrize("op", [*CHANGES, "another op"])
def test_a_planted_difference_of_structure_is_found(op: str) -> None:
    graph, other = capture(Several(), rows()), capture(Several(), rows(3))
    for cls in other.classes.values():
        for node in cls.graph.graph.nodes:
            name = str(getattr(node.target, "overloadpacket", ""))
            if name == op:
                node.args = CHANGES[op](node)
            elif op == "another op" and name == "aten.softplus":
                node.target, node.args = torch.ops.aten.relu.default, node.args[:1]
    assert same_structure(graph, other)


def test_constants_with_other_values_are_found() -> None:
    model = next(fault for fault in FAULTS if fault.name == "all rows of a constant are its first").model()
    graph, other = capture(model, rows()), capture(model, rows(3), precision="float64")
    assert same_structure(graph, other) == ""
    name = next(iter(other.constants))
    other.constants[name][-1] += 1.0
    assert "constant" in same_structure(graph, other)


def test_complex_numbers_keep_their_imaginary_part_in_float64() -> None:
    model = Small()
    model.turn = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))
    model.register_buffer("phase", torch.randn(WIDTH, dtype=torch.complex64))
    copied = copy_for_eager(model).model
    for name, value in {**dict(copied.named_parameters()), **dict(copied.named_buffers())}.items():
        original = model.get_parameter(name) if name != "phase" else model.phase
        assert torch.equal(value.detach().to(original.dtype), original.detach())
        assert value.dtype in (torch.float64, torch.complex128)
