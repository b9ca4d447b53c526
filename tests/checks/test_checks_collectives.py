"""The structural check: it agrees with every plan's program, and names what was changed in one behind its back."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from exactness import KINDS, subject
from tiers import slow
from torch import fx

from autopar.checks.collectives import check_collectives, exchanges, priced
from autopar.errors import ProgramError, UsageError
from autopar.flow import gradient_flow
from autopar.price.state import precision
from autopar.price.table import build
from autopar.search.manual import make_mesh, manual_plan
from autopar.shard import plan_shardings
from autopar.verify import PlanKind
from passes.collectives import convert
from passes.joined import is_joined
from passes.stages import LocalProgram, cut_stages


def program(model: str, **options: object) -> LocalProgram:
    graph = subject(model).graph
    plan = manual_plan(graph, **options)  # type: ignore[arg-type]
    return cut_stages(graph, plan, plan_shardings(graph, plan))


LARGE = [kind for kind in KINDS if kind.devices > 4]
"""The kinds that ``test_exactness`` runs nowhere: each of the others is checked where it runs, by default or in the slow tests."""


@pytest.mark.parametrize(
    ("model", "kinds"), [("mlp", KINDS), ("llama", LARGE), slow("llama", KINDS), slow("bert", KINDS)]
)
def test_every_kind_of_plan_is_emitted_as_it_was_priced(model: str, kinds: Sequence[PlanKind]) -> None:
    graph = subject(model).graph
    counts = {}
    for kind in kinds:
        try:
            plan = kind.plan(graph)
        except UsageError:  # not every model admits every kind
            continue
        counts[kind.name] = check_collectives(cut_stages(graph, plan, plan_shardings(graph, plan)))
    assert len(counts) > len(kinds) / 3 and max(counts.values()) > 0
    if kinds is KINDS:
        assert counts["data 2"] == 0 < counts["tensor 2"] and counts["mixed: tensor 1, 2 and 4"] > counts["tensor 4"]


def test_a_megatron_block_has_four_all_reduces() -> None:
    """Two forward and two backward, of the block's activations (Shoeybi et al. 2019, figure 4)."""
    block = program("llama", tensor=2).layers[1]
    found = sorted((one.backward, one.collective, one.bytes) for one in exchanges(block))
    activation = 8 * 16 * 32 * 8
    assert found == [(False, "all_reduce", activation)] * 2 + [(True, "all_reduce", activation)] * 2


def test_gradients_flow_where_the_price_saw_them_flow() -> None:
    for model in ("mlp", "llama", "bert"):
        for cls in subject(model).graph.classes.values():
            table, _ = build(cls, precision("float64"))
            flow = gradient_flow(cls)
            assert {name: table.value_gradient[name] for name in flow} == flow


def test_it_takes_milliseconds() -> None:
    """A layer class is checked once, however many layers have it."""
    given = program("llama", data=2, tensor=2)
    start = time.perf_counter()
    check_collectives(given)
    assert time.perf_counter() - start < 1.0


# -- faults -----------------------------------------------------------------------------------------------------------


def block_conversion(given: LocalProgram, source: str, target: str) -> fx.Node:
    nodes = given.layers[1].graph.graph.nodes
    return next(n for n in nodes if n.target is convert and (n.args[2], n.args[3]) == (source, target))


def drop(given: LocalProgram) -> None:
    node = block_conversion(given, "P", "I")
    node.replace_all_uses_with(node.args[0])
    given.layers[1].graph.graph.erase_node(node)


def wrong_axis(given: LocalProgram) -> None:
    node = block_conversion(given, "P", "I")
    node.args = (node.args[0], ("data",), *node.args[2:])


def wrong_target(given: LocalProgram) -> None:
    node = block_conversion(given, "P", "I")
    node.args = (*node.args[:3], "R")


def twice(given: LocalProgram) -> None:
    node = block_conversion(given, "I", "R")
    graph = given.layers[1].graph.graph
    with graph.inserting_after(node):
        again = graph.call_function(convert, node.args)
    again.meta = dict(node.meta)
    first = next(iter(node.users))
    first.replace_input_with(node, again)


def unread(given: LocalProgram) -> None:
    node = block_conversion(given, "I", "R")
    graph = given.layers[1].graph.graph
    with graph.inserting_after(node):
        graph.call_function(convert, node.args).meta = dict(node.meta)


def fewer_bytes(given: LocalProgram) -> None:
    node = block_conversion(given, "P", "I")
    node.args[0].meta["val"] = node.args[0].meta["val"][:1]
    node.meta["val"] = node.meta["val"][:1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop, r"model.layers.0: linear_3 reaches add_3 as P on tensor where I was decided"),
        (wrong_axis, r"model.layers.0: linear_3 is S\(0\) on data and is converted from P"),
        (wrong_target, r"linear_3 reaches add_3 as R on tensor where I was decided"),
        (twice, r"in the program, but not priced: backward all_reduce of mul_1 on tensor"),
        (unread, r"nothing reads mul_1 as R on tensor"),
        (fewer_bytes, r"priced, but not in the program: forward all_reduce of linear_3 on tensor \(16384 bytes\)"),
    ],
)
def test_a_changed_program_is_named(change: Callable[[LocalProgram], None], message: str) -> None:
    given = program("llama", data=2, tensor=2, overlap="none")
    check_collectives(given)
    change(given)
    with pytest.raises(ProgramError, match=message) as error:
        check_collectives(given)
    assert "bug in autopar" in (error.value.hint or "")


# -- faults in products joined with the conversion of their input ------------------------------------------------------


def joined_call(given: LocalProgram) -> fx.Node:
    """Query, key and value."""
    return next(n for n in given.layers[1].graph.graph.nodes if is_joined(n))


def joined_on_another_axis(given: LocalProgram) -> None:
    joined_call(given).update_kwarg("axis", "data")


def joined_from_another_type(given: LocalProgram) -> None:
    joined_call(given).update_kwarg("src", "S(1)")


def another_weight(given: LocalProgram) -> None:
    call = joined_call(given)
    query, *others = call.args[1]
    call.update_arg(1, [others[0], *others])


def the_wrong_value(given: LocalProgram) -> None:
    """The residual in place of the norm's result: of equal types, but another value."""
    call = joined_call(given)
    call.update_arg(0, next(iter(given.layers[1].graph.graph.nodes)))


def weight_in_another_type(given: LocalProgram) -> None:
    call = joined_call(given)
    graph = given.layers[1].graph.graph
    query, *others = call.args[1]
    with graph.inserting_before(call):
        whole = graph.call_function(convert, (query, ("tensor",), "S(0)", "R"))
    whole.meta = dict(query.meta)
    call.update_arg(1, [whole, *others])


def not_joined(given: LocalProgram) -> None:
    """As if the pass had left one layer class out."""
    plan = given.plan
    waiting = program("llama", data=2, tensor=2, overlap="none")
    object.__setattr__(given.layers[1], "graph", waiting.layers[1].graph)
    assert plan.layers[1].strategy.options.by_name["overlap"] == "tensor"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (joined_on_another_axis, r"model.layers.0: mul_1 is S\(0\) on data and is converted from I"),
        (joined_from_another_type, r"model.layers.0: mul_1 is I on tensor and is converted from S\(1\)"),
        (
            another_weight,
            r"priced, but not in the program: backward all_reduce of mul_1 on tensor .* overlapped with the gradients of",
        ),
        (the_wrong_value, r"in the program, but not priced: backward all_reduce of x on tensor"),
        (weight_in_another_type, r"reaches linear as R on tensor where S\(0\) was decided"),
        (
            not_joined,
            r"priced, but not in the program: backward all_reduce of mul_1 on tensor .* overlapped with the gradients of",
        ),
    ],
)
def test_a_changed_joined_call_is_named(change: Callable[[LocalProgram], None], message: str) -> None:
    given = program("llama", data=2, tensor=2)
    check_collectives(given)
    change(given)
    with pytest.raises(ProgramError, match=message):
        check_collectives(given)


def test_a_dropped_conversion_between_layers_is_named() -> None:
    graph = subject("mlp").graph
    plan = next(kind for kind in KINDS if kind.name == "mixed: tensor 1, 2 and 4").plan(graph)
    given = cut_stages(graph, plan, plan_shardings(graph, plan))
    (stage,) = given.stages
    assert stage.reshardings
    shortened = replace(stage.reshardings[0], steps=())
    changed = replace(given, stages=(replace(stage, reshardings=(shortened, *stage.reshardings[1:])),))
    with pytest.raises(ProgramError, match=r"the boundary before layers[.\d]+: .*priced, but not in the program"):
        check_collectives(changed)


def test_collectives_on_several_axes_are_one() -> None:
    given = program("llama", mesh=make_mesh(("tensor0", 2), ("tensor1", 2)))
    found = list(exchanges(given.layers[1]))
    assert {one.axes for one in found} == {("tensor0", "tensor1")} and sorted(found) == sorted(priced(given.layers[1]))
    assert re.search(r"all_reduce of \w+ on tensor0, tensor1", str(found[0]))
