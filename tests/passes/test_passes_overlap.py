"""``passes.overlap``: which products are joined with the conversion of their input, where they stand then, and that values stay."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from sketch import Sketch
from torch import Tensor, fx
from torch.nn import functional

from autopar.graph import LayerClass
from autopar.ops.operands import operands
from autopar.plan import Axis, Role, Strategy
from autopar.schedules import Schedule
from autopar.sharding import AxisTypes, Sharding
from autopar.types import I, P, R, S, SpmdType
from passes.collectives import MICROBATCH, convert
from passes.joined import is_joined, results_of, weights_of
from passes.layer import local_layer
from passes.overlap import _JOINED, rewrite_local

aten = torch.ops.aten
LINEAR, LINEARS = _JOINED
TIME, TENSOR = Axis(MICROBATCH, 1, 0), Axis("tensor", 1, 1)  # of one device, so that values can be compared


def types_of(
    cls: LayerClass,
    produced: Mapping[str, SpmdType],
    needed: Mapping[str, tuple[SpmdType, ...]],
    default: SpmdType = I,
) -> AxisTypes:
    """One axis: what is not given has type ``default`` and is needed as it was produced."""
    nodes = [node for node in cls.graph.graph.nodes if node.op != "output"]
    made = {node.name: produced.get(node.name, default) for node in nodes}
    reads = {node.name: tuple(made[o.name] for o in operands(node)) for node in nodes if node.op != "placeholder"}
    returned = tuple(made[node.name] for node in cls.graph.graph.output_node().args[0])  # type: ignore[union-attr]
    return AxisTypes(Role.TENSOR, made, reads | dict(needed), returned, {}, {}, 0.0)


def local(cls: LayerClass, types: AxisTypes, overlap: str = "tensor") -> fx.GraphModule:
    time = types_of(cls, {}, {}, R)
    return local_layer(cls, Sharding((TIME, TENSOR), (time, types)), Strategy((Role.TENSOR,), overlap=overlap)).graph


def column(cls: LayerClass, *products: str, source: SpmdType = I, more: Mapping[str, Any] | None = None) -> AxisTypes:
    """Types in which ``x`` of type ``source`` is read as R by ``products``, whose weights are sharded by rows; all else is sharded by
    columns."""
    produced = {"x": source} | {o.name: S(0) for o in cls_parameters(cls)}
    wanted = {name: (R, S(0)) for name in products}
    return types_of(
        cls, produced | dict((more or {}).get("produced", {})), wanted | dict((more or {}).get("needed", {})), S(2)
    )


def cls_parameters(cls: LayerClass) -> list[fx.Node]:
    nodes = [node for node in cls.graph.graph.nodes if node.op == "placeholder"]
    return nodes[len(nodes) - len(cls.parameters) :]


def calls(gm: fx.GraphModule) -> list[Any]:
    return [node.target for node in gm.graph.nodes if node.op == "call_function"]


def joined(gm: fx.GraphModule) -> list[list[str | None]]:
    """The products of every joined call; ``None`` stands for the converted input."""
    return [[one.product for one in results_of(node)] for node in gm.graph.nodes if is_joined(node)]


class Values(fx.Interpreter):
    """The values of a local graph on one device."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is LINEAR:
            return functional.linear(*args)
        if target is LINEARS:
            x, weights, *rest = args
            biases = rest[0] if rest else [None] * len(weights)
            products = [functional.linear(x, w, b) for w, b in zip(weights, biases, strict=True)]
            return (*products, x) if kwargs.get("return_input") else tuple(products)
        return super().call_function(target, args, kwargs)


def same_values(cls: LayerClass, types: AxisTypes) -> None:
    """Joined or not, the layer has the same results and the same gradients, to the last bit."""
    torch.manual_seed(0)
    given = [
        torch.randn(n.meta["val"].shape, dtype=torch.float64) for n in cls.graph.graph.nodes if n.op == "placeholder"
    ]
    found: list[list[Tensor]] = []
    for overlap in ("tensor", "none"):
        inputs = [tensor.clone().requires_grad_() for tensor in given]
        results = Values(local(cls, types, overlap)).run(*inputs)
        sum(result.square().sum() for result in results).backward()
        found.append([*results, *(tensor.grad for tensor in inputs)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def projections(count: int) -> LayerClass:
    draw = Sketch()
    x = draw.activation("x", 2, 3, 4)
    weights = [draw.parameter(f"w{i}", 6, 4) for i in range(count)]
    return draw.layer(*(draw.call(aten.linear.default, x, weight) for weight in weights))


@pytest.mark.parametrize("source", [I, S(1)], ids=str)
def test_products_of_one_input_are_joined(source: SpmdType) -> None:
    cls = projections(3)
    types = column(cls, "linear_default", "linear_default_1", "linear_default_2", source=source)
    gm = local(cls, types)
    (call,) = [node for node in gm.graph.nodes if is_joined(node)]
    assert call.target is LINEARS and call.kwargs == {"axis": "tensor", "src": str(source)}
    assert [weight.name for weight in weights_of(call)] == ["w0", "w1", "w2"]
    assert joined(gm) == [["linear_default", "linear_default_1", "linear_default_2"]]
    assert convert not in calls(gm) and aten.linear.default not in calls(gm)
    same_values(cls, types)


def test_one_product_is_one_call() -> None:
    cls = projections(1)
    gm = local(cls, column(cls, "linear_default"))
    assert calls(gm) == [LINEAR]
    same_values(cls, column(cls, "linear_default"))


def test_without_overlap_the_conversion_stays() -> None:
    cls = projections(2)
    types = column(cls, "linear_default", "linear_default_1")
    assert calls(local(cls, types, "none")) == [convert, aten.linear.default, aten.linear.default]


def test_biases_and_transposed_weights_come_along() -> None:
    """GPT-2's convolutions: the weight is stored transposed, and the bias is added to the product."""
    draw = Sketch()
    x = draw.activation("x", 2, 3, 4)
    weights, bias = [draw.parameter(f"w{i}", 4, 6) for i in range(2)], draw.parameter("b", 6)
    first = draw.call(aten.linear.default, x, draw.call(aten.t.default, weights[0]))
    second = draw.call(aten.linear.default, x, draw.call(aten.t.default, weights[1]))
    cls = draw.layer(first, draw.call(aten.add.Tensor, second, bias))
    more = {"produced": {"w0": S(1), "w1": S(1), "t_default": S(0), "t_default_1": S(0)}}
    types = column(cls, "linear_default", "linear_default_1", more=more)
    gm = local(cls, types)
    (call,) = [node for node in gm.graph.nodes if is_joined(node)]
    one, other = results_of(call)
    assert (one.bias, other.bias.name) == (None, "b") and other.product == "linear_default_1"
    order = [node.name for node in gm.graph.nodes]
    assert order.index("t_default_1") < order.index(call.name)
    same_values(cls, types)


def test_other_readers_get_the_converted_value_from_the_call() -> None:
    draw = Sketch()
    x, weight = draw.activation("x", 2, 3, 4), draw.parameter("w", 6, 4)
    gate = draw.call(aten.sigmoid.default, x)
    cls = draw.layer(gate, draw.call(aten.linear.default, x, weight))
    types = column(
        cls, "linear_default", more={"needed": {"sigmoid_default": (R,)}, "produced": {"sigmoid_default": R}}
    )
    gm = local(cls, types)
    assert joined(gm) == [["linear_default", None]] and convert not in calls(gm)
    same_values(cls, types)


def test_a_product_behind_an_expensive_op_stays_alone() -> None:
    """A parallel block: the second projection reads the same input, but stands behind a product of the first one's result."""
    draw = Sketch()
    x = draw.activation("x", 2, 4, 4)
    weights = [draw.parameter(f"w{i}", 6, 4) for i in range(2)]
    first = draw.call(aten.linear.default, x, weights[0])
    scores = draw.call(aten.matmul.default, first, draw.call(aten.transpose.int, first, 1, 2))
    cls = draw.layer(scores, draw.call(aten.linear.default, x, weights[1]))
    types = column(
        cls, "linear_default", "linear_default_1", more={"produced": {"transpose_int": S(1), "matmul_default": P}}
    )
    gm = local(cls, types)
    assert joined(gm) == [["linear_default", None]] and calls(gm).count(aten.linear.default) == 1
    same_values(cls, types)


def test_what_has_no_weight_gradient_to_run_under_is_not_joined() -> None:
    draw = Sketch()
    x = draw.activation("x", 2, 3, 4)
    frozen, row = draw.parameter("w0", 6, 4, trainable=False), draw.parameter("w1", 6, 4)
    cls = draw.layer(*(draw.call(aten.linear.default, x, weight) for weight in (frozen, row)))
    more = {"needed": {"linear_default_1": (S(2), S(1))}, "produced": {"w1": S(1), "linear_default_1": P}}
    assert joined(local(cls, column(cls, "linear_default", more=more))) == []


def test_a_weight_that_is_gathered_first_is_not_joined() -> None:
    cls = projections(1)
    types = column(
        cls, "linear_default", more={"needed": {"linear_default": (R, R)}, "produced": {"linear_default": R}}
    )
    assert joined(local(cls, types)) == []


def test_an_input_without_gradient_is_not_joined() -> None:
    draw = Sketch()
    x, weight = draw.activation("x", 2, 3, 4, grad=False), draw.parameter("w", 6, 4)
    cls = draw.layer(draw.call(aten.linear.default, x, weight))
    assert joined(local(cls, column(cls, "linear_default", source=S(1)))) == []


def test_joining_twice_changes_nothing() -> None:
    cls = projections(2)
    types = column(cls, "linear_default", "linear_default_1")
    gm = local(cls, types)
    before = [(node.op, node.target, str(node.args)) for node in gm.graph.nodes]
    again = rewrite_local(gm, cls, Sharding((TIME, TENSOR), (types_of(cls, {}, {}, R), types)), "tensor")
    assert [(node.op, node.target, str(node.args)) for node in again.graph.nodes] == before


def test_a_schedule_that_splits_the_backward_has_no_overlap() -> None:
    strategy = Strategy((Role.TENSOR,))
    assert strategy.under(Schedule("zero-bubble", 2, 4)).options.by_name["overlap"] == "none"
    assert strategy.under(Schedule("1f1b", 2, 4)) == strategy
