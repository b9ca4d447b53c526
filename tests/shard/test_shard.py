"""The op-level optimum: proved against brute force and a second solver, and the layouts that it must find."""

from __future__ import annotations

import functools
import itertools
import math
import random
import time
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from exactness import subject
from sketch import Sketch

from autopar.capture import capture
from autopar.devices import parse
from autopar.flow import gradient_flow, parameter_nodes
from autopar.graph import Graph, LayerClass
from autopar.plan import Axis, Role, Strategy
from autopar.price import Pricer
from autopar.search.manual import make_mesh
from autopar.shard import eliminate as elimination
from autopar.shard import layer_sharding, role_types, solve
from autopar.shard import problem as problem_module
from autopar.shard.eliminate import eliminate
from autopar.shard.milp import solve_milp
from autopar.shard.plan import LayerTypes
from autopar.shard.problem import Problem
from autopar.shard.solve import _solve
from autopar.sharding import AxisTypes, Sharding
from autopar.types import I, P, R, S
from passes.communication import conversions
from passes.pad import pad_class

aten = torch.ops.aten


# -- the optimum ------------------------------------------------------------------------------------------------------


def brute_force(problem: Problem) -> float:
    """The least objective over every choice of one option per node; infinite if none is legal."""
    problem.cost = functools.cache(problem.cost)  # asked for again and again
    problem.conversion_cost = functools.cache(problem.conversion_cost)
    names = list(problem.options)
    choices = itertools.product(*(range(len(problem.options[name])) for name in names))
    return min(problem.objective(dict(zip(names, choice, strict=True))) for choice in choices)


def choices_of(problem: Problem) -> int:
    return math.prod(len(options) for options in problem.options.values())


def ordered_by_looking_at_all(
    factors: list[elimination._Factor], sizes: dict[str, int], measure: elimination.Measure
) -> list[str]:
    """``_ordered``, with everything measured anew before every step."""
    near = {name: {name}.union(*(f.variables for f in factors if name in f.variables)) for name in sizes}
    found = []
    while near:
        entries = {name: math.prod(sizes[v] for v in group) for name, group in near.items()}
        found.append(min(near, key=lambda v: (measure(v, near, entries, sizes), v)))
        group = near.pop(found[-1]) - {found[-1]}
        for v in group:
            near[v] = (near[v] | group) - {found[-1]}
    return found


@pytest.mark.parametrize("measure", [elimination._table_size, elimination._remaining, elimination._fill_in])
def test_the_order_of_elimination_is_that_of_looking_at_every_variable_each_time(measure: elimination.Measure) -> None:
    draw = random.Random(0)
    for count in range(1, 25):
        sizes = {f"v{i}": draw.randint(1, 5) for i in range(count)}
        pairs = [tuple(draw.sample(list(sizes), min(2, count))) for _ in range(count + 3)]
        factors = [elimination._Factor(pair, np.zeros([sizes[v] for v in pair])) for pair in pairs]
        assert list(elimination._ordered(factors, sizes, measure)) == ordered_by_looking_at_all(factors, sizes, measure)


def test_a_long_chain_is_eliminated_in_time_that_grows_with_its_length() -> None:
    sizes = {f"v{i}": 2 for i in range(8_000)}
    names = list(sizes)
    factors = [elimination._Factor(pair, np.zeros((2, 2))) for pair in itertools.pairwise(names)]
    begun_s = time.process_time()
    assert len(elimination._ordered(factors, sizes, elimination._table_size)) == 8_000
    assert time.process_time() - begun_s < 2  # looking at every variable each time takes over 5


def two_linears() -> LayerClass:
    """A residual around two linears with a gelu between."""
    draw = Sketch("two_linears")
    x = draw.activation("x", 4, 8, 16)
    up, down = draw.parameter("up", 32, 16), draw.parameter("down", 16, 32)
    inner = draw.call(aten.gelu.default, draw.call(aten.linear.default, x, up))
    return draw.layer(draw.call(aten.add.Tensor, x, draw.call(aten.linear.default, inner, down)))


def shared_readers() -> LayerClass:
    """Two products of one value, multiplied: the conversion of the value is to be paid once."""
    draw = Sketch("shared_readers")
    x = draw.activation("x", 4, 8, 16)
    gate, up = draw.parameter("gate", 32, 16), draw.parameter("up", 32, 16)
    left, right = draw.call(aten.linear.default, x, gate), draw.call(aten.linear.default, x, up)
    return draw.layer(draw.call(aten.mul.Tensor, left, right))


def summed_loss() -> LayerClass:
    """A loss: its type must be I or P, and there are no gradients of the labels."""
    draw = Sketch("summed_loss")
    x = draw.activation("x", 4, 8, 16)
    y = draw.input("y", 4, 8, 6, dtype=torch.float64)
    out = draw.parameter("out", 6, 16)
    difference = draw.call(aten.sub.Tensor, draw.call(aten.linear.default, x, out), y)
    return draw.layer(draw.call(aten.sum.default, draw.call(aten.mul.Tensor, difference, difference)))


def random_layer(seed: int) -> LayerClass:
    """Up to five calls on random earlier values, of random widths, as long as brute force remains cheap."""
    rng = random.Random(seed)
    draw = Sketch(f"random_{seed}")
    rows, length, width = rng.choice((2, 4)), rng.choice((4, 6)), rng.choice((8, 12, 64))
    values = [draw.activation("x", rows, length, width)]
    weights = [draw.parameter(f"w{i}", width, width) for i in range(2)]
    for _ in range(rng.randint(3, 4)):
        value = rng.choice(values)
        kind = rng.choice(("linear", "linear", "gelu", "softmax", "add", "mul"))
        if kind == "linear":
            values.append(draw.call(aten.linear.default, value, rng.choice(weights)))
        elif kind == "gelu":
            values.append(draw.call(aten.gelu.default, value))
        elif kind == "softmax":
            values.append(draw.call(aten.softmax.int, value, -1))
        else:
            values.append(draw.call(getattr(aten, kind).Tensor, value, rng.choice(values)))
    return draw.layer(values[-1])


ROLES = (Role.DATA, Role.TENSOR, Role.TENSOR_SEQUENCE, Role.IDLE)


def assert_optimal(cls: LayerClass, role: Role, size: int, most: int = 60_000) -> None:
    problem = Problem(cls, role, size, {})
    assert problem.feasible and choices_of(problem) <= most, choices_of(problem)
    best = brute_force(problem)
    for solver in (eliminate, solve_milp):
        found = solver(problem)
        value = math.inf if found is None else problem.objective(found)
        assert value == pytest.approx(best, rel=1e-9, abs=1e-12), solver.__name__


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.value)
@pytest.mark.parametrize("make", [two_linears, shared_readers, summed_loss], ids=lambda make: make.__name__)
def test_both_solvers_find_what_brute_force_finds(make: Any, role: Role) -> None:
    assert_optimal(make(), role, 2)


@pytest.mark.parametrize("seed", range(12))
def test_random_layers(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under prices that favour compute, wire, waiting or memory in turn: no layout is best under all of them."""
    weights = {
        "BYTE_HELD_S": (0.0, 1e-12, 1e-9),
        "COLLECTIVE_SHARE": (0.0, 0.02, 0.5),
        "REFERENCE_LINK_BYTES_PER_S": (1e9, 2e11, 1e14),
    }
    rng = random.Random(seed)
    for name, values in weights.items():
        monkeypatch.setattr(problem_module, name, rng.choice(values))
    cls = random_layer(seed)
    tried = 0
    for role in ROLES[1:3]:
        if choices_of(Problem(cls, role, 2, {})) <= 25_000:
            assert_optimal(cls, role, 2)
            tried += 1
    problem = Problem(cls, Role.TENSOR, 2, {})
    assert objective(problem, eliminate) == pytest.approx(objective(problem, solve_milp), rel=1e-9, abs=1e-12)


def objective(problem: Problem, solver: Any) -> float:
    found = solver(problem)
    assert found is not None
    return problem.objective(found)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_both_solvers_agree_on_whole_blocks(name: str) -> None:
    """Far too many choices for brute force, so the two methods hold each other: they share only the statement of the problem."""
    graph = subject(name).graph
    for index in (0, 1, len(graph.layers) - 1):
        cls = graph.classes[graph.layers[index].cls]
        for role in ROLES[1:3]:
            problem = Problem(cls, role, 2, {})
            assert objective(problem, solve_milp) == pytest.approx(objective(problem, eliminate), rel=1e-9, abs=1e-12)


def recurrence(steps: int) -> LayerClass:
    """A recurrence written out: every step reads a part of the same three values."""
    draw = Sketch(f"recurrence{steps}")
    x = draw.activation("x", 4, steps, 16)
    gate, step, out = (draw.call(aten.linear.default, x, draw.parameter(name, 16, 16)) for name in ("a", "b", "c"))
    state, results = draw.call(aten.select.int, step, 1, 0), []
    for at in range(steps):
        forget, more, read = (draw.call(aten.select.int, value, 1, at) for value in (gate, step, out))
        state = draw.call(aten.add.Tensor, draw.call(aten.mul.Tensor, forget, state), more)
        results.append(draw.call(aten.mul.Tensor, state, read))
    return draw.layer(draw.call(aten.add.Tensor, x, draw.call(aten.stack.default, results, 1)))


@pytest.mark.parametrize("role", ROLES[1:3], ids=lambda role: role.value)
def test_a_recurrence_fits_in_smaller_tables_with_fewer_conversions(role: Role, monkeypatch: Any) -> None:
    """A written-out scan took minutes in a mixed-integer program; with one conversion of each value at a time its tables fit."""
    problem = Problem(recurrence(2), role, 2, {})
    best = objective(problem, eliminate)
    assert best == pytest.approx(objective(problem, solve_milp), rel=1e-9)
    monkeypatch.setattr(elimination, "MAX_ENTRIES", 35_000 if role is Role.TENSOR else 15_000)
    with pytest.raises(elimination.TableTooLargeError):
        elimination._order(*elimination._factors(problem, elimination.MAX_CONVERSIONS))
    assert objective(problem, eliminate) == pytest.approx(best, rel=1e-9)


def test_a_value_in_no_type_that_its_readers_take_is_no_plan() -> None:
    """An op without a rule runs on whole values alone, and the batch is cut: that raised numpy's error of an empty table."""
    draw = Sketch("unruled")
    x = draw.activation("x", 4, 3, 8)
    lost = draw.call(aten.histc.default, x, 4)
    both = draw.call(aten.add.Tensor, draw.call(aten.sum.default, lost), draw.call(aten.mean.default, lost))
    problem = Problem(draw.layer(draw.call(aten.mul.Tensor, x, both)), Role.DATA, 2, {}, over_microbatches=True)
    assert eliminate(problem) is None


def test_a_conversion_is_paid_once_for_all_its_readers() -> None:
    cls = shared_readers()
    problem = Problem(cls, Role.TENSOR, 2, {})
    options = {
        name: {(o.operands, o.result): i for i, o in enumerate(found)} for name, found in problem.options.items()
    }
    columns = {"x": ((), I), "gate": ((), S(0)), "up": ((), S(0)), "linear_default": ((R, S(0)), S(2))}
    columns |= {"linear_default_1": columns["linear_default"], "mul_tensor": ((S(2), S(2)), S(2))}
    chosen = {name: options[name][key] for name, key in columns.items()}
    costs = sum(problem.cost(name)[index] for name, index in chosen.items())
    once = problem.conversion_cost("x", I, R) + problem.conversion_cost("mul_tensor", S(2), I)
    assert problem.objective(chosen) == pytest.approx(costs + once)


# -- the layouts that people write by hand ----------------------------------------------------------------------------


def tokens(rows: int, length: int) -> dict[str, torch.Tensor]:
    ids = torch.zeros(rows, length, dtype=torch.long, device="meta")
    return {"input_ids": ids, "labels": ids}


@pytest.fixture(scope="module")
def llama7b() -> Graph:
    """Llama 2 7B's block (arXiv:2307.09288) at its sequence length of 4096, two of them."""
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        config = transformers.LlamaConfig(
            hidden_size=4096, intermediate_size=11008, num_hidden_layers=2, num_attention_heads=32,
            num_key_value_heads=32, vocab_size=32000,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config)
    return capture(model, tokens(8, 4096), precision="bfloat16")


def gpt2(vocabulary: int) -> Graph:
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config = transformers.GPT2Config(vocab_size=vocabulary, n_layer=2, **off)
        model = transformers.GPT2LMHeadModel(config)
    return capture(model, tokens(8, 1024), precision="bfloat16")


@pytest.fixture(scope="module")
def gpt2_padded() -> Graph:
    return gpt2(50304)


def class_of(graph: Graph, layer: int) -> LayerClass:
    return graph.classes[graph.layers[layer].cls]


def parameter_types(cls: LayerClass, types: AxisTypes) -> dict[str, str]:
    nodes = parameter_nodes(cls)
    return {value.name: str(types.produced[node.name]) for value, node in zip(cls.parameters, nodes, strict=True)}


COLUMN_AND_ROW = {
    "input_layernorm.weight": "I",
    "self_attn.q_proj.weight": "S(0)",
    "self_attn.k_proj.weight": "S(0)",
    "self_attn.v_proj.weight": "S(0)",
    "self_attn.o_proj.weight": "S(1)",
    "post_attention_layernorm.weight": "I",
    "mlp.gate_proj.weight": "S(0)",
    "mlp.up_proj.weight": "S(0)",
    "mlp.down_proj.weight": "S(1)",
}


def layer_conversions(cls: LayerClass, types: AxisTypes) -> list[str]:
    """The collectives of a layer by name, such as ``forward all_reduce``."""
    steps = [step for one in conversions(cls.graph, (types,), gradient_flow(cls)) for step in one.steps]
    passes = [(name, getattr(step, name)) for step in steps for name in ("forward", "backward")]
    return [f"{name} {collective.value}" for name, collective in passes if collective.sends]


@pytest.mark.parametrize("size", [2, 4, 8])
def test_the_tensor_layout_of_llama_is_megatrons(llama7b: Graph, size: int) -> None:
    """arXiv:1909.08053, figure 4: f and g around attention and around the MLP."""
    types = solve(class_of(llama7b, 1), Role.TENSOR, size)
    assert types is not None and types.outputs == (I,)
    collectives = Counter(layer_conversions(class_of(llama7b, 1), types))
    assert collectives == {"forward all_reduce": 2, "backward all_reduce": 2}
    assert parameter_types(class_of(llama7b, 1), types) == COLUMN_AND_ROW


@pytest.mark.parametrize("size", [2, 4, 8])
def test_the_sequence_layout_of_llama_is_megatrons(llama7b: Graph, size: int) -> None:
    """arXiv:2205.05198, figure 5: g-bar and its conjugate; besides, the gradients of the two norms' weights are summed."""
    cls = class_of(llama7b, 1)
    types = solve(cls, Role.TENSOR_SEQUENCE, size)
    assert types is not None and types.outputs == (S(1),)
    assert Counter(layer_conversions(cls, types)) == {
        "forward all_gather": 2,
        "backward reduce_scatter": 2,
        "forward reduce_scatter": 2,
        "backward all_gather": 2,
        "backward all_reduce": 2,
    }
    assert parameter_types(cls, types) == COLUMN_AND_ROW
    weights = [node.name for node in parameter_nodes(cls)]
    reduced = [
        cls.parameters[weights.index(one.value)].name
        for one in conversions(cls.graph, (types,), gradient_flow(cls))
        if one.source == (I,)
    ]
    assert reduced == ["input_layernorm.weight", "post_attention_layernorm.weight"]


@pytest.mark.parametrize("role", [Role.TENSOR, Role.TENSOR_SEQUENCE], ids=lambda role: role.value)
def test_the_head_uses_the_vocabulary_parallel_loss(llama7b: Graph, role: Role) -> None:
    cls = class_of(llama7b, len(llama7b.layers) - 1)
    types = solve(cls, role, 4)
    assert types is not None
    assert set(types.kernel.values()) == {"vocab_parallel_cross_entropy_sum"}
    assert parameter_types(cls, types) == {"model.norm.weight": "I", "lm_head.weight": "S(0)"}
    assert types.outputs == (I,)


@pytest.mark.parametrize("name", ["gpt2", "three uses", "t5", "mixtral"])
def test_layers_of_one_class_have_the_same_types(name: str) -> None:
    """Types are derived once for a class, whatever its layers share with other layers."""
    graph = subject(name).graph
    first = {layer.cls: index for index, layer in reversed(list(enumerate(graph.layers)))}
    for (index, layer), role in itertools.product(enumerate(graph.layers), Role):
        assert role_types(graph, index, role, 2) == role_types(graph, first[layer.cls], role, 2), (layer.name, role)


def test_prices_and_programs_have_the_same_types() -> None:
    graph, mesh = subject("gpt2").graph, make_mesh(("outer", 2), ("inner", 2))
    pricer, types = Pricer(graph, parse("4xH100-80GB"), "float32"), LayerTypes(graph)
    for (index, layer), roles in itertools.product(enumerate(graph.layers), itertools.product(Role, repeat=2)):
        sharding = layer_sharding(types, index, mesh, Strategy(roles), 2)
        assert pricer.types(layer.cls, mesh, roles) == (None if sharding is None else sharding.types)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_tied_embedding_is_sharded_by_vocabulary_in_both_its_uses(gpt2_padded: Graph, size: int) -> None:
    last = len(gpt2_padded.layers) - 1
    (tied,) = gpt2_padded.shared_parameters
    assert gpt2_padded.shared_parameters[tied] == (0, last)
    first, head = (role_types(gpt2_padded, i, Role.TENSOR, size) for i in (0, last))
    assert first is not None and head is not None
    for layer, types in ((0, first), (last, head)):
        assert parameter_types(class_of(gpt2_padded, layer), types)["transformer.wte.weight"] == "S(0)"
    assert "masked_embedding" in first.kernel.values()
    assert set(head.kernel.values()) == {"vocab_parallel_cross_entropy_sum"}


def test_data_needs_no_conversion_anywhere(llama7b: Graph, gpt2_padded: Graph) -> None:
    for graph in (llama7b, gpt2_padded, subject("bert").graph, subject("mlp").graph):
        for index, layer in enumerate(graph.layers):
            types = role_types(graph, index, Role.DATA, 2)
            assert types is not None, layer.name
            cls = class_of(graph, index)
            assert conversions(cls.graph, (types,), gradient_flow(cls)) == ()
            assert set(parameter_types(class_of(graph, index), types).values()) <= {"R"}
        assert types.outputs == (P,)


def test_idle_is_invariant_throughout(llama7b: Graph, gpt2_padded: Graph) -> None:
    for graph in (llama7b, gpt2_padded):
        for index in range(len(graph.layers)):
            types = role_types(graph, index, Role.IDLE, 2)
            assert types is not None
            assert set(types.produced.values()) == {I} and set(types.outputs) == {I} and not types.letter


def test_a_block_is_solved_within_a_second(llama7b: Graph) -> None:
    _solve.cache_clear()
    for role in ROLES:
        start_s = time.perf_counter()
        assert solve(class_of(llama7b, 1), role, 8) is not None
        assert time.perf_counter() - start_s < 1.0


# -- constraints ------------------------------------------------------------------------------------------------------


def test_fixed_types_are_kept() -> None:
    cls = two_linears()
    free = solve(cls, Role.TENSOR, 2)
    assert free is not None
    for t in (I, S(0), S(1)):
        pinned = solve(cls, Role.TENSOR, 2, (("up", t),))
        assert pinned is not None and pinned.produced["up"] == t
        assert pinned.cost_s >= free.cost_s * (1 - 1e-9)


def test_roles_without_a_solution_are_none() -> None:
    draw = Sketch("flat")
    flat = draw.layer(draw.call(aten.gelu.default, draw.activation("x", 6, 5)))
    assert solve(flat, Role.TENSOR_SEQUENCE, 2) is None  # no sequence dim
    assert solve(flat, Role.DATA, 4) is None  # 4 does not divide 6 rows
    assert solve(flat, Role.DATA, 3) is not None
    assert solve(two_linears(), Role.TENSOR_SEQUENCE, 16) is None  # 8 positions


def assert_divisible(cls: LayerClass, types: AxisTypes, size: int) -> None:
    cls = pad_class(cls, Sharding((Axis("axis", size, 1),), (types,)))
    nodes = {node.name: node for node in cls.graph.graph.nodes}
    from autopar.ops.operands import operands

    for name, produced in types.produced.items():
        value = nodes[name].meta["val"]
        if produced.dim is not None:
            assert value.shape[produced.dim] % size == 0, (name, tuple(value.shape), str(produced), size)
        if nodes[name].op != "placeholder":
            for operand, needed in zip(operands(nodes[name]), types.needed[name], strict=True):
                if needed.dim is not None:
                    assert operand.meta["val"].shape[needed.dim] % size == 0, (name, operand.name, str(needed), size)


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6, 8, 16])
def test_sizes_that_do_not_divide_are_padded_or_give_another_layout_or_none(size: int) -> None:
    """Four key heads, eight query heads, a vocabulary of 96, eight rows of 16 tokens: few of them divide by 5 or 16."""
    solved = 0
    for name in ("llama", "gpt2", "bert", "mlp"):
        graph = subject(name).graph
        for index in range(len(graph.layers)):
            for role in ROLES:
                types = role_types(graph, index, role, size)
                if types is not None:
                    solved += 1
                    assert_divisible(class_of(graph, index), types, size)
    assert solved


def test_an_odd_vocabulary_is_padded() -> None:
    graph = gpt2(50257)
    for index in (0, len(graph.layers) - 1):
        types = role_types(graph, index, Role.TENSOR, 2)
        assert types is not None
        assert parameter_types(class_of(graph, index), types)["transformer.wte.weight"] == "S(0)"
        assert_divisible(class_of(graph, index), types, 2)
