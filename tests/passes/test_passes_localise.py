"""``passes.localise_layer``: local sizes in calls, local shapes in ``meta``, kernels where the types ask for them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sketch import Sketch
from test_passes_collectives import OUTER, TENSOR, axis_types, inserted, text
from torch import fx

from autopar.graph import LayerClass
from autopar.plan import Axis, Role
from autopar.program import kernels, kernels_vocab
from autopar.shard import solve
from autopar.sharding import AxisTypes, Sharding
from autopar.types import I, P, R, S
from passes import kernel_calls
from passes.collectives import MICROBATCH, convert
from passes.localise_layer import localise_pass, partition, scale

aten = torch.ops.aten


def localised(cls: LayerClass, *axes: tuple[Axis, AxisTypes]) -> fx.GraphModule:
    return localise_pass(inserted(cls, *axes), Sharding(tuple(a for a, _ in axes), tuple(t for _, t in axes)))


def find(gm: fx.GraphModule, target: Any) -> fx.Node:
    (node,) = [node for node in gm.graph.nodes if node.target is target]
    return node


def heads(draw: Sketch) -> LayerClass:
    """A linear and its split into heads."""
    x, w = draw.activation("x", 4, 6, 8), draw.parameter("w", 32, 8)
    product = draw.call(aten.linear.default, x, w)
    return draw.layer(draw.call(aten.view.default, product, [4, 6, 4, 8]))


HEADS = {"w": S(0), "linear_default": S(2), "view_default": S(2)}


class TestLocalise:
    def test_views_carry_local_sizes(self) -> None:
        cls = heads(Sketch())
        types = axis_types(cls, HEADS, {"linear_default": (R, S(0))})
        gm = localised(cls, (TENSOR, types))
        view = next(node for node in gm.graph.nodes if node.name == "view_default")
        assert list(view.args[1]) == [4, 6, 2, 8]
        assert view.meta["val"].shape == (4, 6, 2, 8) and view.meta["global_shape"] == (4, 6, 4, 8)

    def test_values_are_local_on_all_axes_and_microbatches(self) -> None:
        cls = heads(Sketch())
        rows = axis_types(cls, {"w": R}, default=S(0))
        rows = replace(rows, needed=rows.needed | {"linear_default": (S(0), R)})
        columns = axis_types(cls, HEADS, {"linear_default": (R, S(0))})
        gm = localised(cls, (Axis(MICROBATCH, 2, 0), rows), (OUTER, rows), (TENSOR, columns))
        shapes = {node.name: tuple(node.meta["val"].shape) for node in gm.graph.nodes if node.op != "output"}
        assert shapes["x"] == (1, 6, 8) and shapes["w"] == (16, 8)
        assert shapes["linear_default"] == (1, 6, 16) and shapes["view_default"] == (1, 6, 2, 8)

    def test_a_partition_names_the_axes_outermost_first_and_not_time(self) -> None:
        draw = Sketch()
        cls = draw.layer(draw.call(aten.gelu.default, draw.activation("x", 8, 6)))
        rows = axis_types(cls, {}, default=S(0))
        axes = (Axis(MICROBATCH, 2, 0), OUTER, TENSOR)
        gm = inserted(cls, *((axis, rows) for axis in axes))
        node = find(gm, aten.gelu.default)
        assert partition(node, Sharding(axes, (rows, rows, rows))) == (("outer", "tensor"), None)

    def test_a_mean_over_a_sharded_dim_is_a_sum_over_the_global_count(self) -> None:
        draw = Sketch()
        cls = draw.layer(draw.call(aten.mean.dim, draw.activation("x", 4, 6), [-1], True))
        gm = localised(cls, (TENSOR, axis_types(cls, {"x": S(1), "mean_dim": P})))
        total = find(gm, aten.sum.dim_IntList)
        scaled = find(gm, scale)
        assert scaled.args == (total, 1 / 6) and scaled.name == "mean_dim"

    def test_a_mean_beside_the_sharded_dim_stays(self) -> None:
        draw = Sketch()
        cls = draw.layer(draw.call(aten.mean.dim, draw.activation("x", 4, 6), [-1], True))
        gm = localised(cls, (TENSOR, axis_types(cls, {}, default=S(0))))
        assert find(gm, aten.mean.dim).meta["val"].shape == (2, 1)

    def test_the_loss_knows_where_it_is_a_term(self) -> None:
        draw = Sketch()
        logits, labels = draw.activation("logits", 4, 6, 8), draw.input("labels", 4, 6)
        cls = draw.layer(draw.call(kernels.cross_entropy_sum, logits, labels))
        rows = axis_types(cls, {"cross_entropy_sum": P}, default=S(0))
        node = find(localised(cls, (OUTER, rows)), kernels.cross_entropy_sum)
        assert node.kwargs["partial_axes"] == ("outer",)

    def test_kernels_replace_their_ops(self) -> None:
        draw = Sketch()
        ids, table = draw.input("ids", 4, 6), draw.parameter("table", 8, 16)
        cls = draw.layer(draw.call(aten.embedding.default, table, ids))
        types = axis_types(cls, {"ids": R, "table": S(0), "embedding_default": P}, outputs=(I,))
        gm = localised(cls, (TENSOR, replace(types, kernel={"embedding_default": "masked_embedding"})))
        node = find(gm, kernels_vocab.masked_embedding)
        assert [arg.name for arg in node.args] == ["ids", "table"] and node.kwargs == {"axis": "tensor"}

    def test_a_kernel_on_two_axes_names_both(self) -> None:
        draw = Sketch()
        logits, labels = draw.activation("logits", 4, 6, 8), draw.input("labels", 4, 6)
        cls = draw.layer(draw.call(kernels.cross_entropy_sum, logits, labels))
        types = axis_types(cls, {"logits": S(2), "labels": R, "cross_entropy_sum": I})
        types = replace(types, kernel={"cross_entropy_sum": "vocab_parallel_cross_entropy_sum"})
        rows = axis_types(cls, {"cross_entropy_sum": P}, default=S(0))
        gm = localised(cls, (Axis("rows", 2, 4), rows), (OUTER, types), (TENSOR, types))
        node = find(gm, kernels_vocab.vocab_parallel_cross_entropy_sum)
        assert node.args[2] == ("outer", "tensor") and node.kwargs["partial_axes"] == ("rows",)
        assert node.args[0].meta["val"].shape == (2, 6, 2)

    def test_conversions_are_kept_and_get_the_shape_of_their_target(self) -> None:
        draw = Sketch()
        cls = draw.layer(draw.call(aten.gelu.default, draw.activation("x", 4, 8)))
        gm = localised(cls, (TENSOR, axis_types(cls, {}, default=S(1), outputs=(I,))))
        node = find(gm, convert)
        assert node.args[0].meta["val"].shape == (4, 4) and node.meta["val"].shape == (4, 8)

    def test_whole_values_change_nothing_and_twice_is_once(self) -> None:
        cls = heads(Sketch())
        sharding = Sharding((TENSOR,), (axis_types(cls, {}, default=I),))
        once = localised(cls, (TENSOR, sharding.types[0]))
        assert text(once) == text(cls.graph)
        assert text(localise_pass(once, sharding)) == text(once)

    def test_a_shape_that_the_types_do_not_give_is_refused(self) -> None:
        """A column-parallel product said to be whole: each rank has half of its columns."""
        draw = Sketch()
        x, w = draw.activation("x", 4, 8), draw.parameter("w", 6, 8)
        cls = draw.layer(draw.call(aten.linear.default, x, w))
        wrong = axis_types(cls, {"w": S(0), "linear_default": R}, {"linear_default": (R, S(0))})
        with pytest.raises(AssertionError, match="linear"):
            localised(cls, (TENSOR, wrong))

    @pytest.mark.parametrize("role", [Role.DATA, Role.TENSOR, Role.IDLE], ids=lambda role: role.value)
    def test_what_the_optimum_gives_is_local_throughout(self, role: Role) -> None:
        """Every value has the shape that its types give."""
        cls = heads(Sketch())
        types = solve(cls, role, 2)
        assert types is not None
        gm = localised(cls, (TENSOR, types))
        for node in gm.graph.nodes:
            if node.op != "output" and node.target is not convert:
                expected = list(node.meta["global_shape"])
                t = node.meta["types"][0]
                if t.dim is not None:
                    expected[t.dim] //= 2
                assert list(node.meta["val"].shape) == expected


def test_the_ring_gets_a_scale_of_zero() -> None:
    """Only arguments with the ring's default values are left out, and its default scale is 1 / sqrt(size)."""
    node = fx.Graph().call_function(aten.scaled_dot_product_attention.default, (1, 2, 3), {"scale": 0.0})
    _, _, options = kernel_calls._ring_attention(SimpleNamespace(node=node, axes=("ring",), sharding=()))  # type: ignore[arg-type]
    assert options == {"scale": 0.0}
