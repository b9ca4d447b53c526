"""Faults put into capture on purpose, each with a small model that shows it: ``autopar.capture.check`` must find every one by itself.

A fault is a patch of this process. The check captures the model again for its own few rows, under the same fault, and holds that graph
against the model as it was given.
"""

from __future__ import annotations

import contextlib
import random
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import autopar
import passes.clean.losses
import passes.clean.regions
from autopar.capture import effects, evaluate, export, masks, pipeline, reach, repeat
from autopar.errors import CaptureError
from autopar.ops.facts import op_name
from autopar.ops.operands import args_of
from passes.clean.functional import _Functionaliser
from passes.clean.nodes import add, aten, calls, replace

ROWS, WIDTH = 6, 8

Change = Callable[[fx.Node], None]
"""Breaks one node of a graph."""


# -- models, each with a loss of its own unless a loss function is named -----------------------------------------------


class Small(nn.Module):
    """Two linear layers around ``middle``; the loss is the mean square."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x))).square().mean()

    def middle(self, x: Tensor) -> Tensor:
        return x.tanh()


class Buffers(Small):
    """Two buffers of one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.5, 2.0, WIDTH))
        self.register_buffer("shift", torch.linspace(-1.0, 1.0, WIDTH))

    def middle(self, x: Tensor) -> Tensor:
        return (x * self.scale + self.shift).tanh()


class Table(Small):
    """A product with a table whose rows differ."""

    def middle(self, x: Tensor) -> Tensor:
        return x @ (torch.arange(WIDTH)[:, None] * 3 % 7 - torch.arange(WIDTH)).to(x.dtype)


class Running(Small):
    """A number of each row of the batch: the sum of ones up to it."""

    def middle(self, x: Tensor) -> Tensor:
        return x * torch.ones(x.shape[0], 1, dtype=x.dtype).cumsum(0)


class Window(nn.Module):
    """Attention that sees the last two positions."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.last = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unsqueeze(1) for part in self.mix(x).chunk(3, -1))
        place = torch.arange(x.shape[1])
        mask = (place[None, :] <= place[:, None]) & (place[None, :] > place[:, None] - 2)
        return self.last(F.scaled_dot_product_attention(q, k, v, mask)).square().mean()


class Norm(Small):
    """A frozen batch norm: in eval mode inside a model in train mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH).eval()

    def middle(self, x: Tensor) -> Tensor:
        return self.norm(x)


class TrainedNorm(Norm):
    """A batch norm in train mode, which writes its running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm.train()


class Frozen(Small):
    """Dropout in eval mode inside a model in train mode."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5).eval()

    def middle(self, x: Tensor) -> Tensor:
        return self.drop(x)


class Block(nn.Module):
    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(WIDTH, WIDTH), scale

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.linear(x) * self.scale).tanh()


class Tied(Small):
    """Four blocks, the last two with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.blocks[3].linear.weight = self.blocks[2].linear.weight

    def middle(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Scaled(Small):
    """Four blocks, each with a number of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(1.0 + k) for k in range(4))

    def middle(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Written(Small):
    """A write through a view."""

    def middle(self, x: Tensor) -> Tensor:
        y = x * 2.0
        y[:, :3].mul_(0.1)
        return y


class Detached(Small):
    def middle(self, x: Tensor) -> Tensor:
        return x * x.detach().sigmoid()


class Region(Small):
    def middle(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            gate = x.sigmoid()
        return x * gate


class Logits(nn.Linear):
    """Scores of five classes, for a loss function."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 5)


class Counting(Small):
    """A counter in Python, which the next call reads."""

    calls = 0

    def middle(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * float(self.calls)


class Drawing(Small):
    """A number drawn by Python."""

    def middle(self, x: Tensor) -> Tensor:
        return x * random.random()


class Normed(Small):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, eps=1e-3)

    def middle(self, x: Tensor) -> Tensor:
        return self.norm(x)


class Rounded(Small):
    def middle(self, x: Tensor) -> Tensor:
        return x + (x.detach() * 3).to(torch.int32).to(x.dtype)


class Softmax(Small):
    def middle(self, x: Tensor) -> Tensor:
        return x.softmax(1)


class Joined(Small):
    def middle(self, x: Tensor) -> Tensor:
        return torch.cat((x[:, 3:], x[:, :3] * 2.0), 1)


# -- the faults -------------------------------------------------------------------------------------------------------

Patch = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass(frozen=True)
class Fault:
    """What is broken, in words; a model that shows it (with the batch's labels where there is a loss function); the patch."""

    name: str
    model: Callable[[], nn.Module]
    patch: Patch
    loss_fn: Callable[[], Any] | None = None


def _attribute(where: Any, name: str, new: Any) -> Patch:
    return lambda: mock.patch.object(where, name, new)


def _nodes(op: str, change: Change) -> Patch:
    """Every node of ``op`` is changed before the graph is cleaned."""

    def broken(gm: fx.GraphModule) -> fx.GraphModule:
        for node in calls(gm):
            if op_name(node) == op:
                change(node)
        return gm

    return _cleaning(broken)


def _cleaning(broken: Any) -> Patch:
    """A pass before the others."""
    return _attribute(pipeline, "STEPS", (("fault", broken), *pipeline.STEPS))


def _argument(position: int, new: Any) -> Change:
    def change(node: fx.Node) -> None:
        node.args = (*node.args[:position], new, *node.args[position + 1 :])

    return change


def _dropped(node: fx.Node) -> None:
    replace(node, args_of(node)[0])


def _uncast(node: fx.Node) -> None:
    if not node.meta["val"].is_floating_point():
        node.target = aten.mul.Tensor
        node.args = (node.args[0], 1.0)
        node.meta["val"] = node.args[0].meta["val"]


def _reversed(node: fx.Node) -> None:
    node.args = (node.args[0][::-1], *node.args[1:])


def _wrong_sign(gm: fx.GraphModule) -> fx.GraphModule:
    for node in calls(gm):
        if op_name(node) == "aten.linear" and len(node.args) == 3:
            x, weight, bias = node.args
            replace(node, add(node, aten.sub.Tensor, (add(node, aten.linear.default, (x, weight)), bias)))
    return gm


def _final(name: str, new: Any) -> Patch:
    return _attribute(pipeline, "FINAL_STEPS", tuple((n, new if n == name else p) for n, p in pipeline.FINAL_STEPS))


def _labelled(change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Patch:
    real = export._label
    return _attribute(export, "_label", lambda *args: change(real(*args)))


def _swapped(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return values | {"scale": values["shift"], "shift": values["scale"]}


def _twin(kind: type[nn.Module]) -> Patch:
    real = export.fake_model

    def trained(*args: Any, **kwargs: Any) -> Any:
        found = real(*args, **kwargs)
        for module in found.module.modules():
            if isinstance(module, kind):
                module.train()
        return found

    return _attribute(export, "fake_model", trained)


def _untied(gm: fx.GraphModule) -> fx.GraphModule:
    """Of a tied parameter, the last use is of another parameter with the same values, whose gradient nobody adds."""
    for node in gm.graph.nodes:
        if node.op == "placeholder" and "parameter" in node.meta and node.meta["parameter"].tied:
            last = list(node.users)[-1]
            last.replace_input_with(node, add(last, aten.detach.default, (node,)))
    return gm


def _of_the_first(_: Any, first: dict[str, fx.Node], __: str) -> dict[fx.Node, fx.Node]:
    return {node: node for node in first.values()}


def _numberless() -> Patch:
    real = repeat._MemberCall.key_of
    return _attribute(
        repeat._MemberCall, "key_of", lambda self, value: 0.0 if isinstance(value, float) else real(self, value)
    )


def _no_views() -> Patch:
    real = _Functionaliser._write

    def write(self: Any, alias: Any, new: Any, node: Any) -> None:
        if not alias.chain:
            real(self, alias, new, node)

    return _attribute(_Functionaliser, "_write", write)


def _no_updates() -> Patch:
    real = _Functionaliser._return_buffers

    def return_others(self: Any) -> None:
        self.newest = {base: value for base, value in self.newest.items() if "buffer" not in base.meta}
        real(self)

    return _attribute(_Functionaliser, "_return_buffers", return_others)


def _with_gradient() -> Patch:
    real = passes.clean.regions._copy
    return _attribute(
        passes.clean.regions,
        "_copy",
        lambda gm, body, anchor, operands, no_grad: real(gm, body, anchor, operands, no_grad=False),
    )


def _one_row() -> Patch:
    real = pipeline.build_prelude

    class First(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, *inputs: Tensor) -> Any:
            return self.inner(*(tensor[:1].expand(tensor.shape) for tensor in inputs))

    def build(*args: Any) -> Any:
        scalars, prelude = real(*args)
        return scalars, First(prelude) if prelude is not None else None

    return _attribute(pipeline, "build_prelude", build)


def _frozen() -> Patch:
    real = reach._reached

    def reached(gm: fx.GraphModule, loss: fx.Node) -> set[fx.Node]:
        return {n for n in real(gm, loss) if "parameter" not in n.meta or n.meta["parameter"].name != "first.bias"}

    return _attribute(reach, "_reached", reached)


def _whole_batch_alone(node: fx.Node) -> None:
    if node.meta["val"].shape[0] == ROWS:
        _argument(4, 0.1)(node)


FAULTS = (
    Fault("a buffer becomes zeros", Buffers, _labelled(lambda values: {n: torch.zeros_like(v) for n, v in values.items()})),
    Fault("two buffers are swapped", Buffers, _labelled(_swapped)),
    Fault("all rows of a constant are its first", Table, _attribute(evaluate, "same_bits", lambda *_: True)),
    Fault("a running sum along the batch is worked out of one row", Running, _attribute(evaluate, "by_rows", lambda _: True)),
    Fault("a mask is taken for causal", Window, _attribute(masks, "classify_mask", lambda *_: "causal")),
    Fault("eval mode is ignored: batch norm", Norm, _twin(nn.BatchNorm1d)),
    Fault("eval mode is ignored: dropout", Frozen, _twin(nn.Dropout)),
    Fault("a tie between blocks is lost", Tied, _cleaning(_untied)),
    Fault("repeated blocks read the first one's parameters", Tied, _attribute(repeat, "_own_tensors", _of_the_first)),
    Fault("blocks with other numbers are taken for equal", Scaled, _numberless()),
    Fault("a write through a view is dropped", Written, _no_views()),
    Fault("a buffer's update is dropped", TrainedNorm, _no_updates()),
    Fault("detach is dropped", Detached, _nodes("aten.detach", _dropped)),
    Fault("a region under no_grad gets a gradient", Region, _with_gradient()),
    Fault("a parameter that has a gradient is taken for one without", Small, _frozen()),
    Fault(
        "the classes' weights of a loss are ignored", Logits, _nodes("aten.cross_entropy_loss", _argument(2, None)),
        lambda: nn.CrossEntropyLoss(torch.linspace(0.5, 2.0, 5)),
    ),
    Fault("a mean is a sum", Small, _attribute(passes.clean.losses, "math", types.SimpleNamespace(prod=lambda _: 1))),
    Fault("a number of the batch is computed of its first row", Logits, _one_row(), lambda: nn.CrossEntropyLoss()),
    Fault("a Python counter is baked in", Counting, _attribute(export, "check_again", lambda *_: ([], []))),
    Fault("a number drawn by Python is baked in", Drawing, _attribute(effects, "_python_random_refused", contextlib.nullcontext)),
    Fault("a norm's epsilon is another", Normed, _nodes("aten.layer_norm", _argument(4, 1e-2))),
    Fault("a norm's epsilon is another in the graph of the whole batch alone", Normed, _nodes("aten.layer_norm", _whole_batch_alone)),
    Fault("a cast to integers is lost", Rounded, _nodes("aten.to", _uncast)),
    Fault("a softmax goes along another dim", Softmax, _nodes("aten.softmax", _argument(1, 0))),
    Fault("what is put together comes in another order", Joined, _nodes("aten.cat", _reversed)),
    Fault("a bias is split off with the wrong sign", Small, _final("biases", _wrong_sign)),
)  # fmt: skip


def batch_of(fault: Fault) -> Any:
    generator = torch.Generator().manual_seed(0)
    if fault.model is Window:
        return torch.randn(ROWS, 5, WIDTH, generator=generator)
    x = torch.randn(ROWS, WIDTH, generator=generator)
    if fault.loss_fn is None:
        return x
    labels = torch.randint(5, (ROWS,), generator=generator)
    labels[0] = -100  # not every row counts
    return x, labels


def compiled(fault: Fault) -> Any:
    """``autopar.compile`` of the fault's model, on one device."""
    torch.manual_seed(0)
    model = fault.model()
    loss_fn = fault.loss_fn() if fault.loss_fn is not None else None
    return autopar.compile(model, 1, batch_of(fault), loss_fn, type_check=False)


def found(fault: Fault) -> str:
    """What the check says of the fault; empty where it says nothing."""
    with fault.patch():
        try:
            compiled(fault)
        except CaptureError as error:
            return str(error.message) if "does not compute" in error.message or "dropout" in error.message else ""
    return ""
