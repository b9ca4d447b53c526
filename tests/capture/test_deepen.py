"""Graphs of models that are captured with few blocks equal those of the full models in every field."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from tiers import in_short, slow
from torch import nn

from autopar.capture import deepen
from autopar.cli.load import SizeOptions, load_model
from autopar.devices import parse
from autopar.graph import Graph
from autopar.planning import compared_graph, plan_model
from autopar.search import SearchOptions
from autopar.workload import FewBlocks, Workload
from autopar.zoo import CATALOGUE, few_blocks
from autopar.zoo.hf import build_config

NAMES = [entry.name for entry in CATALOGUE if few_blocks(entry.name)]
KINDS = {entry.config["model_type"]: entry.name for entry in reversed(CATALOGUE) if entry.name in NAMES}
SIZES = SizeOptions(seq=256, global_batch=4)


def fields_of(value: Any, but: tuple[str, ...] = ()) -> dict[str, Any]:
    return {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.name not in but}


def check_equal(graph: Graph, other: Graph) -> None:
    """Compare all fields, with the order of dicts; graphs by their text, and by the shapes and dtypes of their nodes."""
    assert [*graph.constants] == [*other.constants]
    assert all(torch.equal(graph.constants[name], other.constants[name]) for name in graph.constants)
    assert str(graph.prelude and graph.prelude.graph) == str(other.prelude and other.prelude.graph)
    for name, value in fields_of(graph, ("constants", "prelude", "classes", "opaque")).items():
        theirs = getattr(other, name)
        assert value == theirs, name
        if isinstance(value, dict):
            assert [*value] == [*theirs], name
    assert not graph.opaque and not other.opaque
    assert [*graph.classes] == [*other.classes]
    for cls, theirs in zip(graph.classes.values(), other.classes.values(), strict=True):
        assert fields_of(cls, ("graph",)) == fields_of(theirs, ("graph",))
        assert str(cls.graph.graph) == str(theirs.graph.graph)
        for node, counterpart in zip(cls.graph.graph.nodes, theirs.graph.graph.nodes, strict=True):
            val, expected = node.meta.get("val"), counterpart.meta.get("val")
            if isinstance(val, torch.Tensor):
                assert (val.shape, val.dtype) == (expected.shape, expected.dtype), node


@pytest.mark.parametrize("kind", in_short(KINDS, "gpt2", "llama", "deepseek_v3", "vit"))
def test_a_block_is_repeated_as_in_a_deeper_model(kind: str) -> None:
    entry, number, more = few_blocks(KINDS[kind])  # type: ignore[misc]
    count = next(name for name in ("n_layer", "num_hidden_layers") if name in entry.config)
    few, full = (
        Workload(
            *build_config(entry.config | {count: entry.config[count] + by}, SIZES.seq, SIZES.global_batch)
        ).capture()
        for by in (0, 2)
    )
    deeper = deepen(few, number, 2)
    assert deeper is not None and more > 2
    check_equal(deeper, full)


@pytest.mark.parametrize("name", ["gpt2", *(slow(n) for n in NAMES if n != "gpt2")])
def test_the_zoo_is_captured_with_few_blocks(name: str) -> None:
    workload = load_model(name, SIZES, few_blocks=True)
    assert workload.few_blocks is not None
    full = workload.few_blocks.full()
    parameters = sum(p.numel() for p in full.model.parameters())
    assert sum(p.numel() for p in workload.model.parameters()) < parameters
    graph = workload.capture()
    check_equal(graph, full.capture())
    assert sum(math.prod(s.shape) for s in graph.state if s.parameter and s.alias is None) == parameters


def test_blocks_that_differ_are_captured_in_full() -> None:
    """In gpt-oss every second block has a sliding window; T5's blocks are in two lists."""
    assert few_blocks("gpt-oss-120b") is None and few_blocks("t5-large") is None
    entry = next(entry for entry in CATALOGUE if entry.name == "gpt-oss-120b")
    graph = Workload(*build_config(entry.config | {"num_hidden_layers": 4}, SIZES.seq, SIZES.global_batch)).capture()
    assert deepen(graph, 1, 1) is None


def test_a_plan_of_few_captured_blocks_is_the_plan_of_all() -> None:
    few = load_model("gpt2", SIZES, few_blocks=True)
    assert few.few_blocks is not None
    options = SearchOptions(time_limit_s=5.0, pipeline=1, tensor=2)
    (_, plan), (_, full) = (plan_model(w, parse("8xH100"), options) for w in (few, few.few_blocks.full()))
    assert plan.layers == full.layers and plan.prediction == full.prediction
    assert any("5 of its 14 layers were captured" in note for note in plan.notes)


class Stack(nn.Module):
    """Blocks of two classes in turns."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        kinds = (lambda: nn.Linear(4, 4), lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
        self.blocks = nn.ModuleList(kinds[i % 2]() for i in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def test_the_note_of_blocks_that_cannot_be_repeated_is_that_of_the_full_model() -> None:
    batch = (torch.randn(4, 4),)
    graph = compared_graph(Workload(Stack(3), batch, few_blocks=FewBlocks(1, 2, lambda: Workload(Stack(5), batch))))
    assert len(graph.parameters) == 2 * 5
    (note,) = (note for note in graph.notes if "equals the model" in note)
    assert "were captured" not in note
