"""The work of a price: by kind of layer and stage, not by layer."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest

from autopar.capture import deepen
from autopar.devices import parse
from autopar.graph import Graph
from autopar.plan import Plan, Strategy
from autopar.price import Pricer
from autopar.search import filled_plan, reprice
from autopar.search import timeline as timelines
from autopar.workload import Workload
from autopar.zoo.hf import build_config

CLUSTER = parse("16xH100-80GB")
PINS = {"tensor": 2, "pipeline": 4, "microbatches": 8, "zero": 1, "activations": "full:2"}
CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 512, "intermediate_size": 1024,
          "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 1024}  # fmt: skip


@pytest.fixture(scope="module")
def graphs() -> tuple[Graph, Graph]:
    graph = Workload(*build_config(CONFIG, 256, 64), name="llama").capture()
    deep = deepen(graph, 2, 120)
    assert deep is not None
    return graph, deep


def counted(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> tuple[Plan, Counter[str]]:
    """A plan that is priced for the second time, and how often that calls what takes its time."""
    calls: Counter[str] = Counter()

    def count(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def counting(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, counting)

    pricer = Pricer(graph, CLUSTER, "bfloat16")
    plan = filled_plan(graph, CLUSTER.count, PINS, compiled=True)
    plan = reprice(graph, CLUSTER, pricer, plan, "bfloat16")
    for owner, name in (
        (Pricer, "layer"), (Pricer, "odd_experts"), (Pricer, "_price"), (Strategy, "__init__"), (Strategy, "degree"),
        (Strategy, "data_axes"), (timelines, "_totals"),
    ):  # fmt: skip
        count(owner, name)
    again = reprice(graph, CLUSTER, pricer, plan, "bfloat16")
    monkeypatch.undo()
    assert again == plan
    return plan, calls


def test_a_deep_model_takes_no_more_work_than_a_shallow_one(
    graphs: tuple[Graph, Graph], monkeypatch: pytest.MonkeyPatch
) -> None:
    shallow, deep = (counted(graph, monkeypatch)[1] for graph in graphs)
    assert deep == shallow and shallow["layer"] <= 4 * 2 and shallow["_price"] == 0


def test_strategies_that_are_equal_but_not_the_same_have_the_same_price(graphs: tuple[Graph, Graph]) -> None:
    """As those of a plan's file: nothing is shared between its layers."""
    graph, _ = graphs
    pricer = Pricer(graph, CLUSTER, "bfloat16")
    plan = reprice(graph, CLUSTER, pricer, filled_plan(graph, CLUSTER.count, PINS, compiled=True), "bfloat16")
    copies = tuple(dataclasses.replace(x, strategy=dataclasses.replace(x.strategy)) for x in plan.layers)
    assert len({id(layer.strategy) for layer in copies}) == len(copies)
    copied = dataclasses.replace(plan, layers=copies)
    assert reprice(graph, CLUSTER, pricer, copied, "bfloat16") == plan
