"""What a model does besides plain ops: captured exactly, or refused by name with the line and a way out."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_capture_models import assert_equals_eager, pair
from torch import Tensor, nn
from torch.nn.utils import prune

from autopar.capture import capture, check_capture, opaque
from autopar.errors import CaptureError

HELD = nn.Parameter(torch.ones(4, dtype=torch.float64))


class Model(nn.Module):
    """``act(self, y)`` between two linear layers."""

    def __init__(self, act: Callable[[Any, Tensor], Tensor], **held: Any) -> None:
        super().__init__()
        self.a, self.b, self.act = nn.Linear(8, 8), nn.Linear(8, 4), act
        for name, value in held.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.act(self, self.a(x)))


class Reversed(torch.autograd.Function):
    """A gradient reversal: its backward is not that of its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -grad


class Rounded(torch.autograd.Function):
    """A straight-through estimator with a number among its arguments."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, steps: int) -> Tensor:
        ctx.save_for_backward(x)
        return torch.round(x * steps) / steps

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return grad * (x.abs() <= 1), None


# -- refused --------------------------------------------------------------------------------------------------------------


def backward(model: Any, y: Tensor) -> Tensor:
    y.sum().backward(retain_graph=True)
    return y


class Shaken(torch.autograd.Function):
    """Draws numbers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def data_set(model: Any, y: Tensor) -> Tensor:
    y.data = y.data * 2
    return y


def data_written(model: Any, y: Tensor) -> Tensor:
    y.tanh_().data[0].mul_(2)
    return y


def weight_set(model: Any, y: Tensor) -> Tensor:
    model.b.weight.data = model.b.weight.data.clamp(-0.1, 0.1)
    return y


def frozen_meanwhile(model: Any, y: Tensor) -> Tensor:
    model.b.requires_grad_(False)
    return y


def frozen_attribute(model: Any, y: Tensor) -> Tensor:
    model.b.weight.requires_grad = False
    return y


def saved_hooks(model: Any, y: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 0, lambda t: t):
        return y.tanh()


def counted(model: Any, y: Tensor) -> Tensor:
    model.calls += 1
    return y * model.calls


def remembered(model: Any, y: Tensor) -> Tensor:
    before, model.last = model.last, y.detach()
    return y if before is None else y + before


def listed(model: Any, y: Tensor) -> Tensor:
    model.log.append(1)
    return y * len(model.log)


def seeded(model: Any, y: Tensor) -> Tensor:
    torch.manual_seed(0)
    return y * torch.rand_like(y)


REFUSED: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "backward": (lambda: Model(backward), "y.sum().backward(retain_graph=True)", "autopar.opaque"),
    "function that draws": (lambda: Model(lambda m, y: Shaken.apply(y)), "Shaken.apply(y)", "custom_op"),
    "vmap": (lambda: Model(lambda m, y: torch.vmap(m.a)(y)), "torch.vmap(m.a)(y)", "autopar.opaque"),
    "jvp": (lambda: Model(lambda m, y: torch.func.jvp(m.a, (y,), (y,))[1]), "torch.func.jvp", "autopar.opaque"),
    "jacobian": (lambda: Model(lambda m, y: torch.func.jacrev(m.a)(y[0])[0] + y), "jacrev", "autopar.opaque"),
    "data set": (lambda: Model(data_set), "y.data = y.data * 2", "y = ..."),
    "data written": (lambda: Model(data_written), "through detach or .data", "torch.where"),
    "weight set": (lambda: Model(weight_set), "model.b.weight.data = ", "buffer"),
    "frozen meanwhile": (lambda: Model(frozen_meanwhile), "model.b.requires_grad_(False)", "torch.no_grad()"),
    "frozen attribute": (lambda: Model(frozen_attribute), "model.b.weight.requires_grad = False", "torch.no_grad()"),
    "saved tensors": (lambda: Model(saved_hooks), "saved_tensors_hooks(lambda t: t * 0", "recomputes"),
    "counter": (lambda: Model(counted, calls=0), "calls (0, then 1)", "register_buffer"),
    "list": (lambda: Model(listed, log=[]), "log ([], then [1])", "register_buffer"),
    "seed": (lambda: Model(seeded), "torch.manual_seed(0)", "seed before training"),
    "random": (lambda: Model(lambda m, y: y * random.random()), "random.random()", "draw with torch"),
    "layer drop": (lambda: Model(lambda m, y: y if random.random() < 0.5 else m.a(y)), "random.random()", "with torch"),
    "numpy's layer drop": (lambda: Model(lambda m, y: y if np.random.uniform(0, 1) < 0.1 else -y), "uniform", "torch"),
    "choice": (lambda: Model(lambda m, y: y * random.choice([1, 2])), "random.choice([1, 2])", "draw with torch"),
    "numpy array": (lambda: Model(lambda m, y: y * torch.tensor(np.random.randn(8))), "np.random.randn(8)", "torch"),
    "stray attribute": (
        lambda: Model(lambda m, y: y * m.scale, scale=torch.ones(8, requires_grad=True)),
        "scale requires a gradient and is a plain attribute",
        "torch.nn.Parameter",
    ),
    "stray in a list": (
        lambda: Model(lambda m, y: y * m.scales[0], scales=[nn.Parameter(torch.ones(8, dtype=torch.float64))]),
        "y * m.scales[0]",
        "parameter of the model",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_the_line_and_a_way_out(case: str) -> None:
    make, words, hint = REFUSED[case]
    with pytest.raises(CaptureError) as refused:
        capture(make().double(), pair(8, 4), F.mse_loss)
    assert words in refused.value.message and hint in str(refused.value.hint)


def first_call(model: Any, y: Tensor) -> Tensor:
    was_first, model.first = model.first, False
    return y * 2 if was_first else y


@pytest.mark.parametrize(("act", "held"), [(remembered, {"last": None}), (first_call, {"first": True})])
def test_state_that_the_second_call_reads_is_refused(
    act: Callable[[Any, Tensor], Tensor], held: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    model, batch = Model(act, **held).double(), pair(8, 4)
    graph = capture(model, batch, F.mse_loss)
    with pytest.raises(CaptureError, match=f"leaves state for its next call in {next(iter(held))}"):
        check_capture(graph, model, batch, F.mse_loss)


@pytest.mark.parametrize("option", [{"scale_grad_by_freq": True}, {"max_norm": 1.0}, {"sparse": True}])
def test_embeddings_with_gradients_of_their_own_are_refused(option: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Embedding(10, 8, **option), nn.Linear(8, 4))
    with pytest.raises(CaptureError, match=next(iter(option))):
        capture(model, (torch.arange(6), torch.randn(6, 4)), F.mse_loss)


def test_a_loss_that_holds_parameters_of_its_own_is_refused() -> None:
    with pytest.raises(CaptureError, match="requires a gradient and is no parameter of the model") as refused:
        capture(nn.Linear(8, 4).double(), pair(8, 4), lambda out, target: ((out - target) ** 2 * HELD).mean())
    assert "((out - target) ** 2 * HELD).mean()" in refused.value.message


def test_generators_are_as_they_were() -> None:
    before = random.getstate(), np.random.get_state()[2]
    for act in (lambda m, y: y * random.random(), lambda m, y: y):
        with contextlib.suppress(CaptureError):
            capture(Model(act).double(), pair(8, 4), F.mse_loss)
        assert before == (random.getstate(), np.random.get_state()[2])
    assert isinstance(random.random(), float) and isinstance(np.random.uniform(), float)


# -- right ----------------------------------------------------------------------------------------------------------------


def inference(model: Any, y: Tensor) -> Tensor:
    with torch.inference_mode():
        mean = y.mean()
    return y - mean


def unread(model: Any, y: Tensor) -> Tensor:
    model.calls += 1
    return y


def cached(model: Any, y: Tensor) -> Tensor:
    model.longest = max(model.longest, y.shape[0])
    return y * model.longest


def table(model: Any, y: Tensor) -> Tensor:
    """Computed in the first call, and for another size."""
    if model.table is None or model.table.shape[0] != y.shape[1]:
        model.table = torch.arange(y.shape[1], dtype=y.dtype, device=y.device).cos()
    return y + model.table


def tables(model: Any, y: Tensor) -> Tensor:
    if y.shape[1] not in model.tables:
        model.tables[y.shape[1]] = (torch.arange(y.shape[1], dtype=y.dtype), "cos")
    return y + model.tables[y.shape[1]][0]


def filled(model: Any, y: Tensor) -> Tensor:
    if not model.ready:
        model.register_buffer("late", torch.linspace(0, 1, y.shape[1], dtype=y.dtype), persistent=False)
        model.ready = True
    return y * model.late


RIGHT: dict[str, tuple[Callable[[Any, Tensor], Tensor], dict[str, Any], int]] = {
    "data read": (lambda m, y: y + (y.round() - y).data, {}, 0),
    "weight's data": (lambda m, y: y @ m.a.weight.data, {}, 0),
    "inference mode": (inference, {}, 0),
    "no draw counts": (lambda m, y: -y if random.random() < 0.0 else y, {}, 0),
    "no draw of numpy's counts": (lambda m, y: y if np.random.uniform(0, 1) >= 0.0 else -y, {}, 0),
    "unread counter": (unread, {"calls": 0}, 1),
    "cache": (cached, {"longest": 0}, 0),
    "cast without effect": (lambda m, y: m.b.to(m.a.weight.dtype).to(y.device).weight.sum() * y, {}, 0),
    "asks for a gradient": (lambda m, y: y.requires_grad_(), {}, 0),
}


@pytest.mark.parametrize("case", RIGHT)
def test_equals_eager(case: str) -> None:
    act, held, notes = RIGHT[case]
    torch.manual_seed(0)
    assert len(assert_equals_eager(Model(act, **held), pair(8, 4), F.mse_loss).notes) == notes


@pytest.mark.parametrize(
    ("act", "held"), [(table, {"table": None}), (tables, {"tables": {}}), (filled, {"ready": False})]
)
def test_a_cache_that_the_first_call_fills_is_computed_in_every_step(
    act: Callable[[Any, Tensor], Tensor], held: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    model, batch = Model(act, **held).double(), pair(8, 4)
    assert (
        "equals the model over two steps"
        in check_capture(capture(model, batch, F.mse_loss), model, batch, F.mse_loss).note
    )


def prompt(model: Any, y: Tensor) -> Tensor:
    """As a prefix adapter keeps the keys of its prompt."""
    if model.kept is None:
        model.kept = (model.a.weight.sum(0),)
    return y + model.kept[0].sum()


def test_a_cache_with_a_gradient_is_refused() -> None:
    """The second backward would run through the first one."""
    with pytest.raises(CaptureError, match="reads it in its next call: kept"):
        capture(Model(prompt, kept=None), pair(8, 4), F.mse_loss)


def weight_norm(model: nn.Module) -> None:
    nn.utils.weight_norm(model.a)  # type: ignore[arg-type]


def pruned(model: nn.Module) -> None:
    prune.random_unstructured(model.a, "weight", 0.3)


def called(model: nn.Module) -> None:
    pruned(model)
    model(pair(8, 4)[0])


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.parametrize("change", [weight_norm, pruned, called])
def test_a_weight_that_a_hook_computes_before_each_call(change: Callable[[nn.Module], None]) -> None:
    torch.manual_seed(0)
    model, batch = Model(lambda m, y: y.tanh()).double(), pair(8, 4)
    change(model)
    graph = capture(model, batch, F.mse_loss)
    assert {"a.weight_g", "a.weight_v"} <= graph.parameters.keys() or "a.weight_orig" in graph.parameters
    assert "equals the model over two steps" in check_capture(graph, model, batch, F.mse_loss).note


def test_a_weight_that_was_computed_before_is_refused() -> None:
    model = Model(lambda m, y: y @ m.twice, twice=None).double()
    model.twice = model.a.weight * 2
    with pytest.raises(CaptureError, match=r"(?s)self.act\(self.*reads a tensor \[8, 8\] that requires a gradient"):
        capture(model, pair(8, 4), F.mse_loss)


def test_a_loss_that_reads_the_model_itself_trains_it() -> None:
    torch.manual_seed(0)
    model = Model(lambda m, y: y.tanh())
    assert_equals_eager(
        model,
        pair(8, 4),
        lambda out, target: F.mse_loss(out, target) + sum(p.square().sum() for p in model.parameters()),
    )


def test_a_forward_that_was_replaced_reads_its_own_parameters() -> None:
    torch.manual_seed(0)
    model = Model(lambda m, y: y.tanh())
    forward = model.a.forward
    model.a.forward = lambda x: 2 * forward(x)
    assert_equals_eager(model, pair(8, 4), F.mse_loss)


# -- opaque ops -----------------------------------------------------------------------------------------------------------


class Chosen(nn.Module):
    """Rows chosen by their values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        rows = (x[:, 0] > 0).nonzero().squeeze(1)
        return y.index_copy(0, rows, y[rows].flip(0))


class Parted(torch.autograd.Function):
    """Has two results, which go into its backward together."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, one: Tensor, other: Tensor) -> Tensor:
        return one.sign() * other


class Parting(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        one, other = Parted.apply(x)
        return one * other


class Stack(torch.autograd.Function):
    """Runs reversible blocks without a graph; backward computes their inputs from their outputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, blocks: nn.ModuleList, sign: float) -> Tensor:
        with torch.no_grad():
            for block in blocks:
                x = block(x)
        ctx.y, ctx.blocks, ctx.sign = x.detach(), blocks, sign
        return x

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        y = ctx.y
        for block in reversed(ctx.blocks):
            y, dy = block.reverse(y, dy)
        return ctx.sign * dy, None, None


class Coupled(nn.Module):
    """An additive coupling of the halves of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        one, other = x.chunk(2, -1)
        return torch.cat([other, one + self.f(other).tanh()], -1)

    def reverse(self, y: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
        (other, last), (d_other, d_last) = y.chunk(2, -1), dy.chunk(2, -1)
        with torch.enable_grad():
            other = other.detach().requires_grad_()
            added = self.f(other).tanh()
            added.backward(d_last)
        assert other.grad is not None
        return torch.cat([last - added.detach(), other.detach()], -1), torch.cat([d_last, d_other + other.grad], -1)


class Reversible(nn.Module):
    def __init__(self, sign: float = 1.0) -> None:
        super().__init__()
        self.first, self.last, self.sign = nn.Linear(8, 8), nn.Linear(8, 4), sign
        self.blocks = nn.ModuleList(Coupled() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(Stack.apply(self.first(x), self.blocks, self.sign))


class Routed(NamedTuple):
    """What a router gives: rows, the choice of each, a loss, and the number of choices."""

    rows: Tensor
    chosen: Tensor
    losses: dict[str, Tensor]
    choices: int


class Routing(nn.Module):
    """Scales each row by its choice; a list's length depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Routed, None]:
        y = self.linear(x)
        chosen = (y[:, 0] > 0).long()
        used = chosen.unique().tolist()
        return Routed(y * (1 + chosen)[:, None], chosen, {"balance": y.square().mean() / len(used)}, 2), None


class Router(nn.Module):
    """Reads every part of what its router, wrapped as opaque by hand or not, gives."""

    def __init__(self, wrapped: bool) -> None:
        super().__init__()
        self.route: Any = opaque(Routing()) if wrapped else Routing()

    def forward(self, x: Tensor) -> Tensor:
        routed, nothing = self.route(x)
        assert nothing is None and routed.choices == 2
        return routed.rows * 2 + routed.chosen[:, None] + routed.losses["balance"]


class Turned(nn.Module):
    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.factor, self.linear = factor, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.factor if x.sum() > 0 else self.linear(x).tanh()


class Reversing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Reversed.apply(x)


class Rounding(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Rounded.apply(x, 4)


class Each(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(self.linear)(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.reverse = nn.Linear(8, 8), Reversing()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.reverse(self.linear(x))


class Mixed(nn.Module):
    """A product in bfloat16, whatever the rest is in."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = F.linear(x.float(), self.weight.float())
        return y.to(x.dtype)


class Aligned(nn.Module):
    """Connectionist temporal classification, of which torch saves as much as the longest target asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.loss = nn.Linear(8, 5), nn.CTCLoss()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        steps, lengths = torch.full((6,), 10), torch.full((6,), 3)
        scores = self.linear(x).log_softmax(-1).transpose(0, 1)
        return scores, self.loss(scores, torch.tensor([1, 2, 3] * 6), steps, lengths)


class Counting(Turned):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return super().forward(x)


class Scaled(Turned):
    def forward(self, x: Tensor, scale: Tensor | None = None, power: int = 1, name: str = "") -> Tensor:  # type: ignore[override]
        y = super().forward(x) ** power
        return y if scale is None else y * scale


class ByName(nn.Module):
    """Calls a module with arguments by name, among them defaults."""

    def __init__(self, scaled: bool, **more: Any) -> None:
        super().__init__()
        self.part, self.scaled, self.more = Scaled(), scaled, more

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x=x, scale=x.exp() if self.scaled else None, **self.more)


class Drawing(Turned):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.rand_like(x)


class Shrinking(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[x[:, 0] > 0], (0, 0, 0, 6))[:6]


class Selecting(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[x[:, 0] > 0].flip(0)


MADE_OPAQUE: dict[str, tuple[list[Callable[[], nn.Module]], str, int]] = {
    "chosen rows": ([Chosen], "1 (Chosen) runs as one opaque op", 1),
    "control flow": ([Turned, nn.Tanh, Turned], "1 (Turned) and 1 more run as opaque ops", 1),
    "control flow, other numbers": (
        [Turned, lambda: Turned(3.0), Turned],
        "1 (Turned) and 2 more run as opaque ops",
        2,
    ),
    "by name": (
        [lambda: ByName(True, power=1), lambda: ByName(False)],
        "1.part (Scaled) and 1 more run as opaque ops",
        1,
    ),
    "another number": ([lambda: ByName(True, power=2)], "1 (ByName) runs as one opaque op", 1),
    "reversal": ([Reversing], "Reversed runs as one opaque op", 1),
    "straight through": ([Rounding, Reversing], "Rounded runs as one opaque op", 2),
    "vmap": ([Each], "1 (Each) runs as one opaque op", 1),
    "in blocks": ([Block] * 5, "Reversed runs as one opaque op", 1),
    "autocast": ([Mixed], "1 (Mixed) runs as one opaque op", 1),
    "two results": ([Parting], "Parted runs as one opaque op", 1),
    "nested results": ([lambda: Router(False)], "1.route (Routing) runs as one opaque op", 1),
    "padded again": ([Shrinking], "1 (Shrinking) runs as one opaque op", 1),
}


def sequence(*parts: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), *[part() for part in parts], nn.Linear(8, 4))


@pytest.mark.parametrize("case", MADE_OPAQUE)
def test_a_module_that_cannot_be_in_a_graph_runs_as_one_opaque_op(case: str) -> None:
    parts, words, ops = MADE_OPAQUE[case]
    torch.manual_seed(0)
    graph = assert_equals_eager(sequence(*parts), pair(8, 4), F.mse_loss)
    assert any(sentence.startswith(words) for sentence in graph.notes) and len(graph.opaque) == ops
    assert all("replicated on every rank" in sentence for sentence in graph.notes)


def test_a_function_that_takes_modules_is_followed() -> None:
    torch.manual_seed(0)
    graph = assert_equals_eager(Reversible(), pair(8, 4), F.mse_loss)
    assert not graph.opaque and len(graph.assumed) == 1
    model = Reversible().double()
    assert "equals the model" in check_capture(graph, model, pair(8, 4), F.mse_loss).note


def test_a_backward_that_is_no_derivative_is_refused_by_the_comparison() -> None:
    torch.manual_seed(0)
    model = Reversible(sign=-1.0).double()
    graph = capture(model, pair(8, 4), F.mse_loss)
    with pytest.raises(
        CaptureError, match="the backward of Stack is taken to be the derivative of its forward, and"
    ) as error:
        check_capture(graph, model, pair(8, 4), F.mse_loss)
    assert "register_autograd" in str(error.value.hint)


def test_an_opaque_module_may_give_several_tensors() -> None:
    torch.manual_seed(0)
    graph = assert_equals_eager(sequence(lambda: Router(True)), pair(8, 4), F.mse_loss)
    assert len(graph.opaque) == 1


class Objecting(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return {"y": x, "mode": object()}


def test_an_opaque_module_may_not_give_other_objects() -> None:
    model = Model(lambda m, y: m.part(y)["y"], part=opaque(Objecting())).double()
    with pytest.raises(CaptureError, match="Objecting returns an object of the class object") as refused:
        capture(model, pair(8, 4), F.mse_loss)
    assert "plain values" in str(refused.value.hint)


def test_an_opaque_module_of_unknown_results_is_refused() -> None:
    part = opaque(Routing()).double()
    capture(Model(lambda m, y: m.part(y)[0].rows, part=part).double(), pair(8, 4), F.mse_loss)
    model = Model(lambda m, y: m.part(y[:, :8])[0].rows, part=part).double()
    with pytest.raises(CaptureError, match=r"Routing never ran on inputs like float64 \[3, 8\]") as refused:
        capture(model, tuple(t[:3].to("meta") for t in pair(8, 4)), F.mse_loss)
    assert "pass output" in str(refused.value.hint)


class ChosenExperts(nn.Module):
    """Tokens go to the expert that their first number chooses; an expert that none chooses is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for number in (x[:, 0] > 0).long().unique().tolist():
            rows = ((x[:, 0] > 0).long() == number).nonzero().squeeze(1)
            y = y.index_copy(0, rows, self.experts[number](x[rows]))
        return y


def test_a_module_whose_parameters_may_get_no_gradient_does_not_become_opaque() -> None:
    """Which parameters the optimizer leaves alone would depend on a rank's own rows."""
    model = nn.Sequential(nn.Linear(8, 8), ChosenExperts(), nn.Linear(8, 4)).double()
    with pytest.raises(CaptureError, match="depends on the data"):
        capture(model, pair(8, 4), F.mse_loss)


def test_a_module_of_torch_runs_as_one_opaque_op() -> None:
    torch.manual_seed(0)
    graph = assert_equals_eager(Aligned(), (torch.randn(6, 10, 8, dtype=torch.float64),))
    assert graph.notes[0].startswith("loss (CTCLoss) runs as one opaque op")


@pytest.mark.parametrize("part", [Counting, Drawing, Selecting])
def test_where_that_is_not_sound_it_stays_refused(part: Callable[[], nn.Module]) -> None:
    loss = lambda out, target: F.mse_loss(out.sum(0), target[0])  # noqa: E731
    with pytest.raises(CaptureError, match="depend"):
        capture(sequence(part).double(), pair(8, 4), loss)


def test_without_values_it_stays_refused() -> None:
    with pytest.raises(CaptureError, match="Reversed"):
        capture(sequence(Reversing).to("meta"), tuple(t.float() for t in pair(8, 4)), F.mse_loss)


class Clamping(Turned):
    """Writes to what it is given, which an op may not."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.clamp_(min=0))


def test_a_module_that_writes_to_its_arguments_does_not_become_opaque() -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.part, self.last = nn.Linear(8, 8), Clamping(), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            return self.last(self.part(y) + y)

    with pytest.raises(CaptureError, match="depend"):
        capture(Around().double(), pair(8, 4), F.mse_loss)
