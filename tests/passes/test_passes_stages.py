"""``passes.stages``: what crosses a cut, what a stage owns, and in which types it takes the batch."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch
from exactness import subject
from sketch import Sketch, use, whole

from autopar.graph import Graph, LayerClass
from autopar.plan import Plan, Role, Strategy
from autopar.search.manual import make_mesh, manual_plan
from autopar.shard import plan_shardings
from autopar.types import I, R, S
from passes.runner import run
from passes.stages import LocalProgram, cut_stages

aten = torch.ops.aten
ROWS, WIDTH = 8, 4


def entry() -> LayerClass:
    draw = Sketch("Entry")
    x, w = draw.input("x", ROWS, WIDTH, dtype=torch.float64), draw.parameter("w", WIDTH, WIDTH)
    return draw.layer(draw.call(aten.linear.default, x, w))


def middle() -> LayerClass:
    draw = Sketch("Middle")
    h, w = draw.activation("h", ROWS, WIDTH), draw.parameter("w", WIDTH, WIDTH)
    return draw.layer(draw.call(aten.linear.default, h, w))


def end(name: str = "End") -> LayerClass:
    """Reads the newest value, an old one (a long skip) and the batch again."""
    draw = Sketch(name)
    h, skip = draw.activation("h", ROWS, WIDTH), draw.activation("skip", ROWS, WIDTH)
    x = draw.input("x", ROWS, WIDTH, dtype=torch.float64)
    both = draw.call(aten.add.Tensor, h, skip)
    return draw.layer(draw.call(aten.sum.default, draw.call(aten.mul.Tensor, both, x)))


def skip_graph() -> Graph:
    """entry -> a, b = middle(a), c = middle(b), loss = end(c, a)."""
    first, block, last = entry(), middle(), end()
    layers = (
        use(first, "first", (), ("a",)),
        use(block, "second", ("a",), ("b",)),
        use(block, "third", ("b",), ("c",)),
        use(last, "last", ("c", "a"), ("loss",)),
    )
    return whole("skip", (first, block, last), layers)


def cut(graph: Graph, plan: Plan) -> LocalProgram:
    return cut_stages(graph, plan, plan_shardings(graph, plan))


def names(borders: tuple) -> list[str]:
    return [border.value.name for border in borders]


class TestCutStages:
    def test_a_skip_is_handed_on_hop_by_hop(self) -> None:
        graph = skip_graph()
        stages = cut(graph, manual_plan(graph, pipeline=4, microbatches=2)).stages
        assert [names(stage.receives) for stage in stages] == [[], ["a"], ["a", "b"], ["a", "c"]]
        assert [names(stage.sends) for stage in stages] == [["a"], ["a", "b"], ["a", "c"], []]

    def test_what_one_stage_sends_the_next_receives(self) -> None:
        graph = skip_graph()
        stages = cut(graph, manual_plan(graph, pipeline=4, data=2, microbatches=2)).stages
        for sender, receiver in zip(stages, stages[1:], strict=False):
            assert sender.sends == receiver.receives
        (border,) = stages[0].sends
        assert border.shape == (ROWS // 4, WIDTH) and border.types == (S(0),)  # two microbatches on two devices

    def test_a_value_that_nobody_reads_later_is_not_sent(self) -> None:
        graph = skip_graph()
        stages = cut(graph, manual_plan(graph, pipeline=2, cuts=(3,))).stages
        assert names(stages[1].receives) == ["a", "c"]
        assert stages[0].layers == (0, 1, 2) and stages[1].layers == (3,)

    def test_layers_of_one_class_and_strategy_share_their_local_layer(self) -> None:
        graph = skip_graph()
        program = cut(graph, manual_plan(graph, data=2))
        assert program.layers[1] is program.layers[2] and program.layers[0] is not program.layers[1]

    def test_layers_of_one_class_differ_under_different_strategies(self) -> None:
        graph = skip_graph()
        recomputed = {1: Strategy((Role.DATA,), activations="full")}
        program = cut(graph, manual_plan(graph, data=2, strategies=recomputed))
        assert program.layers[1] is not program.layers[2]
        assert program.layers[1].sharding.types[1] is program.layers[2].sharding.types[1]

    def test_inputs_go_to_the_stages_that_read_them(self) -> None:
        graph = skip_graph()
        stages = cut(graph, manual_plan(graph, pipeline=4, microbatches=2)).stages
        assert [sorted(stage.inputs) for stage in stages] == [["x"], [], [], ["x"]]

    def test_an_input_is_sliced_where_all_its_readers_want_that(self) -> None:
        graph = skip_graph()
        (stage,) = cut(graph, manual_plan(graph, data=2)).stages
        assert stage.inputs == {"x": (S(0),)}

    def test_an_input_is_whole_where_its_readers_disagree(self) -> None:
        """The first layer is data-parallel on both axes, the last one idle on the inner one: slicing is free, gathering is not."""
        graph = skip_graph()
        mesh = make_mesh(("outer", 2), ("inner", 2))
        idle = {3: Strategy((Role.DATA, Role.IDLE))}
        plan = manual_plan(graph, mesh=mesh, strategies=idle)
        (stage,) = cut(graph, plan).stages
        assert stage.inputs == {"x": (S(0), R)}
        apart = cut(graph, replace(plan, stages=manual_plan(graph, mesh=mesh, pipeline=2).stages)).stages
        assert [stage.inputs for stage in apart] == [{"x": (S(0), S(0))}, {"x": (S(0), I)}]

    def test_a_parameter_of_two_layers_of_a_stage_is_the_stages_own(self) -> None:
        graph = subject("gpt2").graph
        (tied,) = graph.shared_parameters
        (stage,) = cut(graph, manual_plan(graph, tensor=2)).stages
        assert stage.owned == {tied: 0}

    def test_a_parameter_of_two_stages_belongs_to_a_layer_in_each(self) -> None:
        graph = subject("gpt2").graph
        (tied,) = graph.shared_parameters
        program = cut(graph, manual_plan(graph, pipeline=2, tensor=2, microbatches=2))
        assert [stage.owned for stage in program.stages] == [{}, {}]
        homes = [i for i in (0, len(graph.layers) - 1) if tied in graph.layers[i].parameters]
        layouts = set()
        for i in homes:
            position = graph.layers[i].parameters.index(tied)
            layouts.add((program.layers[i].parameters[position].shape, program.layers[i].parameters[position].types))
        assert len(homes) == 2 and len(layouts) == 1  # one layout in both, or their gradients could not be added

    def test_scalars_and_constants_go_where_they_are_read(self) -> None:
        graph = subject("llama").graph
        first, last = cut(graph, manual_plan(graph, pipeline=2, microbatches=2)).stages
        assert first.scalars == () and last.scalars == ("valid_labels",)
        assert first.constants == last.constants == tuple(graph.constants)

    def test_every_parameter_has_a_stage(self) -> None:
        for name in ("mlp", "gpt2", "llama", "bert"):
            graph = subject(name).graph
            program = cut(graph, manual_plan(graph, pipeline=2, microbatches=2))
            homes = {p for stage in program.stages for i in stage.layers for p in graph.layers[i].parameters}
            assert homes == set(graph.parameters)
            assert [i for stage in program.stages for i in stage.layers] == list(range(len(graph.layers)))


class TestRunner:
    def test_a_failing_step_is_named(self) -> None:
        def fail(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
            raise ValueError("no")

        with pytest.raises(ValueError, match="no") as error:
            run(middle().graph, [("first", lambda gm: gm), ("second", fail)])
        assert error.value.__notes__ == ["in pass 'second'"]

    def test_steps_are_told_at_debug_level_and_graphs_linted(self, caplog: pytest.LogCaptureFixture) -> None:
        def tangle(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
            nodes = list(gm.graph.nodes)
            nodes[1].prepend(nodes[2])  # a use before its definition
            return gm

        with caplog.at_level(logging.DEBUG, "autopar.passes"):
            run(middle().graph, [("nothing", lambda gm: gm)])
            assert "nothing: 4 -> 4 nodes" in caplog.text
            with pytest.raises(RuntimeError) as error:
                run(middle().graph, [("tangle", tangle)])
        assert error.value.__notes__ == ["in pass 'tangle'"]
