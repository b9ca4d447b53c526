"""The rule table: every line executed on shards, the notation, the candidates that models live by, and user rules."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx

from autopar.checks.register import register_rule
from autopar.checks.rules import _difference, build, check, check_candidate, sample
from autopar.checks.samples import samples
from autopar.errors import RuleError
from autopar.ops.operands import operands, shape_of
from autopar.rules import Candidate, candidates, has_rule
from autopar.rules.notation import Atom, parse
from autopar.rules.padding import padding_after
from autopar.rules.table import TABLE
from autopar.rules.views import factors, gather
from autopar.types import I, P, R, S
from passes.localise import local_call, verify

aten = torch.ops.aten
SAMPLES = samples()


def x(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def of(target, *args, **kwargs) -> list[Candidate]:
    """The candidates of a call beyond all-I and all-R."""
    node, _ = build(sample(target, *args, **kwargs))
    found = candidates(node)
    count = len(operands(node))
    assert found[:2] == (Candidate((I,) * count, I), Candidate((R,) * count, R))
    return list(found[2:])


def by_letter(found: list[Candidate]) -> dict[str | None, tuple]:
    return {c.letter: (*c.operands, c.result) for c in found if c.letter}


def test_every_entry_has_a_sample():
    assert set(TABLE) == {given.name for given in SAMPLES}
    assert len(TABLE) >= 200


@pytest.mark.parametrize("name", sorted(TABLE))
def test_entry_holds_on_shards(name):
    reports = [check(given) for given in SAMPLES if given.name == name]
    assert sum(report.executions for report in reports) >= 2, f"{name} needs a sample in autopar/checks/samples.py"


@pytest.mark.parametrize("name", sorted(TABLE))
def test_localised_shapes_on_the_meta_device(name):
    for given in SAMPLES:
        if given.name != name:
            continue
        node, _ = build(given)
        for candidate in candidates(node):
            if candidate.extent % 2 or candidate.kernel:
                continue
            shapes = [_local(shape_of(o), t, 2) for o, t in zip(operands(node), candidate.operands, strict=True)]
            result = _local(shape_of(node), candidate.result, 2)
            verify(node, local_call(node, shapes, result), shapes, result)


def _local(shape, t, n):
    return tuple(size // n if i == t.dim else size for i, size in enumerate(shape))


def test_extent_guards_every_sharded_dim():
    for given in SAMPLES:
        node, _ = build(given)
        for candidate in candidates(node):
            for operand, t in zip(operands(node), candidate.operands, strict=True):
                if t.sharded:
                    assert candidate.extent > 1 and shape_of(operand)[t.dim] % candidate.extent == 0


def test_linear():
    found = of(aten.linear.default, x(2, 6, 8), x(4, 8), x(4))
    assert by_letter(found) == {
        "*0": (S(0), R, R, S(0)),
        "*1": (S(1), R, R, S(1)),
        "k": (S(2), S(1), P, P),
        "n": (R, S(0), S(0), S(2)),
    }
    assert {c.letter: c.extent for c in found} == {"*0": 2, "*1": 6, "k": 8, "n": 4}


def test_sums_are_jointly_linear_and_products_in_each_factor():
    partial = [c.operands for c in of(aten.add.Tensor, x(4, 6), x(4, 6)) if c.linear]
    assert partial == [(P, P)]
    partial = [c.operands for c in of(aten.mul.Tensor, x(4, 6), x(4, 6)) if c.linear]
    assert partial == [(P, R), (R, P)]
    assert not [c for c in of(aten.add.Tensor, x(4), 1.0) if c.linear]
    assert not [c for c in of(aten.gelu.default, x(4)) if P in c.operands]


def test_duplicate_operands_are_kept():
    value = x(4, 6)
    node, _ = build(sample(aten.mul.Tensor, value, value))
    assert len(operands(node)) == 2 and len(node.all_input_nodes) == 1
    assert candidates(node)[2].operands == (S(0), S(0))


def test_broadcast_dims_are_replicated():
    assert by_letter(of(aten.add.Tensor, x(2, 6, 8), x(8)))["*1"] == (S(1), R, S(1))
    assert by_letter(of(aten.add.Tensor, x(2, 6, 8), x(1, 6, 1)))["*0"] == (S(0), R, S(0))


def test_heads_of_a_view():
    found = by_letter(of(aten.view.default, x(2, 6, 32), [2, 6, 4, 8]))
    assert sorted(found.values(), key=str) == [(S(0), S(0)), (S(1), S(1)), (S(2), S(2))]
    assert {c.extent for c in of(aten.view.default, x(2, 6, 32), [2, 6, 4, 8]) if c.letter} == {2, 6, 4}


def test_merged_dim_is_sharded_by_its_outermost_letter_alone():
    found = of(aten.view.default, x(2, 6, 8), [12, 8])
    assert {(c.operands[0], c.result, c.extent) for c in found if c.letter} == {(S(0), S(0), 2), (S(2), S(1), 8)}


def test_factors():
    assert factors((2, 3, 32), (2, 3, 4, 8)) == (["d0=2", "d1=3", "(d2=4 d3=8)"], ["d0=2", "d1=3", "d2=4", "d3=8"])
    assert factors((6, 4), (4, 6))[0] == ["(d0=2 d1=3!)", "d2=4!"] or factors((6, 4), (4, 6))[0][0].startswith("(d0=2")
    assert factors((), ()) == ([], [])
    assert factors((1, 1), (1,)) == (["1", "1"], ["1"])
    assert factors((8, 0), (0,)) == (["1", "1"], ["1"])  # without elements


def test_an_index_of_a_single_element_without_dims_has_no_line():
    assert gather(build(sample(aten.gather.default, x(4), 0, torch.tensor(1)))[0]) is None


@pytest.mark.parametrize(
    ("target", "args"),
    [
        (aten.view.default, (x(), [1, 1])),
        (aten.expand.default, (x(), [2, 3])),
        (aten.repeat.default, (x(), [2, 3])),
        (aten.stack.default, ([x()],)),
        (aten.sum.default, (x(),)),
        (aten.softmax.int, (x(), 0)),
        (aten.aminmax.default, (x(4, 6),)),
        (aten.var_mean.default, (x(4, 6),)),
        (operator.getitem, ((x(), x()), 1)),
    ],
    ids=lambda value: str(value) if callable(value) else "",
)
def test_a_single_operand_without_dims(target, args):
    of(target, *args)


def test_bit_casts_are_no_reshapes():
    node, _ = build(sample(aten.view.dtype, x(4, 6), torch.int64))
    assert local_call(node, [(2, 6)], (2, 6))[:2] == (aten.view.dtype, node.args)
    assert not has_rule(node)  # above all, no partial sum passes


@pytest.mark.parametrize(("limits", "zero"), [((), True), ((0.0, 6.0), True), ((0.5, 1.0), False)])
def test_padding_of_a_clipped_value(limits, zero):
    node, _ = build(sample(aten.hardtanh.default, x(4, 6), *limits))
    assert padding_after(node, [True], in_result=True) is zero


def test_grouped_heads_shard_by_key_heads():
    found = of(
        aten.scaled_dot_product_attention.default,
        x(2, 8, 5, 4),
        x(2, 2, 5, 4),
        x(2, 2, 5, 4),
        is_causal=True,
        enable_gqa=True,
    )
    heads = next(c for c in found if c.letter == "h")
    assert heads.operands == (S(1), S(1), S(1)) and heads.extent == 2
    assert "l" not in by_letter(found)


def test_embedding_and_loss_name_their_kernels():
    embedding = next(c for c in of(aten.embedding.default, x(8, 4), torch.zeros(2, 3, dtype=torch.long)) if c.kernel)
    assert (embedding.operands, embedding.result, embedding.kernel) == ((S(0), R), P, "masked_embedding")
    from autopar.program.kernels import cross_entropy_sum

    found = of(cross_entropy_sum, x(2, 3, 8), torch.zeros(2, 3, dtype=torch.long))
    loss = next(c for c in found if c.kernel)
    assert (loss.operands, loss.result, loss.kernel) == ((S(2), R), I, "vocab_parallel_cross_entropy_sum")
    assert by_letter(found)["*0"] == (S(0), S(0), P)


def test_factories_are_replicated():
    node, _ = build(sample(aten.arange.default, 4))
    assert candidates(node) == (Candidate((), R),)


def test_op_without_a_line_is_replicated():
    node, _ = build(sample(aten.linalg_inv.default, x(4, 4)))
    assert not has_rule(node)
    assert candidates(node) == (Candidate((I,), I), Candidate((R,), R))


def test_mean_over_a_sharded_dim_becomes_a_scaled_sum():
    node, _ = build(sample(aten.mean.dim, x(4, 6), [-1], True))
    target, _, _, factor = local_call(node, [(4, 3)], (4, 1))
    assert target is aten.sum.dim_IntList and factor == 1 / 6
    assert local_call(node, [(2, 6)], (2, 1))[0] is aten.mean.dim


def test_verify_refuses_a_silent_broadcast():
    node, _ = build(sample(aten.expand.default, x(4, 1, 6), [4, 2, 6]))
    verify(node, local_call(node, [(2, 1, 6)], (2, 2, 6)), [(2, 1, 6)], (2, 2, 6))
    with pytest.raises(AssertionError, match="local shapes"):
        verify(node, (aten.expand.default, (node.args[0], [4, 2, 6]), {}, None), [(1, 1, 6)], (2, 2, 6))


@pytest.mark.parametrize(
    ("target", "args", "wrong"),
    [
        (aten.softmax.int, (x(6, 6), -1), Candidate((S(1),), S(1), "b", None, 6)),
        (aten.layer_norm.default, (x(6, 6), [6]), Candidate((S(1),), S(1), "d", None, 6)),
        (aten.linear.default, (x(6, 6), x(6, 6), x(6)), Candidate((S(1), S(1), R), P, "k", None, 6)),
        (aten.gelu.default, (x(6),), Candidate((P,), P)),
        (aten.matmul.default, (x(6, 6), x(6, 6)), Candidate((S(1), S(0)), R, "k", None, 6)),
    ],
)
def test_wrong_types_are_caught(target, args, wrong):
    node, values = build(sample(target, *args))
    with pytest.raises(RuleError, match=r"differs by|shards"):
        check_candidate(node, values, wrong, 2)


@pytest.mark.parametrize("other", [float("inf"), float("-inf"), float("nan")])
def test_infinities_and_nan_hide_no_difference(other):
    expected = torch.tensor([1.0, other])
    assert _difference(expected, expected, "it") == 0.0
    for wrong in (torch.tensor([2.0, other]), torch.tensor([1.0, 0.0]), torch.tensor([other, 1.0])):
        with pytest.raises(RuleError, match="it differs by "):
            _difference(wrong, expected, "it")
    with pytest.raises(RuleError, match="it differs by "):
        _difference(torch.tensor([0.0, other]), torch.zeros(2), "it")


def test_notation():
    line = parse("b (h=2 r) l! , +n -> b ; h = ring -> S(1) ; linear 0+1")
    assert line.operands[0].dims[1] == (Atom("h", 2), Atom("r"))
    assert line.operands[0].dims[2] == (Atom("l", None, True),)
    assert line.operands[1].additive
    assert line.kernels[0][1].result == S(1)
    assert line.linear == (frozenset({0, 1}),)


@pytest.mark.parametrize(
    "text", ["a b", "(a -> a", "a ? -> a", "a -> a ; nonsense here", "* * -> a", "((a) b) -> a", "a -> a ; linear x"]
)
def test_notation_refuses(text):
    with pytest.raises(RuleError, match="the rule"):
        parse(text)


def test_rule_that_does_not_fit_names_the_shapes():
    graph = fx.Graph()
    node = graph.call_function(aten.mm.default, (graph.placeholder("a"), graph.placeholder("b")))
    for item, shape in zip((*node.args, node), ((2, 3), (4, 5), (2, 5)), strict=True):
        item.meta["val"] = torch.empty(shape, device="meta")
    with pytest.raises(RuleError, match=r"\(2, 3\), \(4, 5\)"):
        candidates(node)


@torch.library.custom_op("autopar_tests::scale_heads", mutates_args=())
def scale_heads(value: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return value * scale


scale_heads.register_autograd(
    lambda ctx, g: (g * ctx.saved_tensors[1], (g * ctx.saved_tensors[0]).sum((0, 1))),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def test_register_rule():
    try:
        report = register_rule("autopar_tests::scale_heads", "b s h, h -> b s h")
        assert report.candidates == 5 and report.executions == 10
        assert by_letter(of(torch.ops.autopar_tests.scale_heads.default, x(2, 3, 4), x(4)))["h"] == (S(2), S(0), S(2))
        with pytest.raises(RuleError, match="differs by"):
            register_rule("autopar_tests::scale_heads", "b s h, h -> b s h ; linear 0+1")
        assert TABLE["autopar_tests.scale_heads"] == "b s h, h -> b s h"
    finally:
        TABLE.pop("autopar_tests.scale_heads", None)


def test_register_rule_refuses():
    with pytest.raises(RuleError, match="no 'autopar_tests::missing'"):
        register_rule("autopar_tests::missing", "a -> a")
    with pytest.raises(RuleError, match="is not the name"):
        register_rule("relu", "a -> a")
    with pytest.raises(RuleError, match="differs by"):
        register_rule("aten::cumsum", "a b -> a b", x(6, 6), 1)
    assert callable(TABLE["aten.cumsum"])
