"""The cleaning passes on hand-made graphs: what each rewrites, that values stay, and that twice is once."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

from autopar.capture.backward import refuse_nodes
from autopar.errors import CaptureError
from autopar.graph import Parameter
from autopar.program import kernels
from passes import clean
from passes.clean.nodes import evaluate, note
from passes.fuse_bias import fuse_bias_pass
from passes.runner import run

aten = torch.ops.aten
Pass = Callable[[fx.GraphModule], fx.GraphModule]


class Build:
    """A graph under construction, with meta values and real tensors to run it on."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.root = nn.Module()
        self.tensors: list[torch.Tensor] = []
        self.generator = torch.Generator().manual_seed(0)

    def input(self, name: str, *shape: int, dtype: torch.dtype = torch.float64, **meta: Any) -> fx.Node:
        node = self.graph.placeholder(name.replace(".", "_"))
        floating = dtype.is_floating_point
        self.tensors.append(
            torch.randn(shape, dtype=dtype, generator=self.generator)
            if floating
            else torch.randint(0, 5, shape, generator=self.generator).to(dtype)
        )
        node.meta = {"val": self.tensors[-1].to("meta")} | (meta or {"input": name})
        return node

    def parameter(self, name: str, *shape: int) -> fx.Node:
        return self.input(name, *shape, parameter=Parameter(name, name, shape, shape, torch.float64))

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = evaluate(target, args, kwargs)
        return node

    def module(self, *outputs: fx.Node) -> fx.GraphModule:
        self.graph.output(tuple(outputs))
        return fx.GraphModule(self.root, self.graph)


def ops(gm: fx.GraphModule) -> list[str]:
    """The ops in order, without ``aten.`` and the default overload."""
    names = [
        str(n.target) if "aten" in str(n.target) else n.target.__name__
        for n in gm.graph.nodes
        if n.op == "call_function"
    ]
    return [name.removeprefix("aten.").removesuffix(".default") for name in names]


def text(gm: fx.GraphModule) -> str:
    return "\n".join(node.format_node() or "" for node in gm.graph.nodes)


def apply(build: Build, gm: fx.GraphModule, *steps: Pass, exact: bool = True) -> fx.GraphModule:
    """Run the passes; outputs must stay, ``meta["val"]`` must tell the truth, a second run must change nothing."""
    before = gm(*[t.clone() for t in build.tensors])
    for step in steps:
        gm = step(gm)
    gm.graph.lint()
    gm.recompile()
    after = Checked(gm).run(*[t.clone() for t in build.tensors])
    for a, b in zip(before, after, strict=True):
        assert torch.equal(a, b) if exact else torch.allclose(a, b, rtol=1e-12, atol=0)
    once = text(gm)
    for step in steps:
        gm = step(gm)
    assert text(gm) == once
    return gm


class Checked(fx.Interpreter):
    """Runs a graph and holds every value against its ``meta["val"]``."""

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, torch.Tensor) and "val" in n.meta:
            assert (value.shape, value.dtype) == (n.meta["val"].shape, n.meta["val"].dtype), n.format_node()
        return value


class TestRegions:
    def region(self, target: Any, head: tuple[Any, ...]) -> tuple[Build, fx.GraphModule]:
        inner = fx.Graph()
        x = inner.placeholder("x")
        y = inner.call_function(aten.mul.Tensor, (x, 2.0))
        inner.output((y,))
        b = Build()
        outer = b.input("x", 3)
        for node in (x, y):
            node.meta["val"] = outer.meta["val"]
        b.root.body = fx.GraphModule(nn.Module(), inner)
        body = b.graph.get_attr("body")
        node = b.graph.call_function(target, (*head, body, outer))
        node.meta["val"] = (outer.meta["val"],)
        item = b.call(aten.neg.default, outer)
        picked = b.graph.call_function(operator.getitem, (node, 0))
        picked.meta["val"] = outer.meta["val"]
        return b, b.module(picked, item)

    def test_no_grad_is_inlined_and_detached(self) -> None:
        b, gm = self.region(torch.ops.higher_order.wrap_with_set_grad_enabled, (False,))
        gm = clean.inline_regions_pass(gm)
        assert sorted(ops(gm)) == ["detach", "mul.Tensor", "neg"]
        assert not list(gm.named_children())
        gm.graph.lint()

    def test_autocast_that_is_on_is_refused(self) -> None:
        b, gm = self.region(torch.ops.higher_order.wrap_with_autocast, ("cpu", torch.bfloat16, True, True))
        with pytest.raises(CaptureError, match="autocast"):
            refuse_nodes(gm)


class TestFunctionalise:
    def test_relu_in_place(self) -> None:
        b = Build()
        y = b.call(aten.neg.default, b.input("x", 3))
        z = b.call(aten.relu_.default, y)
        gm = apply(b, b.module(b.call(aten.add.Tensor, y, z)), clean.functionalise_pass)
        assert ops(gm) == ["neg", "relu", "add.Tensor"]
        add = list(gm.graph.nodes)[-2]
        assert add.args[0] is add.args[1], "the old name reads the new value"

    def test_writes_through_views_reach_the_base(self) -> None:
        """T5 shifts its labels like this."""
        b = Build()
        labels = b.input("labels", 2, 5, dtype=torch.int64)
        base = b.call(aten.new_zeros.default, labels, [2, 5])
        early = b.call(aten.slice.Tensor, base, 1, 0, 2)
        b.call(
            aten.copy_.default, b.call(aten.slice.Tensor, base, 1, 1, 9), b.call(aten.slice.Tensor, labels, 1, 0, -1)
        )
        b.call(aten.fill_.Scalar, b.call(aten.select.int, base, 1, 0), 7)
        last = b.call(aten.masked_fill_.Scalar, base, b.call(aten.eq.Scalar, base, 3), 0)
        gm = apply(b, b.module(last, base, early), clean.functionalise_pass)
        assert not any(name.split(".")[0].endswith("_") for name in ops(gm))

    def test_writes_through_transposes_and_reshapes(self) -> None:
        b = Build()
        base = b.call(aten.mul.Tensor, b.input("x", 4, 6), 2.0)
        view = b.call(aten.view.default, b.call(aten.transpose.int, base, 0, 1), [6, 2, 2])
        b.call(aten.add_.Tensor, b.call(aten.select.int, view, 2, 1), 1.0)
        apply(b, b.module(base, view), clean.functionalise_pass)

    def test_batch_norm_hands_out_its_running_statistics(self) -> None:
        b = Build()
        x, mean, var = b.input("x", 4, 3), b.input("mean", 3, buffer="m"), b.input("var", 3, buffer="v")
        b.tensors[2].abs_()
        y = b.call(aten.batch_norm.default, x, None, None, mean, var, True, 0.1, 1e-5, False)
        gm = clean.functionalise_pass(clean.batch_norm_pass(b.module(y)))
        assert "batch norm couples the batch" in gm.meta["unmicrobatchable"] and gm.meta["updates"] == ("m", "v")
        gm.recompile()
        given, old_mean, old_var = (tensor.clone() for tensor in b.tensors)
        result, new_mean, new_var = gm(*b.tensors)
        expected = torch.nn.functional.batch_norm(given, old_mean, old_var, training=True)
        for got, want in ((result, expected), (new_mean, old_mean), (new_var, old_var)):
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)

    def test_batch_norm_in_evaluation_writes_nothing(self) -> None:
        b = Build()
        x, mean, var = b.input("x", 4, 3), b.input("mean", 3, buffer="m"), b.input("var", 3, buffer="v")
        b.tensors[2].abs_()
        y = b.call(aten.batch_norm.default, x, None, None, mean, var, False, 0.1, 1e-5, False)
        gm = apply(b, b.module(y), clean.batch_norm_pass)
        assert "unmicrobatchable" not in gm.meta and "updates" not in gm.meta


class TestNoops:
    def test_devices_go(self) -> None:
        b = Build()
        x = b.input("x", 2, 3)
        ramp = b.call(aten.arange.default, 3, dtype=torch.float64, pin_memory=False)
        ones = b.call(aten.new_ones.default, x, [2, 3], pin_memory=False)
        same = b.call(aten.to.dtype_layout, x, dtype=torch.float64, layout=torch.strided)
        cast = b.call(aten.to.dtype_layout, x, dtype=torch.float32, layout=torch.strided)
        total = b.call(aten.add.Tensor, b.call(aten.mul.Tensor, ramp, ones), same)
        gm = apply(b, b.module(total, cast), clean.devices_pass)
        assert ops(gm) == ["arange", "full", "to.dtype", "mul.Tensor", "add.Tensor"]
        assert not any("pin_memory" in n.kwargs for n in gm.graph.nodes)

    def test_identities_go(self) -> None:
        b = Build()
        x = b.input("x", 2, 3)
        y = b.call(
            aten.slice.Tensor,
            b.call(aten.expand.default, b.call(aten.view.default, x, [2, -1]), [2, 3]),
            1,
            0,
            2**63 - 1,
        )
        y = b.call(aten.contiguous.default, b.call(aten.alias.default, b.call(aten.clone.default, y)))
        y = b.call(aten.dropout.default, b.call(aten.dropout.default, y, 0.0, True), 0.5, False)
        y = b.call(aten.add.Tensor, b.call(aten.to.dtype, y, torch.float64), 0)
        gm = apply(b, b.module(b.call(aten.neg.default, y)), clean.noops_pass)
        assert ops(gm) == ["neg"]

    def test_real_ones_stay(self) -> None:
        b = Build()
        x = b.input("x", 1, 3)
        y = b.call(aten.slice.Tensor, b.call(aten.expand.default, x, [2, 3]), 1, 1, 3)
        y = b.call(aten.detach.default, b.call(aten.add.Tensor, y, 1))
        gm = apply(b, b.module(y), clean.noops_pass)
        assert ops(gm) == ["expand", "slice.Tensor", "add.Tensor", "detach"]

    def test_attention_says_only_what_matters(self) -> None:
        b = Build()
        q = b.input("q", 1, 2, 4, 8)
        y = b.call(aten.scaled_dot_product_attention.default, q, q, q, None, 0.0, True)
        gm = apply(b, b.module(y), clean.attention_defaults_pass)
        (node,) = [n for n in gm.graph.nodes if n.op == "call_function"]
        assert len(node.args) == 3 and node.kwargs == {"is_causal": True}


class TestShapes:
    def test_one_explicit_reshape(self) -> None:
        b = Build()
        y = b.call(aten.view.default, b.input("x", 2, 3, 4), [-1, 4])
        y = b.call(aten.flatten.using_ints, b.call(aten.unflatten.int, y, 1, [2, -1]), 1, 2)
        y = b.call(aten.view.default, y, [2, 3, 2, -1])
        gm = apply(b, b.module(y), clean.reshapes_pass, clean.dead_code_pass)
        assert ops(gm) == ["reshape"]
        assert list(gm.graph.nodes)[-2].args[1] == [2, 3, 2, 2]

    def test_back_and_forth_is_nothing(self) -> None:
        b = Build()
        x = b.input("x", 2, 3)
        y = b.call(aten.view.default, b.call(aten.view.default, x, [-1]), [2, 3])
        gm = apply(b, b.module(b.call(aten.neg.default, y)), clean.reshapes_pass, clean.dead_code_pass)
        assert ops(gm) == ["neg"]

    def test_splits_are_slices(self) -> None:
        b = Build()
        x = b.input("x", 2, 6)
        split = b.call(aten.split.Tensor, x, 4, -1)
        first, second = (b.call(operator.getitem, split, i) for i in (0, 1))
        half = b.call(operator.getitem, b.call(aten.chunk.default, x, 2, 1), 1)
        row = b.call(operator.getitem, b.call(aten.unbind.int, x), 1)
        gm = apply(b, b.module(first, second, half, row), clean.splits_pass)
        assert ops(gm) == ["slice.Tensor"] * 3 + ["select.int"]

    @pytest.mark.parametrize(
        ("sizes", "op"),
        [([2, 2, 3], "view"), ([1, 2, 3, 2, 1], "view"), ([12], "reshape"), ([4, 3], "reshape"), ([3, 4], "reshape")],
    )
    def test_only_a_view_that_is_valid_for_all_strides_is_one(self, sizes: list[int], op: str) -> None:
        b = Build()
        gm = apply(b, b.module(b.call(aten.reshape.default, b.input("x", 2, 6), sizes)), clean.views_pass)
        assert ops(gm) == [op]
        (x,) = (torch.arange(24.0).view(6, 4)[:, ::2].t(),)  # neither contiguous nor dense
        assert torch.equal(gm(x)[0], x.reshape(sizes))

    def test_ops_of_memory_get_elements_side_by_side(self) -> None:
        b = Build()
        x = b.call(aten.contiguous.default, b.call(aten.transpose.int, b.input("x", 2, 6), 0, 1))
        gm = b.module(b.call(aten.view_as_complex.default, x))
        gm = clean.views_pass(clean.noops_pass(gm))
        assert ops(gm) == ["transpose.int", "contiguous", "view_as_complex"]
        assert gm(torch.ones(2, 6))[0].shape == (6,)

    def test_padding_index_is_unsqueeze(self) -> None:
        b = Build()
        x = b.input("mask", 2, 5)
        rows = b.call(aten.arange.default, 2)
        keys = b.call(aten.arange.default, 5)
        for dim in (1, 2, 3):
            rows = b.call(aten.unsqueeze.default, rows, dim)
        for _ in range(3):
            keys = b.call(aten.unsqueeze.default, keys, 0)
        gm = apply(b, b.module(b.call(aten.index.Tensor, x, [rows, keys])), clean.indexing_pass, clean.dead_code_pass)
        assert ops(gm) == ["unsqueeze", "unsqueeze"]

    @pytest.mark.parametrize("rest", [(), (3,), (3, 4)])
    def test_a_row_of_each_example_is_a_gather(self, rest: tuple[int, ...]) -> None:
        b = Build()
        x, i = b.input("x", 2, 5, *rest), b.input("i", 2, dtype=torch.int64)
        j = b.call(aten.arange.default, 2)
        gm = apply(b, b.module(b.call(aten.index.Tensor, x, [j, i])), clean.indexing_pass, clean.dead_code_pass)
        assert ops(gm) == ["remainder.Scalar", "to.dtype", "view", "expand", "gather", "select.int"]
        values, rows = torch.randn(2, 5, *rest), torch.tensor([4, -2])
        assert torch.equal(gm(values, rows)[0], values[[0, 1], rows])

    def test_gathering_index_stays(self) -> None:
        b = Build()
        x, i = b.input("x", 3, 5), b.input("i", 2, dtype=torch.int64)
        j = b.call(aten.arange.default, 2)
        gm = apply(b, b.module(b.call(aten.index.Tensor, x, [j, i])), clean.indexing_pass)
        assert ops(gm) == ["arange", "index.Tensor"]

    def test_a_single_element_that_is_repeated_is_expanded(self) -> None:
        b = Build()
        x = b.input("x", 2, 1, 3)
        one = b.call(aten.repeat_interleave.self_int, x, 4, 1, output_size=4)
        two = b.call(aten.repeat_interleave.self_int, x, 2, 2, output_size=6)
        gm = apply(b, b.module(one, two), clean.splits_pass)
        assert ops(gm) == ["expand", "repeat_interleave.self_int"]
        assert not any("output_size" in node.kwargs for node in gm.graph.nodes)

    def test_a_negative_start_counts_from_the_end(self) -> None:
        b = Build()
        gm = apply(b, b.module(b.call(aten.narrow.default, b.input("x", 2, 5), -1, -2, 2)), clean.splits_pass)
        assert list(gm.graph.nodes)[-2].args[1:] == (1, 3, 5)

    def test_a_slice_of_whole_operands_of_a_cat_is_these_operands(self) -> None:
        b = Build()
        parts = [b.input(f"x{i}", 3, n) for i, n in enumerate((2, 4, 1, 3))]
        joined = b.call(aten.cat.default, parts, -1)
        ranges = [(0, 2), (2, 7), (2, 5), (1, 6), (6, 7), (7, 7)]
        slices = [b.call(aten.slice.Tensor, joined, 1, *each) for each in ranges]
        gm = apply(b, b.module(*slices), clean.splits_pass, clean.dead_code_pass)
        assert ops(gm) == ["cat", "cat", "slice.Tensor", "slice.Tensor", "slice.Tensor"]

    def test_a_slice_of_a_cat_that_casts_or_has_another_dim_stays(self) -> None:
        b = Build()
        wide, narrow = b.input("wide", 2, 3), b.input("narrow", 2, 3, dtype=torch.float32)
        cast = b.call(aten.slice.Tensor, b.call(aten.cat.default, [narrow, wide], 1), 1, 0, 3)
        rows = b.call(aten.slice.Tensor, b.call(aten.cat.default, [wide, wide], 1), 0, 0, 1)
        gm = apply(b, b.module(cast, rows), clean.splits_pass)
        assert ops(gm) == ["cat", "slice.Tensor", "cat", "slice.Tensor"]

    def test_parts_that_overlap(self) -> None:
        b = Build()
        split = b.call(aten.tensor_split.indices, b.input("x", 8), [5, 3, -1])
        gm = apply(b, b.module(*[b.call(operator.getitem, split, i) for i in range(4)]), clean.splits_pass)
        slices = [node.args[2:] for node in gm.graph.nodes if node.target is aten.slice.Tensor]
        assert slices == [(0, 5), (5, 5), (3, 7), (7, 8)]

    def test_the_same_elements_of_each_example_are_no_row_of_each(self) -> None:
        b = Build()
        x, columns = b.input("x", 2, 5), b.input("columns", 2, dtype=torch.int64)
        rows = b.call(aten.unsqueeze.default, b.call(aten.arange.default, 2), 1)
        gm = apply(b, b.module(b.call(aten.index.Tensor, x, [rows, columns])), clean.indexing_pass)
        assert ops(gm) == ["arange", "unsqueeze", "index.Tensor"]


class TestRows:
    @pytest.mark.parametrize("sizes", [(5, 1, 4), (6, 1)], ids=str)
    def test_a_parameter_aligned_with_the_merged_dim_keeps_it(self, sizes: tuple[int, ...]) -> None:
        b = Build()
        merged = b.call(aten.reshape.default, b.input("x", 2, 3, 4), [6, 4])
        gm = apply(b, b.module(b.call(aten.mul.Tensor, merged, b.parameter("g", *sizes))), clean.rows_pass)
        assert ops(gm) == ["reshape", "mul.Tensor"]

    def test_many_steps_before_the_rows_are_no_recursion(self) -> None:
        b = Build()
        x, weight = b.input("x", 2, 3, 4), b.parameter("g", 4)
        for _ in range(1100):  # more than Python's limit of recursion
            x, weight = b.call(aten.neg.default, x), b.call(aten.add.Tensor, weight, weight)
        merged = b.call(aten.reshape.default, x, [6, 4])
        gm = apply(b, b.module(b.call(aten.mul.Tensor, merged, weight)), clean.rows_pass)
        assert ops(gm)[-2:] == ["mul.Tensor", "reshape"]

    def test_rows_of_a_parameter_from_which_others_are_picked_keep_it(self) -> None:
        b = Build()
        table = b.call(aten.expand.default, b.parameter("g", 1, 4), [6, 4])
        merged = b.call(aten.reshape.default, b.input("x", 2, 3, 2, dtype=torch.int64), [6, 2])
        picked = b.call(aten.gather.default, table, 1, b.call(aten.clamp.default, merged, 0, 3))
        gm = apply(b, b.module(picked), clean.rows_pass)
        assert ops(gm) == ["expand", "clamp", "reshape", "gather"]

    def test_a_parameter_of_one_row_does_not(self) -> None:
        b = Build()
        merged = b.call(aten.reshape.default, b.input("x", 2, 3, 4), [6, 4])
        gm = apply(b, b.module(b.call(aten.mul.Tensor, merged, b.parameter("g", 1, 4))), clean.rows_pass)
        assert ops(gm) == ["mul.Tensor", "reshape"]


class TestBorders:
    @pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
    def test_padding_with_what_is_there_is_slices_beside_it(self, mode: str) -> None:
        b = Build()
        x = b.input("x", 2, 3, 5, 4)
        gm = apply(b, b.module(b.call(aten.pad.default, x, [1, 2, 3, 0], mode)), clean.borders_pass)
        assert "pad" not in ops(gm) and ops(gm).count("cat") == 2

    def test_padding_with_a_number_and_cutting_stay(self) -> None:
        b = Build()
        x = b.input("x", 2, 3, 5)
        cut = b.call(aten.pad.default, x, [1, -1], "reflect")
        gm = apply(b, b.module(b.call(aten.pad.default, x, [1, 1]), cut), clean.borders_pass)
        assert ops(gm) == ["pad", "pad"]


class TestBags:
    @staticmethod
    def bags(b: Build, mode: int, padding: int | None, step: int = 5, scaled: bool = False) -> fx.Node:
        weight, x = b.parameter("w", 7, 4), b.input("x", 3, 5, dtype=torch.int64)
        scales = b.call(aten.reshape.default, b.input("s", 3, 5), [-1]) if scaled else None
        flat = b.call(aten.reshape.default, x, [-1])
        offsets = b.call(aten.arange.start_step, 0, 15, step, dtype=torch.int64)
        found = b.call(
            aten.embedding_bag.padding_idx, weight, flat, offsets, False, mode, False, scales, False, padding
        )
        return b.call(operator.getitem, found, 0)

    @pytest.mark.parametrize("padding", [None, 2, -4])
    @pytest.mark.parametrize("mode", [0, 1], ids=["sum", "mean"])
    def test_bags_of_one_length_are_an_embedding_and_a_sum(self, mode: int, padding: int | None) -> None:
        b = Build()
        gm = apply(b, b.module(self.bags(b, mode, padding)), clean.bags_pass, exact=False)
        assert "embedding" in ops(gm) and "embedding_bag.padding_idx" not in ops(gm)

    def test_scales_of_single_samples(self) -> None:
        b = Build()
        gm = apply(b, b.module(self.bags(b, 0, 2, scaled=True)), clean.bags_pass, exact=False)
        assert "embedding" in ops(gm)

    @pytest.mark.parametrize(("mode", "step"), [(2, 5), (0, 4)], ids=["the largest", "bags of two lengths"])
    def test_others_stay(self, mode: int, step: int) -> None:
        b = Build()
        gm = apply(b, b.module(self.bags(b, mode, None, step)), clean.bags_pass)
        assert "embedding_bag.padding_idx" in ops(gm)


class TestLinear:
    def test_conv1d_is_linear_on_plain_dims(self) -> None:
        b = Build()
        x, w, bias = b.input("x", 2, 3, 4), b.parameter("w", 4, 5), b.parameter("b", 5)
        y = b.call(aten.addmm.default, bias, b.call(aten.reshape.default, x, [6, 4]), w)
        y = b.call(aten.reshape.default, y, [2, 3, 5])
        gm = apply(b, b.module(y), clean.linear_pass, clean.dead_code_pass, exact=False)
        assert ops(gm) == ["t", "linear"]

    def test_the_heads_are_merged_before_it(self) -> None:
        b = Build()
        x, w, bias = b.input("x", 2, 3, 2, 2), b.parameter("w", 4, 5), b.parameter("b", 5)
        y = b.call(aten.addmm.default, bias, b.call(aten.reshape.default, x, [6, 4]), w)
        y = b.call(aten.reshape.default, y, [2, 3, 5])
        gm = apply(b, b.module(y), clean.linear_pass, clean.dead_code_pass, exact=False)
        assert ops(gm) == ["t", "reshape", "linear"]

    def test_products_of_activations_stay(self) -> None:
        b = Build()
        x, y = b.input("x", 2, 3), b.input("y", 3, 2)
        gm = apply(b, b.module(b.call(aten.matmul.default, x, y)), clean.linear_pass)
        assert ops(gm) == ["matmul"]

    @pytest.mark.parametrize("transposed", [False, True])
    def test_fused_projection_is_parts(self, transposed: bool) -> None:
        b = Build()
        w = b.parameter("qkv.weight", *((4, 6) if transposed else (6, 4)))
        bias, x = b.parameter("qkv.bias", 6), b.input("x", 2, 4)
        y = b.call(aten.linear.default, x, b.call(aten.t.default, w) if transposed else w, bias)
        pieces = [b.call(aten.slice.Tensor, y, 1, i, j) for i, j in ((0, 2), (2, 3), (3, 6))]
        before = b.module(*pieces)(*b.tensors)
        gm = clean.fused_projections_pass(fx.GraphModule(b.root, b.graph))
        placeholders = {n.name: n for n in gm.graph.nodes if n.op == "placeholder"}
        parts = [n.meta["parameter"] for n in placeholders.values() if "parameter" in n.meta]
        weights = sorted((p for p in parts if p.original == "qkv.weight"), key=lambda p: p.start)
        assert [(p.name, p.dim, p.start) for p in weights] == [
            (f"qkv.weight.part{i}", int(transposed), start) for i, start in enumerate((0, 2, 3))
        ]
        originals = {"qkv.weight": b.tensors[0], "qkv.bias": b.tensors[1]}
        values = [
            originals[n.meta["parameter"].original].narrow(
                n.meta["parameter"].dim, n.meta["parameter"].start, n.meta["val"].shape[n.meta["parameter"].dim]
            )
            if "parameter" in n.meta
            else b.tensors[2]
            for n in placeholders.values()
        ]
        after = Checked(gm).run(*values)
        assert all(torch.allclose(a, c, rtol=1e-12) for a, c in zip(before, after, strict=True))
        once = text(gm)
        assert text(clean.fused_projections_pass(gm)) == once

    def test_projection_that_is_read_whole_stays(self) -> None:
        b = Build()
        w, x = b.parameter("w", 6, 4), b.input("x", 2, 4)
        y = b.call(aten.linear.default, x, w)
        pieces = [b.call(aten.slice.Tensor, y, 1, i, i + 3) for i in (0, 3)]
        gm = apply(b, b.module(*pieces, b.call(aten.neg.default, y)), clean.fused_projections_pass)
        assert ops(gm)[0] == "linear" and ops(gm).count("linear") == 1

    def test_projection_with_a_gap_stays(self) -> None:
        b = Build()
        w, x = b.parameter("w", 6, 4), b.input("x", 2, 4)
        y = b.call(aten.linear.default, x, w)
        gm = apply(
            b, b.module(*[b.call(aten.slice.Tensor, y, 1, i, i + 2) for i in (0, 4)]), clean.fused_projections_pass
        )
        assert ops(gm).count("linear") == 1

    def test_a_bias_that_is_no_vector_stays_in_its_op(self) -> None:
        b = Build()
        bias, x, w = b.parameter("b", 1, 6), b.input("x", 2, 4), b.parameter("w", 4, 6)
        pieces = b.call(aten.chunk.default, b.call(aten.addmm.default, bias, x, w), 2, 1)
        gm = b.module(*[b.call(operator.getitem, pieces, i) for i in range(2)])
        gm = apply(b, gm, clean.splits_pass, clean.linear_pass, clean.fused_projections_pass)
        assert ops(gm) == ["addmm", "slice.Tensor", "slice.Tensor"]


class TestBias:
    def test_a_bias_is_an_op_of_its_own_and_comes_back(self) -> None:
        b = Build()
        x, w, bias = b.input("x", 2, 3, 4), b.parameter("w", 5, 4), b.parameter("b", 5)
        y = b.call(aten.linear.default, x, w, bias)
        gm = apply(b, b.module(y), clean.split_bias_pass, exact=False)
        assert ops(gm) == ["linear", "add.Tensor"]
        assert ops(apply(b, gm, fuse_bias_pass, exact=False)) == ["linear"]

    def test_a_product_that_is_read_twice_keeps_its_bias_apart(self) -> None:
        b = Build()
        x, w, bias = b.input("x", 2, 4), b.parameter("w", 5, 4), b.parameter("b", 5)
        product = b.call(aten.linear.default, x, w)
        gm = b.module(b.call(aten.add.Tensor, product, bias), product)
        assert ops(apply(b, gm, fuse_bias_pass)) == ["linear", "add.Tensor"]

    def test_what_is_no_bias_stays(self) -> None:
        b = Build()
        x, w, residual = b.input("x", 2, 4), b.parameter("w", 5, 4), b.input("r", 2, 5)
        gm = b.module(b.call(aten.add.Tensor, b.call(aten.linear.default, x, w), residual))
        assert ops(apply(b, gm, fuse_bias_pass)) == ["linear", "add.Tensor"]


class TestAttention:
    def repeated(self, b: Build, name: str, groups: int) -> fx.Node:
        x = b.input(name, 2, 2, 5, 4)
        y = b.call(aten.expand.default, b.call(aten.unsqueeze.default, x, 2), [2, 2, groups, 5, 4])
        return b.call(aten.reshape.default, y, [2, 2 * groups, 5, 4])

    def test_repeated_heads_are_grouped_queries(self) -> None:
        b = Build()
        q, k, v = b.input("q", 2, 6, 5, 4), self.repeated(b, "k", 3), self.repeated(b, "v", 3)
        y = b.call(aten.scaled_dot_product_attention.default, q, k, v)
        gm = apply(b, b.module(y), clean.grouped_query_pass, clean.dead_code_pass, exact=False)
        assert ops(gm) == ["scaled_dot_product_attention"]
        assert list(gm.graph.nodes)[-2].kwargs == {"enable_gqa": True}

    def test_interleaved_repeats_too(self) -> None:
        b = Build()
        q, k, v = b.input("q", 2, 6, 5, 4), b.input("k", 2, 2, 5, 4), b.input("v", 2, 2, 5, 4)
        k, v = (b.call(aten.repeat_interleave.self_int, t, 3, 1) for t in (k, v))
        y = b.call(aten.scaled_dot_product_attention.default, q, k, v)
        gm = apply(b, b.module(y), clean.grouped_query_pass, clean.dead_code_pass, exact=False)
        assert ops(gm) == ["scaled_dot_product_attention"]

    def test_tiled_heads_are_not(self) -> None:
        """``h0 h1 h0 h1`` is another order than ``h0 h0 h1 h1``."""
        b = Build()
        q, x = b.input("q", 2, 6, 5, 4), b.input("k", 2, 2, 5, 4)
        k = b.call(aten.expand.default, b.call(aten.unsqueeze.default, x, 1), [2, 3, 2, 5, 4])
        k = b.call(aten.reshape.default, k, [2, 6, 5, 4])
        gm = apply(b, b.module(b.call(aten.scaled_dot_product_attention.default, q, k, k)), clean.grouped_query_pass)
        assert "expand" in ops(gm)


class TestLosses:
    @pytest.mark.parametrize("smoothing", [0.0, 0.1])
    @pytest.mark.parametrize("reduction", [1, 2])
    def test_cross_entropy_on_plain_dims(self, smoothing: float, reduction: int) -> None:
        b = Build()
        logits, labels = b.input("logits", 2, 3, 5), b.input("labels", 2, 3, dtype=torch.int64)
        b.tensors[1][0, 0] = -100
        flat = b.call(aten.reshape.default, logits, [6, 5]), b.call(aten.reshape.default, labels, [6])
        loss = b.call(aten.cross_entropy_loss.default, *flat, None, reduction, -100, smoothing)
        gm = apply(b, b.module(loss), clean.cross_entropy_pass, clean.dead_code_pass, exact=False)
        mean = ["ne.Scalar", "sum", "to.dtype", "div.Tensor"] if reduction == 1 else []
        assert ops(gm) == ["cross_entropy_sum", *mean]
        (node,) = [n for n in gm.graph.nodes if n.target is kernels.cross_entropy_sum]
        assert [n.name for n in node.args[:2]] == ["logits", "labels"]

    def test_torch_layout_is_permuted(self) -> None:
        b = Build()
        logits, labels = b.input("logits", 2, 3, 5), b.input("labels", 2, 3, dtype=torch.int64)
        swapped = b.call(aten.transpose.int, logits, 1, 2)
        other = b.input("other", 2, 5, 3)
        gm = b.module(*[b.call(aten.cross_entropy_loss.default, x, labels) for x in (swapped, other)])
        gm = apply(b, gm, clean.cross_entropy_pass, clean.dead_code_pass, exact=False)
        assert ops(gm).count("permute") == 1 and "transpose.int" not in ops(gm)

    def test_all_ignored_is_nan_as_in_torch(self) -> None:
        b = Build()
        logits, labels = b.input("logits", 2, 5), b.input("labels", 2, dtype=torch.int64)
        gm = clean.cross_entropy_pass(b.module(b.call(aten.cross_entropy_loss.default, logits, labels)))
        gm.recompile()
        assert gm(b.tensors[0], torch.full((2,), -100))[0].isnan()

    def test_probabilities_and_weights_stay(self) -> None:
        b = Build()
        logits, soft, weight = b.input("logits", 4, 5), b.input("soft", 4, 5), b.input("weight", 5)
        hard = b.input("hard", 4, dtype=torch.int64)
        first = b.call(aten.cross_entropy_loss.default, logits, soft)
        second = b.call(aten.cross_entropy_loss.default, logits, hard, weight)
        gm = apply(b, b.module(first, second), clean.cross_entropy_pass)
        assert ops(gm) == ["cross_entropy_loss"] * 2

    @pytest.mark.parametrize(
        "op", [aten.mse_loss, aten.l1_loss, aten.smooth_l1_loss, aten.huber_loss, aten.binary_cross_entropy_with_logits]
    )
    def test_means_are_sums(self, op: Any) -> None:
        b = Build()
        x, y = b.input("x", 2, 3), b.input("y", 2, 3)
        gm = apply(b, b.module(b.call(op.default, x, y)), clean.mean_losses_pass, exact=False)
        assert ops(gm)[1:] == ["mul.Tensor"]

    def test_mean_of_everything(self) -> None:
        b = Build()
        x = b.input("x", 2, 3)
        gm = b.module(b.call(aten.mean.default, x), b.call(aten.mean.dim, x, [0]))
        gm = apply(b, gm, clean.mean_losses_pass, exact=False)
        assert ops(gm) == ["sum", "mul.Tensor", "mean.dim"]

    @pytest.mark.parametrize("op", [aten.mean, aten.mse_loss])
    def test_a_mean_is_finite_where_the_sum_is_not(self, op: Any) -> None:
        """A mean that is not the loss keeps its dtype."""
        b = Build()
        x, y = (b.input(name, 70_000, dtype=torch.float16) for name in "xy")
        b.tensors = [torch.full((70_000,), 2.0).half(), torch.zeros(70_000).half()]
        mean = b.call(op.default, *((x,) if op is aten.mean else (x, y)))
        gm = apply(b, b.module(b.call(aten.mul.Tensor, y, mean), mean), clean.mean_losses_pass, clean.wide_losses_pass)
        assert ops(gm)[-4:] == ["sum", "mul.Tensor", "to.dtype", "mul.Tensor"]

    def test_a_16_bit_loss_is_wide_where_it_is_the_loss(self) -> None:
        """A buffer that averages the loss keeps its dtype."""
        b = Build()
        logits, labels = b.input("logits", 4, 5, dtype=torch.bfloat16), b.input("labels", 4, dtype=torch.int64)
        average = b.input("average", dtype=torch.bfloat16)
        loss = b.call(aten.cross_entropy_loss.default, logits, labels)
        halved = b.call(aten.mul.Tensor, loss, 0.5)
        updated = b.call(aten.lerp.Scalar, average, b.call(aten.detach.default, loss), 0.1)
        gm = clean.wide_losses_pass(clean.cross_entropy_pass(b.module(halved, updated)))
        gm.recompile()
        wide, narrow = Checked(gm).run(*b.tensors)
        assert (wide.dtype, narrow.dtype) == (torch.float32, torch.bfloat16)
        assert wide != wide.bfloat16()


class TestBroadcast:
    def test_moves_past_pointwise_ops_and_embeddings(self) -> None:
        b = Build()
        ids, table, x = b.input("ids", 1, 3, dtype=torch.int64), b.parameter("table", 5, 4), b.input("x", 2, 3, 4)
        wide = b.call(aten.expand.default, ids, [2, 3])
        y = b.call(aten.mul.Tensor, b.call(aten.embedding.default, table, wide), 2.0)
        gm = apply(b, b.module(b.call(aten.add.Tensor, x, y)), clean.broadcast_pass)
        assert ops(gm) == ["embedding", "mul.Tensor", "add.Tensor"]

    def test_stays_before_what_needs_it(self) -> None:
        b = Build()
        token, x = b.parameter("token", 1, 1, 4), b.input("x", 2, 3, 4)
        y = b.call(aten.cat.default, [b.call(aten.expand.default, token, [2, 1, 4]), x], 1)
        gm = apply(b, b.module(y), clean.broadcast_pass)
        assert ops(gm) == ["expand", "cat"]

    def test_a_dtype_that_would_change_stays(self) -> None:
        """Without dims, a float32 operand does not make the result float32."""
        b = Build()
        x, gate = b.input("x", 2, 3, dtype=torch.bfloat16), b.input("gate", dtype=torch.float32)
        wide = b.call(aten.expand.default, b.call(aten.sigmoid.default, gate), [2, 3])
        gm = apply(b, b.module(b.call(aten.mul.Tensor, x, wide)), clean.broadcast_pass)
        assert ops(gm) == ["sigmoid", "expand", "mul.Tensor"]

    def test_attention_masks_broadcast(self) -> None:
        b = Build()
        q, mask = b.input("q", 2, 3, 5, 4), b.input("mask", 2, 1, 1, 5)
        wide = b.call(aten.expand.default, mask, [2, 3, 5, 5])
        gm = b.module(b.call(aten.scaled_dot_product_attention.default, q, q, q, wide))
        assert ops(apply(b, gm, clean.broadcast_pass, exact=False)) == ["scaled_dot_product_attention"]


class TestDeadCodeAndRunner:
    def test_inputs_stay(self) -> None:
        b = Build()
        x, _, w = b.input("x", 2), b.input("unread", 2), b.parameter("w", 2)
        b.call(aten.mul.Tensor, x, w)
        gm = clean.dead_code_pass(b.module(b.call(aten.neg.default, x)))
        assert [n.name for n in gm.graph.nodes if n.op == "placeholder"] == ["x", "unread"]
        assert ops(gm) == ["neg"]

    def test_the_runner_names_the_step_that_failed(self) -> None:
        def broken(gm: fx.GraphModule) -> fx.GraphModule:
            raise ValueError("no")

        b = Build()
        gm = b.module(b.call(aten.neg.default, b.input("x", 2)))
        with pytest.raises(ValueError, match="no") as caught:
            run(gm, [("dead code", clean.dead_code_pass), ("broken", broken)])
        assert caught.value.__notes__ == ["in pass 'broken'"]

    def test_notes_are_said_once(self) -> None:
        gm = Build().module()
        note(gm, "a")
        note(gm, "a")
        assert gm.meta["notes"] == ["a"]

    def test_all_steps_twice_are_once(self) -> None:
        b = Build()
        x, w, bias = b.input("x", 2, 3, 4), b.parameter("w", 4, 12), b.parameter("b", 12)
        y = b.call(aten.addmm.default, bias, b.call(aten.view.default, x, [-1, 4]), w)
        split = b.call(aten.split.Tensor, b.call(aten.view.default, y, [2, 3, 12]), 4, 2)
        q, k, v = (b.call(operator.getitem, split, i) for i in range(3))
        gm = b.module(b.call(aten.mean.default, b.call(aten.add.Tensor, b.call(aten.mul.Tensor, q, k), v)))
        gm = run(gm, clean.STEPS)
        once = text(gm)
        assert ops(gm) == ["t", "linear"] * 3 + ["mul.Tensor", "add.Tensor", "sum", "mul.Tensor"]
        assert text(run(copy.copy(gm), clean.STEPS)) == once
