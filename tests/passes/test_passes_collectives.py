"""``passes.collectives``: where conversions stand, how often, and where they may not."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from sketch import Sketch
from torch import fx

from autopar.errors import ProgramError
from autopar.flow import gradient_flow
from autopar.graph import LayerClass
from autopar.ops.operands import operands
from autopar.plan import Axis, Role
from autopar.sharding import AxisTypes, Sharding
from autopar.types import I, P, R, S, SpmdType
from passes.collectives import MICROBATCH, convert, insert_collectives_pass

aten = torch.ops.aten
TENSOR, OUTER = Axis("tensor", 2, 1), Axis("outer", 2, 2)


def axis_types(
    cls: LayerClass,
    produced: Mapping[str, SpmdType],
    needed: Mapping[str, tuple[SpmdType, ...]] | None = None,
    default: SpmdType = I,
    outputs: tuple[SpmdType, ...] | None = None,
) -> AxisTypes:
    """One axis: what is not given has type ``default``, is needed as it was produced, and leaves as it is."""
    nodes = [node for node in cls.graph.graph.nodes if node.op != "output"]
    made = {node.name: produced.get(node.name, default) for node in nodes}
    reads = {
        node.name: () if node.op == "placeholder" else tuple(made[operand.name] for operand in operands(node))
        for node in nodes
    }
    leaving = tuple(made[value.name] for value in cls.outputs) if outputs is None else outputs
    return AxisTypes(Role.TENSOR, made, reads | dict(needed or {}), leaving, {}, {}, 0.0)


def inserted(cls: LayerClass, *axes: tuple[Axis, AxisTypes]) -> fx.GraphModule:
    flow = gradient_flow(cls)
    for node in cls.graph.graph.nodes:
        node.meta["gradient"] = flow.get(node.name, False)
    return insert_collectives_pass(cls.graph, Sharding(tuple(a for a, _ in axes), tuple(t for _, t in axes)))


def converts(gm: fx.GraphModule) -> list[tuple[str, str, str, str]]:
    """(value, axis, source, target) of every conversion, in order."""
    found = []
    for node in gm.graph.nodes:
        if node.target is convert:
            value, axes, source, target = node.args
            found.append((value.name, "+".join(axes), source, target))
    return found


def text(gm: fx.GraphModule) -> str:
    """The graph as text, whatever it is called."""
    return "\n".join(node.format_node() or "" for node in gm.graph.nodes if node.op != "output")


def two_products(draw: Sketch) -> LayerClass:
    x = draw.activation("x", 4, 6, 8)
    left, right = draw.parameter("left", 8, 8), draw.parameter("right", 8, 8)
    a, b = draw.call(aten.linear.default, x, left), draw.call(aten.linear.default, x, right)
    return draw.layer(draw.call(aten.mul.Tensor, a, b))


COLUMNS = {name: S(2) for name in ("linear_default", "linear_default_1", "mul_tensor")} | {"left": S(0), "right": S(0)}
NEEDED = {"linear_default": (R, S(0)), "linear_default_1": (R, S(0))}


class TestInsertCollectives:
    def test_one_conversion_serves_all_readers_of_a_type(self) -> None:
        cls = two_products(Sketch())
        gm = inserted(cls, (TENSOR, axis_types(cls, COLUMNS, NEEDED, outputs=(I,))))
        assert converts(gm) == [("x", "tensor", "I", "R"), ("mul_tensor", "tensor", "S(2)", "I")]
        (first,) = [node for node in gm.graph.nodes if node.target is convert and node.args[0].name == "x"]
        assert {user.name for user in first.users} == {"linear_default", "linear_default_1"}

    def test_one_conversion_per_target_type(self) -> None:
        cls = two_products(Sketch())
        needed = NEEDED | {"linear_default_1": (S(2), S(1)), "mul_tensor": (S(2), S(2))}
        produced = COLUMNS | {"right": S(1), "linear_default_1": P}
        gm = inserted(cls, (TENSOR, axis_types(cls, produced, needed)))
        assert converts(gm) == [
            ("x", "tensor", "I", "R"),
            ("x", "tensor", "I", "S(2)"),
            ("linear_default_1", "tensor", "P", "S(2)"),
        ]

    def test_one_op_may_read_one_value_in_two_types(self) -> None:
        draw = Sketch()
        x = draw.activation("x", 4, 8)
        cls = draw.layer(draw.call(aten.mul.Tensor, x, x))
        types = axis_types(cls, {"mul_tensor": P}, {"mul_tensor": (P, R)})
        gm = inserted(cls, (TENSOR, types))
        product = next(node for node in gm.graph.nodes if node.target is aten.mul.Tensor)
        assert [operand.args[3] for operand in product.args] == ["P", "R"]

    def test_output_is_converted_to_its_border_type(self) -> None:
        draw = Sketch()
        cls = draw.layer(draw.call(aten.gelu.default, draw.activation("x", 4, 8)))
        gm = inserted(cls, (TENSOR, axis_types(cls, {"gelu_default": S(1), "x": S(1)}, outputs=(I,))))
        assert converts(gm) == [("gelu_default", "tensor", "S(1)", "I")]
        (result,) = next(node for node in gm.graph.nodes if node.op == "output").args[0]
        assert result.target is convert and result.meta["types"] == (I,)

    def test_equal_types_need_nothing_and_a_second_pass_changes_nothing(self) -> None:
        cls = two_products(Sketch())
        for t in (I, R, S(0)):
            sharding = (TENSOR, axis_types(cls, {}, default=t))
            once = inserted(cls, sharding)
            assert converts(once) == [] and text(once) == text(cls.graph)
            again = insert_collectives_pass(once, Sharding((TENSOR,), (sharding[1],)))
            assert text(again) == text(once)

    def test_the_given_graph_is_left_as_it_was(self) -> None:
        cls = two_products(Sketch())
        before = text(cls.graph)
        inserted(cls, (TENSOR, axis_types(cls, COLUMNS, NEEDED, outputs=(I,))))
        assert text(cls.graph) == before
        assert not any("types" in node.meta for node in cls.graph.graph.nodes)

    def test_every_node_says_its_types_on_every_axis(self) -> None:
        cls = two_products(Sketch())
        gm = inserted(cls, (OUTER, axis_types(cls, {}, default=S(0))), (TENSOR, axis_types(cls, COLUMNS, NEEDED)))
        types = {node.name: node.meta["types"] for node in gm.graph.nodes if node.op != "output"}
        assert types["mul_tensor"] == (S(0), S(2)) and types["x"] == (S(0), I)
        (converted,) = [node for node in gm.graph.nodes if node.target is convert]
        assert converted.meta["types"] == (S(0), R)
        gm.graph.lint()

    def test_equal_conversions_on_two_axes_are_one(self) -> None:
        draw = Sketch()
        cls = draw.layer(draw.call(aten.gelu.default, draw.activation("x", 4, 8)))
        nested = axis_types(cls, {}, default=S(0), outputs=(I,))
        gm = inserted(cls, (OUTER, nested), (TENSOR, nested))
        assert converts(gm) == [("gelu_default", "outer+tensor", "S(0)", "I")]

    def test_two_axes_convert_inner_first_when_a_dim_is_let_go(self) -> None:
        draw = Sketch()
        cls = draw.layer(draw.call(aten.gelu.default, draw.activation("x", 4, 8)))
        outer, inner = (axis_types(cls, {}, default=S(0), outputs=(t,)) for t in (I, R))
        gm = inserted(cls, (OUTER, outer), (TENSOR, inner))
        assert [axis for _, axis, _, _ in converts(gm)] == ["tensor", "outer"]

    def test_invariant_and_replicated_are_one_without_a_gradient(self) -> None:
        """The two differ in what the backward pass does, and an index has none."""
        draw = Sketch()
        ids = draw.input("ids", 4, 6)
        table = draw.parameter("table", 8, 16)
        cls = draw.layer(draw.call(aten.embedding.default, table, ids))
        types = axis_types(cls, {"table": S(1), "embedding_default": S(2)}, {"embedding_default": (S(1), R)})
        gm = inserted(cls, (TENSOR, types))
        assert types.produced["ids"] == I and converts(gm) == []

    def test_other_conversions_of_values_without_gradient_stay(self) -> None:
        draw = Sketch()
        x = draw.activation("x", 4, 6)
        mask = draw.input("mask", 4, 6, dtype=torch.float64)
        cls = draw.layer(draw.call(aten.mul.Tensor, x, mask))
        types = axis_types(cls, {"x": S(1), "mul_tensor": S(1)}, {"mul_tensor": (S(1), S(1))})
        assert converts(inserted(cls, (TENSOR, types))) == [("mask", "tensor", "I", "S(1)")]

    def test_no_collective_over_microbatches(self) -> None:
        draw = Sketch()
        cls = draw.layer(draw.call(aten.softmax.int, draw.activation("x", 4, 8), 0))
        types = axis_types(cls, {"x": S(0), "softmax_int": R}, {"softmax_int": (R,)})
        with pytest.raises(ProgramError, match=r"x would need a conversion S\(0\) to R over the microbatches") as error:
            inserted(cls, (Axis(MICROBATCH, 2, 0), types), (TENSOR, axis_types(cls, {})))
        assert error.value.hint == "plan with one microbatch"
        gm = inserted(cls, (Axis(MICROBATCH, 1, 0), types), (TENSOR, axis_types(cls, {})))
        assert converts(gm) == []  # one microbatch is the whole batch

    def test_meta_of_the_module_is_kept(self) -> None:
        cls = two_products(Sketch())
        cls.graph.meta["mark"] = 7
        assert inserted(cls, (TENSOR, axis_types(cls, {}))).meta["mark"] == 7
