"""The table of facts about ops: every name is an op's, stands once, and the facts that passes and prices rely on hold."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import fx

import autopar.capture.grouped_product  # noqa: F401  registers the op
from autopar.ops.facts import ALSO_POINTWISE, OpKind, facts, is_pointwise, is_random, op_of
from autopar.program import kernels, kernels_experts, kernels_fp8, kernels_logits, kernels_random, kernels_vocab
from passes.collectives import convert
from passes.localise_layer import scale

aten = torch.ops.aten
MODULES = {
    "kernels": kernels,
    "kernels_experts": kernels_experts,
    "kernels_fp8": kernels_fp8,
    "kernels_logits": kernels_logits,
    "kernels_random": kernels_random,
    "kernels_vocab": kernels_vocab,
}
NAMES = [name for kind in OpKind for name in kind.value]


def call(target, *args, **kwargs) -> fx.Node:
    return fx.Graph().call_function(target, args, kwargs)


def test_every_name_is_of_one_kind() -> None:
    assert [name for name, count in Counter(NAMES).items() if count > 1] == []


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("transformers.")])
def test_every_name_is_an_op(name: str) -> None:
    room, _, short = name.partition(".")
    if room in ("aten", "autopar"):
        packet = getattr(getattr(torch.ops, room), short)
        target = getattr(packet, packet.overloads()[0])
    else:
        target = getattr(MODULES[room], short)
    assert op_of(target).name == name and op_of(target).short == short


def test_what_selective_recomputation_keeps() -> None:
    expensive = (aten.linear.default, aten.einsum.default, aten.conv2d.default, kernels.attention)
    assert all(op_of(target).is_expensive and op_of(target).may_be_summed for target in expensive)
    assert op_of(aten.embedding.default).may_be_summed and not op_of(aten.embedding.default).is_expensive
    assert not op_of(aten.softmax.int).may_be_summed


def test_autograd_saves_nothing_for_linear_ops() -> None:
    linear = (aten.add.Tensor, aten.view.default, aten.sum.default, kernels.reshape, convert, scale)
    assert all(op_of(target).saves_nothing for target in linear)
    assert not any(op_of(target).saves_nothing for target in (aten.mul.Tensor, aten.linear.default, aten.exp.default))


def test_dropout_is_random_where_it_drops() -> None:
    x = fx.Graph().placeholder("x")
    assert is_random(call(aten.dropout.default, x, 0.1, True)) and not is_random(
        call(aten.dropout.default, x, 0.1, False)
    )
    attention = aten.scaled_dot_product_attention.default
    assert is_random(call(attention, x, x, x, dropout_p=0.1)) and not is_random(call(attention, x, x, x))
    assert is_random(call(kernels_random.uniform, x)) and not is_random(call(aten.add.Tensor, x, x))
    assert is_pointwise(call(aten.where.self, x, x, x)) and not is_pointwise(call(aten.dropout.default, x, 0.1, True))


def functional(packet) -> list:
    """The overloads that take a tensor, write to none and make tensors."""
    found = [getattr(packet, name) for name in packet.overloads()]
    return [
        op
        for op in found
        if any(str(a.type) == "Tensor" for a in op._schema.arguments)
        and not any(a.alias_info is not None and a.alias_info.is_write for a in op._schema.arguments)
        and {str(r.type) for r in op._schema.returns} <= {"Tensor", "List[Tensor]"}
    ]


def arguments(op, make) -> dict[str, object]:
    """Arguments of an op without which it cannot be called, and all that are tensors: ``make(place)``, the mask and 0-d operands apart."""
    scalars = {"number": 2, "float": 0.5, "bool": False, "int": 1, "Device": torch.device("cpu"), "str": "floor"}
    scalars |= {
        "Optional[Device]": torch.device("cpu"),
        "Optional[int]": None,
        "Optional[str]": "floor",
        "ScalarType": torch.float32,
        "dtype": torch.float32,
    }
    given: dict[str, object] = {}
    for argument in op._schema.arguments:
        kind, name = str(argument.type), argument.name
        if kind == "Tensor":
            place = sum(isinstance(value, torch.Tensor) for value in given.values())
            zero_dim = name == "value"
            given[name] = (
                torch.tensor(2.0, dtype=torch.float64) if zero_dim else make(place, name in ("mask", "condition"))
            )
        elif not argument.has_default_value():
            given[name] = torch.float32 if kind == "int" and name == "dtype" else scalars[kind]
    if op is aten.clamp.default or op is aten.clip.default or op is aten.clamp.Tensor or op is aten.clip.Tensor:
        given["min"] = 0.4 if op._schema.overload_name == "" else make(1, False)
    return given


def of_part(op, given: dict[str, object], part) -> torch.Tensor:
    """The op on a part of every operand that is a whole tensor."""
    return op(**{k: part(v) if isinstance(v, torch.Tensor) and v.dim() == 2 else v for k, v in given.items()})


@pytest.mark.parametrize("name", sorted(ALSO_POINTWISE))
def test_what_is_called_pointwise_computes_element_by_element(name: str) -> None:
    """Parts of the result are the results of parts, and operands of one row or column count as if they were repeated."""
    torch.manual_seed(0)
    ops = [op for op in functional(getattr(aten, name.partition(".")[2])) if op_of(op).pointwise]
    assert sum(is_elementwise(op, dtype) for op in ops for dtype in (torch.float64, torch.int64, torch.bool)) > 0


def is_elementwise(op, dtype: torch.dtype) -> bool:
    """Whether the op takes this dtype; fails if it then does not compute element by element."""

    def drawn(shape: tuple[int, int], mask: bool) -> torch.Tensor:
        if mask or dtype == torch.bool:
            return torch.rand(shape) > 0.5
        return torch.rand(shape).double() * 0.8 + 0.1 if dtype.is_floating_point else torch.randint(1, 4, shape)

    given = arguments(op, lambda place, mask: drawn((5, 6), mask))
    try:
        whole = op(**given)
    except (RuntimeError, NotImplementedError):
        return False
    assert whole.shape == (5, 6)
    for part in (slice(1, 4), slice(4, 5)):
        same(of_part(op, given, lambda x, part=part: x[part].clone()), whole[part])
        same(of_part(op, given, lambda x, part=part: x[:, part].clone()), whole[:, part])
    operands = sum(isinstance(value, torch.Tensor) and value.dim() == 2 for value in given.values())
    if operands < 2 or op._schema.name == "aten::to":  # of another tensor ``to`` takes the dtype alone
        return True
    for shapes in (((5, 6), (5, 1), (1, 6)), ((5, 1), (1, 6), (5, 6))):
        thin = arguments(op, lambda place, mask, shapes=shapes: drawn(shapes[place], mask))
        same(op(**thin), of_part(op, thin, lambda x: x.expand(5, 6).clone()))
    return True


def same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-14, atol=0, equal_nan=True)  # the last bit is the vector units'


@pytest.mark.parametrize(
    "target",
    [
        aten.where.default, aten.renorm.default, aten.cumsum.default, aten.softmax.int, aten.roll.default, aten.prelu.default,
        aten.rand_like.default, aten.dropout.default, aten.bernoulli.default, aten.sort.default, aten.type_as.default,
        aten.isin.Tensor_Tensor, aten.empty_like.default, aten.tril.default, aten.index.Tensor,
    ],
    ids=str,
)  # fmt: skip
def test_what_looks_elsewhere_is_not_pointwise(target) -> None:
    """Random numbers, places, neighbours, and operands that are not broadcast."""
    assert not is_pointwise(call(target, fx.Graph().placeholder("x"), 0.5, True))


def test_a_node_that_is_no_call_has_no_facts() -> None:
    node = fx.Graph().placeholder("x")
    assert facts(node).name == "" and facts(node).kind is OpKind.OTHER and not is_random(node)
